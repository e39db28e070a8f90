"""Method, aggregator and meters of a run, from settings and overrides."""

import math
from collections.abc import Sequence
from dataclasses import replace

from fedbudget.arrays import Float32
from fedbudget.budget.control import AdaptiveTau, BalancedTau, Controller, FixedTau
from fedbudget.budget.solver import EXCHANGE, LinearProblem, SolverChoice, choose
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
from fedbudget.models.base import Model, with_dropout
from fedbudget.models.curvature import directions_of, is_quadratic
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.combine import COMBINE_RULES
from fedbudget.protocol.features import dropout
from fedbudget.protocol.features.feature import Quantize, trial_rounds
from fedbudget.protocol.features.held_out import SHARE, held_out_rows
from fedbudget.protocol.features.local_step import LOCAL_STEPS
from fedbudget.protocol.features.newton import Newton, NewtonAggregator
from fedbudget.protocol.features.node_privacy import PrivateAggregator
from fedbudget.protocol.features.sample_privacy import (
    SampleAggregator,
    SamplePrivacy,
    SampleSumAggregator,
    SampleSums,
)
from fedbudget.protocol.features.validation import Validation
from fedbudget.protocol.messages import Broadcast
from fedbudget.protocol.method import Delta, Method
from fedbudget.protocol.update import UPDATE_RULES, KMeansSplit, UpdateRule
from fedbudget.randomness import Stream, generator
from fedbudget.resources import RESOURCES
from fedbudget.resources.kinds import DGD, SGD, Profile, SimulatedTime
from fedbudget.resources.meters import Meters
from fedbudget.resources.resource import Metering, Usage
from fedbudget.resources.speeds import Speeds
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.settings.compatibility import (
    ADAPTIVE,
    automatic_step,
    corrects_drift,
    needs_descent,
    update_rule,
    validates,
)
from fedbudget.settings.settings import Settings


def build_method(
    settings: Settings,
    overrides: Overrides = NOTHING,
    sizes: Sequence[int] | None = None,
    model: Model | None = None,
) -> Method:
    """Return the method of the settings, with overrides in place of its parts.

    Args:
      sizes: number of samples of each node, if known before the run.
      model: the model, if known before the run.
    """
    if is_private(settings):
        return _private_method(settings, overrides, settings.nodes or len(sizes or ()) or 1)
    if settings.method == "newton":
        return _newton_method(settings, sizes, model)
    accelerated = settings.method == "accelerated"
    frugal = settings.method in ADAPTIVE
    correct_drift = settings.drift_correction
    if correct_drift is None:
        own_rule = overrides.update is not None or overrides.combine is not None
        correct_drift = corrects_drift(settings) and not own_rule
    delta: Delta = settings.delta or ("parameters" if frugal else "gradient")
    by_data = None
    if settings.workload == "by-data" and sizes is not None:
        by_data = tuple(sizes)
    by_speed = settings.workload == "by-speed"
    if settings.workload is None and not settings.secure_aggregation:
        by_speed = frugal and correct_drift and settings.tau == "adaptive"
    paper = settings.method == "paper"
    longest = settings.tau_max
    if overrides.controller is not None:
        longest = min(longest, getattr(overrides.controller, "tau_max", 1))
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
        local_step=LOCAL_STEPS[settings.local_step]() if settings.local_step else None,
        spending=PaperSpending() if paper else CarefulSpending(longest),
        by_data=by_data,
        by_speed=settings.tau_max if by_speed else None,
        validation=validation_of(settings, model),
        solver=solver_text(settings, model, sizes),
        extra=overrides.features,
    )


def validation_of(settings: Settings, model: Model | None = None) -> Validation | None:
    """Return how nodes validate w; None if they hold out no rows.

    Args:
      settings: the settings.
      model: the model, once it is known.
    """
    share = settings.validation
    if share is None:
        share = SHARE if validates(settings) else 0.0
    if not share:
        return None
    second_stage = model is not None and with_dropout(model, dropout.SHARE) is not None
    return Validation(share, settings.spend_all, second_stage)


def _newton_method(
    settings: Settings, sizes: Sequence[int] | None, model: Model | None
) -> Method:
    """Return Newton's method; without its feature if the model is not known yet."""
    newton = None
    if model is not None and sizes:
        newton = newton_of(settings, model, sizes)
    return Method(
        FixedTau(1),
        FixedStep(1.0),
        spending=CarefulSpending(1),
        validation=validation_of(settings, model),
        newton=newton,
        solver=solver_text(settings, model, sizes),
    )


def newton_of(settings: Settings, model: Model, sizes: Sequence[int]) -> Newton:
    """Return the feature of Newton's method.

    Args:
      settings: with the batch size and the share of held-out rows.
      model: the model.
      sizes: number of samples of each node.
    """
    problem = linear_problem(settings, model, sizes)
    if problem is None:
        raise UserError(
            f"`method` newton solves linear, softmax and svm, not {model.name}: use "
            "`method` accelerated"
        )
    directions = directions_of(model)
    assert directions is not None
    return Newton(
        directions.outputs,
        directions.inputs,
        directions.bias,
        problem.quadratic,
        problem.extra(_exchange(settings)),
        problem.evaluation,
    )


def linear_problem(
    settings: Settings, model: Model, sizes: Sequence[int]
) -> LinearProblem | None:
    """Return the sizes of a problem that Newton's method could solve; None for others."""
    directions = directions_of(model)
    if directions is None:
        return None
    validation = validation_of(settings, model)
    share = 0.0 if validation is None else validation.share
    rows = max(size - held_out_rows(size, share) for size in sizes)
    return LinearProblem(
        directions.outputs,
        directions.inputs,
        is_quadratic(model),
        rows,
        batch_of(settings) or rows,
        validation is not None,
    )


def choose_solver(
    settings: Settings, model: Model, sizes: Sequence[int], *, network: bool = False
) -> SolverChoice:
    """Choose between descent and Newton's method, whatever the method is.

    Args:
      settings: with the batch size and the share of held-out rows.
      model: the model.
      sizes: number of samples of each node.
      network: whether nodes are on other machines.
    """
    reason = needs_descent(settings, network=network)
    if reason is not None:
        return SolverChoice(False, reason)
    problem = linear_problem(settings, model, sizes)
    if problem is None:
        return SolverChoice(False, f"{model.name} is no linear, softmax or svm model")
    limits = settings.limits().limits
    updates = math.inf
    if settings.costs != "measured" and "time" in limits:
        updates = limits["time"] / _profile(settings).step.mean
    return choose(
        problem,
        exchange=_exchange(settings),
        updates=updates,
        rounds=math.inf if settings.rounds is None else settings.rounds,
        counts_bytes=not {"bytes", "money"}.isdisjoint(limits),
    )


def solver_text(
    settings: Settings, model: Model | None, sizes: Sequence[int] | None
) -> str:
    """Return why a run solves or descends, for methods accelerated and newton.

    Args:
      settings: with the batch size and the share of held-out rows.
      model: the model, once it is known.
      sizes: number of samples of each node, once they are known.
    """
    if model is None or not sizes or settings.method not in ("accelerated", "newton"):
        return ""
    choice = choose_solver(settings, model, sizes)
    if settings.method == "newton":
        return f"Newton's method: {choice.reason}"
    if choice.newton:
        return f"descent; method newton would be cheaper: {choice.reason}"
    return f"descent: {choice.reason}"


def _exchange(settings: Settings) -> float:
    """Return the cost of an exchange in local updates, if it is known."""
    if settings.costs == "measured":
        return EXCHANGE
    profile = _profile(settings)
    return profile.aggregation.mean / profile.step.mean


def _private_method(settings: Settings, overrides: Overrides, nodes: int) -> Method:
    """Return the method of a private run: no drift correction, only noisy sums change w."""
    rule = private_rule(settings, overrides, nodes)
    return Method(
        _controller(settings),
        _step_size(settings),
        overrides.update or _update(settings),
        proximal=settings.proximal,
        spending=PrivateSpending(settings.tau_max),
        private=rule,
    )


def _controller(
    settings: Settings, correct_drift: bool = False, delta: Delta = "gradient"
) -> Controller:
    if settings.tau != "adaptive":
        return FixedTau(settings.tau)
    if settings.method == "accelerated":
        return BalancedTau(settings.tau_max)
    phi = settings.phi
    if phi is None and correct_drift:
        phi = 0.0025
    elif phi is None:
        phi = 5e-5 if settings.model == "cnn" else 0.025
    return AdaptiveTau(phi, settings.gamma, settings.tau_max, leap=delta == "parameters")


def _step_size(settings: Settings) -> StepSize:
    if automatic_step(settings):
        return SearchedStep() if settings.method == "accelerated" else AutoStep()
    eta = 0.01
    if settings.step_size is not None:
        eta = float(settings.step_size)
    elif settings.local_step is not None:
        eta = LOCAL_STEPS[settings.local_step].eta
    return FallingStep(eta, settings.step_fall) if settings.step_fall else FixedStep(eta)


def _update(settings: Settings) -> UpdateRule:
    private = is_private(settings)
    by_method = settings.method == "accelerated" and settings.update is None and not private
    if by_method and settings.model == "kmeans":
        return KMeansSplit(settings.clusters)
    rule = UPDATE_RULES[update_rule(settings, private=private)]
    options = {
        option: getattr(settings, f"server_{option}")
        for option in ("step_size", "momentum", "beta2", "epsilon")
    }
    made: UpdateRule = rule(
        **{option: value for option, value in options.items() if value is not None}
    )
    return made


def build_aggregator(
    method: Method,
    meters: Meters,
    start: tuple[Float32, Usage] | Checkpoint,
    *,
    rounds: int | None,
    quantize: Quantize | None = None,
    statistics: int = 0,
) -> Aggregator:
    """Return the aggregator after its first broadcast; refuse an impossible budget.

    Args:
      start: w(0), [parameters], and a trial round; or a checkpoint.
      rounds: maximum number of rounds.
      quantize: maps w to its encoded form at nodes; the identity by default.
      statistics: number of running statistics at the end of w; a checkpoint has its own.
    """
    budget = meters.budget
    kind = _kind(method)
    if method.private is not None and statistics:
        raise UserError(
            "a private run does not support running statistics of normalization layers: "
            "use group normalization"
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
    if isinstance(method.newton, Newton) and meters.time.source == "simulated":
        extra = method.newton.cost * expected.step
        expected = replace(expected, aggregation=expected.aggregation + extra)
    aggregator = kind(
        w,
        method=method,
        budget=budget,
        expected=expected,
        rounds=rounds,
        quantize=quantize,
        statistics=statistics,
    )
    aggregator.start()  # a checkpoint holds a started run
    return aggregator


def _kind(method: Method) -> type[Aggregator]:
    if method.newton is not None:
        return NewtonAggregator
    if method.private is None:
        return Aggregator
    if isinstance(method.private.feature, SampleSums):
        return SampleSumAggregator
    per_sample = isinstance(method.private.feature, SamplePrivacy)
    return SampleAggregator if per_sample else PrivateAggregator


def rounds_to_try(method: Method, w: Float32) -> list[Broadcast]:
    """Return rounds like those of the run, to measure their cost."""
    return trial_rounds(method.features, w, method.step_size.first().eta)


def build_meters(settings: Settings, *, network: bool = False) -> Meters:
    """Return the meters of the settings.

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
    """Return the speeds of nodes in synchronous rounds; None if they are equal."""
    if settings.speeds is None or settings.method == "asynchronous":
        return None
    assert settings.nodes is not None
    return drawn_speeds(settings, settings.nodes)


def drawn_speeds(settings: Settings, nodes: int) -> Speeds:
    """Return the speeds of the settings, drawn if they are random."""
    assert settings.speeds is not None
    return Speeds.of(settings.speeds, nodes, generator(settings.seed, Stream.SPEEDS))


def _profile(settings: Settings) -> Profile:
    """Return the simulated time of a local update and of an aggregation."""
    batch = batch_of(settings)
    if settings.method == "centralized":
        return baselines.profile(batch)
    case = Partition.parse(settings.partition or "case:1").case
    return (SGD if batch else DGD[case or 1]).times(settings.aggregation_factor)
