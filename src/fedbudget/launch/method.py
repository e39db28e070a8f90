"""The method of a run, how τ, η and the rest are chosen, from settings and what was given from Python; and what goes by
it, the aggregator.

The meters of a run.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from fedbudget.arrays import Float32
from fedbudget.budget.control import AdaptiveTau, BalancedTau, Controller, FixedTau
from fedbudget.budget.spending import CarefulSpending, PaperSpending, PrivateSpending
from fedbudget.budget.step_size import (
    AutoStep,
    FallingStep,
    FixedStep,
    SearchedStep,
    StepSize,
)
from fedbudget.data.partition import Partition
from fedbudget.engines import baselines
from fedbudget.errors import UserError
from fedbudget.launch.inputs import batch_of
from fedbudget.launch.prepared import NOTHING, Overrides
from fedbudget.launch.privacy import is_private, private_rule, run_budget
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.combine import COMBINE_RULES
from fedbudget.protocol.messages import Broadcast
from fedbudget.protocol.method import Delta, Method
from fedbudget.protocol.node_privacy import PrivateAggregator
from fedbudget.protocol.sample_privacy import SampleAggregator
from fedbudget.protocol.state import Quantize
from fedbudget.protocol.update import UPDATE_RULES, SplitCentres, UpdateRule
from fedbudget.protocol.workload import DataWorkload
from fedbudget.randomness import Stream, generator
from fedbudget.resources import RESOURCES
from fedbudget.resources.kinds import DGD, SGD, Profile, SimulatedTime
from fedbudget.resources.meters import Meters
from fedbudget.resources.resource import Metering, RoundUsage
from fedbudget.resources.speeds import Speeds
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.settings.settings import Settings


def build_method(
    settings: Settings, overrides: Overrides = NOTHING, sizes: Sequence[int] | None = None
) -> Method:
    """The method that the settings name, with what was given in place of its parts.

    Args:
      sizes: of all nodes' data, where they are known before the run.
    """
    if is_private(settings):
        return _private_method(settings, overrides, settings.nodes or len(sizes or ()) or 1)
    accelerated = settings.method == "accelerated"
    frugal = settings.method in ("frugal", "accelerated")
    correct_drift = settings.drift_correction
    if correct_drift is None:
        plain = (
            settings.update in (None, "average")
            and overrides.update is None
            and overrides.combine is None
        )
        plain = plain and settings.combine in (None, "mean", "clipped")
        plain = (
            plain and settings.proximal is None
        )  # two cures of the same thing, of which one was asked for
        correct_drift = frugal and plain
    delta: Delta = settings.delta or ("parameters" if frugal else "gradient")
    return Method(
        overrides.controller or _controller(settings, correct_drift, delta),
        overrides.step_size or _step_size(settings),
        overrides.update or _update(settings),
        overrides.combine or COMBINE_RULES[settings.combine or "mean"](),
        correct_drift=correct_drift,
        partly=accelerated,
        one_step=accelerated,
        delta=delta,
        proximal=settings.proximal,
        spending=PaperSpending()
        if settings.method == "paper"
        else CarefulSpending(settings.tau_max),
        by_data=DataWorkload(tuple(sizes))
        if settings.workload == "by-data" and sizes is not None
        else None,
        by_speed=settings.tau_max
        if _shares_work(settings, frugal and correct_drift)
        else None,
    )


def _private_method(settings: Settings, overrides: Overrides, nodes: int) -> Method:
    """Of a run that is private: drift is not corrected, and w goes on by nothing but sums with noise."""
    rule = private_rule(
        settings, overrides, nodes
    )  # refuses other methods, which have no update either
    return Method(
        FixedTau(settings.tau)
        if settings.tau != "adaptive"
        else BalancedTau(settings.tau_max),
        _step_size(settings),
        overrides.update or _update(replace(settings, update=settings.update or "average")),
        proximal=settings.proximal,
        spending=PrivateSpending(settings.tau_max),
        private=rule,
    )


def _shares_work(settings: Settings, possible: bool) -> bool:
    """Whether faster nodes make more local updates."""
    possible = possible and settings.tau == "adaptive"
    if settings.workload == "by-speed" and not possible:
        raise UserError(
            "`workload` by-speed needs a `tau` that is adaptive and drift that is corrected, as methods frugal and "
            "accelerated do"
        )
    return possible and settings.workload in (None, "by-speed")


def require_known_workload(settings: Settings) -> None:
    """Refuses what needs all nodes' samples to be known before the run, for nodes that come and go."""
    if settings.workload == "by-data":
        raise UserError(
            "`workload` by-data is for simulated nodes, of which all is known: use fedbudget run"
        )


def _controller(settings: Settings, correct_drift: bool, delta: Delta) -> Controller:
    if settings.tau != "adaptive":
        return FixedTau(settings.tau)
    if settings.method == "accelerated":
        return BalancedTau(settings.tau_max)
    phi = settings.phi
    if phi is None:
        phi = 0.0025 if correct_drift else 5e-5 if settings.model == "cnn" else 0.025
    return AdaptiveTau(phi, settings.gamma, settings.tau_max, leap=delta == "parameters")


def _step_size(settings: Settings) -> StepSize:
    eta = settings.step_size or (
        "auto" if settings.method in ("frugal", "accelerated") else 0.01
    )
    if eta == "auto":
        if settings.step_fall:
            raise UserError(
                "`step_fall` goes with a `step_size` that is a number; the automatic one falls by itself"
            )
        return SearchedStep() if settings.method == "accelerated" else AutoStep()
    return FallingStep(eta, settings.step_fall) if settings.step_fall else FixedStep(eta)


def _update(settings: Settings) -> UpdateRule:
    own = settings.method == "accelerated" and settings.update is None
    # The motion of a centre is that of samples which may be another's by now: K-means does without.
    name = (
        "accelerate" if own and settings.model != "kmeans" else settings.update or "average"
    )
    rule: type[Any] = UPDATE_RULES[name]
    given: dict[str, Any] = {}
    if own and settings.model == "kmeans":
        rule = SplitCentres
        given = {"clusters": settings.clusters}
    for option in ("step_size", "momentum", "beta2", "epsilon"):
        if (value := getattr(settings, f"server_{option}")) is not None:
            if option not in {field.name for field in fields(rule)}:
                raise UserError(f"`server_{option}` has no meaning with `update` {name}")
            given[option] = value
    made: UpdateRule = rule(**given)
    return made


def build_aggregator(
    method: Method,
    meters: Meters,
    start: tuple[Float32, RoundUsage] | Checkpoint,
    *,
    rounds: int | None,
    quantize: Quantize | None = None,
    statistics: int = 0,
) -> Aggregator:
    """The aggregator of a run, that has announced its first round; a budget which cannot work is refused before.

    Args:
      start: w(0), [parameters], and a trial round; or where the run's aggregator before this one had come to.
      rounds: the most rounds to make, besides the budget.
      quantize: what nodes will hold of a new w; the w itself when left out.
      statistics: how many of w's last numbers are running statistics; a checkpoint knows.
    """
    budget = meters.budget
    kind = _kind(method)
    if method.private is not None and statistics:
        raise UserError(
            "a private run has no place for running statistics of normalization layers: use group normalization"
        )
    if isinstance(start, Checkpoint):
        more = start.conditions.extended_by(budget.limits, rounds)
        return kind.resume(
            start.state,
            method=method,
            budget=budget,
            rounds=rounds,
            quantize=quantize,
            more=more,
        )
    w, trial = start
    expected = meters.expect(trial)
    aggregator = kind(
        w,
        method=method,
        budget=budget,
        expected=expected,
        rounds=rounds,
        quantize=quantize,
        statistics=statistics,
    )
    aggregator.start()  # before the first checkpoint, which is of a run that has
    return aggregator


def _kind(method: Method) -> type[Aggregator]:
    if method.private is None:
        return Aggregator
    return SampleAggregator if method.private.per_sample else PrivateAggregator


def trial_broadcast(method: Method, w: Float32) -> Broadcast:
    """What a trial round begins with: what the run's first broadcast says."""
    return Broadcast.first(w, method.step_size.first().eta, method.request)


def build_meters(settings: Settings, *, network: bool = False) -> Meters:
    """The meters that the settings ask for.

    Args:
      network: whether nodes are on other machines.
    """
    declared = {
        name: getattr(settings, name)
        for resource in RESOURCES.values()
        for name in resource.settings
    }
    simulated = None
    if settings.costs != "measured":
        simulated = SimulatedTime(
            _profile(settings), generator(settings.seed, Stream.COSTS)
        )
    return Meters.of(
        run_budget(settings), Metering(simulated, network, declared), speeds_of(settings)
    )


def speeds_of(settings: Settings) -> Speeds | None:
    """Of nodes that make rounds together, where they differ."""
    if settings.speeds is None or settings.method == "asynchronous":
        return None
    assert settings.nodes is not None
    return drawn_speeds(settings, settings.nodes)


def drawn_speeds(settings: Settings, nodes: int) -> Speeds:
    """The speeds that settings have."""
    assert settings.speeds is not None
    return Speeds.of(settings.speeds, nodes, generator(settings.seed, Stream.SPEEDS))


def _profile(settings: Settings) -> Profile:
    """The simulated time of a local update and of an aggregation."""
    batch = batch_of(settings)
    if settings.method == "centralized":
        return baselines.profile(batch)
    case = Partition.parse(settings.partition or "case:1").case
    return (SGD if batch else DGD[case or 1]).times(settings.aggregation_factor)
