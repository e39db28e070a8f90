"""Custom controllers, step sizes, update rules and combination rules."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedbudget.arrays import Float32, Int64
from fedbudget.budget.budget import Budget
from fedbudget.budget.control import (
    AdaptiveTau,
    ControlInputs,
    Decision,
    FixedTau,
    Reason,
)
from fedbudget.budget.step_size import AutoStep, FixedStep, StepSizeInputs, StepSizeState
from fedbudget.errors import UserError
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.combine import WeightedMean
from fedbudget.protocol.features.drift import Correction, DriftPart
from fedbudget.protocol.features.feature import report_layout
from fedbudget.protocol.features.momentum import Momentum
from fedbudget.protocol.features.proximal import Proximal
from fedbudget.protocol.messages import LOSSES, Broadcast, Report, ReportLayout
from fedbudget.protocol.method import Method
from fedbudget.protocol.sums import Sums
from fedbudget.protocol.update import Accelerate, ServerMomentum
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.runs.explain import Explanation
from fedbudget.runs.plot import chosen_tau
from fedbudget.runs.record import RoundRecord
from support.hand_made import (
    ONE,
    as_broadcast,
    as_train,
    last,
    make,
    report,
    train_report,
    w_of,
    with_values,
)
from support.methods import bits, nodes
from support.problems import problem, run_rounds


@dataclass(frozen=True)
class Alternating:
    """Alternate between few and many local updates."""

    few: int = 2
    many: int = 5
    estimates: bool = False

    def first(self) -> Decision:
        return Decision(self.few, "few at first")

    def next(self, previous: Decision, inputs: ControlInputs) -> Decision:
        return Decision(
            self.few if previous.tau == self.many else self.many, "the other one"
        )


@dataclass(frozen=True)
class Counted(StepSizeState):
    rounds: int = 0


@dataclass(frozen=True)
class Decaying:
    """η / (1 + rounds), halved after a recovery."""

    eta: float
    adapts: bool = False

    def first(self) -> Counted:
        return Counted(self.eta)

    def next(self, state: Counted, inputs: StepSizeInputs) -> Counted:
        return Counted(self.eta / (2 + state.rounds), rounds=state.rounds + 1)

    def recover(self, state: Counted, inputs: StepSizeInputs) -> Counted:
        return replace(state, eta=state.eta / 2)


@dataclass(frozen=True)
class Listening(FixedStep):
    """Settled while w improves."""

    def next(self, state: StepSizeState, inputs: StepSizeInputs) -> StepSizeState:
        return replace(state, settled=inputs.improved)


@dataclass(frozen=True)
class Halfway:
    """Move w halfway to the mean."""

    def first(self, w: Float32) -> None:
        return None

    def next(self, state: None, w: Float32, mean: Float32) -> tuple[None, Float32]:
        return None, np.float32(0.5) * (w + mean)


@dataclass(frozen=True)
class Median:
    """Median over nodes of every parameter."""

    needs_reports: bool = True

    def combine(self, w: Float32, sizes: Int64, nodes: Int64) -> Float32:
        return np.asarray(np.median(w, axis=0), np.float32)


METHOD = Method(Alternating(), Decaying(0.1), update=ServerMomentum(0.5), combine=Median())


class TestController:
    def test_custom_reasons_are_recorded(self) -> None:
        rounds = [aggregator.last for _, _, aggregator in run(Alternating(), eta=0.1)]
        chosen = [(each.tau, each.reason) for each in rounds if each is not None]
        assert chosen[:4] == [
            (2, "few at first"),
            (5, "the other one"),
            (2, "the other one"),
            (5, "the other one"),
        ]
        assert chosen[-1] == (0, Reason.FINAL)

    def test_zero_updates_are_refused(self) -> None:
        with pytest.raises(
            UserError, match="chose 0 local updates; a round needs at least 1"
        ):
            make(controller=Alternating(few=0))

    def test_custom_reasons_are_shown(self) -> None:
        rounds = [aggregator.last for _, _, aggregator in run(Alternating(), eta=0.1)]
        records = [
            RoundRecord.of(each, accuracy=None, wall=0.0)
            for each in rounds
            if each is not None
        ]
        assert [RoundRecord.from_json(record.to_json()) for record in records] == records
        axis = Figure().subplots()
        chosen_tau(axis, records, range(len(records)))
        legend = axis.get_legend()
        assert legend is not None
        assert [text.get_text().strip() for text in legend.get_texts()] == [
            "few at first",
            "the other one",
        ]
        nothing = np.empty(0)
        own = Explanation(records[1], nothing.astype(np.int64), nothing, None)
        assert (own.record.reason, own.sentence) == (
            "the other one",
            "the controller gave this reason itself",
        )


class TestStepSize:
    def test_state_persists_between_rounds(self) -> None:
        rounds = list(run(FixedTau(1), eta=Decaying(0.6)))
        etas = [as_train(broadcast).eta for broadcast, _, _ in rounds[:4]]
        assert etas == pytest.approx([0.6, 0.3, 0.2, 0.15])

    def test_recover_after_lost_round(self) -> None:
        aggregator = make(step_size=Decaying(0.6))
        nothing = np.full((2, 2), np.nan, np.float32)
        lost = with_values(report(aggregator.start(), 1.0), w=nothing)
        assert as_train(aggregator.receive(lost, ONE)).eta == pytest.approx(0.3)

    @pytest.mark.parametrize(
        ("losses", "improved"),
        [((0.8, 0.9), True), ((0.5, 1.2), False), ((1.1, 1.2), False)],
    )
    def test_improved_means_significantly_better(
        self, losses: tuple[float, float], improved: bool
    ) -> None:
        """Two nodes with loss 1 before. The second pair is better by 0.15 ± 0.35 on
        average.
        """
        aggregator = make(step_size=Listening(0.1))
        second = as_broadcast(aggregator.receive(report(aggregator.start(), 1.0), ONE))
        given = report(second, 1.0)
        aggregator.receive(with_values(given, losses=np.array(losses)), ONE)
        assert aggregator.state.step_size.settled is improved

    def test_nan_is_refused(self) -> None:
        with pytest.raises(ValueError, match="must be 0 or a positive number, not nan"):
            make(step_size=Decaying(np.nan))


class TestUpdateRule:
    def test_moves_w_of_the_round(self) -> None:
        aggregator = make(update=Halfway())
        second = as_broadcast(
            aggregator.receive(report(aggregator.start(), 1.0, w=4.0), ONE)
        )
        third = as_broadcast(aggregator.receive(report(second, 1.0, w=8.0), ONE))
        assert second.w.tolist() == w_of(2.0).tolist()
        assert third.w.tolist() == w_of(5.0).tolist()

    def test_divergence_causes_recovery(self) -> None:
        class Diverging(Halfway):
            def next(self, state: None, w: Float32, mean: Float32) -> tuple[None, Float32]:
                return None, mean * np.float32(np.inf)

        aggregator = make(update=Diverging())
        again = as_train(aggregator.receive(report(aggregator.start(), 1.0, w=1.0), ONE))
        assert (again.w.tolist(), again.tau) == ([0, 0], 1)
        aggregator.receive(report(again, 1.0, w=1.0), ONE)
        assert last(aggregator).reason == Reason.RECOVERY

    def test_wrong_shape_is_refused(self) -> None:
        class Short(Halfway):
            def next(self, state: None, w: Float32, mean: Float32) -> tuple[None, Float32]:
                return None, mean[:1]

        aggregator = make(update=Short())
        before = aggregator.start()
        with pytest.raises(
            UserError, match=r"Short returned an array of shape \(1,\), not \(2,\)"
        ):
            aggregator.receive(report(before, 1.0), ONE)
        assert aggregator.pending is before


class TestCombineRule:
    def test_one_extreme_node_keeps_median(self) -> None:
        aggregator = make(combine=Median())
        w = np.array([[1, 0], [3, 4], [1e9, -1e9]], np.float32)
        three = train_report(w, sizes=np.array([1, 1, 50]))
        aggregator.start()
        assert as_broadcast(aggregator.receive(three, ONE)).w.tolist() == [3, 0]

    def test_dropped_nodes_are_not_combined(self) -> None:
        aggregator = make(combine=Median())
        w = np.array([[1, 0], [np.nan, 4], [5, 6]], np.float32)
        aggregator.start()
        three = train_report(w, sizes=np.array([1, 1, 50]))
        assert as_broadcast(aggregator.receive(three, ONE)).w.tolist() == [3, 3]

    def test_weighted_mean_matches_sums(self) -> None:
        rng = np.random.default_rng(0)
        w = rng.normal(size=(9, 40)).astype(np.float32)
        sizes = rng.integers(1, 90, 9)
        numbers = np.arange(9) * 3
        sums = Sums.of(train_report(w, sizes=sizes, nodes=numbers), LOSSES)
        mean = WeightedMean().combine(w, sizes, numbers)
        assert mean.tobytes() == sums.mean("w").tobytes()

    def test_sums_are_refused(self) -> None:
        aggregator = make(combine=Median())
        broadcast = aggregator.start()
        sums = Sums.of(report(broadcast, 1.0), broadcast.report)
        with pytest.raises(
            UserError, match="Median needs every node's report, and here only sums arrive"
        ):
            aggregator.receive(sums, ONE)

    def test_custom_rule_needs_reports(self) -> None:
        with pytest.raises(UserError, match="Median must set needs_reports to True"):
            make(combine=Median(needs_reports=False))


def test_failing_controller_changes_nothing() -> None:
    class Failing(Alternating):
        def next(self, previous: Decision, inputs: ControlInputs) -> Decision:
            raise ZeroDivisionError

    aggregator = make(controller=Failing())
    broadcast = aggregator.start()
    with pytest.raises(ZeroDivisionError):
        aggregator.receive(report(broadcast, 1.0), ONE)
    assert (aggregator.pending, aggregator.last) == (broadcast, None)


def test_drift_correction_needs_averages() -> None:
    with pytest.raises(UserError, match="Median does not: turn drift correction off"):
        Method(FixedTau(1), FixedStep(0.1), correct_drift=True, combine=Median())


class TestFeatures:
    """The features of a run follow from its rules, in a fixed order."""

    @pytest.mark.parametrize(
        ("method", "names"),
        [
            ({}, []),
            ({"controller": AdaptiveTau()}, ["estimates"]),
            ({"step_size": AutoStep()}, ["estimates"]),
            ({"correct_drift": True, "update": Accelerate()}, ["drift", "momentum"]),
            ({"correct_drift": True, "by_speed": 9}, ["drift", "workload"]),
            ({"by_data": (3, 5), "proximal": 0.1}, ["workload", "proximal"]),
            ({"update": ServerMomentum(0.5), "proximal": 0.1}, ["proximal"]),
        ],
    )
    def test_follow_from_the_rules(self, method: dict[str, Any], names: list[str]) -> None:
        rules: dict[str, Any] = {"controller": FixedTau(1), "step_size": FixedStep(0.1)}
        built = Method(**{**rules, **method})
        assert [feature.name for feature in built.features] == names

    def test_own_features_come_last(self) -> None:
        method = Method(FixedTau(1), FixedStep(0.1), proximal=0.1, extra=(Momentum(0.5),))
        assert method.features == (Proximal(0.1), Momentum(0.5))

    def test_equal_names_are_refused(self) -> None:
        with pytest.raises(
            UserError, match="two features have the same name: proximal, proximal"
        ):
            Method(FixedTau(1), FixedStep(0.1), proximal=0.1, extra=(Proximal(0.2),))

    @pytest.mark.parametrize("gradient", [False, True])
    def test_report_layout_follows(self, gradient: bool) -> None:
        """Estimates need a w_i(t₀), which no node has in the first round."""
        method = Method(
            AdaptiveTau(),
            FixedStep(0.1),
            correct_drift=True,
            partly=True,
            delta="gradient" if gradient else "parameters",
        )
        drift = ("losses", "best_losses", "plain", "corrected", "lasting", "shifted")
        first = report_layout(method.features, True)
        assert first == ReportLayout(drift, ("w",))
        later = report_layout(method.features, False)
        assert later.numbers == (*drift, "rho", "beta")
        assert later.optional == ("rho", "beta")
        assert later.vectors == (("w", "gradients") if gradient else ("w",))


def test_broadcast_has_w_and_mean() -> None:
    """The nodes compute c, the mean of all c_i, from the mean of w."""
    method = Method(FixedTau(3), FixedStep(0.05), update=Halfway(), correct_drift=True)
    fleets = nodes("svm", None, method.features)
    start = problem("svm", 12).start(1)
    budget = Budget({"time": 60.0})
    aggregator = Aggregator(start, method=method, budget=budget, expected=ONE)
    broadcast = aggregator.start()
    for _ in range(5):
        merged = Report.merge([fleet.answer(broadcast) for fleet in fleets])
        mean = np.average(merged.vectors["w"], axis=0, weights=merged.sizes)
        before = broadcast
        broadcast = as_broadcast(aggregator.receive(merged, ONE))
        drift = broadcast.part(DriftPart)
        assert drift is not None
        assert drift.mean is not None
        assert np.allclose(drift.mean, mean, atol=1e-6)
        assert np.allclose(broadcast.w, (before.w + mean) / 2, atol=1e-6)
    known = []
    for fleet in fleets:
        assert fleet.state is not None
        own = fleet.state.memories["drift"]
        assert isinstance(own, Correction)
        fleet.answer(broadcast)
        after = fleet.state.memories["drift"]
        assert isinstance(after, Correction)
        known.append((own.own[0], after.mean))
    sizes = [int(fleet.shards.size[0]) for fleet in fleets]
    means = np.average([own for own, _ in known], axis=0, weights=sizes)
    for _, common in known:
        assert np.allclose(common, means, atol=1e-4 * np.abs(means).max())


def test_custom_rules_resume_from_checkpoints(tmp_path: Path) -> None:
    """Checkpoints save and load custom states."""
    budget = Budget({"time": 60.0})
    fleets = nodes("svm", 5)
    aggregator = Aggregator(
        problem("svm", 12).start(1), method=METHOD, budget=budget, expected=ONE
    )
    broadcast: Any = aggregator.start()
    while isinstance(broadcast, Broadcast):
        Checkpoint(aggregator.state).save(tmp_path)
        state = Checkpoint.load(tmp_path, METHOD).state
        assert type(state.step_size) is Counted
        assert type(state.update) is type(aggregator.state.update)
        again = Aggregator.resume(state, method=METHOD, budget=budget)
        merged = Report.merge([fleet.answer(broadcast) for fleet in fleets])
        broadcast = aggregator.receive(merged, ONE)
        assert bits(again.receive(merged, ONE)) == bits(broadcast)
        assert bits(again.last) == bits(aggregator.last)
    assert last(aggregator).round > 5


def run(controller: Any, **method: Any) -> Any:
    """Run three nodes with different data in this process."""
    return run_rounds(
        nodes("svm", None), controller, rounds=6, w=problem("svm", 12).start(1), **method
    )
