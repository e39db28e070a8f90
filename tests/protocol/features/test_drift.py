"""Drift correction, compared with a second implementation and with SCAFFOLD."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.budget.budget import Budget, Costs, Ledger
from fedbudget.budget.control import AdaptiveTau, Controller, FixedTau
from fedbudget.budget.step_size import FixedStep
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.drift import (
    Correction,
    Divergence,
    DriftCorrection,
    DriftPart,
    DriftState,
    mean_gradient,
    next_mean,
)
from fedbudget.protocol.features.estimates import EstimatesState
from fedbudget.protocol.features.feature import RoundResult, report_layout
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import (
    Broadcast,
    CatchUp,
    LocalError,
    PeerError,
    Report,
    TrainRound,
)
from fedbudget.protocol.method import Method
from fedbudget.protocol.sums import Sums
from support.fleets import one_fleet, single_node_fleets, sorted_parts
from support.hand_made import ONE, as_broadcast, train_report, with_values
from support.methods import bits
from support.problems import (
    MODELS,
    LocalGradient,
    Problem,
    corrected_descent,
    problem,
    run_rounds,
    unequal_parts,
)

FRUGAL: dict[str, Any] = {"correct_drift": True, "delta": "parameters"}
CORRECT = DriftPart(correct=True, share=1.0)


@st.composite
def attendances(draw: st.DrawFn, nodes: int = 4, rounds: int = 9) -> list[list[int]]:
    """Nodes present in each round: they arrive late, miss rounds, and return."""
    here = st.lists(st.integers(0, nodes - 1), min_size=1, unique=True).map(sorted)
    return [draw(here) for _ in range(rounds)]


def starting(w: Float32, controller: Controller, **method: Any) -> Aggregator:
    """An aggregator with ample budget."""
    return Aggregator(
        w,
        method=Method(controller, FixedStep(0.1), **method),
        budget=Budget({"time": 1e6}),
        expected=ONE,
    )


def known(aggregator: Aggregator) -> DriftState:
    state = aggregator.state.states["drift"]
    assert isinstance(state, DriftState)
    return state


def first_round(w: Float32, *, partly: bool = False) -> TrainRound:
    """A first round of two updates with drift correction."""
    return TrainRound(
        round=1,
        w=w,
        report=report_layout((DriftCorrection(partly),), True),
        tau=2,
        eta=0.1,
        effective=2,
        parts=(CORRECT,),
    )


class TestAgainstSecondImplementation:
    @pytest.mark.parametrize("name", MODELS)
    @settings(deadline=None, max_examples=8)
    @given(seed=st.integers(0, 10**4), tau=st.integers(1, 6))
    def test_all_nodes_in_all_rounds(self, name: str, seed: int, tau: int) -> None:
        self.check(name, seed, tau, [list(range(4))] * 9, [True] * 9)

    @settings(deadline=None, max_examples=40)
    @given(seed=st.integers(0, 10**4), tau=st.integers(1, 6), present=attendances())
    def test_nodes_miss_rounds_and_return(
        self, seed: int, tau: int, present: list[list[int]]
    ) -> None:
        self.check("svm", seed, tau, present, [True] * 9)

    @settings(deadline=None, max_examples=40)
    @given(present=attendances(), correct=st.lists(st.booleans(), min_size=8, max_size=8))
    def test_some_rounds_are_uncorrected(
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

        def transform(report: Report) -> Report:
            """Force the decision of the next round."""
            if "plain" not in report.numbers or report.round >= len(correct):
                return report
            # Grows each round, so earlier reports do not matter.
            weight, nodes = 10.0**report.round, len(report.nodes)
            plain, corrected = (weight, 0.0) if correct[report.round] else (0.0, weight)
            return with_values(
                report, plain=np.full(nodes, plain), corrected=np.full(nodes, corrected)
            )

        broadcast = [
            broadcast.w
            for broadcast, _, _ in run_rounds(
                single_node_fleets(case, parts),
                FixedTau(tau),
                eta=0.05,
                rounds=9,
                w=start,
                present=present,
                transform=transform,
                **FRUGAL,
            )
        ]
        np.testing.assert_allclose(np.array(broadcast), np.array(expected), atol=2e-5)


class TestWithoutDrift:
    def visited(self, fleet: Fleet, w: Float32, tau: int, **method: Any) -> Float32:
        return np.array(
            [
                broadcast.w
                for broadcast, _, _ in run_rounds(
                    [fleet], FixedTau(tau), eta=0.1, rounds=8, w=w, **method
                )
            ]
        )

    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("batch", [None, 5])
    @pytest.mark.parametrize("tau", [1, 7])
    def test_correction_changes_nothing(
        self, name: str, batch: int | None, tau: int
    ) -> None:
        """With one update per round, or with the same data on all nodes."""
        case = problem(name, 4)
        parts = [np.arange(len(case.table))] * 5
        if tau == 1:
            parts = unequal_parts(len(case.table), 4, 12)
        batch = batch and min(batch, *map(len, parts))
        corrected, plain = (
            self.visited(one_fleet(case, parts, batch), case.start(1), tau, **method)
            for method in (FRUGAL, {})
        )
        np.testing.assert_allclose(corrected, plain, atol=2e-6)


def test_correction_removes_drift() -> None:
    """With many updates per round, nodes still reach the centralized minimum."""
    case = problem("linear", 2)
    parts, w = sorted_parts(case, 4), case.start(1)
    everything: Float64 = w.astype(np.float64)
    for _ in range(2000):
        everything = everything - 0.1 * case.gradient(everything, case.x, case.y)
    off = {}
    for name, method in {"plain": {}, "corrected": FRUGAL}.items():
        *_, (broadcast, _, _) = run_rounds(
            [one_fleet(case, parts)], FixedTau(20), eta=0.1, rounds=100, w=w, **method
        )
        off[name] = float(np.linalg.norm(broadcast.w - everything))
    assert off["corrected"] < 1e-4 < 0.1 < off["plain"]


class TestForget:
    """Nodes leave for good, or return without their memory."""

    NODES = 4

    @settings(deadline=None, max_examples=40)
    @given(
        seed=st.integers(0, 10**4),
        before=attendances(rounds=4),
        after=attendances(rounds=4),
        lost=st.sets(st.integers(0, 3), min_size=1, max_size=3),
        tau=st.integers(1, 5),
    )
    def test_remaining_nodes_restart(
        self,
        seed: int,
        before: list[list[int]],
        after: list[list[int]],
        lost: set[int],
        tau: int,
    ) -> None:
        """A round without correction resets all c_i and c to 0, as at the start of a run.

        Lost nodes may return later as new nodes. If none of them ever took part, nothing is
        lost.
        """
        assume(any(node in here for here in before for node in lost))
        case = problem("svm", 3)
        parts = unequal_parts(len(case.table), self.NODES, seed)
        stay = [node for node in range(self.NODES) if node not in lost]
        features = (DriftCorrection(),)
        fleets = single_node_fleets(case, parts, features=features)
        aggregator = starting(case.start(3), FixedTau(tau), correct_drift=True)
        broadcast = aggregator.start()
        visited = []
        for number, here in enumerate([*before, stay, *after]):
            if number == len(before):
                broadcast = aggregator.forget(lost)
                for node in lost:
                    new = single_node_fleets(case, parts, features=features)
                    fleets[node] = new[node]
            visited.append(broadcast.w)
            report = Report.merge([fleets[node].answer(broadcast) for node in here])
            broadcast = as_broadcast(aggregator.receive(self.always_correct(report), ONE))
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
        nodes = len(report.nodes)
        return with_values(report, plain=np.ones(nodes), corrected=np.zeros(nodes))

    def after_three(self, **method: Any) -> tuple[Aggregator, Broadcast]:
        case = problem("svm", 3)
        aggregator = starting(case.start(1), AdaptiveTau(), **method)
        features = aggregator.method.features
        fleet = one_fleet(case, sorted_parts(case, 4), features=features)
        broadcast = aggregator.start()
        for _ in range(3):
            broadcast = as_broadcast(aggregator.receive(fleet.answer(broadcast), ONE))
        return aggregator, broadcast

    def test_next_round_changes_only_correction(self) -> None:
        aggregator, broadcast = self.after_three(**FRUGAL)
        assert broadcast.parts == (CORRECT,)
        instead = aggregator.forget([2])
        assert instead.parts == (DriftPart(correct=False, share=1.0),)
        assert bits(replace(instead, parts=broadcast.parts)) == bits(broadcast)
        assert aggregator.pending is instead
        assert known(aggregator).nodes.tolist() == [0, 1, 3]

    def test_delta_is_of_next_round(self) -> None:
        aggregator, _ = self.after_three(**FRUGAL)
        aggregator.forget([2])
        estimates = aggregator.state.states["estimates"]
        divergence = known(aggregator).divergence
        assert isinstance(estimates, EstimatesState)
        assert estimates.values is not None
        assert divergence is not None
        assert estimates.values.delta == divergence.plain != divergence.corrected

    def test_unknown_nodes_change_nothing(self) -> None:
        aggregator, broadcast = self.after_three(**FRUGAL)
        assert aggregator.forget([7, 9]) is broadcast
        assert aggregator.forget([]) is broadcast

    def test_no_change_without_correction(self) -> None:
        aggregator, broadcast = self.after_three()
        assert aggregator.forget([2]) is broadcast

    def test_uncorrected_round_stays(self) -> None:
        aggregator, _ = self.after_three(**FRUGAL)
        once = aggregator.forget([2])
        assert bits(aggregator.forget([3])) == bits(once)
        assert known(aggregator).nodes.tolist() == [0, 1]

    def test_only_between_rounds(self) -> None:
        with pytest.raises(
            LocalError, match="forget nodes between rounds: the run is ready"
        ):
            starting(np.zeros(2, np.float32), FixedTau(1), correct_drift=True).forget([1])


class TestDecision:
    def corrected(
        self, batch: int | None, parts: Sequence[Int64], case: Problem
    ) -> list[bool]:
        rounds = run_rounds(
            [one_fleet(case, parts, batch)],
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

    def test_corrects_different_data(self) -> None:
        case = problem("svm", 3, samples=400)
        assert all(self.corrected(None, sorted_parts(case, 4), case))

    def test_ignores_mini_batch_noise(self) -> None:
        # Mini-batches of one sample from equal data: the noise of a shift never returns.
        case = problem("svm", 3, samples=400)
        rng = np.random.default_rng(1)
        parts = np.array_split(rng.permutation(400), 4)
        parts = [
            part[: 97 + node] for node, part in enumerate(parts)
        ]  # different sizes draw different samples
        corrected = self.corrected(1, parts, case)
        assert sum(corrected[10:]) < 10

    def test_delta_is_of_next_round(self) -> None:
        case = problem("svm", 3)
        aggregators = run_rounds(
            [one_fleet(case, sorted_parts(case, 4))],
            AdaptiveTau(),
            eta=0.05,
            rounds=5,
            w=case.start(1),
            transform=lambda report: (
                report
                if report.round != 3
                else with_values(report, corrected=np.full(4, 1e3))
            ),
            **FRUGAL,
        )
        seen = [
            (broadcast.part(DriftPart), aggregator.last)
            for broadcast, _, aggregator in aggregators
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

    def test_divergence_is_a_moving_average(self) -> None:
        assert Divergence(1.0, 0.0).then(Divergence(3.0, 4.0)) == Divergence(2.0, 2.0)
        assert Divergence(2.0, 2.0).correct
        assert not Divergence(2.0, 2.1).correct


class TestDivergedNodes:
    def test_diverged_node_keeps_its_correction(self) -> None:
        known = Correction.first(2, np.zeros(2, np.float32))
        known = known.learn(np.array([[1, 2], [3, 4]], np.float32), CORRECT)
        known = known.with_mean(np.array([2, 3], np.float32))
        # Less the shifts (1, 1) and (-1, -1).
        known = known.learn(np.array([[5, np.inf], [5, 6]], np.float32), CORRECT)
        assert known.own.tolist() == [[1, 2], [6, 7]]

    def test_no_correction_if_all_diverge(self) -> None:
        case = problem("linear", 2)
        rounds = run_rounds(
            [one_fleet(case, sorted_parts(case, 4))],
            FixedTau(50),
            eta=1e5,
            rounds=4,
            w=case.start(1),
            **FRUGAL,
        )
        drifts = [broadcast.part(DriftPart) for broadcast, _, _ in rounds]
        assert drifts[1] == DriftPart(correct=False, share=0.0)


class TestCatchUp:
    def test_returning_node_needs_catch_up(self) -> None:
        case = problem("svm", 3)
        fleet = one_fleet(case, sorted_parts(case, 2), features=[DriftCorrection()])
        first = first_round(case.start(1))
        fleet.answer(first)
        with pytest.raises(PeerError, match="round 3 after round 1, without a catch-up"):
            fleet.receive(replace(first, round=3))
        with pytest.raises(PeerError, match="without the mean of all corrections"):
            fleet.receive(replace(first, round=3, catch_up=CatchUp(case.start(1))))

    @pytest.mark.parametrize("batch", [None, 5])
    def test_returning_node_compares_right_best(self, batch: int | None) -> None:
        case = problem("svm", 3)
        parts = sorted_parts(case, 3)
        present = [[0, 1, 2], [0], [0, 1], [2], [0, 1, 2], [1], [0, 1, 2]]
        best = case.start(1)
        for broadcast, report, aggregator in run_rounds(
            single_node_fleets(case, parts, batch),
            FixedTau(2),
            eta=0.05,
            rounds=7,
            w=best,
            present=present,
        ):
            if batch is None:
                best_losses = report.numbers["best_losses"]
                for node, loss in zip(report.nodes, best_losses, strict=True):
                    rows = parts[node]
                    exact = case.loss(best.astype(np.float64), case.x[rows], case.y[rows])
                    assert loss == pytest.approx(exact, rel=1e-5)
            else:
                own = {int(node) for node in report.nodes}
                assert own <= {0, 1, 2}
            if (
                broadcast.round > 1
                and aggregator.last is not None
                and np.average(report.numbers["losses"], weights=report.sizes)
                < np.average(report.numbers["best_losses"], weights=report.sizes)
            ):
                best = broadcast.w


def test_next_mean_by_hand() -> None:
    """c = 2; nodes with half of the data moved along 10 on average: the new c is 1 + 5."""
    start, end = np.array([1.0], np.float32), np.array([0.0], np.float32)
    gradient = mean_gradient(start, end, 0.1)
    assert gradient.tolist() == [10]
    assert next_mean(np.array([2.0], np.float32), gradient, 0.5).tolist() == [6]
    assert next_mean(np.array([2.0], np.float32), gradient, 1.0).tolist() == [10]
    assert next_mean(None, gradient, 0.5).tolist() == [5]


def scaffold(
    nodes: Sequence[LocalGradient], x: Float64, *, steps: int, eta: float, rounds: int
) -> list[Float64]:
    """Karimireddy et al., Algorithm 1, option II, all clients, global step 1."""
    c, own, visited = np.zeros_like(x), [np.zeros_like(x) for _ in nodes], [x]
    for _ in range(rounds):
        ends, fresh = [], []
        for gradient, c_i in zip(nodes, own, strict=True):
            y = x.copy()
            for _ in range(steps):
                y = y - eta * (gradient(y) - c_i + c)
            ends.append(y)
            fresh.append(c_i - c + (x - y) / (steps * eta))
        c = c + np.mean([new - old for new, old in zip(fresh, own, strict=True)], axis=0)
        x, own = x + np.mean([y - x for y in ends], axis=0), fresh
        visited.append(x)
    return visited


@pytest.mark.parametrize("name", MODELS)
def test_fixed_steps_match_scaffold(name: str) -> None:
    case = problem(name, 3)
    parts, start = (
        np.split(np.argsort(case.x[:, 0]), 4),
        case.start(3),
    )  # equal sizes, different data

    def corrected(report: Report) -> Report:
        """Always correct, as published."""
        if "plain" not in report.numbers:
            return report
        return with_values(report, plain=np.ones(4), corrected=np.zeros(4))

    rounds = run_rounds(
        single_node_fleets(case, parts),
        FixedTau(5),
        eta=0.05,
        rounds=9,
        w=start,
        transform=corrected,
        correct_drift=True,
    )
    expected = scaffold(
        case.local(parts), start.astype(np.float64), steps=5, eta=0.05, rounds=9
    )
    np.testing.assert_allclose(
        [broadcast.w for broadcast, _, _ in rounds], expected, atol=2e-5
    )


def vector(*values: float) -> Float32:
    return np.array(values, np.float32)


LEDGER = Ledger.open(Budget({"time": 1.0}), Costs(np.ones(1), np.zeros(1)))


def result_of(broadcast: TrainRound, sums: Sums) -> RoundResult:
    """A round that does not move w."""
    w = broadcast.w
    return RoundResult(
        broadcast,
        sums,
        start=w,
        combined=w,
        mean=w,
        w=w,
        slowdown=1.0,
        recover=False,
        capped=False,
        times=None,
        quantize=None,
        statistics=0,
        last=False,
        ledger=LEDGER,
        states={},
    )


class TestStrength:
    def test_persistent_share_of_shifts(self) -> None:
        """Reports contain the projection of the new shifts on the old ones."""
        rng = np.random.default_rng(3)
        sizes = np.array([3, 5, 2])
        drift = DriftPart(correct=True, share=1.0, strength=0.7)
        known, gradients = (
            Correction.first(3, np.zeros(9, np.float32)),
            rng.normal(size=(2, 3, 9)).astype(np.float32),
        )
        gradients[1] += gradients[0]
        first = known.learn(gradients[0].copy(), drift)
        first = first.with_mean(
            np.average(first.own, axis=0, weights=sizes).astype(np.float32)
        )
        shift = first.used(drift)
        assert shift is not None
        second = first.learn(gradients[1] + shift, drift)
        lasting, shifted = second.persistence
        later = second.with_mean(
            np.average(second.own, axis=0, weights=sizes).astype(np.float32)
        )
        stayed = (
            sizes
            @ np.einsum("ij,ij->i", later.shift, first.shift)
            / (sizes @ np.square(first.shift).sum(axis=1))
        )
        broadcast = first_round(np.zeros(9, np.float32), partly=True)
        nothing = np.zeros((3, 9), np.float32)
        sums = Sums.of(
            train_report(
                nothing,
                sizes=sizes,
                plain=np.ones(3),
                corrected=np.ones(3),
                lasting=lasting,
                shifted=shifted,
            ),
            broadcast.report,
        )
        state = DriftCorrection(partly=True).after(
            DriftState.first(broadcast.w), result_of(broadcast, sums)
        )
        assert state.lasting == pytest.approx(float(stayed), rel=1e-4)
        assert 0.2 < stayed < 1.8

    @pytest.mark.parametrize(
        ("persistent", "strength"),
        [
            ([0.6], 0.6),
            ([0.6, 0.2], 0.4),
            ([-3.0], 0),
            ([7.0], 1),
            ([0.5, np.nan], 0.5),
            ([], 1),
        ],
    )
    def test_moving_average_between_0_and_1(
        self, persistent: list[float], strength: float
    ) -> None:
        state = DriftState.first(vector(0))
        for ratio in persistent or [np.nan]:
            state = state.after(
                first_round(vector(0), partly=True),
                vector(0),
                1.0,
                Divergence(1.0, 1.0),
                partly=True,
                restart=False,
                start=vector(0),
                lasted=ratio,
            )
        assert state.coming.strength == pytest.approx(strength)

    @given(strength=st.floats(0, 1), seed=st.integers(0, 1000))
    def test_shifts_cancel_for_any_strength(self, strength: float, seed: int) -> None:
        """Σ D_i c_i = D c for any strength: the mean direction of nodes is the mean of
        their gradients.
        """
        rng = np.random.default_rng(seed)
        sizes, drift = (
            np.array([3.0, 5.0, 2.0]),
            DriftPart(correct=True, share=1.0, strength=strength),
        )
        known = Correction.first(3, np.zeros(4, np.float32))
        for _ in range(4):
            gradients = rng.normal(size=(3, 4)).astype(np.float32)
            shift = known.used(drift)
            assert shift is not None
            direction = gradients + shift
            mean = np.average(direction, axis=0, weights=sizes).astype(np.float32)
            known = known.learn(direction, drift).with_mean(mean)
            assert np.allclose(known.own, gradients, atol=1e-5)
            assert np.allclose(
                np.average(known.own, axis=0, weights=sizes), known.mean, atol=1e-5
            )
