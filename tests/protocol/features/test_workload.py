"""Different numbers of local updates per node: by speed, and by data as in FedNova."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbudget
from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.budget.budget import Budget
from fedbudget.budget.control import BalancedTau, FixedTau
from fedbudget.budget.step_size import FixedStep
from fedbudget.errors import UserError
from fedbudget.launch.simulate import simulate
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.drift import DriftPart
from fedbudget.protocol.features.feature import Feature, NodeTimes, report_layout
from fedbudget.protocol.features.workload import (
    RECENT,
    SpeedShares,
    SpeedWorkload,
    StepTimes,
    Work,
    effective_tau,
    updates_of,
)
from fedbudget.protocol.messages import PeerError, TrainReport, TrainRound
from fedbudget.protocol.method import Method
from fedbudget.settings.settings import Settings
from support.fleets import one_fleet, single_node_fleets, sorted_parts
from support.hand_made import as_broadcast, as_train
from support.methods import bits
from support.problems import (
    MODELS,
    LocalGradient,
    Problem,
    corrected_descent,
    costs,
    problem,
    run_rounds,
    unequal_parts,
)

several_times = st.lists(st.floats(0.01, 10), min_size=1, max_size=12).map(np.array)


def measured(times: Float64, rounds: int = 1) -> StepTimes:
    found = StepTimes.none()
    for number in range(1, rounds + 1):
        found = found.after(number, NodeTimes(np.arange(len(times)), times))
    return found


def workload(times: Sequence[float] | Float64, most: int = 100) -> SpeedShares:
    found = SpeedShares.of(measured(np.asarray(times, np.float64)), 2, most)
    assert found is not None
    return found


def round_with(work: Work, tau: int, w: Float32, number: int = 1) -> TrainRound:
    """A round in which each node makes its own number of updates."""
    return TrainRound(
        round=number,
        w=w,
        report=report_layout((), number == 1),
        tau=tau,
        eta=0.1,
        effective=work.effective,
        parts=(work,),
    )


class TestUpdatesBySpeed:
    def test_by_hand(self) -> None:
        two_fast = workload([0.25, 0.25, 1, 1, 1])
        assert two_fast.updates(2).tolist() == [8, 8, 2, 2, 2]
        # The mean is 4.4, and 1.5 times the harmonic mean 1.5 · 5 / (2/8 + 3/2) = 30/7.
        work = two_fast.work(2)
        assert work.effective == pytest.approx(30 / 7)
        assert (work.most, work.updates) == (8, (8, 8, 2, 2, 2))
        assert two_fast.length(9) == 4  # of 2.14, 4.29, 6.43, 8.57, 10.7

    @settings(deadline=None)
    @given(times=several_times, length=st.integers(1, 30))
    def test_no_node_exceeds_the_slowest(self, times: Float64, length: int) -> None:
        updates = workload(times).updates(length)
        assert (updates * times <= length * times.max() * (1 + 1e-6)).all()
        assert ((updates + 1) * times > length * times.max() * (1 - 1e-6))[
            updates < 100
        ].all()
        assert updates.min() == length

    @settings(deadline=None)
    @given(times=several_times, tau=st.integers(1, 60))
    def test_effective_tau_is_nearest(self, times: Float64, tau: int) -> None:
        found = workload(times)
        off = {
            k: abs(np.log(effective_tau(found.updates(k)) / tau)) for k in range(1, tau + 1)
        }
        assert off[found.length(tau)] == pytest.approx(min(off.values()))

    def test_updates_are_limited(self) -> None:
        assert workload([0.001, 1.0], most=40).updates(3).tolist() == [40, 3]

    def test_unknown_node_counts_as_slowest(self) -> None:
        work = workload([0.5, 1.0]).work(3)
        broadcast = round_with(work, 3, np.zeros(1, np.float32), number=2)
        sent = broadcast.to(np.array([0, 7])).part(Work)
        assert sent == Work(work.effective, 6, (6, 3), 3)


class TestStepTimes:
    def test_third_slow_round_counts(self) -> None:
        times = measured(np.array([1.0, 1.0]), rounds=5)
        ratios = []
        for number in range(6, 10):
            times = times.after(number, NodeTimes(np.array([0, 1]), np.array([1.0, 10.0])))
            found = SpeedShares.of(times, number + 1, 100)
            assert found is not None
            ratios.append(found.ratios.tolist())
        assert ratios == [[1, 1], [1, 1], [10, 1], [10, 1]]

    def test_absent_nodes_expire(self) -> None:
        times = measured(np.array([1.0, 2.0, 50.0]))
        for number in range(2, RECENT + 2):
            times = times.after(number, NodeTimes(np.array([0, 1]), np.array([1.0, 2.0])))
        here, gone = (
            SpeedShares.of(times, coming, 100) for coming in (RECENT + 1, RECENT + 2)
        )
        assert here is not None
        assert gone is not None
        assert here.nodes.tolist() == [0, 1, 2]
        assert gone.nodes.tolist() == [0, 1]

    def test_invalid_times_are_ignored(self) -> None:
        times = StepTimes.none().after(
            1, NodeTimes(np.arange(4), np.array([1.0, np.nan, 0.0, np.inf]))
        )
        assert times.nodes.tolist() == [0]


class TestChoice:
    """The work after one round with two nodes."""

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
        fleet = one_fleet(case, unequal_parts(60, 2, 1), features=method.features)
        report = fleet.answer(aggregator.start())
        cost = costs([0.1] * len(limits), [1.0] * len(limits))
        return as_broadcast(
            aggregator.receive(report, cost, times=NodeTimes(report.nodes, np.array(times)))
        ).part(Work)

    def test_fast_node_makes_more_updates(self) -> None:
        work = self.work([1, 4], time=1e4)
        assert work is not None
        slow, fast = work.updates[1], work.updates[0]
        assert fast == 4 * slow

    @pytest.mark.parametrize(
        ("times", "limits", "chosen"),
        [
            ([1, 4], {"energy": 1e4}, False),
            ([1, 4], {"energy": 1e4, "time": 2e4}, False),
            ([1, 4], {"energy": 2e4, "time": 1e4}, True),
            ([1, 1], {"time": 1e4}, False),
            ([1, 1.1], {"time": 1e4}, False),
        ],
        ids=["energy", "energy is scarce", "time is scarce", "equal", "almost equal"],
    )
    def test_needs_scarce_time_and_different_speeds(
        self, times: list[float], limits: dict[str, Any], chosen: bool
    ) -> None:
        assert (self.work(times, **limits) is not None) == chosen

    def test_not_without_by_speed(self) -> None:
        assert self.work([1, 4], by_speed=None, time=1e4) is None


class TestAgainstSecondImplementation:
    """τ = 4 for the effective node, from round 2 on."""

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
    def test_nodes_miss_rounds_and_return(
        self, seed: int, present: list[list[int]]
    ) -> None:
        case = problem("svm", 3)
        parts, start = unequal_parts(len(case.table), 4, seed), case.start(3)
        present = [[0, 1, 2, 3], *present]
        broadcasts = [
            broadcast
            for broadcast, _, _ in run_rounds(
                single_node_fleets(case, parts),
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
        rounds = [as_train(each) for each in broadcasts[:9]]
        drifts = [each.part(DriftPart) for each in rounds]
        expected = corrected_descent(
            case.local(parts),
            [len(part) for part in parts],
            start.astype(np.float64),
            taus=[each.tau for each in rounds],
            eta=0.05,
            present=present,
            correct=[drift is not None and drift.correct for drift in drifts],
            own_taus=[updates_of(each, np.arange(4)).tolist() for each in rounds],
            effective=[each.effective for each in rounds],
        )
        assert any(each.part(Work) is not None for each in rounds)
        np.testing.assert_allclose(
            np.array([each.w for each in broadcasts]), np.array(expected), atol=2e-5
        )

    @pytest.mark.parametrize("batch", [None, 5])
    def test_fleet_matches_single_nodes(self, batch: int | None) -> None:
        case = problem("softmax", 4)
        parts = unequal_parts(len(case.table), 4, 12)

        def visited(*, each_alone: bool) -> list[object]:
            fleets = (
                single_node_fleets(case, parts, batch)
                if each_alone
                else [one_fleet(case, parts, batch)]
            )
            how: dict[str, Any] = {
                "correct_drift": True,
                "delta": "parameters",
                "by_speed": 100,
            }
            run = run_rounds(
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


class TestLimit:
    """Nodes with different data; the fast ones make up to eight times the updates."""

    TIMES = np.array([1.0, 0.125, 0.5, 1.0])

    def test_minimum_with_drift_correction(self) -> None:
        case = problem("svm", 2)
        parts, w = sorted_parts(case, 4), case.start(1)
        how: dict[str, Any] = {
            "eta": 0.1,
            "rounds": 300,
            "w": w,
            "correct_drift": True,
            "delta": "parameters",
        }
        *_, (equal, _, _) = run_rounds([one_fleet(case, parts)], FixedTau(6), **how)
        *_, (unequal, _, _) = run_rounds(
            [one_fleet(case, parts)], FixedTau(6), times=self.TIMES, by_speed=100, **how
        )
        least = self.minimum(case)
        assert unequal.catch_up is not None
        for end in (equal.w, unequal.w):
            assert case.loss(end.astype(np.float64), case.x, case.y) <= least * (1 + 1e-5)
        np.testing.assert_allclose(unequal.w, equal.w, atol=1e-4)

    def test_no_minimum_without_drift_correction(self) -> None:
        """Normalization alone, as in FedNova, is not enough."""
        case = problem("svm", 2)
        fleet = one_fleet(case, sorted_parts(case, 4), features=[SpeedWorkload(100)])
        w = case.start(1)
        work = workload(self.TIMES).work(3)
        for number in range(1, 301):
            report = fleet.answer(round_with(work, 3, w, number))
            own = report.vectors["w"]
            w = np.average(own, axis=0, weights=report.sizes).astype(np.float32)
        assert case.loss(w.astype(np.float64), case.x, case.y) > self.minimum(case) * (
            1 + 1e-3
        )

    def minimum(self, case: Problem) -> float:
        w = case.start(1).astype(np.float64)
        for _ in range(4000):
            w = w - 0.1 * case.gradient(w, case.x, case.y)
        return float(case.loss(w, case.x, case.y))


@pytest.mark.parametrize("updates", [(1,), (1, 0), (3, 1)])
def test_fleet_refuses_wrong_work(updates: tuple[int, ...]) -> None:
    case = problem("svm", 3)
    features: list[Feature] = [SpeedWorkload(100)]
    fleet = one_fleet(case, unequal_parts(60, 2, 1), features=features)
    with pytest.raises(PeerError, match=r"2 nodes cannot make|more than 2"):
        fleet.receive(round_with(Work(1.0, 2, updates, 1), 1, case.start(1)))


def fednova(
    nodes: Sequence[LocalGradient],
    sizes: Sequence[int],
    x: Float64,
    *,
    steps: Sequence[int],
    eta: float,
) -> Float64:
    """Wang et al., (6) to (8), a_i all ones: x - τ_eff Σ p_i η d_i, τ_eff = Σ p_i τ_i."""
    shares = np.array(sizes) / sum(sizes)
    directions = []
    for gradient, tau in zip(nodes, steps, strict=True):
        own, total = x.copy(), np.zeros_like(x)
        for _ in range(tau):
            slope = gradient(own)
            own, total = own - eta * slope, total + slope
        directions.append(total / tau)
    effective = float(shares @ np.array(steps))
    return np.asarray(x - effective * eta * np.tensordot(shares, directions, axes=1))


class TestFedNova:
    SIZES = (6, 24, 12, 18)
    UPDATES = (2, 8, 4, 6)

    def parts(self, case: Problem) -> list[Int64]:
        return np.split(np.argsort(case.x[:, 0]), np.cumsum(self.SIZES)[:-1])

    @pytest.mark.parametrize("name", MODELS)
    def test_rounds_match_publication(self, name: str) -> None:
        case = problem(name, 3)
        parts, w = self.parts(case), case.start(3)
        rounds = run_rounds(
            single_node_fleets(case, parts),
            FixedTau(8),
            eta=0.05,
            rounds=7,
            w=w,
            by_data=self.SIZES,
        )
        expected = [w.astype(np.float64)]
        for _ in range(7):
            expected.append(
                fednova(
                    case.local(parts),
                    self.SIZES,
                    expected[-1],
                    steps=self.UPDATES,
                    eta=0.05,
                )
            )
        np.testing.assert_allclose(
            [broadcast.w for broadcast, _, _ in rounds], expected, atol=2e-5
        )

    def test_with_fedprox(self) -> None:
        """A node makes its own number of updates; its update is rescaled to τ_eff."""
        case = problem("svm", 4)
        parts, w = self.parts(case), case.start(4)
        how: dict[str, Any] = {"by_data": self.SIZES, "proximal": 0.7}
        fleets = [one_fleet(case, parts)]
        _, report, _ = next(
            iter(run_rounds(fleets, FixedTau(8), eta=0.05, rounds=1, w=w, **how))
        )
        effective = (
            sum(
                size * updates
                for size, updates in zip(self.SIZES, self.UPDATES, strict=True)
            )
            / 60
        )
        assert isinstance(report, TrainReport)
        for own, gradient, updates in zip(
            report.w, case.local(parts), self.UPDATES, strict=True
        ):
            end = start = w.astype(np.float64)
            for _ in range(updates):
                end = end - 0.05 * (gradient(end) + 0.7 * (end - start))
            np.testing.assert_allclose(own, w + effective / updates * (end - w), atol=2e-5)

    def test_equal_shards_are_averaged(self) -> None:
        case = problem("softmax", 5)
        parts, w = np.split(np.argsort(case.x[:, 0]), 4), case.start(5)
        common: dict[str, Any] = {"eta": 0.1, "rounds": 5, "w": w}
        plain, nova = (
            [
                each.w
                for each, _, _ in run_rounds(
                    single_node_fleets(case, parts), FixedTau(5), **common, by_data=how
                )
            ]
            for how in (None, (15,) * 4)
        )
        np.testing.assert_allclose(plain, nova, atol=1e-6)

    def test_run_assigns_updates_by_samples(self) -> None:
        common: dict[str, Any] = {
            "partition": "dirichlet:0.3",
            "tau": 20,
            "step_size": 0.1,
            "rounds": 3,
            "model": "svm",
        }
        run = simulate(
            Settings(**common, method="frugal", drift_correction=False, workload="by-data")
        )
        assert run.aggregator is not None
        broadcast = run.aggregator.pending
        assert isinstance(broadcast, TrainRound)
        work = broadcast.part(Work)
        assert work is not None
        sizes = run.shards.size
        assert work.updates == tuple(
            max(1, round(20 * size / sizes.max())) for size in sizes.tolist()
        )
        assert broadcast.tau == work.most == 20

    def test_real_nodes_are_refused(self) -> None:
        with pytest.raises(
            UserError, match="workload by-data works only with simulated nodes"
        ):
            fedbudget.train(
                dataset="digits",
                model="svm",
                rounds=2,
                workload="by-data",
                tau=3,
                engine="network",
            )
