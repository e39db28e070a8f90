"""Estimates of ρ, β and δ."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from fedbudget.arrays import Float32
from fedbudget.budget.control import AdaptiveTau, Estimates, FixedTau
from fedbudget.data.sampling import BatchIndices, Sampler
from fedbudget.data.shards import Shards, Table
from fedbudget.models import FunctionModel
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.estimates import (
    EstimateSlopes,
    first_steepness,
    gather,
    mini_batches,
)
from fedbudget.protocol.features.feature import report_layout
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import PeerError, Report, TrainReport, TrainRound
from fedbudget.protocol.state import Round
from support.fleets import one_fleet, sorted_parts
from support.hand_made import FIRST, ONE, as_train, last, make, report, with_values
from support.methods import bits
from support.problems import MODELS, problem, run_rounds

THIRD = replace(
    FIRST, round=3, report=report_layout((EstimateSlopes(gradient=True),), False)
)


class TestEstimates:
    def second(self, estimates: tuple[float, float, float]) -> Aggregator:
        """An aggregator after two rounds, the second with estimates."""
        aggregator = make(1000, controller=AdaptiveTau())
        broadcast = as_train(aggregator.receive(report(aggregator.start(), 1), ONE))
        aggregator.receive(report(broadcast, 1, estimates=estimates), ONE)
        return aggregator

    def third(self, aggregator: Aggregator, reported: Report) -> Round:
        aggregator.receive(replace(reported, round=3), ONE)
        return last(aggregator)

    def test_none_in_the_first_round(self) -> None:
        aggregator = make(1000, controller=AdaptiveTau())
        broadcast = as_train(aggregator.receive(report(aggregator.start(), 1), ONE))
        assert last(aggregator).estimates is None
        assert broadcast.tau == 1
        assert {"rho", "beta"} <= {*broadcast.report.numbers}

    def test_weighted_by_shard_sizes(self) -> None:
        aggregator = make(1000, controller=AdaptiveTau())
        broadcast = as_train(aggregator.receive(report(aggregator.start(), 1), ONE))
        uneven = with_values(
            replace(report(broadcast, 1), sizes=np.array([30, 10])),
            rho=np.array([1.0, 5.0]),
            beta=np.array([2.0, 6.0]),
            gradients=np.array([[0, 4], [0, 0]], np.float32),
        )
        aggregator.receive(uneven, ONE)
        # The mean gradient is (0, 3); distances are 1 and 3: (30·1 + 10·3)/40 = 1.5.
        assert last(aggregator).estimates == Estimates(2.0, 3.0, 1.5)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, 1e13, -1.0])
    @pytest.mark.parametrize("name", ["rho", "beta"])
    def test_invalid_values_keep_previous(self, name: str, bad: float) -> None:
        aggregator = self.second((1.0, 2.0, 3.0))
        fresh = report(THIRD, 1, estimates=(4.0, 5.0, 6.0))
        record = self.third(aggregator, with_values(fresh, **{name: np.array([bad, bad])}))
        assert record.kept == (name,)
        assert record.estimates == replace(
            Estimates(4.0, 5.0, 6.0), **{name: {"rho": 1.0, "beta": 2.0}[name]}
        )

    @pytest.mark.parametrize("bad", [np.inf, 3e38])
    def test_invalid_gradients_keep_previous_delta(self, bad: float) -> None:
        aggregator = self.second((1.0, 2.0, 3.0))
        record = self.third(aggregator, report(THIRD, 1, estimates=(4.0, 5.0, bad)))
        assert record.kept == ("delta",)
        assert record.estimates == Estimates(4.0, 5.0, 3.0)

    def test_none_until_all_three_valid(self) -> None:
        aggregator = self.second((np.nan, 2.0, 3.0))
        assert last(aggregator).estimates is None
        assert last(aggregator).kept == ("rho",)
        record = self.third(aggregator, report(THIRD, 1, estimates=(4.0, 5.0, 6.0)))
        assert record.estimates == Estimates(4.0, 5.0, 6.0)

    def test_dropped_nodes_are_ignored(self) -> None:
        aggregator = self.second((1.0, 2.0, 3.0))
        fresh = report(THIRD, 1, estimates=(4.0, 5.0, 6.0))
        w = np.array([[1, 1], [np.nan, 1]], np.float32)
        record = self.third(
            aggregator, with_values(fresh, w=w, rho=np.array([7.0, np.nan]))
        )
        assert record.estimates == Estimates(7.0, 5.0, 0.0)
        assert record.kept == ()

    def test_unrequested_values_are_refused(self) -> None:
        aggregator = make(1000)
        broadcast = aggregator.start()
        assert broadcast.report.numbers == ("losses", "best_losses")
        ones = np.ones(2)
        more = with_values(report(broadcast, 1), rho=ones, beta=ones)
        with pytest.raises(PeerError, match="a report with beta, rho"):
            aggregator.receive(more, ONE)


@pytest.mark.parametrize("batch", [None, 5])
def test_delta_from_parameters_matches_paper(batch: int | None) -> None:
    """With τ = 1 both ways of computing δ are equal."""
    case = problem("svm", 8)
    parts = sorted_parts(case, 4)
    found = {}
    for delta in ("gradient", "parameters"):
        rounds = run_rounds(
            [one_fleet(case, parts, batch)],
            FixedTau1(),
            eta=0.1,
            rounds=6,
            w=case.start(1),
            delta=delta,
        )
        found[delta] = [
            aggregator.last.estimates
            for _, _, aggregator in rounds
            if aggregator.last is not None
        ]
    for paper, ours in zip(found["gradient"][1:], found["parameters"][1:], strict=True):
        assert paper is not None
        assert ours is not None
        assert (ours.rho, ours.beta) == (paper.rho, paper.beta)
        assert ours.delta == pytest.approx(paper.delta, rel=1e-4)


class FixedTau1(FixedTau):
    """τ = 1, with estimates."""

    estimates: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__(1)


def test_delta_from_parameters_saves_gradients() -> None:
    case = problem("svm", 8)
    sizes = {}
    for delta in ("gradient", "parameters"):
        rounds = run_rounds(
            [one_fleet(case, sorted_parts(case, 4))],
            AdaptiveTau(),
            eta=0.1,
            rounds=3,
            w=case.start(1),
            delta=delta,
        )
        sizes[delta] = [report.wire_bytes for _, report, _ in rounds]
    assert [a - b for a, b in zip(sizes["gradient"], sizes["parameters"], strict=True)] == [
        0,  # no estimates in round 1
        4 * 4 * 5,  # four nodes, five float32
        4 * 4 * 5,
        0,  # the final loss
    ]


def test_mini_batches_reach_32_samples() -> None:
    assert [mini_batches(batch) for batch in (None, 100, 32, 31, 10, 1)] == [
        1,
        1,
        1,
        2,
        4,
        32,
    ]


@pytest.mark.parametrize("name", MODELS)
def test_gather_matches_second_computation(name: str) -> None:
    """Losses are means; the gradient difference is that of the steepest mini-batch."""
    case = problem(name, 5, samples=200)
    parts = [np.arange(0, 80), np.arange(80, 200)]
    shards = Shards.of(case.table, parts)
    indices = Sampler(shards.size, 3, seed=1).round(11)
    w, best, elsewhere = (
        case.start(1),
        case.start(2),
        np.stack([case.start(3), case.start(4)]),
    )
    found = gather(case.model, shards, indices, w, best, elsewhere)
    for node in range(2):
        losses, best_losses, changes, turns = [], [], [], []
        for update in range(11):
            rows = parts[node][indices.of(node, update, len(parts[node]))]
            x, y = case.x[rows], case.y[rows]
            at_w, at_best, there = (
                np.asarray(each, np.float64) for each in (w, best, elsewhere[node])
            )
            losses.append(case.loss(at_w, x, y))
            best_losses.append(case.loss(at_best, x, y))
            changes.append(abs(case.loss(there, x, y) - losses[-1]))
            turns.append(case.gradient(there, x, y) - case.gradient(at_w, x, y))
        assert found.losses[node] == pytest.approx(np.mean(losses), rel=1e-5)
        assert found.best_losses[node] == pytest.approx(np.mean(best_losses), rel=1e-5)
        assert found.loss_change[node] == pytest.approx(np.mean(changes), rel=1e-4)
        np.testing.assert_allclose(
            found.steepest[node], max(turns, key=np.linalg.norm), atol=1e-4
        )


@pytest.mark.parametrize(("batch", "curvature"), [(4, True), (4, False), (40, True)])
def test_fleet_gathers_for_small_batches(batch: int, curvature: bool) -> None:
    """With several mini-batches the reported loss is not that of the first local update."""
    case = problem("svm", 5, samples=200)
    features = [EstimateSlopes(gradient=True, curvature=curvature)]
    fleet = Fleet(
        case.model,
        Shards.of(case.table, [np.arange(100), np.arange(100, 200)]),
        batch=batch,
        seed=3,
        features=features,
    )
    first = TrainRound(
        round=1,
        w=case.start(1),
        report=report_layout(tuple(features), True),
        tau=2,
        eta=0.1,
        effective=2,
    )
    fleet.answer(first)
    sampler = fleet.sampler.fork()
    second = replace(
        first, round=2, w=case.start(2), report=report_layout(tuple(features), False)
    )
    report = fleet.answer(second)
    assert isinstance(report, TrainReport)
    if curvature and mini_batches(batch) > 1:
        sampler.round(mini_batches(batch), fresh=True)
    one = sampler.round(2, fresh=curvature)
    alone = case.model.descend(second.w[None], fleet.shards, one, 0.0)
    several = not np.allclose(report.losses, alone.losses, rtol=1e-6)
    assert several == (curvature and batch < 32)
    assert (report.numbers["beta"] > 0).all()


CURVATURE = EstimateSlopes(gradient=True, curvature=True)


class TestCurvature:
    """Requests of a step size that follows β."""

    def ask(self, round: int, w: Float32, tau: int = 1) -> TrainRound:
        return self.broadcast(CURVATURE, round, w, tau)

    def broadcast(
        self, feature: EstimateSlopes, round: int, w: Float32, tau: int = 1
    ) -> TrainRound:
        return TrainRound(
            round=round,
            w=w,
            report=report_layout((feature,), round == 1),
            tau=tau,
            eta=0.1,
            effective=tau,
        )

    def test_identical_nodes_find_largest_eigenvalue(self) -> None:
        """Power iteration over rounds reaches the largest eigenvalue of the Hessian."""
        case = problem("linear", 3, regularization=0.0)
        nodes = one_fleet(case, [np.arange(60)] * 3, features=[CURVATURE])
        w, found = case.start(1), []
        for round in range(1, 25):
            report = nodes.answer(self.ask(round, w))
            w = report.vectors["w"][0]
            found.append(report.numbers.get("beta"))
        largest = float(np.linalg.eigvalsh(case.x.T @ case.x / 60).max())
        assert found[0] is None
        assert found[1] is not None
        assert found[-1] is not None
        assert 0 < found[1][0] < 0.95 * largest
        np.testing.assert_allclose(found[-1], largest, rtol=0.01)

    def test_different_nodes_report_usual_beta(self) -> None:
        """The request changes nothing if the shards differ."""
        case = problem("svm", 3)
        without = EstimateSlopes(gradient=True)
        asked, plain = (
            one_fleet(case, [np.arange(20), np.arange(20, 60)], features=[feature])
            for feature in (CURVATURE, without)
        )
        for round in (1, 2, 3):
            w = case.start(round)
            one = asked.answer(self.ask(round, w))
            other = plain.answer(self.broadcast(without, round, w))
            assert ("beta" in one.numbers) == (round > 1)
            assert bits(one) == bits(other)

    def test_rounds_start_with_fresh_mini_batch(self) -> None:
        """The first mini-batch of a round was not used for the last update."""
        case = problem("svm", 3, samples=2000)
        nodes = one_fleet(case, [np.arange(2000)], 1, [CURVATURE])
        drawn = []
        for round in range(1, 11):
            nodes.receive(self.ask(round, case.start(1), tau=2))
            nodes.update()
            assert nodes._local is not None
            drawn += nodes._local.indices.positions[0, :, 0].tolist()
            nodes.report()
        assert len(set(drawn)) == 20


def vector(*values: float) -> Float32:
    return np.array(values, np.float32)


def quadratic(curvature: Float32) -> tuple[FunctionModel, Shards]:
    """½ Σ a_j w_j² at every node, independent of the samples."""

    def loss(w: Float32, x: object, y: object) -> tuple[float, Float32]:
        return float(0.5 * (curvature * w * w).sum()), curvature * w

    model = FunctionModel(loss, initial=np.zeros(len(curvature)))
    return model, Shards.whole(Table(np.zeros((2, 1), np.float32), np.zeros(2, np.float32)))


class TestFirstSteepness:
    @pytest.mark.parametrize("beta", [0.02, 0.3, 3.0, 2000.0])
    def test_exact_for_a_quadratic(self, beta: float) -> None:
        model, shards = quadratic(vector(beta, beta))
        w = vector(1, 2)
        found = first_steepness(
            model, shards, BatchIndices.whole(1), w, np.float32(beta) * w[None]
        )
        assert found == pytest.approx(
            [max(beta, 1 / 30)], rel=1e-3
        )  # a first step is at most 30

    def test_looks_ahead_if_steepness_grows(
        self,
    ) -> None:
        """F = w⁴/4 at w = 1: s β(s) = (s - 1)³ + 1 is 300 at s = 7.69; β(w) is 3."""

        def loss(w: Float32, x: object, y: object) -> tuple[float, Float32]:
            return float((w**4).sum() / 4), w**3

        model, (_, shards) = FunctionModel(loss, initial=np.ones(1)), quadratic(vector(1))
        found = first_steepness(
            model, shards, BatchIndices.whole(1), vector(1), np.ones((1, 1), np.float32)
        )
        assert found == pytest.approx([300 / 7.69], rel=0.1)  # between steps of 1 and 10

    def test_finds_steep_direction_across_gradient(self) -> None:
        """The gradient at w has a thousandth of its length along a curvature of 100."""
        curvature = vector(1, 100)
        model, shards = quadratic(curvature)
        w = vector(1, 1e-5)
        found = first_steepness(
            model, shards, BatchIndices.whole(1), w, (curvature * w)[None]
        )
        assert found == pytest.approx([100], rel=0.01)

    def test_nan_without_gradient(self) -> None:
        model, shards = quadratic(vector(1, 1))
        assert np.isnan(
            first_steepness(
                model,
                shards,
                BatchIndices.whole(1),
                vector(0, 0),
                np.zeros((1, 2), np.float32),
            )
        )


class TestOwnSteps:
    """Step sizes of nodes whose own loss is steep."""

    CURVATURES = (1.0, 50.0)

    def second_report(self, eta: float) -> Report:
        """Report of two updates of two nodes with ½ a_i w², after a first round."""
        curvatures = np.array(self.CURVATURES, np.float32)

        def loss(w: Float32, x: Float32, y: object) -> tuple[float, Float32]:
            curvature = x.mean()
            return float(0.5 * curvature * (w * w).sum()), curvature * w

        model = FunctionModel(loss, initial=np.ones(1))
        x = np.repeat(curvatures, 2)[:, None]
        table = Table(x, np.zeros(4, np.float32))
        shards = Shards.of(table, [np.array([0, 1]), np.array([2, 3])])
        slopes = EstimateSlopes(curvature=True, one_step=True)
        fleet = Fleet(model, shards, batch=None, seed=0, features=(slopes,))
        first = TrainRound(
            round=1,
            w=vector(1),
            tau=1,
            eta=eta,
            effective=1,
            report=report_layout((slopes,), True),
        )
        fleet.answer(first)
        layout = report_layout((slopes,), False)
        return fleet.answer(replace(first, round=2, tau=2, effective=2, report=layout))

    def test_steep_node_reports_mean_gradient(self) -> None:
        """With η = 0.1 the second node steps by 1.5/50 = 0.03, to -0.5 and then 0.25.

        The mean of its gradients 50 and -25 is 12.5, so it reports 1 - 2 · 0.1 · 12.5.
        """
        report = self.second_report(eta=0.1)
        assert report.vectors["w"][:, 0] == pytest.approx([0.81, -1.5], rel=1e-4)

    def test_common_step_if_all_are_stable(self) -> None:
        report = self.second_report(eta=0.01)
        assert report.vectors["w"][:, 0] == pytest.approx([0.99**2, 0.25], rel=1e-4)
