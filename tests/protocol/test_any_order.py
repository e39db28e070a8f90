"""The conversation with all that a network does to it, in any order: hypothesis plays the
network.

Nodes join, leave, and come back with or without their memory; reports are lost, come twice,
or come too late; the aggregator is killed and recalled. Whatever happens:

- what was spent, t and the round never fall, and are the sums over the rounds that were
  closed, each counted once;
- a report that is refused changes nothing;
- a node that answers the same broadcast again says the same, to the last bit;
- every node compares with the right w^f, and with whole shards and all nodes present w^f
  never gets worse;
- c is the mean of all c_i, where the proof in protocol/drift.py says so, and every node
knows its own c_i."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from fedbudget.arrays import Float32, Float64
from fedbudget.budget.budget import Budget
from fedbudget.budget.control import AdaptiveTau, FixedTau
from fedbudget.budget.step_size import AutoStep, FixedStep
from fedbudget.data.shards import Shards
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, PeerError, Report
from fedbudget.protocol.method import Method
from fedbudget.protocol.state import AggregatorState
from fedbudget.protocol.workload import NodeTimes
from support.hand_made import go_on
from support.methods import accelerated, bits
from support.problems import costs, problem

CASE = problem("svm", 3)
NODES = range(4)
PARTS = np.split(
    np.argsort(CASE.x[:, 0]), [7, 22, 40]
)  # data of their own kinds, in different amounts
SIZES = [len(part) for part in PARTS]
node_numbers = st.sampled_from(NODES)

METHODS = {
    "plain": Method(FixedTau(2), FixedStep(0.1)),
    "corrected": Method(FixedTau(3), FixedStep(0.1), correct_drift=True),
    "frugal": Method(
        AdaptiveTau(tau_max=6), AutoStep(start=0.02), correct_drift=True, delta="parameters"
    ),
    "accelerated": accelerated(tau_max=6),
}
METHODS |= {
    f"{name} by speed": replace(METHODS[name], by_speed=20)
    for name in ("frugal", "accelerated")
}
TIMES = np.array([1.0, 0.2, 3.0, 0.6])
"""Of a local update at each node."""


def new_fleet(node: int, batch: int | None) -> Fleet:
    return Fleet(
        CASE.model,
        Shards.of(CASE.table, [PARTS[node]]),
        batch=batch,
        seed=9,
        numbers=[node],
    )


def loss(w: Float32, nodes: list[int]) -> float:
    """F over these nodes' samples, in float64."""
    rows = np.concatenate([PARTS[node] for node in nodes])
    return CASE.loss(w.astype(np.float64), CASE.x[rows], CASE.y[rows])


class Network(RuleBasedStateMachine):
    """Carries messages between an aggregator and four nodes, badly."""

    @initialize(method=st.sampled_from(sorted(METHODS)), batch=st.sampled_from([None, 3]))
    def start(self, method: str, batch: int | None) -> None:
        self.how: dict[str, Any]
        self.how, self.batch = (
            {"budget": Budget({"time": 1e6}), "method": METHODS[method]},
            batch,
        )
        self.aggregator = Aggregator(CASE.start(1), expected=costs([1], [1]), **self.how)
        self.broadcast = self.aggregator.start()
        self.fleets = {node: new_fleet(node, batch) for node in NODES}
        self.connected: set[int] = set()
        self.without_memory: set[int] = set()  # to be forgotten when the round is over
        self.before: dict[int, Fleet] = {}  # forks of those who have answered in this round
        self.arrived: dict[int, Report] = {}
        self.answered: dict[int, Any] = {}  # the bits of all answers in this round
        self.late: list[Report] = []
        self.own: dict[int, Float64] = {}  # c_i of all that count, worked out here
        self.last_w = self.broadcast.w  # of the round before
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
        self.fleets[node] = new_fleet(node, self.batch)
        self.before.pop(node, None)
        self.without_memory.add(node)

    @rule(
        node=node_numbers,
        fate=st.sampled_from(["arrives", "arrives", "arrives", "is lost", "is late"]),
    )
    def answer(self, node: int, fate: str) -> None:
        if node not in self.connected or node in self.before or node in self.without_memory:
            return  # who comes back without memory takes part from the next round on
        fleet = self.fleets[node]
        self.before[node] = fleet.fork()
        report = fleet.answer(self.broadcast.to(fleet.numbers))
        self.check_answer(node, fleet, report)
        if fate == "arrives":
            self.arrived[node] = report
        elif fate == "is late":
            self.late.append(report)

    @rule()
    def everyone_answers(self) -> None:
        for node in NODES:
            self.join(node)
            self.answer(node, "arrives")

    def check_answer(self, node: int, fleet: Fleet, report: Report) -> None:
        assert self.answered.setdefault(node, bits(report)) == bits(report)
        if self.batch is None:
            best = self.aggregator.state.best
            assert report.best_losses[0] == pytest.approx(loss(best, [node]), rel=1e-5)
        drift, known = self.broadcast.drift, fleet._correction
        if drift is not None and known is not None and report.w is not None:
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
        answer = go_on(self.aggregator.receive(report, costs([seconds], [1]), times=times))
        self.spent += seconds * broadcast.tau + 1
        self.t += (
            broadcast.tau if broadcast.work is None else round(broadcast.work.effective)
        )
        self.rounds += 1
        assert self.aggregator.last is not None
        assert self.aggregator.last.nodes == len(reports)
        self.learn(broadcast, report)
        self.last_w = broadcast.w
        self.check_best(before)
        for node, fork in self.before.items():
            if node not in self.arrived:  # what it said came to nothing
                self.fleets[node] = fork
        self.broadcast = answer
        self.check_mean()
        if self.without_memory:
            self.broadcast = self.aggregator.forget(self.without_memory)
            for node in self.without_memory:
                self.own.pop(node, None)
        self.before, self.arrived, self.answered, self.without_memory = {}, {}, {}, set()

    def learn(self, broadcast: Broadcast, report: Report) -> None:
        """Each c_i after an interval, by its definition."""
        assert report.w is not None
        corrected = broadcast.drift is not None and broadcast.drift.correct
        of_these = {
            node: self.learned(broadcast, node, w)
            for node, w in zip(report.nodes.tolist(), report.w, strict=True)
        }
        of_others = (
            self.own
            if corrected
            else {node: np.zeros(CASE.model.parameters) for node in self.own}
        )
        self.own = of_others | of_these

    def learned(self, broadcast: Broadcast, node: int, w: Float32) -> Float64:
        """c_i: along what a node's own gradients led it, from w(t₀) and what was gone once
        more of w's last way.
        """
        start = broadcast.w.astype(np.float64)
        start = start + broadcast.momentum * (start - self.last_w)
        drift, c = broadcast.drift, self.mean()
        shift: Float64 | float = 0.0
        if drift is not None and drift.correct:
            shift = (1.0 if drift.strength is None else drift.strength) * (
                c - self.own.get(node, c)
            )
        tau = broadcast.tau if broadcast.work is None else broadcast.work.effective
        return np.asarray((start - w) / (broadcast.eta * tau) - shift)

    def mean(self) -> Float64:
        if not self.own:
            return np.zeros(CASE.model.parameters)
        weights = [SIZES[node] for node in self.own]
        return np.asarray(np.average(list(self.own.values()), axis=0, weights=weights))

    def check_mean(self) -> None:
        drift, catch_up = self.broadcast.drift, self.broadcast.catch_up
        if drift is not None and drift.correct:
            assert catch_up is not None
            assert catch_up.mean is not None
            np.testing.assert_allclose(catch_up.mean, self.mean(), atol=1e-3)

    def check_best(self, before: AggregatorState[Any, Any]) -> None:
        if self.batch is None and set(self.arrived) == set(NODES):
            everyone = list(NODES)
            assert (
                loss(self.aggregator.state.best, everyone)
                <= loss(before.best, everyone) + 1e-6
            )

    @rule()
    def kill_and_resume_the_aggregator(self) -> None:
        """What had arrived is gone; nodes go back, and do the round again."""
        before = self.aggregator.state
        self.aggregator = Aggregator.resume(before, **self.how)
        assert bits(self.aggregator.state) == bits(before)
        assert bits(self.aggregator.pending) == bits(self.broadcast)
        self.fleets |= self.before
        self.before, self.arrived = {}, {}

    # What must be refused.

    def check_refused(self, *reports: Report) -> None:
        before, record = bits(self.aggregator.state), self.aggregator.last
        with pytest.raises(PeerError):
            self.aggregator.receive(Report.merge(reports), costs([1], [1]))
        assert bits(self.aggregator.state) == before
        assert self.aggregator.last is record

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def a_report_comes_twice(self, data: st.DataObject) -> None:
        twice = self.arrived[data.draw(st.sampled_from(sorted(self.arrived)))]
        self.check_refused(*self.arrived.values(), twice)

    @precondition(
        lambda self: any(report.round < self.broadcast.round for report in self.late)
    )
    @rule(data=st.data(), alone=st.booleans())
    def a_report_comes_late(self, data: st.DataObject, alone: bool) -> None:
        old = [
            number
            for number, report in enumerate(self.late)
            if report.round < self.broadcast.round
        ]
        late = self.late.pop(data.draw(st.sampled_from(old)))
        self.check_refused(late, *([] if alone else self.arrived.values()))

    # What always holds.

    @invariant()
    def every_round_is_counted_once_and_nothing_is_taken_back(self) -> None:
        if not hasattr(self, "rounds"):
            return  # hypothesis looks before the start, too
        state = self.aggregator.state
        assert state.round == self.rounds + 1
        assert state.t == self.t
        assert state.ledger.spent[0] == pytest.approx(self.spent, rel=1e-12)


Network.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestNetwork = Network.TestCase
