"""Calls of features in a round: their order, and states that appear and vanish."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fedbudget.arrays import Float32, Float64
from fedbudget.budget.control import Decision
from fedbudget.protocol.features.feature import (
    Choice,
    Feature,
    FeatureState,
    LocalRound,
    RoundResult,
    trial_rounds,
)
from fedbudget.protocol.features.node_privacy import NodePrivacy
from fedbudget.protocol.messages import Broadcast, PrivateRound, RoundPart
from fedbudget.protocol.state import Outcome
from support.fleets import one_fleet
from support.hand_made import ONE, as_broadcast, make, report
from support.problems import problem, unequal_parts


@dataclass(frozen=True)
class Noted(RoundPart):
    """Name of the feature that sent it."""

    by: str


@dataclass(frozen=True, eq=False)
class Calls(Feature):
    """A feature without state that notes its calls, and changes nothing."""

    name: ClassVar[str] = "one"
    log: list[tuple[str, str]] = field(default_factory=list)

    def note(self, method: str) -> None:
        self.log.append((method, self.name))

    def begin(self, local: LocalRound) -> None:
        self.note("begin")

    def measure(self, local: LocalRound) -> None:
        self.note("measure")

    def shift(self, local: LocalRound) -> None:
        self.note("shift")

    def end(self, local: LocalRound) -> None:
        self.note("end")

    def report(self, local: LocalRound) -> Mapping[str, Float64 | Float32]:
        self.note("report")
        return {}

    def message(self, state: None) -> RoundPart:
        self.note("message")
        return Noted(self.name)

    def after(self, state: None, result: RoundResult) -> None:
        self.note("after")

    def recorded(self, state: None, result: RoundResult | None) -> Mapping[str, Any]:
        self.note("recorded")
        return {}

    def choose(
        self, state: None, decision: Decision, choice: Choice
    ) -> tuple[FeatureState | None, Decision]:
        self.note("choose")
        return None, decision

    def announce(self, state: None, tau: int) -> tuple[Any, float]:
        self.note("announce")
        return None, tau

    def forget(
        self,
        state: None,
        nodes: Collection[int],
        states: Mapping[str, FeatureState],
        broadcast: Broadcast,
    ) -> None:
        self.note("forget")


@dataclass(frozen=True, eq=False)
class MoreCalls(Calls):
    name: ClassVar[str] = "two"


def test_order_of_calls() -> None:
    """Each stage of a round calls all features, in their order."""
    log: list[tuple[str, str]] = []
    features = (Calls(log), MoreCalls(log))
    aggregator = make(extra=features)
    broadcast = aggregator.start()
    assert broadcast.parts == (Noted("one"), Noted("two"))
    case = problem("linear", 3, features=2)
    fleet = one_fleet(case, unequal_parts(60, 3, 1), features=features)

    def called(*methods: str) -> bool:
        expected = [(method, name) for method in methods for name in ("one", "two")]
        found = list(log)
        log.clear()
        return found == expected

    log.clear()
    given = fleet.answer(broadcast)
    assert called("begin", "measure", "shift", "end", "report")
    aggregator.receive(given, ONE)
    assert called("after", "recorded", "choose", "announce", "message")
    aggregator.forget([0])
    assert called("forget")


@dataclass(frozen=True)
class Count(FeatureState):
    number: int


@dataclass(frozen=True)
class Counter(Feature):
    """Counts rounds."""

    name: ClassVar[str] = "counter"

    def first(self, w: Float32) -> Count:
        return Count(0)

    def after(self, state: Count, result: RoundResult) -> Count:
        return Count(state.number + 1)


@dataclass(frozen=True)
class Follower(Feature):
    """One more than the counter before it."""

    name: ClassVar[str] = "follower"

    def after(self, state: Count | None, result: RoundResult) -> Count:
        counter = result.states["counter"]
        assert isinstance(counter, Count)
        return Count(counter.number + 1)


@dataclass(frozen=True)
class Leavers(Feature):
    """Counts nodes that left; it has no state before the first of them."""

    name: ClassVar[str] = "leavers"

    def forget(
        self,
        state: Count | None,
        nodes: Collection[int],
        states: Mapping[str, FeatureState],
        broadcast: Broadcast,
    ) -> Count:
        return Count(len(nodes) + (0 if state is None else state.number))


def test_earlier_states_are_up_to_date() -> None:
    aggregator = make(extra=(Counter(), Follower()))
    broadcast: Broadcast | Outcome = aggregator.start()
    for _ in range(3):
        broadcast = aggregator.receive(report(as_broadcast(broadcast), 1.0), ONE)
    assert aggregator.state.states == {"counter": Count(3), "follower": Count(4)}


def test_feature_without_state() -> None:
    """It has no entry among the states, in any phase of a run."""
    aggregator = make(20, extra=(Calls(),))
    broadcast: Broadcast | Outcome = aggregator.start()
    while isinstance(broadcast, Broadcast):
        assert aggregator.state.states == {}
        aggregator.forget([0])
        aggregator.state.require_possible()
        broadcast = aggregator.receive(report(broadcast, 1.0), ONE)
    assert aggregator.state.states == {}


def test_first_state_after_nodes_left() -> None:
    aggregator = make(extra=(Leavers(),))
    aggregator.start()
    aggregator.forget([3])
    aggregator.forget([1, 2])
    assert aggregator.state.states == {"leavers": Count(3)}


def test_trial_rounds_of_private_runs() -> None:
    """They have the kind of the run's rounds, and no final loss."""
    rounds = trial_rounds((NodePrivacy(),), np.zeros(2, np.float32), 0.5)
    assert [type(each) for each in rounds] == [PrivateRound] * 3
