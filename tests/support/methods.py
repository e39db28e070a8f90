"""Whole runs of three small nodes with every method and simulated costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from fedbudget.budget.budget import Budget, Costs
from fedbudget.budget.control import AdaptiveTau, BalancedTau, FixedTau
from fedbudget.budget.spending import CarefulSpending
from fedbudget.budget.step_size import AutoStep, FixedStep, SearchedStep
from fedbudget.engines.engine import Nodes, RoundTerms
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.feature import Feature
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.protocol.method import Method
from fedbudget.protocol.state import AggregatorState, Outcome, Round
from fedbudget.protocol.update import Accelerate, ServerMomentum
from fedbudget.resources.kinds import SGD, SimulatedTime
from fedbudget.resources.resource import Usage
from support.fleets import single_node_fleets
from support.problems import costs, problem

BUDGET = Budget({"time": 2.0})
EXPECTED = costs([SGD.step.mean], [SGD.aggregation.mean])


def accelerated(tau_max: int) -> Method:
    """The accelerated method with settings for short runs."""
    return Method(
        BalancedTau(tau_max),
        SearchedStep(start=0.02),
        update=Accelerate(),
        correct_drift=True,
        partly=True,
        one_step=True,
        delta="parameters",
        spending=CarefulSpending(tau_max),
    )


METHODS: dict[str, Method] = {
    "fixed": Method(FixedTau(3), FixedStep(0.05)),
    "paper": Method(AdaptiveTau(phi=0.01, tau_max=8), FixedStep(0.05)),
    "frugal": Method(
        AdaptiveTau(tau_max=8, leap=True),
        AutoStep(start=0.02),
        correct_drift=True,
        delta="parameters",
    ),
    "accelerated": accelerated(tau_max=8),
    # The first step size is far too large, so the run returns to an earlier w.
    "astray": Method(
        AdaptiveTau(tau_max=8),
        AutoStep(start=20.0, growth=50.0),
        correct_drift=True,
        delta="parameters",
    ),
    "proximal": Method(FixedTau(4), FixedStep(0.05), proximal=0.5),
    "momentum": Method(
        AdaptiveTau(tau_max=8),
        AutoStep(start=0.02),
        update=ServerMomentum(0.5),
        delta="parameters",
    ),
}
ROUNDS = {"fixed": 8, "proximal": 8}
"""Maximum number of rounds."""


def nodes(name: str, batch: int | None, features: Sequence[Feature] = ()) -> list[Fleet]:
    """Three fleets of one node each, with different data."""
    case = problem(name, 12)
    parts = np.split(np.argsort(case.x[:, 0]), [17, 40])
    return single_node_fleets(case, parts, batch, features)


def new_aggregator(name: str, method: str, **more: Any) -> Aggregator:
    return Aggregator(
        problem(name, 12).start(1),
        method=METHODS[method],
        budget=BUDGET,
        expected=EXPECTED,
        rounds=ROUNDS.get(method),
        **more,
    )


def resume(state: AggregatorState[Any, Any], method: str, **more: Any) -> Aggregator:
    return Aggregator.resume(
        state, method=METHODS[method], budget=BUDGET, rounds=ROUNDS.get(method), **more
    )


def simulated_time() -> SimulatedTime:
    return SimulatedTime(SGD, np.random.default_rng(5))


def read_costs(time: SimulatedTime, broadcast: Broadcast) -> Costs:
    cost = time.read(Usage({}, nodes=3, updates=broadcast.steps))
    return costs([cost.step], [cost.aggregation])


@dataclass(frozen=True)
class RoundResult:
    """One round and the aggregator's next message."""

    broadcast: Broadcast
    record: Round | None
    answer: Broadcast | Outcome


def one_round(
    aggregator: Aggregator, fleets: Sequence[Fleet], time: SimulatedTime
) -> RoundResult:
    broadcast = aggregator.pending
    assert broadcast is not None
    report = Report.merge([fleet.answer(broadcast) for fleet in fleets])
    answer = aggregator.receive(report, read_costs(time, broadcast))
    return RoundResult(broadcast, aggregator.last, answer)


def bits(value: Any) -> Any:
    """Convert a value so that equality means equal bits: NaN equals NaN, -0 is not 0."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, float):
        return value.hex()
    if is_dataclass(value):
        return type(value).__name__, [
            bits(getattr(value, field.name)) for field in fields(value)
        ]
    if isinstance(value, Mapping):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [bits(each) for each in value]
    return value


def recorded_broadcasts(nodes: Nodes) -> list[Broadcast]:
    """A list that receives each broadcast to these nodes."""
    sent: list[Broadcast] = []
    begin = nodes.begin

    def begin_and_record(broadcast: Broadcast, terms: RoundTerms) -> None:
        sent.append(broadcast)
        begin(broadcast, terms)

    nodes.begin = begin_and_record  # type: ignore[method-assign]
    return sent
