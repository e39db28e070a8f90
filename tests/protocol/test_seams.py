"""What a user may bring: a controller, a step size, an update rule and a combination rule
of one's own.

The classes below are the examples of the documentation: a few lines each, and nothing else
in the project knows them."""

import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

import fedbudget
from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.budget.budget import Budget
from fedbudget.budget.control import ControlInputs, Decision, FixedTau, Reason
from fedbudget.budget.step_size import FixedStep, StepSizeInputs, StepSizeState
from fedbudget.codec import flatten, restore
from fedbudget.errors import UserError
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.combine import WeightedMean
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.protocol.method import Method
from fedbudget.protocol.sums import ReportsHere
from fedbudget.protocol.update import ServerMomentum
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.runs.explain import Explanation
from fedbudget.runs.plot import chosen_tau
from fedbudget.runs.record import RoundRecord
from support.hand_made import ONE, go_on, last, make, report, w_of
from support.methods import bits, nodes
from support.problems import converse, problem


@dataclass(frozen=True)
class Alternating:
    """Few local updates, then many, and so on."""

    few: int = 2
    many: int = 5
    estimates: bool = False

    def first(self) -> Decision:
        return Decision(self.few, "few to begin with")

    def next(self, previous: Decision, inputs: ControlInputs) -> Decision:
        return Decision(
            self.few if previous.tau == self.many else self.many, "the other one"
        )


@dataclass(frozen=True)
class Counted(StepSizeState):
    rounds: int = 0


@dataclass(frozen=True)
class Decaying:
    """η / (1 + rounds), halved when the run has gone back."""

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
    """w moves half of the way to the mean."""

    def first(self, w: Float32) -> None:
        return None

    def next(self, state: None, w: Float32, mean: Float32) -> tuple[None, Float32]:
        return None, np.float32(0.5) * (w + mean)


@dataclass(frozen=True)
class Median:
    """Of every parameter the median over nodes, whatever one of them sends."""

    needs_reports: bool = True

    def combine(self, w: Float32, sizes: Int64, nodes: Int64) -> Float32:
        return np.asarray(np.median(w, axis=0), np.float32)


METHOD = Method(Alternating(), Decaying(0.1), update=ServerMomentum(0.5), combine=Median())


@pytest.mark.parametrize("example", [Alternating, Decaying, Halfway, Median])
def test_examples_are_short(example: type) -> None:
    assert (
        len(inspect.getsource(example).strip().splitlines()) <= 16
    )  # with the decorator and a sentence


@pytest.mark.parametrize("example", [Alternating, Decaying, Halfway, Median])
def test_one_file_for_each(example: type) -> None:
    """No module of the project knows these classes, or others of their kind by name."""
    assert not mentions(rf"\b{example.__name__}\b", "protocol", "engines", "runs")


class TestController:
    def test_decides_with_reasons_of_its_own(self) -> None:
        rounds = [aggregator.last for _, _, aggregator in run(Alternating(), eta=0.1)]
        chosen = [(each.tau, each.reason) for each in rounds if each is not None]
        assert (
            chosen[:4]
            == [
                (2, "few to begin with"),
                *[(5, "the other one"), (2, "the other one")] * 2,
            ][:4]
        )
        assert chosen[-1] == (0, Reason.FINAL)

    def test_a_round_has_at_least_one_update(self) -> None:
        with pytest.raises(UserError, match="chose 0 local updates; a round needs at least 1"):
            make(controller=Alternating(few=0))

    def test_reasons_are_shown_as_they_are(self) -> None:
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
            "few to begin with",
            "the other one",
        ]
        nothing = np.empty(0)
        own = Explanation(
            1, 5, "the other one", nothing.astype(np.int64), nothing, None, 0.1, False
        )
        assert (own.reason, own.sentence) == (
            "the other one",
            "the controller gave this reason itself",
        )


class TestStepSize:
    def test_its_state_goes_from_round_to_round(self) -> None:
        etas = [broadcast.eta for broadcast, _, _ in run(FixedTau(1), eta=Decaying(0.6))]
        assert etas[:4] == pytest.approx([0.6, 0.3, 0.2, 0.15])

    def test_after_going_back(self) -> None:
        aggregator = make(step_size=Decaying(0.6))
        lost = replace(
            report(aggregator.start(), 1.0), w=np.full((2, 2), np.nan, np.float32)
        )
        assert go_on(aggregator.receive(lost, ONE)).eta == pytest.approx(0.3)

    @pytest.mark.parametrize(
        ("losses", "improved"),
        [((0.8, 0.9), True), ((0.5, 1.2), False), ((1.1, 1.2), False)],
    )
    def test_hears_of_better_w_unless_by_chance(
        self, losses: tuple[float, float], improved: bool
    ) -> None:
        """Of two nodes that both had 1 before; the second pair is better on average by
        0.15, give or take 0.35.
        """
        aggregator = make(step_size=Listening(0.1))
        second = go_on(aggregator.receive(report(aggregator.start(), 1.0), ONE))
        aggregator.receive(
            replace(report(second, 1.0), losses=np.array(losses), best_losses=np.ones(2)),
            ONE,
        )
        assert aggregator.state.step_size.settled is improved

    def test_must_be_a_number(self) -> None:
        with pytest.raises(ValueError, match="must be 0 or a positive number, not nan"):
            make(step_size=Decaying(np.nan))


class TestUpdateRule:
    def test_moves_w_from_where_the_round_began(self) -> None:
        aggregator = make(update=Halfway())
        second = go_on(aggregator.receive(report(aggregator.start(), 1.0, w=4.0), ONE))
        third = go_on(aggregator.receive(report(second, 1.0, w=8.0), ONE))
        assert (second.w.tolist(), third.w.tolist()) == (
            w_of(2.0).tolist(),
            w_of(5.0).tolist(),
        )

    def test_momentum_by_a_second_computation(self) -> None:
        rounds = list(run(FixedTau(3), eta=0.05, update=ServerMomentum(0.5)))
        v: Float64 = np.zeros(rounds[0][0].w.size)
        for (broadcast, answer, _), (after, _, _) in pairwise(rounds):
            assert answer.w is not None
            mean = np.average(answer.w.astype(np.float64), axis=0, weights=answer.sizes)
            v = 0.5 * v + mean - broadcast.w
            np.testing.assert_allclose(after.w, broadcast.w + v, atol=1e-5)

    def test_starts_anew_after_going_back(self) -> None:
        aggregator = make(update=ServerMomentum(0.5))
        second = go_on(aggregator.receive(report(aggregator.start(), 2.0, w=1.0), ONE))
        lost = replace(report(second, 1.0, best=2.0), w=np.full((2, 2), np.inf, np.float32))
        third = go_on(aggregator.receive(lost, ONE))
        assert (third.w.tolist(), aggregator.state.update.v.tolist()) == (
            second.w.tolist(),
            [0, 0],
        )

    def test_one_that_diverges_brings_the_run_back(self) -> None:
        class Diverging(Halfway):
            def next(self, state: None, w: Float32, mean: Float32) -> tuple[None, Float32]:
                return None, mean * np.float32(np.inf)

        aggregator = make(update=Diverging())
        again = go_on(aggregator.receive(report(aggregator.start(), 1.0, w=1.0), ONE))
        assert (again.w.tolist(), again.tau) == ([0, 0], 1)
        aggregator.receive(report(again, 1.0, w=1.0), ONE)
        assert last(aggregator).reason == Reason.RECOVERY

    def test_another_shape_is_refused(self) -> None:
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
    def test_one_wild_node_does_not_move_the_median(self) -> None:
        aggregator = make(combine=Median())
        w = np.array([[1, 0], [3, 4], [1e9, -1e9]], np.float32)
        three = Report(1, np.arange(3), np.array([1, 1, 50]), np.ones(3), np.ones(3), w=w)
        aggregator.start()
        assert go_on(aggregator.receive(three, ONE)).w.tolist() == [3, 0]

    def test_nodes_that_are_left_out_have_no_part(self) -> None:
        aggregator = make(combine=Median())
        w = np.array([[1, 0], [np.nan, 4], [5, 6]], np.float32)
        aggregator.start()
        three = Report(1, np.arange(3), np.array([1, 1, 50]), np.ones(3), np.ones(3), w=w)
        assert go_on(aggregator.receive(three, ONE)).w.tolist() == [3, 3]

    def test_the_weighted_mean_is_that_of_sums_to_the_bit(self) -> None:
        rng = np.random.default_rng(0)
        w, sizes, numbers = (
            rng.normal(size=(9, 40)).astype(np.float32),
            rng.integers(1, 90, 9),
            np.arange(9) * 3,
        )
        sums = ReportsHere(Report(1, numbers, sizes, np.ones(9), np.ones(9), w=w)).sums
        assert sums.w is not None
        assert (
            WeightedMean().combine(w, sizes, numbers).tobytes()
            == sums.mean(sums.w).tobytes()
        )

    def test_where_only_sums_arrive_it_is_refused(self) -> None:
        aggregator = make(combine=Median())
        sums = ReportsHere(report(aggregator.start(), 1.0))
        with pytest.raises(
            UserError, match="Median needs every node's report, and here only sums arrive"
        ):
            aggregator.receive(sums, ONE)

    def test_a_rule_of_sums_can_only_be_the_weighted_mean(self) -> None:
        with pytest.raises(UserError, match="Median must set needs_reports to True"):
            make(combine=Median(needs_reports=False))


def test_a_controller_that_fails_changes_nothing() -> None:
    class Failing(Alternating):
        def next(self, previous: Decision, inputs: ControlInputs) -> Decision:
            raise ZeroDivisionError

    aggregator = make(controller=Failing())
    broadcast = aggregator.start()
    with pytest.raises(ZeroDivisionError):
        aggregator.receive(report(broadcast, 1.0), ONE)
    assert (aggregator.pending, aggregator.last) == (broadcast, None)


def test_drift_is_not_corrected_where_reports_are_not_averaged() -> None:
    with pytest.raises(UserError, match="Median does not: turn drift correction off"):
        Method(FixedTau(1), FixedStep(0.1), correct_drift=True, combine=Median())


def test_where_w_is_not_the_mean_nodes_are_told_both() -> None:
    """c stays the mean of all c_i, which nodes work out from the mean alone."""
    method = Method(FixedTau(3), FixedStep(0.05), update=Halfway(), correct_drift=True)
    fleets, start = nodes("svm", None), problem("svm", 12).start(1)
    aggregator = Aggregator(
        start, method=method, budget=Budget({"time": 60.0}), expected=ONE
    )
    broadcast: Any = aggregator.start()
    for _ in range(5):
        merged = Report.merge([fleet.answer(broadcast) for fleet in fleets])
        assert merged.w is not None
        mean = np.average(merged.w, axis=0, weights=merged.sizes)
        before, broadcast = broadcast, aggregator.receive(merged, ONE)
        assert np.allclose(broadcast.mean, mean, atol=1e-6)
        assert np.allclose(broadcast.w, (before.w + mean) / 2, atol=1e-6)
    for fleet in fleets:
        fleet.receive(broadcast)
    own = [fleet._correction for fleet in fleets]
    sizes = [int(fleet.shards.size[0]) for fleet in fleets]
    means = np.average(
        [each.own[0] for each in own if each is not None], axis=0, weights=sizes
    )
    for each in own:
        assert each is not None
        assert np.allclose(each.mean, means, atol=1e-4 * np.abs(means).max())


def test_a_run_with_all_of_them_resumes_from_any_checkpoint(tmp_path: Path) -> None:
    """States of one's own are saved and read like any other."""
    budget, fleets = Budget({"time": 60.0}), nodes("svm", 5)
    aggregator = Aggregator(
        problem("svm", 12).start(1), method=METHOD, budget=budget, expected=ONE
    )
    broadcast: Any = aggregator.start()
    while isinstance(broadcast, Broadcast):
        Checkpoint(aggregator.state).save(tmp_path)
        state = Checkpoint.load(tmp_path, METHOD).state
        assert (type(state.step_size), type(state.update)) == (
            Counted,
            type(aggregator.state.update),
        )
        again = Aggregator.resume(state, method=METHOD, budget=budget)
        merged = Report.merge([fleet.answer(broadcast) for fleet in fleets])
        broadcast = aggregator.receive(merged, ONE)
        assert bits(again.receive(merged, ONE)) == bits(broadcast)
        assert bits(again.last) == bits(aggregator.last)
    assert last(aggregator).round > 5


class TestFieldsOfMessages:
    """A new field is declared in messages.py, filled by the fleet, and summed or used: at
    most 4 files.
    """

    @pytest.mark.parametrize("field", ["rho", "beta", "gradients", "plain", "curvature"])
    def test_few_modules_know_a_field(self, field: str) -> None:
        modules = mentions(
            rf"(report|request)\.{field}\b|\"{field}\"|\b{field}=", "protocol"
        )
        assert "fleet.py" in modules
        assert len({*modules, "messages.py"}) <= 4

    def test_a_new_field_is_merged_measured_and_carried(self) -> None:
        kind = make_dataclass(
            "Wider", [("norms", Float64 | None, None)], bases=(Report,), frozen=True
        )
        parts = [
            kind(
                1,
                np.array([node]),
                np.array([5]),
                np.ones(1),
                np.ones(1),
                norms=np.array([node + 0.5]),
            )
            for node in (1, 0)
        ]
        merged: Any = kind.merge(parts)  # type: ignore[attr-defined]
        assert merged.norms.tolist() == [0.5, 1.5]
        assert merged.wire_bytes == 2 * (32 + 3 * 8)
        plain, arrays = flatten(merged)
        assert bits(restore(kind, json.loads(json.dumps(plain)), arrays)) == bits(merged)


def run(controller: Any, **method: Any) -> Any:
    """A whole run of three nodes with data of their own kinds, in this process."""
    return converse(
        nodes("svm", None), controller, rounds=6, w=problem("svm", 12).start(1), **method
    )


def mentions(pattern: str, *rooms: str) -> Sequence[str]:
    """The modules of these rooms that have the pattern in their code."""
    package = Path(fedbudget.__file__).parent
    files = [
        file for reserve in rooms for file in sorted((package / reserve).rglob("*.py"))
    ]
    code = {
        file.name: re.sub(r'"""(.|\n)*?"""|#.*', "", file.read_text()) for file in files
    }
    return [name for name, text in code.items() if re.search(pattern, text)]
