"""Drift correction: against a second implementation, with nodes that come and go, and where
it must change nothing.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.budget.budget import Budget
from fedbudget.budget.control import AdaptiveTau, Controller, FixedTau
from fedbudget.budget.step_size import FixedStep
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.drift import (
    Correction,
    Divergence,
    DriftState,
    mean_gradient,
    next_mean,
)
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import (
    Broadcast,
    CatchUp,
    Drift,
    LocalError,
    PeerError,
    Report,
    Request,
)
from fedbudget.protocol.method import Method
from support.fleets import alone, sorted_parts, together
from support.hand_made import ONE, go_on
from support.methods import bits
from support.problems import (
    MODELS,
    Problem,
    converse,
    corrected_descent,
    problem,
    unequal_parts,
)

FRUGAL: dict[str, Any] = {"correct_drift": True, "delta": "parameters"}


@st.composite
def attendances(draw: st.DrawFn, nodes: int = 4, rounds: int = 9) -> list[list[int]]:
    """Who takes part in each round: nodes come late, miss rounds, and return."""
    here = st.lists(st.integers(0, nodes - 1), min_size=1, unique=True).map(sorted)
    return [draw(here) for _ in range(rounds)]


def starting(w: Float32, controller: Controller, **method: Any) -> Aggregator:
    """An aggregator with a budget that does not matter."""
    return Aggregator(
        w,
        method=Method(controller, FixedStep(0.1), **method),
        budget=Budget({"time": 1e6}),
        expected=ONE,
    )


def known(aggregator: Aggregator) -> DriftState:
    assert aggregator.state.drift is not None
    return aggregator.state.drift


class TestAgainstASecondImplementation:
    @pytest.mark.parametrize("name", MODELS)
    @settings(deadline=None, max_examples=8)
    @given(seed=st.integers(0, 10**4), tau=st.integers(1, 6))
    def test_all_nodes_in_all_rounds(self, name: str, seed: int, tau: int) -> None:
        self.check(name, seed, tau, [list(range(4))] * 9, [True] * 9)

    @settings(deadline=None, max_examples=40)
    @given(seed=st.integers(0, 10**4), tau=st.integers(1, 6), present=attendances())
    def test_nodes_that_come_late_miss_rounds_and_return(
        self, seed: int, tau: int, present: list[list[int]]
    ) -> None:
        self.check("svm", seed, tau, present, [True] * 9)

    @settings(deadline=None, max_examples=40)
    @given(present=attendances(), correct=st.lists(st.booleans(), min_size=8, max_size=8))
    def test_rounds_that_are_not_corrected(
        self, present: list[list[int]], correct: list[bool]
    ) -> None:
        self.check("svm", 5, 3, present, [True, *correct])

    def check(
        self, name: str, seed: int, tau: int, present: list[list[int]], correct: list[bool]
    ) -> None:
        case = problem(name, 3)
        parts, start = unequal_parts(len(case.table), 4, seed), case.start(3)
        expected = corrected_descent(
            case.local(parts),
            [len(part) for part in parts],
            start.astype(np.float64),
            taus=[tau] * 9,
            eta=0.05,
            present=present,
            correct=correct,
        )

        def heard(report: Report) -> Report:
            """Makes the aggregator decide as we want for the round after."""
            if report.plain is None or report.round >= len(correct):
                return report
            # More each time, so that what was said before does not count.
            weight, nodes = 10.0**report.round, len(report.nodes)
            plain, corrected = (weight, 0.0) if correct[report.round] else (0.0, weight)
            return replace(
                report, plain=np.full(nodes, plain), corrected=np.full(nodes, corrected)
            )

        broadcast = [
            broadcast.w
            for broadcast, _, _ in converse(
                alone(case, parts),
                FixedTau(tau),
                eta=0.05,
                rounds=9,
                w=start,
                present=present,
                heard=heard,
                **FRUGAL,
            )
        ]
        np.testing.assert_allclose(np.array(broadcast), np.array(expected), atol=2e-5)


class TestWhereItMustChangeNothing:
    def visited(self, fleet: Fleet, w: Float32, tau: int, **method: Any) -> Float32:
        return np.array(
            [
                broadcast.w
                for broadcast, _, _ in converse(
                    [fleet], FixedTau(tau), eta=0.1, rounds=8, w=w, **method
                )
            ]
        )

    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("batch", [None, 5])
    def test_one_update_a_round(self, name: str, batch: int | None) -> None:
        case = problem(name, 4)
        parts = unequal_parts(len(case.table), 4, 12)
        batch = batch and min(batch, *map(len, parts))
        found, plain = (
            self.visited(together(case, parts, batch), case.start(1), 1, **method)
            for method in (FRUGAL, {})
        )
        np.testing.assert_allclose(found, plain, atol=2e-6)

    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("batch", [None, 5])
    def test_identical_shards(self, name: str, batch: int | None) -> None:
        case = problem(name, 4)
        parts = [np.arange(len(case.table))] * 5
        found, plain = (
            self.visited(together(case, parts, batch), case.start(1), 7, **method)
            for method in (FRUGAL, {})
        )
        np.testing.assert_allclose(found, plain, atol=2e-6)


def test_it_takes_the_drift_away() -> None:
    """With many updates a round, nodes with their own kind of data end where one place with
    all data would.
    """
    case = problem("linear", 2)
    parts, w = sorted_parts(case, 4), case.start(1)
    everything: Float64 = w.astype(np.float64)
    for _ in range(2000):
        everything = everything - 0.1 * case.gradient(everything, case.x, case.y)
    off = {}
    for name, method in {"plain": {}, "corrected": FRUGAL}.items():
        *_, (broadcast, _, _) = converse(
            [together(case, parts)], FixedTau(20), eta=0.1, rounds=100, w=w, **method
        )
        off[name] = float(np.linalg.norm(broadcast.w - everything))
    assert off["corrected"] < 1e-4 < 0.1 < off["plain"]


class TestForgettingNodes:
    """Nodes leave for good, or come back without their memory."""

    NODES = 4

    @settings(deadline=None, max_examples=40)
    @given(
        seed=st.integers(0, 10**4),
        before=attendances(rounds=4),
        after=attendances(rounds=4),
        lost=st.sets(st.integers(0, 3), min_size=1, max_size=3),
        tau=st.integers(1, 5),
    )
    def test_those_who_stay_go_on_as_if_they_began_there(
        self,
        seed: int,
        before: list[list[int]],
        after: list[list[int]],
        lost: set[int],
        tau: int,
    ) -> None:
        """An interval without correction begins with all c_i = c = 0, as a run does:
        nothing of the past is left.

        Those that are lost may come back later; then they are new. Where none of them ever
        took part, nothing is lost."""
        assume(any(node in here for here in before for node in lost))
        case = problem("svm", 3)
        parts = unequal_parts(len(case.table), self.NODES, seed)
        stay = [node for node in range(self.NODES) if node not in lost]
        fleets = alone(case, parts)
        aggregator = starting(case.start(3), FixedTau(tau), correct_drift=True)
        broadcast = aggregator.start()
        visited = []
        for number, here in enumerate([*before, stay, *after]):
            if number == len(before):
                broadcast = aggregator.forget(lost)
                for node in lost:
                    fleets[node] = alone(case, parts)[node]
            visited.append(broadcast.w)
            report = Report.merge([fleets[node].answer(broadcast) for node in here])
            broadcast = go_on(aggregator.receive(self.always_correct(report), ONE))
        visited.append(broadcast.w)
        expected = corrected_descent(
            case.local(parts),
            [len(part) for part in parts],
            visited[len(before)].astype(np.float64),
            taus=[tau] * 5,
            eta=0.1,
            present=[stay, *after],
            correct=[True] * 5,
        )
        np.testing.assert_allclose(
            np.array(visited[len(before) :]), np.array(expected), atol=2e-5
        )

    def always_correct(self, report: Report) -> Report:
        return replace(
            report, plain=np.ones(len(report.nodes)), corrected=np.zeros(len(report.nodes))
        )

    def after_three(self, **method: Any) -> tuple[Aggregator, Broadcast]:
        case = problem("svm", 3)
        fleet = together(case, sorted_parts(case, 4))
        aggregator = starting(case.start(1), AdaptiveTau(), **method)
        broadcast = aggregator.start()
        for _ in range(3):
            broadcast = go_on(aggregator.receive(fleet.answer(broadcast), ONE))
        return aggregator, broadcast

    def test_the_next_round_is_the_same_but_for_the_correction(self) -> None:
        aggregator, broadcast = self.after_three(**FRUGAL)
        assert broadcast.drift == Drift(correct=True, share=1.0)
        instead = aggregator.forget([2])
        assert instead.drift == Drift(correct=False, share=1.0)
        assert bits(replace(instead, drift=broadcast.drift)) == bits(broadcast)
        assert aggregator.pending is instead
        assert known(aggregator).nodes.tolist() == [0, 1, 3]

    def test_delta_is_that_of_the_coming_round(self) -> None:
        aggregator, _ = self.after_three(**FRUGAL)
        aggregator.forget([2])
        estimates, divergence = aggregator.state.estimates, known(aggregator).divergence
        assert estimates is not None
        assert divergence is not None
        assert estimates.delta == divergence.plain != divergence.corrected

    def test_nodes_that_never_took_part_have_nothing_to_forget(self) -> None:
        aggregator, broadcast = self.after_three(**FRUGAL)
        assert aggregator.forget([7, 9]) is broadcast
        assert aggregator.forget([]) is broadcast

    def test_without_correction_there_is_nothing_to_do(self) -> None:
        aggregator, broadcast = self.after_three()
        assert aggregator.forget([2]) is broadcast

    def test_a_round_that_is_not_corrected_anyway_stays_as_it_is(self) -> None:
        aggregator, _ = self.after_three(**FRUGAL)
        once = aggregator.forget([2])
        assert bits(aggregator.forget([3])) == bits(once)
        assert known(aggregator).nodes.tolist() == [0, 1]

    def test_only_between_rounds(self) -> None:
        with pytest.raises(
            LocalError, match="forget nodes between rounds: the run is ready"
        ):
            starting(np.zeros(2, np.float32), FixedTau(1), correct_drift=True).forget([1])


class TestDecidesByItself:
    def corrected(
        self, batch: int | None, parts: Sequence[Int64], case: Problem
    ) -> list[bool]:
        rounds = converse(
            [together(case, parts, batch)],
            FixedTau(5),
            eta=0.02,
            rounds=60,
            w=case.start(1),
            correct_drift=True,
        )
        return [
            aggregator.last.corrected
            for _, _, aggregator in rounds
            if aggregator.last is not None
        ][:-1]

    def test_it_corrects_where_data_are_of_different_kinds(self) -> None:
        case = problem("svm", 3, samples=400)
        assert all(self.corrected(None, sorted_parts(case, 4), case))

    def test_it_does_not_where_all_that_differs_is_noise(self) -> None:
        # Mini-batches of one sample, from data of one kind: what a shift would take away is
        # never there again.
        case = problem("svm", 3, samples=400)
        rng = np.random.default_rng(1)
        parts = np.array_split(rng.permutation(400), 4)
        parts = [
            part[: 97 + node] for node, part in enumerate(parts)
        ]  # of different sizes, so of different samples
        corrected = self.corrected(1, parts, case)
        assert sum(corrected[10:]) < 10

    def test_delta_is_that_of_the_coming_round(self) -> None:
        case = problem("svm", 3)
        aggregators = converse(
            [together(case, sorted_parts(case, 4))],
            AdaptiveTau(),
            eta=0.05,
            rounds=5,
            w=case.start(1),
            heard=lambda report: (
                report if report.round != 3 else replace(report, corrected=np.full(4, 1e3))
            ),
            **FRUGAL,
        )
        seen = [
            (broadcast.drift, aggregator.last) for broadcast, _, aggregator in aggregators
        ]
        drift, last = seen[2]
        assert drift is not None
        assert drift.correct
        assert last is not None
        assert last.estimates is not None
        assert last.divergence is not None
        assert last.estimates.delta == last.divergence.plain
        after = seen[3][0]
        assert after is not None
        assert not after.correct

    def test_it_judges_by_half_of_what_was_and_half_of_what_is(self) -> None:
        assert Divergence(1.0, 0.0).then(Divergence(3.0, 4.0)) == Divergence(2.0, 2.0)
        assert Divergence(2.0, 2.0).correct
        assert not Divergence(2.0, 2.1).correct


class TestWhatDiverges:
    def test_a_node_whose_w_is_not_finite_keeps_its_correction(self) -> None:
        known = Correction.first(2, np.zeros(2, np.float32))
        known = known.learn(
            np.array([[1, 2], [3, 4]], np.float32), Drift(correct=True, share=1.0)
        )
        known = known.with_mean(np.array([2, 3], np.float32))
        # Less the shifts (1, 1) and (-1, -1).
        known = known.learn(
            np.array([[5, np.inf], [5, 6]], np.float32), Drift(correct=True, share=1.0)
        )
        assert known.own.tolist() == [[1, 2], [6, 7]]

    def test_when_all_diverge_the_next_round_is_not_corrected(self) -> None:
        case = problem("linear", 2)
        request = converse(
            [together(case, sorted_parts(case, 4))],
            FixedTau(50),
            eta=1e5,
            rounds=4,
            w=case.start(1),
            **FRUGAL,
        )
        drifts = [broadcast.drift for broadcast, _, _ in request]
        assert drifts[1] == Drift(correct=False, share=0.0)


class TestNews:
    def test_without_them_a_node_that_was_away_cannot_go_on(self) -> None:
        case = problem("svm", 3)
        fleet = together(case, sorted_parts(case, 2))
        drift = Drift(correct=True, share=1.0)
        first = Broadcast(
            1, case.start(1), 2, 0.1, Request(drift=True), False, False, drift
        )
        fleet.answer(first)
        with pytest.raises(PeerError, match="round 3 after round 1, without a catch-up"):
            fleet.receive(replace(first, round=3))
        with pytest.raises(PeerError, match="without the mean of all corrections"):
            fleet.receive(replace(first, round=3, catch_up=CatchUp(case.start(1))))

    @pytest.mark.parametrize("batch", [None, 5])
    def test_a_node_that_was_away_compares_with_the_right_best_w(
        self, batch: int | None
    ) -> None:
        case = problem("svm", 3)
        parts = sorted_parts(case, 3)
        present = [[0, 1, 2], [0], [0, 1], [2], [0, 1, 2], [1], [0, 1, 2]]
        best = case.start(1)
        for broadcast, report, aggregator in converse(
            alone(case, parts, batch),
            FixedTau(2),
            eta=0.05,
            rounds=7,
            w=best,
            present=present,
        ):
            if batch is None:
                for node, loss in zip(report.nodes, report.best_losses, strict=True):
                    rows = parts[node]
                    exact = case.loss(best.astype(np.float64), case.x[rows], case.y[rows])
                    assert loss == pytest.approx(exact, rel=1e-5)
            else:
                own = {int(node) for node in report.nodes}
                assert own <= {0, 1, 2}
            if (
                broadcast.round > 1
                and aggregator.last is not None
                and np.average(report.losses, weights=report.sizes)
                < np.average(report.best_losses, weights=report.sizes)
            ):
                best = broadcast.w


def test_the_mean_after_a_round_counts_those_who_took_part() -> None:
    # c = 2, half of the data went along 10 on average: c' = 1 + 5.
    start, end = np.array([1.0], np.float32), np.array([0.0], np.float32)
    gradient = mean_gradient(start, end, 0.1)
    assert gradient.tolist() == [10]
    assert next_mean(np.array([2.0], np.float32), gradient, 0.5).tolist() == [6]
    assert next_mean(np.array([2.0], np.float32), gradient, 1.0).tolist() == [10]
    assert next_mean(None, gradient, 0.5).tolist() == [5]
