"""Private aggregators and hand-made reports, without nodes."""

from collections.abc import Callable

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.budget.budget import Budget
from fedbudget.budget.control import FixedTau
from fedbudget.budget.spending import PrivateSpending
from fedbudget.budget.step_size import AutoStep, FixedStep, StepSize
from fedbudget.engines.engine import Pay, no_payment, settle
from fedbudget.engines.noise import SeededNoise
from fedbudget.protocol.features.feature import Noise
from fedbudget.protocol.features.node_privacy import (
    NodePrivacy,
    PrivateAggregator,
    clipped,
    reported_norms,
)
from fedbudget.protocol.features.sample_privacy import (
    SampleAggregator,
    SamplePrivacy,
    SampleSumAggregator,
    SampleSums,
)
from fedbudget.protocol.messages import (
    Broadcast,
    NormReport,
    PrivateRound,
    Report,
    UpdateReport,
)
from fedbudget.protocol.method import Method, PrivateRule
from fedbudget.protocol.state import Outcome
from fedbudget.protocol.sums import NoisySums
from fedbudget.protocol.update import ServerMomentum
from support.problems import costs

DELTA = 1e-5


def aggregator(
    limits: dict[str, float],
    nodes: int,
    parameters: int,
    noise: Noise | None = None,
    rounds: int | None = None,
) -> PrivateAggregator:
    """An aggregator of node privacy; an update costs 0.01 s, an aggregation 0.1 s."""
    rule = PrivateRule(nodes, noise or SeededNoise(0), NodePrivacy())
    method = Method(FixedTau(1), FixedStep(0.1), spending=PrivateSpending(50), private=rule)
    names = list(limits)
    step, rest = (
        [each.get(name, 0.0) for name in names]
        for each in ({"time": 0.01}, {"time": 0.1, "bytes": 100.0})
    )
    return PrivateAggregator(
        np.zeros(parameters, np.float32),
        method=method,
        budget=Budget(limits, DELTA),
        expected=costs(step, rest),
        rounds=rounds,
    )


def sample_aggregator(
    limits: dict[str, float],
    nodes: int = 5,
    parameters: int = 20,
    noise: Noise | None = None,
    rounds: int | None = None,
    tau: int | None = None,
    step: StepSize | None = None,
) -> SampleAggregator:
    """An aggregator of sample privacy; an update costs 0.01 s, an aggregation 0.1 s."""
    rule = PrivateRule(nodes, noise or SeededNoise(0), SamplePrivacy(), tau)
    method = Method(
        FixedTau(1), step or AutoStep(), spending=PrivateSpending(50), private=rule
    )
    each = [
        [given.get(name, 0.0) for name in limits]
        for given in ({"time": 0.01}, {"time": 0.1, "bytes": 100.0})
    ]
    return SampleAggregator(
        np.zeros(parameters, np.float32),
        method=method,
        budget=Budget(limits, DELTA),
        expected=costs(*each),
        rounds=rounds,
    )


def sample_sum_aggregator(
    limits: dict[str, float], nodes: int, parameters: int
) -> SampleSumAggregator:
    """An aggregator of sums over samples; an update costs 0.01 s, an aggregation 0.1 s."""
    rule = PrivateRule(nodes, SeededNoise(0), SampleSums(), 1, excess=1.5)
    method = Method(
        FixedTau(1),
        AutoStep(),
        ServerMomentum(),
        spending=PrivateSpending(50),
        private=rule,
        sums_only=True,
    )
    each = [
        [given.get(name, 0.0) for name in limits]
        for given in ({"time": 0.01}, {"time": 0.1})
    ]
    return SampleSumAggregator(
        np.zeros(parameters, np.float32),
        method=method,
        budget=Budget(limits, DELTA),
        expected=costs(*each),
    )


def report(
    broadcast: Broadcast, updates: Float32, numbers: list[int] | None = None
) -> NormReport:
    """Report of nodes with these updates."""
    nodes = np.array(range(len(updates)) if numbers is None else numbers)
    sizes = np.ones(len(nodes), np.int64)
    lengths = {"lengths": reported_norms(updates)}
    number = broadcast.round
    if not isinstance(broadcast, PrivateRound):
        return NormReport(round=number, nodes=nodes, sizes=sizes, numbers=lengths)
    vectors = {"updates": clipped(updates, broadcast.clip)}
    return UpdateReport(
        round=number, nodes=nodes, sizes=sizes, numbers=lengths, vectors=vectors
    )


def run_to_end(
    run: PrivateAggregator,
    answer: Callable[[Broadcast], Report | NoisySums],
    pay: Pay = no_payment,
) -> list[Broadcast]:
    """Run all rounds as an engine does; return all broadcasts."""
    message: Broadcast | Outcome = run.start()
    settle(run, pay)
    sent = []
    while isinstance(message, Broadcast):
        sent.append(message)
        message = run.receive(answer(message), run.ledger.costs)
        settle(run, pay)
    return sent
