"""The interface of features: a feature of our own in a run, computed by hand.

Two nodes with one parameter and F_i(w) = ½(w - a_i)², a = (4, 8), D = (1, 3). A leash pulls
local updates back to w(t₀): w ← w - η (w - a_i + k (w - w(t₀))). With η = ½ and τ = 2:

    w(0) = 0, k = 1       node 0: 2, 2            node 1: 4, 4            mean move 3.5
    w(2) = 3.5, k = ½     node 0: 3.75, 3.8125    node 1: 5.75, 6.3125    mean move 2.1875
    w(4) = 5.6875, k = ½

The aggregator halves k after a mean move of more than 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from fedbudget.arrays import Float32, Float64
from fedbudget.budget.budget import Budget
from fedbudget.budget.control import FixedTau
from fedbudget.budget.step_size import FixedStep
from fedbudget.data.shards import Shards, Table
from fedbudget.errors import UserError
from fedbudget.models import FunctionModel
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.feature import (
    Feature,
    FeatureSettings,
    FeatureState,
    LocalRound,
    NodeMemory,
    Reported,
    RoundResult,
    defining,
    register_feature,
    trial_rounds,
    wire_types,
)
from fedbudget.protocol.features.proximal import Proximal
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import (
    Broadcast,
    FinalRound,
    PeerError,
    Report,
    RoundPart,
    TrainRound,
)
from fedbudget.protocol.method import Method
from fedbudget.protocol.outliers import Outlier
from support.hand_made import ONE, as_final, as_train, last
from support.methods import bits


@dataclass(frozen=True)
class Strength(RoundPart):
    """k of a round."""

    k: float


@dataclass(frozen=True)
class LeashState(FeatureState):
    """k of the coming round, and whether the last round changed it."""

    k: float
    changed: bool = False


@dataclass(frozen=True)
class Rounds(NodeMemory):
    """Number of rounds with a leash."""

    count: int


@register_feature
@dataclass(frozen=True)
class Leash(Feature):
    """Halve k after long moves; nodes report moves and their number of rounds."""

    name: ClassVar[str] = "leash"
    types: ClassVar[tuple[type, ...]] = (Strength, LeashState, Rounds)
    k: float
    longest: float = 3.0

    def reported(self, first: bool) -> Reported:
        return Reported({"rounds": 10.0}, vectors=("moves",))

    def begin(self, local: LocalRound) -> None:
        before = local.memories.get(self.name)
        count = before.count if isinstance(before, Rounds) else 0
        local.memories[self.name] = Rounds(count + 1)

    def pull(self, local: LocalRound, w: Float32) -> Float32:
        part = local.broadcast.part(Strength)
        assert part is not None
        return np.float32(part.k) * (w - local.broadcast.w)

    def report(self, local: LocalRound) -> Mapping[str, Float64 | Float32]:
        if local.w is None:
            return {}
        memory = local.memories[self.name]
        assert isinstance(memory, Rounds)
        rounds = np.full(len(local.numbers), float(memory.count))
        return {"rounds": rounds, "moves": local.w - local.broadcast.w}

    def first(self, w: Float32) -> LeashState:
        return LeashState(self.k)

    def message(self, state: LeashState) -> RoundPart:
        return Strength(state.k)

    def after(self, state: LeashState, result: RoundResult) -> LeashState:
        assert result.sums.weighted_mean("rounds") == result.broadcast.round
        if abs(float(result.sums.mean("moves")[0])) <= self.longest:
            return LeashState(state.k)
        return LeashState(state.k / 2, changed=True)

    def recorded(self, state: LeashState, result: RoundResult | None) -> Mapping[str, Any]:
        return {"kept": ("leash",) if result is not None and state.changed else ()}


@dataclass(frozen=True)
class Idle(Feature):
    """A feature that defines nothing but its name."""

    name: ClassVar[str] = "idle"


W = np.zeros(1, np.float32)
BUDGET = Budget({"time": 1e3})
METHOD = Method(FixedTau(2), FixedStep(0.5), extra=(Leash(1.0), Idle()))


def new_fleet(method: Method = METHOD) -> Fleet:
    def loss(w: Float32, x: Float32, y: object) -> tuple[float, Float32]:
        return 0.5 * float(np.square(w - x).mean()), w - x.mean(axis=0)

    table = Table(np.array([[4], [8], [8], [8]], np.float32), np.zeros(4, np.float32))
    shards = Shards.of(table, [np.arange(1), np.arange(1, 4)])
    model = FunctionModel(loss, initial=np.zeros(1))
    return Fleet(model, shards, batch=None, seed=0, features=method.features)


def new_aggregator(method: Method = METHOD, rounds: int = 2) -> Aggregator:
    return Aggregator(W, method=method, budget=BUDGET, expected=ONE, rounds=rounds)


def test_run_by_hand() -> None:
    aggregator, fleet = new_aggregator(), new_fleet()
    first = as_train(aggregator.start())
    assert first.parts == (Strength(1.0),)
    assert first.report.numbers == ("losses", "best_losses", "rounds")
    assert first.report.vectors == ("w", "moves")
    report = fleet.answer(first)
    assert report.vectors["w"].tolist() == [[2], [4]]
    assert report.vectors["moves"].tolist() == [[2], [4]]
    assert report.numbers["rounds"].tolist() == [1, 1]

    second = as_train(aggregator.receive(report, ONE))
    assert last(aggregator).kept == ("leash",)
    assert second.w.tolist() == [3.5]
    assert second.parts == (Strength(0.5),)
    report = fleet.answer(second)
    assert report.vectors["w"].tolist() == [[3.8125], [6.3125]]
    assert report.numbers["rounds"].tolist() == [2, 2]

    final = as_final(aggregator.receive(report, ONE))
    assert last(aggregator).kept == ()
    assert final.w.tolist() == [5.6875]
    assert aggregator.state.states == {"leash": LeashState(0.5)}
    aggregator.receive(fleet.answer(final), ONE)
    # ½ (1 · 1.6875² + 3 · 2.3125²) / 4
    assert last(aggregator).loss == pytest.approx(2.361328125)


def test_pulls_add_up() -> None:
    """A leash of 1 is FedProx with μ = 1: both halves together give the same move."""
    both = replace(METHOD, proximal=0.5, extra=(Leash(0.5),))
    first = new_aggregator(both).start()
    assert new_fleet(both).answer(first).vectors["w"].tolist() == [[2], [4]]


def after_one_round() -> tuple[Aggregator, Fleet, Broadcast]:
    aggregator, fleet = new_aggregator(rounds=9), new_fleet()
    second = as_train(aggregator.receive(fleet.answer(aggregator.start()), ONE))
    return aggregator, fleet, second


def test_states_survive_resumption() -> None:
    aggregator, fleet, second = after_one_round()
    again = Aggregator.resume(aggregator.state, method=METHOD, budget=BUDGET, rounds=9)
    assert bits(again.pending) == bits(second)
    restarted = new_fleet()
    restarted.recall(fleet.memory())
    assert bits(restarted.answer(second)) == bits(fleet.answer(second))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ((Leash(1.0),), "the run began with Idle and must resume with it"),
        ((Leash(2.0), Idle()), "the run began with other options of its features"),
        ((Leash(1.0), Idle(), Proximal(1.0)), "began without Proximal"),
    ],
)
def test_other_features_cannot_resume(extra: tuple[Feature, ...], message: str) -> None:
    aggregator, _, _ = after_one_round()
    other = replace(METHOD, extra=extra)
    with pytest.raises(UserError, match=message):
        Aggregator.resume(aggregator.state, method=other, budget=BUDGET)


def test_outliers_are_capped_by_median() -> None:
    """100 rounds are more than 10 times the median: the node's numbers are medians."""
    aggregator, fleet, second = after_one_round()
    three = [replace_nodes(fleet.answer(second), offset) for offset in (0, 2, 4)]
    report = Report.merge(three)
    numbers = {**report.numbers, "rounds": np.array([2.0, 2, 2, 2, 2, 100])}
    aggregator.receive(replace(report, numbers=numbers), ONE, peers=np.arange(6))
    expected = Outlier("rounds", reported=100, limit=20, counted=2)
    assert last(aggregator).outliers == {5: (expected,)}


def replace_nodes(report: Report, offset: int) -> Report:
    return replace(report, nodes=report.nodes + offset)


def test_only_defined_methods_are_called() -> None:
    features = METHOD.features
    assert defining(features, "pull") == [features[0]]
    assert defining(features, "shift") == []


def test_trial_rounds_have_the_message() -> None:
    rounds = trial_rounds(METHOD.features, W, 0.5)
    assert [type(each) for each in rounds] == [*[TrainRound] * 3, FinalRound]
    assert all(each.parts == (Strength(1.0),) for each in rounds)
    fleet = new_fleet()
    for each in rounds:
        fleet.answer(each).require_answers(each)


def test_feature_is_built_from_settings() -> None:
    settings = FeatureSettings.of(Leash(0.25))
    assert settings == FeatureSettings("Leash", {"k": 0.25, "longest": 3.0})
    assert settings.build() == Leash(0.25)
    with pytest.raises(PeerError, match="uses the feature Idle, which is not known here"):
        FeatureSettings.of(Idle()).build()
    with pytest.raises(PeerError, match="the feature Leash has no option longer"):
        FeatureSettings("Leash", {"longer": 1.0}).build()


def test_types_of_registered_features() -> None:
    types = wire_types()
    assert Strength in types[RoundPart]
    assert LeashState in types[FeatureState]
    assert Rounds in types[NodeMemory]


def test_registered_name_is_taken() -> None:
    members = {"name": "other", "__module__": "elsewhere"}
    taken: type[Feature] = dataclass(frozen=True)(type("Leash", (Feature,), members))
    with pytest.raises(ValueError, match="a feature named Leash exists already"):
        register_feature(taken)
    with pytest.raises(ValueError, match="must be a frozen dataclass"):
        register_feature(type("Loose", (Feature,), {"name": "loose"}))
