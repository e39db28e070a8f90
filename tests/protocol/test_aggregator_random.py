"""Random runs of the aggregator: unreliable networks, random costs, and hostile reports.

`Network` is a state machine. Nodes join, leave, and return with or without their memory;
reports are lost, duplicated or late; the aggregator is killed and resumed. It checks:

- cost, t and the round number never decrease, and count each closed round once;
- a refused report changes nothing;
- a node that answers the same broadcast twice sends the same bits;
- every node compares with the right w^f, and with whole shards and all nodes present w^f
  never gets worse;
- c is the mean of all c_i, as proved in features/drift.py, and every node has its own c_i.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from fedbudget.arrays import Float32, Float64
from fedbudget.budget.budget import Budget, Costs
from fedbudget.budget.control import AdaptiveTau, ControlInputs, Decision, FixedTau, Reason
from fedbudget.budget.spending import PaperSpending
from fedbudget.budget.step_size import AutoStep, FixedStep
from fedbudget.data.shards import Shards
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.drift import Correction, DriftCatchUp, DriftPart
from fedbudget.protocol.features.estimates import EstimatesState
from fedbudget.protocol.features.feature import NodeTimes
from fedbudget.protocol.features.momentum import MomentumPart
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import (
    Broadcast,
    FinalRound,
    PeerError,
    Report,
    TrainReport,
    TrainRound,
)
from fedbudget.protocol.method import Method
from fedbudget.protocol.state import AggregatorState, Outcome
from support.fleets import single_node_fleets, sorted_parts
from support.hand_made import as_train, report, with_values
from support.methods import METHODS, accelerated, bits
from support.problems import costs, problem

SVM = problem("svm", 3)

NODES = range(4)

PARTS = np.split(np.argsort(SVM.x[:, 0]), [7, 22, 40])  # different data, different sizes

SIZES = [len(part) for part in PARTS]

node_numbers = st.sampled_from(NODES)

NETWORK_METHODS = {
    "plain": Method(FixedTau(2), FixedStep(0.1)),
    "corrected": Method(FixedTau(3), FixedStep(0.1), correct_drift=True),
    "frugal": Method(
        AdaptiveTau(tau_max=6), AutoStep(start=0.02), correct_drift=True, delta="parameters"
    ),
    "accelerated": accelerated(tau_max=6),
}

NETWORK_METHODS |= {
    f"{name} by speed": replace(NETWORK_METHODS[name], by_speed=20)
    for name in ("frugal", "accelerated")
}

TIMES = np.array([1.0, 0.2, 3.0, 0.6])
"""Seconds of a local update at each node."""


def new_fleet(node: int, batch: int | None, method: Method) -> Fleet:
    return Fleet(
        SVM.model,
        Shards.of(SVM.table, [PARTS[node]]),
        batch=batch,
        seed=9,
        features=method.features,
        numbers=[node],
    )


def loss(w: Float32, nodes: list[int]) -> float:
    """F over the samples of these nodes, in float64."""
    rows = np.concatenate([PARTS[node] for node in nodes])
    return SVM.loss(w.astype(np.float64), SVM.x[rows], SVM.y[rows])


class Network(RuleBasedStateMachine):
    """Carry messages unreliably between an aggregator and four nodes."""

    @initialize(
        method=st.sampled_from(sorted(NETWORK_METHODS)), batch=st.sampled_from([None, 3])
    )
    def start(self, method: str, batch: int | None) -> None:
        self.method = NETWORK_METHODS[method]
        self.batch = batch
        self.how: dict[str, Any] = {
            "budget": Budget({"time": 1e6}),
            "method": self.method,
        }
        self.aggregator = Aggregator(SVM.start(1), expected=costs([1], [1]), **self.how)
        self.broadcast = as_train(self.aggregator.start())
        self.fleets = {node: new_fleet(node, batch, self.method) for node in NODES}
        self.connected: set[int] = set()
        self.without_memory: set[int] = set()  # to be forgotten when the round is over
        self.before: dict[int, Fleet] = {}  # forks of nodes that answered in this round
        self.arrived: dict[int, Report] = {}
        self.answered: dict[int, Any] = {}  # the bits of all answers in this round
        self.late: list[Report] = []
        self.own: dict[int, Float64] = {}  # c_i of all counted nodes, computed here
        self.last_w = self.broadcast.w  # w of the previous round
        self.spent, self.t, self.rounds = 0.0, 0, 0

    # Nodes.

    @rule(node=node_numbers)
    def join(self, node: int) -> None:
        self.connected.add(node)

    @rule(node=node_numbers)
    def leave(self, node: int) -> None:
        self.connected.discard(node)

    @rule(node=node_numbers)
    def lose_memory(self, node: int) -> None:
        self.fleets[node] = new_fleet(node, self.batch, self.method)
        self.before.pop(node, None)
        self.without_memory.add(node)

    @rule(
        node=node_numbers,
        fate=st.sampled_from(["arrives", "arrives", "arrives", "is lost", "is late"]),
    )
    def answer(self, node: int, fate: str) -> None:
        if node not in self.connected or node in self.before or node in self.without_memory:
            return  # a node without memory takes part from the next round on
        fleet = self.fleets[node]
        self.before[node] = fleet.fork()
        report = fleet.answer(self.broadcast.to(fleet.numbers))
        self.check_answer(node, fleet, report)
        if fate == "arrives":
            self.arrived[node] = report
        elif fate == "is late":
            self.late.append(report)

    @rule()
    def all_answer(self) -> None:
        for node in NODES:
            self.join(node)
            self.answer(node, "arrives")

    def check_answer(self, node: int, fleet: Fleet, report: Report) -> None:
        assert self.answered.setdefault(node, bits(report)) == bits(report)
        assert isinstance(report, TrainReport)
        if self.batch is None:
            best = self.aggregator.state.best
            assert report.best_losses[0] == pytest.approx(loss(best, [node]), rel=1e-5)
        known = fleet.memory().memories.get("drift")
        if isinstance(known, Correction):
            np.testing.assert_allclose(
                known.own[0], self.learned(self.broadcast, node, report.w[0]), atol=1e-3
            )

    # The aggregator.

    @precondition(lambda self: self.arrived)
    @rule(random=st.randoms(use_true_random=False), seconds=st.floats(0, 3))
    def close_the_round(self, random: Any, seconds: float) -> None:
        broadcast, before = self.broadcast, self.aggregator.state
        reports = list(self.arrived.values())
        random.shuffle(reports)
        report = Report.merge(reports)
        times = NodeTimes(report.nodes, TIMES[report.nodes])
        answer = as_train(
            self.aggregator.receive(report, costs([seconds], [1]), times=times)
        )
        self.spent += seconds * broadcast.tau + 1
        self.t += round(broadcast.effective)
        self.rounds += 1
        assert self.aggregator.last is not None
        assert self.aggregator.last.nodes == len(reports)
        self.learn(broadcast, report)
        self.last_w = broadcast.w
        self.check_best(before)
        for node, fork in self.before.items():
            if node not in self.arrived:  # its report was lost
                self.fleets[node] = fork
        self.broadcast = answer
        self.check_mean()
        if self.without_memory:
            self.broadcast = as_train(self.aggregator.forget(self.without_memory))
            for node in self.without_memory:
                self.own.pop(node, None)
        self.before, self.arrived, self.answered, self.without_memory = {}, {}, {}, set()

    def learn(self, broadcast: TrainRound, report: Report) -> None:
        """Compute each c_i after an interval from its definition."""
        drift = broadcast.part(DriftPart)
        corrected = drift is not None and drift.correct
        of_these = {
            node: self.learned(broadcast, node, w)
            for node, w in zip(report.nodes.tolist(), report.vectors["w"], strict=True)
        }
        of_others = (
            self.own
            if corrected
            else {node: np.zeros(SVM.model.parameters) for node in self.own}
        )
        self.own = of_others | of_these

    def learned(self, broadcast: TrainRound, node: int, w: Float32) -> Float64:
        """c_i: the mean gradient of the node, from the extrapolated w(t₀)."""
        start = broadcast.w.astype(np.float64)
        momentum = broadcast.part(MomentumPart)
        if momentum is not None:
            start = start + momentum.share * (start - self.last_w)
        drift, c = broadcast.part(DriftPart), self.mean()
        shift: Float64 | float = 0.0
        if drift is not None and drift.correct:
            shift = (1.0 if drift.strength is None else drift.strength) * (
                c - self.own.get(node, c)
            )
        span = broadcast.eta * broadcast.effective
        return np.asarray((start - w) / span - shift)

    def mean(self) -> Float64:
        if not self.own:
            return np.zeros(SVM.model.parameters)
        weights = [SIZES[node] for node in self.own]
        return np.asarray(np.average(list(self.own.values()), axis=0, weights=weights))

    def check_mean(self) -> None:
        drift, catch_up = self.broadcast.part(DriftPart), self.broadcast.catch_up
        if drift is not None and drift.correct:
            assert catch_up is not None
            missed = catch_up.part(DriftCatchUp)
            assert missed is not None
            np.testing.assert_allclose(missed.mean, self.mean(), atol=1e-3)

    def check_best(self, before: AggregatorState[Any, Any]) -> None:
        if self.batch is None and set(self.arrived) == set(NODES):
            everyone = list(NODES)
            assert (
                loss(self.aggregator.state.best, everyone)
                <= loss(before.best, everyone) + 1e-6
            )

    @rule()
    def kill_and_resume_aggregator(self) -> None:
        """Arrived reports are lost; nodes go back and repeat the round."""
        before = self.aggregator.state
        self.aggregator = Aggregator.resume(before, **self.how)
        assert bits(self.aggregator.state) == bits(before)
        assert bits(self.aggregator.pending) == bits(self.broadcast)
        self.fleets |= self.before
        self.before, self.arrived = {}, {}

    # Refused reports.

    def check_refused(self, *reports: Report) -> None:
        before, record = bits(self.aggregator.state), self.aggregator.last
        with pytest.raises(PeerError):
            self.aggregator.receive(Report.merge(reports), costs([1], [1]))
        assert bits(self.aggregator.state) == before
        assert self.aggregator.last is record

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def duplicate_report(self, data: st.DataObject) -> None:
        twice = self.arrived[data.draw(st.sampled_from(sorted(self.arrived)))]
        self.check_refused(*self.arrived.values(), twice)

    @precondition(
        lambda self: any(report.round < self.broadcast.round for report in self.late)
    )
    @rule(data=st.data(), alone=st.booleans())
    def late_report(self, data: st.DataObject, alone: bool) -> None:
        old = [
            number
            for number, report in enumerate(self.late)
            if report.round < self.broadcast.round
        ]
        late = self.late.pop(data.draw(st.sampled_from(old)))
        self.check_refused(late, *([] if alone else self.arrived.values()))

    # Invariants.

    @invariant()
    def each_round_counts_once(self) -> None:
        if not hasattr(self, "rounds"):
            return  # hypothesis also checks before the start
        state = self.aggregator.state
        assert state.round == self.rounds + 1
        assert state.t == self.t
        assert state.ledger.spent[0] == pytest.approx(self.spent, rel=1e-12)


Network.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)

TestNetwork = Network.TestCase


@dataclass(frozen=True)
class Drawn:
    """A controller that chooses at random."""

    rng: np.random.Generator

    @property
    def estimates(self) -> bool:
        return False

    def first(self) -> Decision:
        return Decision(int(self.rng.integers(1, 30)), Reason.FIXED)

    def next(self, previous: Decision, inputs: ControlInputs) -> Decision:
        return self.first()


NAMES = ("time", "energy", "bytes")


def some_costs(rng: np.random.Generator, resources: int) -> Costs:
    """Random costs; some are 0, as bytes per update are."""
    step, aggregation = rng.exponential(1.0, (2, resources))
    return Costs(step * (rng.random(resources) < 0.8), aggregation + 1e-3)


def random_run(rng: np.random.Generator) -> tuple[Aggregator, Costs]:
    resources = int(rng.integers(1, 4))
    expected = some_costs(rng, resources)
    limits = (
        2 * (expected.step + expected.aggregation) * (1 + rng.exponential(20.0, resources))
    )
    aggregator = Aggregator(
        np.zeros(2, np.float32),
        method=Method(Drawn(rng), FixedStep(0.1), spending=PaperSpending()),
        budget=Budget(dict(zip(NAMES, limits.tolist(), strict=False))),
        expected=expected,
        rounds=int(rng.integers(1, 20)) if rng.random() < 0.2 else None,
    )
    return aggregator, expected


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32 - 1))
def test_overspending_is_bounded_by_rising_costs(
    seed: int,
) -> None:
    """At each decision a round and the final loss fit at the estimated costs. Only a later
    rise of costs can overspend.
    """
    rng = np.random.default_rng(seed)
    aggregator, expected = random_run(rng)
    broadcast: Broadcast | Outcome = aggregator.start()
    decided, beyond = expected, np.zeros_like(expected.step)
    stopping = False
    while isinstance(broadcast, Broadcast):
        # The final loss is evaluated even if it does not fit.
        at_once = isinstance(broadcast, FinalRound) and not stopping
        if not stopping and not at_once:
            decided, beyond = aggregator.ledger.costs, np.zeros_like(beyond)
        stopping = not isinstance(broadcast, TrainRound) or broadcast.stop
        actual = some_costs(rng, len(beyond))
        free = Costs(np.zeros_like(beyond), np.zeros_like(beyond))
        beyond = beyond + rise(free if at_once else decided, actual, broadcast.steps)
        broadcast = aggregator.receive(report(broadcast, 1), actual)
    limit = broadcast.ledger.budget.array
    assert (broadcast.ledger.spent <= limit + beyond + 1e-9 * limit).all()
    assert broadcast.stopped_by in (*broadcast.ledger.budget.limits, "rounds")


def rise(estimated: Costs, actual: Costs, updates: int) -> Float64:
    step, aggregation = (
        actual.step - estimated.step,
        actual.aggregation - estimated.aggregation,
    )
    return np.asarray(step * updates + aggregation)


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32 - 1))
def test_constant_costs_use_the_budget(seed: int) -> None:
    """The rest of the binding resource does not pay for another round with one update."""
    aggregator, steady = random_run(np.random.default_rng(seed))
    broadcast: Broadcast | Outcome = aggregator.start()
    while isinstance(broadcast, Broadcast):
        broadcast = aggregator.receive(report(broadcast, 1), steady)
    budget = broadcast.ledger.budget
    left = budget.array - broadcast.ledger.spent
    assert (left >= -1e-9 * budget.array).all()
    if broadcast.stopped_by != "rounds":
        binding = list(budget.limits).index(broadcast.stopped_by)
        one_more = steady.step[binding] + steady.aggregation[binding]
        assert left[binding] <= one_more + 1e-9 * budget.array[binding]


SOFTMAX = problem("softmax", seed=4)

ANYTHING = st.floats(width=32) | st.sampled_from(
    [3.4e38, -3.4e38, 1e30, -1e30, 9e11, 1e-30]
)


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_hostile_numbers_keep_run_alive(name: str, data: st.DataObject) -> None:
    """One of three nodes sends arbitrary numbers."""
    aggregator = Aggregator(
        SOFTMAX.start(0),
        method=METHODS[name],
        budget=Budget({"time": 100.0}),
        expected=Costs(np.array([1.0]), np.array([1.0])),
        rounds=6,
    )
    parts = sorted_parts(SOFTMAX, 3)
    fleets = single_node_fleets(SOFTMAX, parts, features=METHODS[name].features)
    message: Broadcast | Outcome = aggregator.start()
    while isinstance(message, Broadcast):
        *honest, other = [fleet.answer(message) for fleet in fleets]
        values = {**other.numbers, **other.vectors}
        field = data.draw(st.sampled_from(sorted(values)))
        anything = np.full_like(values[field], data.draw(ANYTHING))
        other = with_values(other, **{field: anything})
        message = aggregator.receive(
            Report.merge([*honest, other]), Costs(np.array([0.5]), np.array([0.5]))
        )
        state = aggregator.state
        assert np.isfinite(state.w).all()
        assert np.isfinite(state.best).all()
        assert 0 < state.step_size.eta < np.inf
        estimates = state.states.get("estimates")
        if isinstance(estimates, EstimatesState) and estimates.values is not None:
            assert all(np.isfinite(value) for value in vars(estimates.values).values())
