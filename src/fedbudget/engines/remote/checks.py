"""Checks of received costs, descriptions and broadcasts, for every transport.

The codec has checked types and the ranges of the annotations. The functions here check
relations between fields, and everything that a peer could use to do harm. A broken rule
raises `PeerError` with a reason.
"""

import math
import re
from collections.abc import Sequence

import numpy as np

from fedbudget.data.agreement import Moments, TableDescription
from fedbudget.data.tables import Layout
from fedbudget.engines.remote.messages import Hello, RoundRequest, Welcome
from fedbudget.engines.remote.task import LONG_NAME, MOST_READINGS, SamplesDescription, Task
from fedbudget.protocol.features.drift import DriftCatchUp, DriftPart
from fedbudget.protocol.features.workload import Work
from fedbudget.protocol.messages import (
    LocalUpdates,
    PeerError,
    PersonalRound,
    Private,
    RoundPart,
    SiteRound,
    TrainRound,
)
from fedbudget.resources import TIME
from fedbudget.resources.resource import Usage

_MOST_FEATURES = 2**28
_MOST_RHO = 1000.0  # of a round; with more, the noise would vanish
# Gradients that are clipped to subnormal numbers would be rounded to longer ones.
_LARGEST_CLIP = 2.0**40  # its inverse is the smallest
_RESOURCE = re.compile(rf"[A-Za-z]{{1,{LONG_NAME}}}")  # may be unknown here


def checked_costs(costs: Usage) -> Usage:
    """Return the readings of costs; a peer decides about nothing else."""
    for readings in (costs.readings, costs.evaluation):
        if len(readings) > MOST_READINGS:
            raise PeerError(f"costs of {len(readings)} readings")
        for name, reading in readings.items():
            if not _RESOURCE.fullmatch(name):
                raise PeerError(f"{name[:20]!r} is not a name of a resource")
            if len(reading.host) > LONG_NAME:
                raise PeerError(f"a host name of {len(reading.host)} characters")
            if not 0 <= reading.step < math.inf:
                raise PeerError(f"{name} (step) is {reading.step}")
            if not 0 <= reading.whole < math.inf:
                raise PeerError(f"{name} (whole) is {reading.whole}")
    if TIME.name not in costs.readings:
        raise PeerError("costs without the time of a round")
    return Usage(costs.readings, evaluation=costs.evaluation)


def check_request(request: RoundRequest, task: Task) -> None:
    """Check the ranges of a broadcast's numbers."""
    broadcast = request.broadcast
    if not 1 <= broadcast.round < 2**31 or not request.base_round < broadcast.round:
        raise PeerError(f"round {broadcast.round} after round {request.base_round}")
    steps = broadcast.steps
    if not 1 <= steps <= task.tau_max:
        raise PeerError(f"tau is {steps}; the task allows {task.tau_max}")
    work = broadcast.by_kind.get(Work)
    most = steps if work is None else work.most
    effective: float = most
    if isinstance(broadcast, TrainRound):
        effective = broadcast.effective
    if not 0 < effective <= most <= task.tau_max:
        raise PeerError(
            f"{most} updates, {effective} in effect; the task allows {task.tau_max}"
        )
    if isinstance(broadcast, LocalUpdates) and not 0 < broadcast.eta < math.inf:
        raise PeerError(f"eta is {broadcast.eta}")
    if isinstance(broadcast, Private):
        clip = getattr(broadcast, "clip", 1.0)
        usual = 1 / _LARGEST_CLIP <= clip <= _LARGEST_CLIP
        if not (usual and 0 < broadcast.rho <= _MOST_RHO):
            raise PeerError(f"a private round with the clip {clip} and ρ {broadcast.rho}")
    catch_up = broadcast.catch_up
    if isinstance(broadcast, SiteRound):
        if broadcast.parts or catch_up is not None:
            raise PeerError("a round of personal models with parts")
        if isinstance(broadcast, PersonalRound):
            _check_prior(broadcast.prior)
        return
    _check_parts(broadcast.parts, DriftPart, task)
    if catch_up is not None:
        _check_parts(catch_up.parts, DriftCatchUp, task)


def _check_prior(prior: Sequence[float]) -> None:
    """Check shares of candidates."""
    positive = all(0 <= share <= 1 for share in prior)
    if prior and not (positive and math.isclose(sum(prior), 1, abs_tol=1e-6)):
        raise PeerError("a prior of personal models that does not add up to 1")


def _check_parts(parts: Sequence[RoundPart], drift: type[RoundPart], task: Task) -> None:
    """Check parts of features.

    Args:
      parts: the parts.
      drift: the part that drift correction always has.
      task: the task.
    """
    kinds = [type(part) for part in parts]
    known = {kind for feature in task.built_features for kind in feature.types}
    if len(set(kinds)) < len(kinds) or not known.issuperset(kinds):
        names = ", ".join(kind.__name__ for kind in kinds)
        raise PeerError(f"a broadcast with parts that do not fit the task: {names}")
    if (drift in known) != (drift in kinds):
        raise PeerError("drift correction that does not fit the task")
    try:
        for part in parts:
            if part.bounded:
                part.require_possible()
    except ValueError as error:
        raise PeerError(f"a broadcast is impossible: {error}") from None


def check_hello(hello: Hello) -> None:
    if not hello.samples.sizes:
        raise PeerError("a node without samples")
    if hello.samples.layout is not None and not hello.samples.public:
        raise PeerError("a layout that is not agreed on yet")
    _check_samples(hello.samples)


def check_welcome(welcome: Welcome) -> None:
    if list(welcome.numbers) != sorted(set(welcome.numbers)):
        raise PeerError("nodes' numbers that are not in ascending order")
    check_task(welcome.task)


def check_task(task: Task) -> None:
    for name in task.readings:
        if not _RESOURCE.fullmatch(name):
            raise PeerError(f"{name[:20]!r} is not a name of a resource")
    for name, value in task.model_options.items():
        fits = len(value) <= LONG_NAME if isinstance(value, str) else math.isfinite(value)
        if not fits or len(name) > LONG_NAME:
            raise PeerError(f"the option {name[:LONG_NAME]} is {str(value)[:LONG_NAME]}")
    _check_samples(task.samples)


def _check_samples(samples: SamplesDescription) -> None:
    shape = samples.shape
    features = math.prod(shape[:5])  # a product of very many numbers would take very long
    if not 1 <= len(shape) <= 4 or min(shape) < 1 or features > _MOST_FEATURES:
        raise PeerError(f"samples of shape {tuple(shape[:8])}")
    _check_moments(samples.features, features)
    _check_moments(samples.target, 1)
    if samples.table is not None:
        _check_table(samples.table, samples)
    if samples.layout is not None:
        _check_layout(samples.layout, features)


def _check_table(table: TableDescription, samples: SamplesDescription) -> None:
    if (
        samples.features is not None
        or samples.shape != (len(table.columns),)
        or table.rows != sum(samples.sizes)
    ):
        raise PeerError("a table that does not match its samples")
    for column in table.columns.values():
        if (column.kind == "category") != bool(column.counts):
            raise PeerError("categories that do not match the kind of their column")
        counted = sum(column.counts.values())
        if max(column.present, column.weight, counted) > table.rows:
            raise PeerError("a column with an impossible number of rows")


def _check_layout(layout: Layout, features: int) -> None:
    if len(set(layout.names)) != len(layout.names) or layout.features != features:
        raise PeerError(f"columns that do not add up to {features} features")
    for column in layout.columns:
        if column.categories is None:
            fits = column.other is None and (
                column.fill is None
                or (not isinstance(column.fill, str) and math.isfinite(column.fill))
            )
            if column.range is not None:
                fits = fits and column.range[0] <= column.range[1]
        else:
            unique = len(set(column.categories)) == len(column.categories)
            fits = unique and column.fill in (None, *column.categories)
            last = None if column.other is None else column.categories[-1:]
            fits = fits and column.range is None and last in (None, (column.other,))
        if not fits:
            raise PeerError(f"an invalid column {column.name}")


def _check_moments(moments: Moments | None, columns: int) -> None:
    if moments is None:
        return
    if {moments.mean.shape, moments.deviation.shape} != {(columns,)}:
        raise PeerError(f"means of shape {moments.mean.shape}, not of {columns} columns")
    finite = np.isfinite(moments.mean).all() and np.isfinite(moments.deviation).all()
    if not finite or moments.deviation.min() < 0:
        raise PeerError("invalid means or deviations")
