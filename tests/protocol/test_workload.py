"""Nodes that make different numbers of local updates: who makes how many, and that w is
none the worse for it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.budget.budget import Budget
from fedbudget.budget.control import BalancedTau, FixedTau
from fedbudget.budget.step_size import FixedStep
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.messages import Broadcast, PeerError, Request, Work
from fedbudget.protocol.method import Method
from fedbudget.protocol.workload import (
    RECENT,
    NodeTimes,
    StepTimes,
    Workload,
    effective_tau,
)
from support.fleets import alone, sorted_parts, together
from support.hand_made import go_on
from support.methods import bits
from support.problems import (
    Problem,
    converse,
    corrected_descent,
    costs,
    problem,
    unequal_parts,
)

several_times = st.lists(st.floats(0.01, 10), min_size=1, max_size=12).map(np.array)


def measured(times: Float64, rounds: int = 1) -> StepTimes:
    found = StepTimes.none()
    for number in range(1, rounds + 1):
        found = found.after(number, NodeTimes(np.arange(len(times)), times))
    return found


def workload(times: Sequence[float] | Float64, most: int = 100) -> Workload:
    found = Workload.of(measured(np.asarray(times, np.float64)), 2, most)
    assert found is not None
    return found


class TestWhoMakesHowMany:
    def test_by_hand(self) -> None:
        two_fast = workload([0.25, 0.25, 1, 1, 1])
        assert two_fast.updates(2).tolist() == [8, 8, 2, 2, 2]
        # The mean is 4.4, and 1.5 times the harmonic mean 1.5 · 5 / (2/8 + 3/2) = 30/7.
        said = two_fast.work(2)
        assert said.effective == pytest.approx(30 / 7)
        assert (said.most, said.updates) == (8, (8, 8, 2, 2, 2))
        assert two_fast.length(9) == 4  # of 2.14, 4.29, 6.43, 8.57, 10.7

    @settings(deadline=None)
    @given(times=several_times, length=st.integers(1, 30))
    def test_nobody_is_longer_at_it_than_the_slowest(
        self, times: Float64, length: int
    ) -> None:
        updates = workload(times).updates(length)
        assert (updates * times <= length * times.max() * (1 + 1e-6)).all()
        assert ((updates + 1) * times > length * times.max() * (1 - 1e-6))[
            updates < 100
        ].all()
        assert updates.min() == length

    @settings(deadline=None)
    @given(times=several_times, tau=st.integers(1, 60))
    def test_the_length_comes_nearest_to_the_tau_that_is_wanted(
        self, times: Float64, tau: int
    ) -> None:
        found = workload(times)
        off = {
            k: abs(np.log(effective_tau(found.updates(k)) / tau)) for k in range(1, tau + 1)
        }
        assert off[found.length(tau)] == pytest.approx(min(off.values()))

    def test_no_more_than_the_most(self) -> None:
        assert workload([0.001, 1.0], most=40).updates(3).tolist() == [40, 3]

    def test_a_node_of_which_nothing_is_known_makes_as_many_as_the_slowest(self) -> None:
        said = workload([0.5, 1.0]).work(3)
        broadcast = Broadcast(
            2, np.zeros(1, np.float32), 3, 0.1, Request(), best=False, stop=False, work=said
        )
        assert broadcast.to(np.array([0, 7])).work == Work(said.effective, 6, (6, 3))


class TestTimes:
    def test_two_slow_rounds_are_passed_over_and_the_third_counts(self) -> None:
        times = measured(np.array([1.0, 1.0]), rounds=5)
        ratios = []
        for number in range(6, 10):
            times = times.after(number, NodeTimes(np.array([0, 1]), np.array([1.0, 10.0])))
            found = Workload.of(times, number + 1, 100)
            assert found is not None
            ratios.append(found.ratios.tolist())
        assert ratios == [[1, 1], [1, 1], [10, 1], [10, 1]]

    def test_who_is_away_for_long_does_not_set_the_length(self) -> None:
        times = measured(np.array([1.0, 2.0, 50.0]))
        for number in range(2, RECENT + 2):
            times = times.after(number, NodeTimes(np.array([0, 1]), np.array([1.0, 2.0])))
        (here, gone) = (
            Workload.of(times, coming, 100) for coming in (RECENT + 1, RECENT + 2)
        )
        assert here is not None
        assert gone is not None
        assert here.nodes.tolist(), gone.nodes.tolist() == ([0, 1, 2], [0, 1])

    def test_what_is_no_time_says_nothing(self) -> None:
        times = StepTimes.none().after(
            1, NodeTimes(np.arange(4), np.array([1.0, np.nan, 0.0, np.inf]))
        )
        assert times.nodes.tolist() == [0]


class TestWhenItIsChosen:
    """After one round of two nodes, of which one takes four times as long."""

    def work(
        self, times: Sequence[float], *, by_speed: int | None = 100, **limits: float
    ) -> Work | None:
        case = problem("svm", 3)
        method = Method(
            BalancedTau(),
            FixedStep(0.1),
            correct_drift=True,
            delta="parameters",
            by_speed=by_speed,
        )
        aggregator = Aggregator(
            case.start(1),
            method=method,
            budget=Budget(limits),
            expected=costs([0.1] * len(limits), [1.0] * len(limits)),
        )
        fleet = together(case, unequal_parts(60, 2, 1))
        report = fleet.answer(aggregator.start())
        cost = costs([0.1] * len(limits), [1.0] * len(limits))
        return go_on(
            aggregator.receive(report, cost, times=NodeTimes(report.nodes, np.array(times)))
        ).work

    def test_where_time_is_all_that_is_limited(self) -> None:
        work = self.work([1, 4], time=1e4)
        assert work is not None
        slow, fast = work.updates[1], work.updates[0]
        assert fast == 4 * slow

    def test_not_for_energy_alone(self) -> None:
        assert self.work([1, 4], energy=1e4) is None

    def test_by_which_of_several_is_scarce(self) -> None:
        assert self.work([1, 4], energy=1e4, time=2e4) is None
        assert self.work([1, 4], energy=2e4, time=1e4) is not None

    def test_not_where_nodes_are_as_fast_as_each_other_nearly(self) -> None:
        assert self.work([1, 1], time=1e4) is None
        assert self.work([1, 1.1], time=1e4) is None

    def test_not_where_the_method_has_it_not(self) -> None:
        assert self.work([1, 4], by_speed=None, time=1e4) is None


class TestAgainstASecondImplementation:
    """With τ = 4 chosen for the effective node, from the second round on."""

    TIMES = np.array([1.0, 0.2, 3.0, 0.6])

    @settings(deadline=None, max_examples=30)
    @given(
        seed=st.integers(0, 10**4),
        present=st.lists(
            st.lists(st.integers(0, 3), min_size=1, unique=True).map(sorted),
            min_size=8,
            max_size=8,
        ),
    )
    def test_nodes_that_come_late_miss_rounds_and_return(
        self, seed: int, present: list[list[int]]
    ) -> None:
        case = problem("svm", 3)
        parts, start = unequal_parts(len(case.table), 4, seed), case.start(3)
        present = [[0, 1, 2, 3], *present]
        told = [
            broadcast
            for broadcast, _, _ in converse(
                alone(case, parts),
                FixedTau(4),
                eta=0.05,
                rounds=9,
                w=start,
                present=present,
                times=self.TIMES,
                correct_drift=True,
                delta="parameters",
                by_speed=100,
            )
        ]
        rounds = told[:9]
        expected = corrected_descent(
            case.local(parts),
            [len(part) for part in parts],
            start.astype(np.float64),
            taus=[each.tau for each in rounds],
            eta=0.05,
            present=present,
            correct=[each.drift is not None and each.drift.correct for each in rounds],
            own_taus=[each.updates(np.arange(4)).tolist() for each in rounds],
            effective=[each.effective for each in rounds],
        )
        assert any(each.work is not None for each in rounds)
        np.testing.assert_allclose(
            np.array([each.w for each in told]), np.array(expected), atol=2e-5
        )

    @pytest.mark.parametrize("batch", [None, 5])
    def test_nodes_alone_and_together_give_the_same_bits(self, batch: int | None) -> None:
        case = problem("softmax", 4)
        parts = unequal_parts(len(case.table), 4, 12)

        def visited(*, each_alone: bool) -> list[object]:
            fleets = (
                alone(case, parts, batch) if each_alone else [together(case, parts, batch)]
            )
            how: dict[str, Any] = {
                "correct_drift": True,
                "delta": "parameters",
                "by_speed": 100,
            }
            run = converse(
                fleets,
                FixedTau(4),
                eta=0.1,
                rounds=6,
                w=case.start(1),
                times=self.TIMES,
                **how,
            )
            return [bits(broadcast) for broadcast, _, _ in run]

        assert visited(each_alone=True) == visited(each_alone=False)


class TestWhereItComesToRest:
    """Nodes with data of their own kinds, of which the fast ones make up to eight times the
    updates.
    """

    TIMES = np.array([1.0, 0.125, 0.5, 1.0])

    def test_with_drift_corrected_at_the_minimum_whatever_each_makes(self) -> None:
        case = problem("svm", 2)
        parts, w = sorted_parts(case, 4), case.start(1)
        how: dict[str, Any] = {
            "eta": 0.1,
            "rounds": 300,
            "w": w,
            "correct_drift": True,
            "delta": "parameters",
        }
        *_, (equal, _, _) = converse([together(case, parts)], FixedTau(6), **how)
        *_, (unequal, _, _) = converse(
            [together(case, parts)], FixedTau(6), times=self.TIMES, by_speed=100, **how
        )
        least = self.minimum(case)
        assert unequal.catch_up is not None
        for end in (equal.w, unequal.w):
            assert case.loss(end.astype(np.float64), case.x, case.y) <= least * (1 + 1e-5)
        np.testing.assert_allclose(unequal.w, equal.w, atol=1e-4)

    def test_without_it_somewhere_else(self) -> None:
        """Normalising alone, as FedNova does, is no cure."""
        case = problem("svm", 2)
        fleet, w = together(case, sorted_parts(case, 4)), case.start(1)
        said = workload(self.TIMES).work(3)
        for number in range(1, 301):
            w = self.averaged(
                fleet.answer(self.uncorrected(number, w, said)).w, fleet.shards.size
            )
        assert case.loss(w.astype(np.float64), case.x, case.y) > self.minimum(case) * (
            1 + 1e-3
        )

    def uncorrected(self, number: int, w: Float32, work: Work) -> Broadcast:
        return Broadcast(number, w, 3, 0.1, Request(), best=False, stop=False, work=work)

    def averaged(self, w: Float32 | None, sizes: Int64) -> Float32:
        assert w is not None
        return np.asarray(np.average(w, axis=0, weights=sizes), np.float32)

    def minimum(self, case: Problem) -> float:
        w = case.start(1).astype(np.float64)
        for _ in range(4000):
            w = w - 0.1 * case.gradient(w, case.x, case.y)
        return float(case.loss(w, case.x, case.y))


@pytest.mark.parametrize("updates", [(1,), (1, 0), (3, 1)])
def test_a_fleet_refuses_work_that_is_not_its_own(updates: tuple[int, ...]) -> None:
    case = problem("svm", 3)
    fleet = together(case, unequal_parts(60, 2, 1))
    broadcast = Broadcast(
        1,
        case.start(1),
        1,
        0.1,
        Request(),
        best=False,
        stop=False,
        work=Work(1.0, 2, updates),
    )
    with pytest.raises(PeerError, match="2 nodes cannot make"):
        fleet.receive(broadcast)
