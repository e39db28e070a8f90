"""Checks of received costs, descriptions and broadcasts, for every transport.

The codec has checked types and the ranges of the annotations. The functions here check
relations between fields, and everything that a peer could use to do harm. A broken rule
raises `PeerError` with a reason.
"""

import math
import re

import numpy as np

from fedbudget.data.agreement import Moments, TableDescription
from fedbudget.data.tables import Layout
from fedbudget.engines.remote.messages import Hello, RoundRequest, Welcome
from fedbudget.engines.remote.task import LONG_NAME, MOST_READINGS, SamplesDescription, Task
from fedbudget.protocol.messages import PeerError
from fedbudget.resources import TIME
from fedbudget.resources.resource import NodeCosts

_MOST_FEATURES = 2**28
_RESOURCE = re.compile(rf"[A-Za-z]{{1,{LONG_NAME}}}")  # may be unknown here


def checked_costs(costs: NodeCosts) -> NodeCosts:
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
    return NodeCosts(costs.readings, evaluation=costs.evaluation)


def check_request(request: RoundRequest, task: Task) -> None:
    """Check the ranges of a broadcast's numbers."""
    broadcast = request.broadcast
    if not 1 <= broadcast.round < 2**31 or not request.base_round < broadcast.round:
        raise PeerError(f"round {broadcast.round} after round {request.base_round}")
    if broadcast.request != task.request:
        raise PeerError("a broadcast that requests other reports than the task")
    if not 0 <= broadcast.tau <= task.tau_max:
        raise PeerError(f"tau is {broadcast.tau}; the task allows {task.tau_max}")
    if not 0 < broadcast.eta < math.inf:
        raise PeerError(f"eta is {broadcast.eta}")
    work = broadcast.work
    if work is not None and not 0 < work.effective <= work.most <= task.tau_max:
        raise PeerError(
            f"{work.most} updates, {work.effective} in effect; "
            f"the task allows {task.tau_max}"
        )
    private = broadcast.private
    if private is not None and not (
        0 <= private.clip < math.inf and 0 < private.rho < math.inf
    ):
        raise PeerError(f"a private round is {private}")
    if broadcast.drift is not None and not 0 <= broadcast.drift.share <= 1:
        raise PeerError(f"the share of a round is {broadcast.drift.share}")
    catch_up = broadcast.catch_up
    if catch_up is not None and (
        catch_up.since < 0 or (catch_up.mean is not None) != task.request.drift
    ):
        raise PeerError("`catch_up` does not fit the task")


def check_hello(hello: Hello) -> None:
    if not hello.samples.sizes:
        raise PeerError("a node without samples")
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
    columns = len(table.names)
    if (
        samples.features is not None
        or samples.shape != (columns,)
        or table.rows != sum(samples.sizes)
    ):
        raise PeerError("a table that does not match its samples")
    lists = (table.kinds, table.present, table.fills, table.weights)
    if len(set(table.names)) != columns or any(
        each is not None and np.shape(each) != (columns,) for each in lists
    ):
        raise PeerError("columns with different numbers of names, kinds and figures")
    if table.kinds.count("category") != len(table.categories) or (table.fills is None) != (
        table.weights is None
    ):
        raise PeerError("categories or fill values that do not match the columns")
    _check_moments(table.numbers, columns)
    for counts in (table.present, table.weights):
        if counts is None:
            continue
        whole = (counts >= 0) & (counts <= table.rows) & (counts == np.round(counts))
        if not whole.all():
            raise PeerError("a column with an impossible number of rows")
    if any(sum(counts.values()) > table.rows for counts in table.categories):
        raise PeerError("a category with more rows than the table")
    if table.fills is not None and table.weights is not None:
        used = table.fills[table.weights > 0]
        if not np.isfinite(used).all():
            raise PeerError("a fill value that is not finite")


def _check_layout(layout: Layout, features: int) -> None:
    if len(set(layout.names)) != len(layout.names) or layout.features != features:
        raise PeerError(f"columns that do not add up to {features} features")
    for column in layout.columns:
        if column.categories is None:
            fits = column.fill is None or (
                not isinstance(column.fill, str) and math.isfinite(column.fill)
            )
        else:
            unique = len(set(column.categories)) == len(column.categories)
            fits = unique and column.fill in (None, *column.categories)
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
