"""Algorithm 3, and whole conversations: τ=1 is centralized descent, identical shards, and
fleets of one.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float32, Int64
from fedbudget.budget.control import AdaptiveTau, Estimates, FixedTau, Reason
from fedbudget.data.sampling import Sampler
from fedbudget.data.shards import Shards, Table
from fedbudget.models import FunctionModel, LinearRegression
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, LocalError, PeerError, Report, Request
from support.problems import (
    MODELS,
    Problem,
    algorithm_1,
    converse,
    problem,
    svm_gradient,
    svm_loss,
    unequal_parts,
)


def a_broadcast(
    w: Float32, *, round: int = 1, tau: int = 2, estimate: bool = True, best: bool = False
) -> Broadcast:
    return Broadcast(round, w, tau, 0.1, Request(estimate, gradient=True), best, stop=False)


def fleet(
    case: Problem,
    parts: Sequence[Int64],
    *,
    batch: int | None = None,
    numbers: Sequence[int] | None = None,
) -> Fleet:
    return Fleet(
        case.model, Shards.of(case.table, parts), batch=batch, seed=9, numbers=numbers
    )


@pytest.mark.parametrize("name", MODELS)
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 10**4))
def test_proposition_3_one_update_a_round_is_centralized_descent(
    name: str, seed: int
) -> None:
    case = problem(name, 3)
    nodes = fleet(case, unequal_parts(len(case.table), 4, seed))
    w = case.start(3).astype(np.float64)
    broadcast = [
        broadcast.w
        for broadcast, _, _ in converse(
            [nodes], FixedTau(1), eta=0.2, rounds=12, w=case.start(3)
        )
    ]
    assert len(broadcast) == 13
    for broadcast_w in broadcast:
        np.testing.assert_allclose(broadcast_w, w, atol=1e-5)
        w = w - 0.2 * case.gradient(w, case.x, case.y)


@pytest.mark.parametrize("name", ["linear", "svm"])
@pytest.mark.parametrize("tau", [2, 5])
def test_a_conversation_visits_the_w_of_algorithm_1(name: str, tau: int) -> None:
    case = problem(name, 6)
    parts = unequal_parts(len(case.table), 3, 6)
    sizes, start = [len(part) for part in parts], case.start(6)
    path = algorithm_1(
        case.local(parts), sizes, start.astype(np.float64), tau=tau, rounds=6, eta=0.2
    )
    broadcast = [
        broadcast.w
        for broadcast, _, _ in converse(
            [fleet(case, parts)], FixedTau(tau), eta=0.2, rounds=6, w=start
        )
    ]
    np.testing.assert_allclose(np.array(broadcast), path.aggregated, atol=1e-5)
    for x in range(
        1, tau + 1
    ):  # and between aggregations: w(x) is where one round of x updates ends
        *_, last = converse([fleet(case, parts)], FixedTau(x), eta=0.2, rounds=1, w=start)
        np.testing.assert_allclose(last[0].w, path.w[x], atol=1e-5)


@pytest.mark.parametrize("batch", [None, 5])
def test_identical_shards_estimate_nothing_and_get_the_largest_tau(
    batch: int | None,
) -> None:
    case = problem("svm", 4)
    everything = np.arange(len(case.table))
    nodes = fleet(case, [everything] * 5, batch=batch)
    records = []
    for _, report, aggregator in converse(
        [nodes], AdaptiveTau(tau_max=60), eta=0.1, rounds=6, w=case.start(4)
    ):
        assert aggregator.last is not None
        records.append(aggregator.last)
        if report.rho is not None and report.beta is not None:
            assert not report.rho.any()
            assert not report.beta.any()
    assert [record.tau for record in records] == [1, 1, 10, 60, 60, 60, 0]
    assert all(record.estimates == Estimates(0.0, 0.0, 0.0) for record in records[1:])
    assert all(record.reason is Reason.SEARCH_LIMIT for record in records[2:-1])


def assert_same_reports(one: Report, other: Report) -> None:
    for field in fields(Report):
        mine, its = getattr(one, field.name), getattr(other, field.name)
        assert (mine is None) == (its is None), field.name
        if mine is not None:
            np.testing.assert_array_equal(mine, its, err_msg=field.name)
            assert np.asarray(mine).dtype == np.asarray(its).dtype


@pytest.mark.parametrize("batch", [None, 7])
@pytest.mark.parametrize("name", MODELS)
def test_a_fleet_gives_the_bits_that_fleets_of_one_give(
    name: str, batch: int | None
) -> None:
    case = problem(name, 12, samples=900, features=30)
    parts = [
        np.arange(0, 7),
        np.arange(7, 200),
        np.arange(200, 500),
        np.arange(500, 700),
        np.arange(700, 900),
    ]
    together = fleet(case, parts, batch=batch)
    alone = [
        fleet(case, [part], batch=batch, numbers=[number])
        for number, part in enumerate(parts)
    ]
    controller = AdaptiveTau(phi=0.01, tau_max=12)
    compared = 0
    for whole, single in zip(
        converse([together], controller, eta=0.05, rounds=6, w=case.start(1)),
        converse(alone[::-1], controller, eta=0.05, rounds=6, w=case.start(1)),
        strict=True,
    ):
        assert_same_reports(whole[1], single[1])
        np.testing.assert_array_equal(whole[0].w, single[0].w)
        assert whole[0].tau == single[0].tau
        compared += whole[1].gradients is not None
    assert compared == 5


@pytest.mark.parametrize("batch", [None, 6])
def test_a_function_model_reports_what_the_kernel_reports(batch: int | None) -> None:
    case = problem("svm", 2)

    def in_numpy(w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
        exact = (w.astype(np.float64), x.astype(np.float64), y.astype(np.float64))
        return svm_loss(*exact, 0.1), svm_gradient(*exact, 0.1).astype(np.float32)

    parts = (
        unequal_parts(60, 3, 1)
        if batch is None
        else [np.arange(0, 10), np.arange(10, 30), np.arange(30, 60)]
    )
    own = FunctionModel(in_numpy, initial=case.start(2))
    loop = Fleet(own, Shards.of(case.table, parts), batch=batch, seed=9)
    for (_, mine, _), (_, its, _) in zip(
        converse(
            [fleet(case, parts, batch=batch)],
            FixedTau(3),
            eta=0.2,
            rounds=5,
            w=case.start(2),
        ),
        converse([loop], FixedTau(3), eta=0.2, rounds=5, w=case.start(2)),
        strict=True,
    ):
        np.testing.assert_allclose(mine.losses, its.losses, rtol=1e-5)
        if mine.w is not None and its.w is not None:
            np.testing.assert_allclose(mine.w, its.w, atol=1e-5)


@pytest.mark.parametrize("batch", [None, 8])
def test_estimates_are_those_of_algorithm_3(batch: int | None) -> None:
    case = problem("linear", 5)
    parts = [np.arange(0, 15), np.arange(15, 60)]
    nodes = fleet(case, parts, batch=batch)
    first = nodes.answer(a_broadcast(case.start(5), tau=3))
    assert first.w is not None
    assert first.rho is first.beta is first.gradients is None
    w = case.start(6)
    second = nodes.answer(a_broadcast(w, round=2, tau=4))
    assert second.rho is not None
    assert second.beta is not None
    assert second.gradients is not None
    sampler = Sampler(np.array([15, 45]), batch, seed=9)
    indices = [sampler.round(3), sampler.round(4)][1]
    for i, part in enumerate(parts):
        rows = part[indices.of(i, 0, len(part))]
        x, y = case.x[rows], case.y[rows]
        here, there = w.astype(np.float64), first.w[i].astype(np.float64)
        distance = np.linalg.norm(there - here)
        rise = abs(case.loss(there, x, y) - case.loss(here, x, y))
        turn = np.linalg.norm(case.gradient(there, x, y) - case.gradient(here, x, y))
        assert second.losses[i] == pytest.approx(case.loss(here, x, y), rel=1e-5)
        assert second.rho[i] == pytest.approx(rise / distance, rel=1e-4)
        assert second.beta[i] == pytest.approx(turn / distance, rel=1e-4)
        np.testing.assert_allclose(
            second.gradients[i], case.gradient(here, x, y), atol=1e-5
        )


def test_without_estimation_nothing_more_is_sent() -> None:
    case = problem("svm", 5)
    nodes = fleet(case, [np.arange(0, 15), np.arange(15, 60)])
    for round in (1, 2):
        report = nodes.answer(a_broadcast(case.start(round), round=round, estimate=False))
        assert (
            report.rho
            is report.beta
            is report.gradients
            is report.plain
            is report.corrected
            is None
        )


def test_the_best_w_is_evaluated_again_on_the_rounds_own_mini_batch() -> None:
    case = problem("svm", 5)
    nodes = fleet(case, [np.arange(60)], batch=8)
    sampler = Sampler(np.array([60]), 8, seed=9)
    w = [case.start(seed) for seed in range(4)]
    best = [0, 0, 1, 1]  # the third broadcast says that the second one's w became w^f
    for number, tau in enumerate([3, 2, 2, 0]):
        broadcast = a_broadcast(w[number], round=number + 1, tau=tau, best=number == 2)
        report = nodes.answer(broadcast)
        rows = sampler.round(tau).of(0, 0, 60)
        exact = case.loss(w[best[number]].astype(np.float64), case.x[rows], case.y[rows])
        assert report.best_losses is not None
        assert report.best_losses[0] == pytest.approx(exact, rel=1e-5)


def test_no_update_gives_the_loss_and_nothing_else() -> None:
    case = problem("svm", 5)
    nodes = fleet(case, [np.arange(0, 15), np.arange(15, 60)])
    nodes.answer(a_broadcast(case.start(1)))
    report = nodes.answer(a_broadcast(case.start(2), round=2, tau=0))
    exact = [
        case.loss(case.start(2).astype(np.float64), case.x[r], case.y[r])
        for r in (slice(0, 15), slice(15, 60))
    ]
    np.testing.assert_allclose(report.losses, exact, rtol=1e-5)
    assert report.w is report.rho is report.gradients is None


def test_a_w_that_diverged_gives_estimates_that_are_no_numbers_and_no_warning() -> None:
    positive = Table(np.full((6, 2), 2.0, np.float32), np.zeros(6, np.float32))
    nodes = Fleet(
        LinearRegression(2),
        Shards.of(positive, [np.arange(3), np.arange(3, 6)]),
        batch=None,
        seed=0,
    )
    first = nodes.answer(a_broadcast(np.full(2, -3e38, np.float32), tau=1))
    assert first.w is not None
    assert np.isposinf(first.w).all()
    report = nodes.answer(a_broadcast(np.full(2, 3e38, np.float32), round=2))
    assert report.rho is not None
    assert report.beta is not None
    assert not np.isfinite(report.rho).any()
    assert not np.isfinite(report.beta).any()


class TestOrder:
    def setup_method(self) -> None:
        self.case = problem("svm", 5)
        self.fleet = fleet(self.case, [np.arange(60)])

    def test_no_update_before_a_broadcast(self) -> None:
        with pytest.raises(LocalError, match="update comes once after each receive"):
            self.fleet.update()

    def test_no_second_update(self) -> None:
        self.fleet.answer(a_broadcast(self.case.start(1)))
        with pytest.raises(LocalError, match="update comes once after each receive"):
            self.fleet.update()

    def test_no_report_before_the_update(self) -> None:
        with pytest.raises(LocalError, match="report comes after update"):
            self.fleet.report()
        self.fleet.receive(a_broadcast(self.case.start(1)))
        with pytest.raises(LocalError, match="report comes after update"):
            self.fleet.report()

    def test_a_w_of_another_length_is_refused(self) -> None:
        with pytest.raises(PeerError, match=r"w has shape \(4,\); svm has 5 parameters"):
            self.fleet.receive(a_broadcast(np.zeros(4, np.float32)))

    def test_a_negative_tau_is_refused(self) -> None:
        with pytest.raises(PeerError, match="tau is -1"):
            self.fleet.receive(a_broadcast(self.case.start(1), tau=-1))

    @pytest.mark.parametrize("numbers", [[3], [4, 3], [3, 3]])
    def test_nodes_are_numbered_in_rising_order(self, numbers: list[int]) -> None:
        with pytest.raises(ValueError, match="one number each, in rising order"):
            fleet(self.case, [np.arange(30), np.arange(30, 60)], numbers=numbers)


@pytest.mark.parametrize(
    ("estimate", "batch", "evaluations"), [(False, None, 3), (True, None, 4), (True, 2, 5)]
)
def test_estimates_cost_one_evaluation_a_round_and_w_f_one_with_mini_batches(
    estimate: bool, batch: int | None, evaluations: int
) -> None:
    """Of τ=3 updates; Algorithm 3 asks for F_i and ∇F_i at w_i besides, and for F_i(w^f)
    where samples change.
    """
    calls = 0

    def mean_of_data(w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
        nonlocal calls
        calls += 1
        return 0.5 * float(((x - w) ** 2).sum(axis=1).mean()), w - x.mean(axis=0)

    table = Table(np.arange(12, dtype=np.float32).reshape(6, 2), np.zeros(6, np.float32))
    shards = Shards.of(table, [np.arange(3), np.arange(3, 6)])
    nodes = Fleet(
        FunctionModel(mean_of_data, initial=np.zeros(2)), shards, batch=batch, seed=0
    )
    nodes.answer(a_broadcast(np.zeros(2, np.float32), tau=3, estimate=estimate))
    calls = 0
    nodes.answer(a_broadcast(np.ones(2, np.float32), round=2, tau=3, estimate=estimate))
    assert calls == 2 * evaluations  # two nodes


class TestForTheStepSize:
    """What is asked of nodes when the step size follows β."""

    def ask(self, round: int, w: Float32, tau: int = 1) -> Broadcast:
        return replace(
            a_broadcast(w, round=round, tau=tau),
            request=Request(True, gradient=True, curvature=True),
        )

    def test_nodes_that_do_not_differ_find_the_steepest_direction(self) -> None:
        """The largest eigenvalue of the Hessian, after some rounds of power iteration."""
        case = problem("linear", 3, regularization=0.0)
        nodes = fleet(case, [np.arange(60)] * 3)
        w, found = case.start(1), []
        for round in range(1, 25):
            report = nodes.answer(self.ask(round, w))
            assert report.w is not None
            w = report.w[0]
            found.append(report.beta)
        largest = float(np.linalg.eigvalsh(case.x.T @ case.x / 60).max())
        assert found[0] is None
        assert found[1] is not None
        assert found[-1] is not None
        assert 0 < found[1][0] < 0.95 * largest
        np.testing.assert_allclose(found[-1], largest, rtol=0.01)

    def test_others_are_measured_as_ever(self) -> None:
        case = problem("svm", 3)
        asked, plain = (fleet(case, [np.arange(20), np.arange(20, 60)]) for _ in range(2))
        for round in (1, 2, 3):
            w = case.start(round)
            one, other = (
                asked.answer(self.ask(round, w)),
                plain.answer(a_broadcast(w, round=round, tau=1)),
            )
            if one.beta is not None and other.beta is not None:
                np.testing.assert_array_equal(one.beta, other.beta)
                np.testing.assert_array_equal(one.rho, other.rho)

    def test_a_round_begins_with_a_mini_batch_that_w_was_not_just_fitted_to(self) -> None:
        case = problem("svm", 3, samples=2000)
        nodes = fleet(case, [np.arange(2000)], batch=1)
        drawn = []
        for round in range(1, 11):
            nodes.receive(self.ask(round, case.start(1), tau=2))
            nodes.update()
            assert nodes._indices is not None
            drawn += nodes._indices.positions[0, :, 0].tolist()
        assert len(set(drawn)) == 20
