"""Update rules: worked out by hand, by the published formulas, and by Flower."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp import strategy as flower
from hypothesis import given
from hypothesis import strategies as st

import fedbudget
from fedbudget.arrays import Float32, Float64
from fedbudget.budget.budget import Budget, Costs
from fedbudget.budget.control import FixedTau
from fedbudget.budget.step_size import FixedStep
from fedbudget.codec import file_codec
from fedbudget.data import load
from fedbudget.errors import UserError
from fedbudget.frozen import updated
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.combine import WeightedMean
from fedbudget.protocol.features.drift import DriftCatchUp, DriftPart
from fedbudget.protocol.messages import Broadcast, TrainReport
from fedbudget.protocol.method import Method
from fedbudget.protocol.stages import move
from fedbudget.protocol.update import (
    UPDATE_RULES,
    Accelerate,
    Average,
    FedAdam,
    FedYogi,
    KMeansSplit,
    KMeansSplitState,
    Motion,
    ServerMomentum,
    UpdateRule,
    restarted,
    with_statistics_of,
    without_statistics,
)
from support.fleets import single_node_fleets
from support.hand_made import (
    ONE,
    as_broadcast,
    make,
    report,
    train_report,
    with_values,
)
from support.methods import bits
from support.problems import problem, run_rounds

SEEDS = range(10)

NextV = Callable[[float, float, float], float]


def updates(seed: int) -> Float32:
    """Mean updates of 12 rounds; parameters move by little and by much."""
    rng = np.random.default_rng(seed)
    return (rng.normal(0.3, 1.0, (12, 4)) * [0.01, 0.1, 1.0, 10.0]).astype(np.float32)


def follow(rule: UpdateRule, deltas: Float32) -> Float32:
    """Return every w, starting from 0."""
    w: Float32 = np.zeros(deltas.shape[1], np.float32)
    state = rule.first(w)
    visited = []
    for delta in deltas:
        state, w = rule.next(state, w, w + delta)
        visited.append(w)
    return np.array(visited)


def one_parameter(rule: UpdateRule, *deltas: float) -> list[float]:
    """Return every w of a single parameter, starting from 0."""
    column = np.array(deltas, np.float32)[:, None]
    return [float(w) for w in follow(rule, column)[:, 0]]


class TestByHand:
    """Adaptive rules with s = 1, β₁ = 1/2, β₂ = 3/4 and ε = 1, so v starts at 1."""

    def test_fedadam(self) -> None:
        # m = 2, v = 0.75 + 0.25 * 16 = 4.75; then m = 1 - 1 = 0.
        step = 2 / (math.sqrt(4.75) + 1)
        assert one_parameter(FedAdam(1.0, 0.5, 0.75, 1.0), 4, -2) == pytest.approx(
            [step, step]
        )

    def test_fedyogi(self) -> None:
        # m = 4, v = 1 + 0.25 * 64 = 17; then m = 2 + 1 = 3, v = 17 - 0.25 * 4 = 16:
        # a step of 3/5.
        step = 4 / (math.sqrt(17) + 1)
        assert one_parameter(FedYogi(1.0, 0.5, 0.75, 1.0), 8, 2) == pytest.approx(
            [step, step + 3 / 5]
        )

    def test_fedavgm(self) -> None:
        # v = 0.1 * 2 = 0.2, then 0.5 * 0.2 + 0.1 * 4 = 0.5.
        assert one_parameter(ServerMomentum(0.5, step_size=0.1), 2, 4) == pytest.approx(
            [0.2, 0.7]
        )

    def test_fedavg(self) -> None:
        assert one_parameter(Average(), 2, 4) == [2, 6]


def algorithm_2(
    deltas: Float32, eta: float, beta1: float, beta2: float, tau: float, next_v: NextV
) -> Float64:
    """Reddi et al., Algorithm 2, with v₋₁ = τ²."""
    x, m, v = ([value] * deltas.shape[1] for value in (0.0, 0.0, tau**2))
    visited = []
    for row in deltas.tolist():
        for j, delta in enumerate(row):
            m[j] = beta1 * m[j] + (1 - beta1) * delta
            v[j] = next_v(v[j], delta, beta2)
            x[j] = x[j] + eta * m[j] / (math.sqrt(v[j]) + tau)
        visited.append(list(x))
    return np.array(visited)


def adam(v: float, delta: float, beta2: float) -> float:
    return beta2 * v + (1 - beta2) * delta**2


def yogi(v: float, delta: float, beta2: float) -> float:
    return v - (1 - beta2) * delta**2 * ((v > delta**2) - (v < delta**2))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("rule", "next_v"), [(FedAdam, adam), (FedYogi, yogi)])
def test_adaptive_rules_match_publication(
    rule: type[FedAdam | FedYogi], next_v: NextV, seed: int
) -> None:
    deltas, rng = updates(seed), np.random.default_rng(seed)
    options = (
        rng.uniform(0.01, 1),
        rng.uniform(0, 0.95),
        rng.uniform(0.5, 0.999),
        10 ** rng.uniform(-3, 0),
    )
    expected = algorithm_2(deltas, *options, next_v)
    np.testing.assert_allclose(
        follow(rule(*options), deltas), expected, rtol=1e-4, atol=1e-5
    )


def hsu(deltas: Float32, momentum: float, step_size: float) -> Float64:
    """v ← βv + Δw, w ← w - ηv, with the pseudo-gradient Δw: minus the mean update."""
    visited, w, v = [], np.zeros(deltas.shape[1]), np.zeros(deltas.shape[1])
    for delta in deltas.astype(np.float64):
        v = momentum * v - delta
        w = w - step_size * v
        visited.append(w)
    return np.array(visited)


@pytest.mark.parametrize("seed", SEEDS)
def test_momentum_matches_publication(seed: int) -> None:
    found = follow(ServerMomentum(0.9, step_size=0.3), updates(seed))
    np.testing.assert_allclose(found, hsu(updates(seed), 0.9, 0.3), rtol=1e-4, atol=1e-4)


class TestAgainstFlower:
    """Flower's strategies on the same means."""

    def visited(
        self, strategy: flower.FedAvg, deltas: Float32, monkeypatch: pytest.MonkeyPatch
    ) -> Float32:
        w: Float32 = np.zeros(deltas.shape[1], np.float32)
        found = []
        for number, delta in enumerate(deltas, start=1):
            mean = ArrayRecord({"w": Array(w + delta)})
            monkeypatch.setattr(
                flower.FedAvg,
                "aggregate_train",
                lambda *_, mean=mean: (mean, MetricRecord()),
            )
            if isinstance(strategy, flower.FedAdam):
                # Flower corrects a bias (Kingma and Ba); the published algorithm does not.
                unbiased = math.sqrt(1 - 0.99 ** (number + 1)) / (1 - 0.9 ** (number + 1))
                strategy.eta = 0.3 / unbiased
            if isinstance(strategy, flower.FedAdam | flower.FedYogi):
                strategy.current_arrays = {"w": w}
            elif isinstance(strategy, flower.FedAvgM):
                strategy.current_arrays = ArrayRecord({"w": Array(w)})
            after, _ = strategy.aggregate_train(number, [])
            assert after is not None
            w = after["w"].numpy().astype(np.float32)
            found.append(w)
        return np.array(found)

    @pytest.mark.parametrize(
        ("rule", "theirs"), [(FedAdam, flower.FedAdam), (FedYogi, flower.FedYogi)]
    )
    def test_adaptive_rules(
        self,
        rule: type[FedAdam | FedYogi],
        theirs: type[flower.FedAdam | flower.FedYogi],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        strategy = theirs(eta=0.3, beta_1=0.9, beta_2=0.99, tau=0.01)
        strategy.v_t = {"w": np.full(4, 0.01**2)}  # Flower starts at 0
        found = follow(rule(step_size=0.3, epsilon=0.01), updates(1))
        np.testing.assert_allclose(
            found, self.visited(strategy, updates(1), monkeypatch), rtol=1e-4, atol=1e-5
        )

    def test_momentum(self, monkeypatch: pytest.MonkeyPatch) -> None:
        strategy = flower.FedAvgM(server_learning_rate=0.3, server_momentum=0.9)
        found = follow(ServerMomentum(0.9, step_size=0.3), updates(1))
        np.testing.assert_allclose(
            found, self.visited(strategy, updates(1), monkeypatch), rtol=1e-4, atol=1e-5
        )


class TestInARun:
    @pytest.mark.parametrize("rule", [FedAdam(0.05), FedYogi(0.05)])
    def test_rounds_match_second_computation(self, rule: FedAdam | FedYogi) -> None:
        """Recompute w from the reports."""
        case = problem("svm", 3)
        parts = np.split(np.argsort(case.x[:, 0]), 4)
        rounds = list(
            run_rounds(
                single_node_fleets(case, parts),
                FixedTau(3),
                eta=0.1,
                rounds=8,
                w=case.start(1),
                update=rule,
            )
        )
        deltas, visited = [], []
        for (broadcast, answer, _), (after, _, _) in pairwise(rounds):
            w = answer.vectors["w"]
            deltas.append(np.average(w, axis=0, weights=answer.sizes) - broadcast.w)
            visited.append(after.w - rounds[0][0].w)
        next_v = adam if isinstance(rule, FedAdam) else yogi
        expected = algorithm_2(np.array(deltas), 0.05, 0.9, 0.99, 1e-3, next_v)
        np.testing.assert_allclose(visited, expected, rtol=1e-3, atol=1e-4)

    def test_state_restarts_after_recovery(self) -> None:
        aggregator = make(update=FedAdam(epsilon=0.5))
        second = as_broadcast(
            aggregator.receive(report(aggregator.start(), 2.0, w=1.0), ONE)
        )
        nothing = np.full((2, 2), np.inf, np.float32)
        lost = with_values(report(second, 1.0, best=2.0), w=nothing)
        as_broadcast(aggregator.receive(lost, ONE))
        state = aggregator.state.update
        assert (state.m.tolist(), state.v.tolist()) == ([0, 0], [0.25, 0.25])

    @pytest.mark.parametrize("name", UPDATE_RULES)
    def test_state_survives_the_codec(self, name: str) -> None:
        rule, w = UPDATE_RULES[name](), np.ones(3, np.float32)
        state, _ = rule.next(rule.first(w), w, w + np.float32(0.5))
        if state is not None:
            codec = file_codec(type(state))
            assert bits(codec.restore(*codec.plain(state))) == bits(state)

    def test_overflow_raises_no_error(self) -> None:
        rule, w = FedAdam(), np.zeros(1, np.float32)
        with np.errstate(all="raise"):
            rule.next(rule.first(w), w, np.array([3e38], np.float32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_size": 0.0}, "step_size must be a positive number, not 0"),
        ({"epsilon": -1.0}, "epsilon must be a positive number, not -1"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, not 1"),
        ({"beta2": 1.5}, r"beta2 must be at least 0 and below 1, not 1\.5"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, float], message: str) -> None:
    for rule in (FedAdam, FedYogi):
        with pytest.raises(UserError, match=message):
            rule(**options)


def test_momentum_step_must_be_positive() -> None:
    with pytest.raises(UserError, match="step_size must be a positive number, not 0"):
        ServerMomentum(step_size=0.0)


def vector(*values: float) -> Float32:
    return np.array(values, np.float32)


class TestAccelerate:
    def test_by_hand(self) -> None:
        """Parameters that continue, reverse, and rest: v = 0.95 v_old + g Δ."""
        state = Motion(vector(1, 1, 1, 0), vector(2, 2, 1, 5))
        after, w = Accelerate().next(state, vector(0, 0, 0, 0), vector(1, -1, 0, 1))
        assert after.gains == pytest.approx([2.8, 1, 1, 5])
        assert after.velocity == pytest.approx([0.95 + 2.8, 0.475 - 1, 0.95, 5])
        assert w == pytest.approx(after.velocity)

    def test_gains_stay_between_1_and_100(self) -> None:
        rule, state, w = Accelerate(), Motion(vector(1, 1), vector(90, 1.2)), vector(0, 0)
        after, _ = rule.next(state, w, vector(1, -1))
        assert after.gains.tolist() == [100, 1]

    @given(
        steps=st.lists(st.floats(-1, 1, width=16), min_size=1, max_size=12),
        factor=st.sampled_from([0.125, 8, 64]),
    )
    def test_scale_of_parameters_is_irrelevant(
        self, steps: list[float], factor: float
    ) -> None:
        """The bits are equal for scales that are powers of two."""

        def path(scale: float) -> list[float]:
            rule, w = Accelerate(), vector(0)
            state, found = rule.first(w), []
            for step in steps:
                state, w = rule.next(state, w, w + np.float32(scale * step))
                found.append(float(w[0]) / scale)
            return found

        assert path(factor) == path(1)

    def test_faster_than_averaging_if_ill_conditioned(self) -> None:
        """½(x² + y²/1000), one gradient step with η = 1 per round."""
        curvature = vector(1, 1e-3)
        plain = w = vector(1, 1)
        rule = Accelerate()
        state = rule.first(w)
        for _ in range(60):
            plain = plain - curvature * plain
            state, w = rule.next(state, w, w - curvature * w)
        assert abs(plain[1]) > 0.9
        assert np.abs(w).max() < 0.1


class TestTrust:
    """A mean update is shortened if gradients suddenly become long."""

    def test_by_hand(self) -> None:
        """The limit is 1.5 times the longest rate; 90 % of the longest is remembered."""
        rule, state, shares, rates = Accelerate(), Accelerate().first(vector(0)), [], []
        for rate in (2.0, 1.0, 8.0, 8.0):
            state, share = rule.trust(state, rate)
            shares.append(share)
            rates.append(state.rate)
        assert shares == pytest.approx([1, 1, 2.7 / 8, 4.05 / 8])
        assert rates == pytest.approx([2, 1.8, 2.7, 4.05])

    def test_long_mean_update_is_shortened(self) -> None:
        """Mean updates 1 and 10 with η τ = 0.5: the second is shortened to 1.5."""
        rule = Accelerate()
        state = updated(make().state, update=rule.first(vector(0, 0)))
        first = move(state, rule, vector(0.6, 0.8), state.w, span=0.5)
        state = updated(state, w=first.w, update=first.update)
        second = move(state, rule, first.w + vector(6, 8), state.w, span=0.5)
        assert second.w - first.w == pytest.approx(
            0.95 * first.w + 1.4 * 1.5 * vector(0.6, 0.8), rel=1e-5
        )


def centres(*values: float) -> Float32:
    """Centres with one feature each."""
    return np.array(values, np.float32)


class TestKMeansSplit:
    """Centres without samples move next to centres with samples."""

    def test_furthest_moving_centre_splits(self) -> None:
        """Two centres moved less than half as far. One of them is placed next to the first:
        a centre splits once per round.
        """
        rule, w = KMeansSplit(4), centres(0, 9, 9, 9)
        state, moved = rule.next(rule.first(w), w, centres(4, 9, 8, 7.5))
        assert state.counted.tolist() == [True, False, False, False]
        np.testing.assert_allclose(moved, [4, 4.04, 8, 7.5], rtol=1e-6)

    def test_active_centres_double_each_round(self) -> None:
        rule, w = KMeansSplit(8), centres(*range(8))
        state, counts = rule.first(w), list[int]()
        for _ in range(4):
            mean = w + np.where(
                np.arange(8) < max(1, 2 ** len(counts)), np.float32(1), np.float32(0)
            )
            state, w = rule.next(state, w, mean)
            counts.append(int(state.counted.sum()))
        assert counts == [1, 2, 4, 8]

    def test_active_centre_stays(self) -> None:
        """A converged centre does not move either."""
        rule, w = KMeansSplit(2), centres(0, 9)
        state = KMeansSplitState(np.array([True, True]), rounds=3)
        assert rule.next(state, w, centres(1, 9))[1].tolist() == [1, 9]

    def test_rounding_is_not_motion(self) -> None:
        """A mean of equal numbers may differ in the last digit."""
        rule, w = KMeansSplit(2), centres(0, 9)
        state = KMeansSplitState(np.array([True, False]), rounds=3)
        np.testing.assert_allclose(
            rule.next(state, w, centres(1, np.nextafter(9, 10)))[1], [1, 1.01], rtol=1e-6
        )

    def test_no_split_without_motion(self) -> None:
        rule, w = KMeansSplit(2), centres(0, 9)
        assert rule.next(rule.first(w), w, w)[1].tolist() == [0, 9]

    def test_no_split_after_recovery(self) -> None:
        """A short round after a recovery moves few centres."""
        rule, w = KMeansSplit(3), centres(0, 9, 5)
        state = restarted(rule, rule.first(w), w)
        assert rule.next(state, w, centres(1, 9, 5))[1].tolist() == [1, 9, 5]
        assert restarted(Average(), None, w) is None


def test_digits_have_ten_clusters() -> None:
    """Without the rule one centre takes all samples."""
    task: Any = {
        "model": "kmeans",
        "dataset": "digits",
        "clusters": 10,
        "case": 2,
        "nodes": 5,
        "budget": "time=5s",
    }
    split = fedbudget.train(**task)
    average = fedbudget.train(**task, update="average", drift_correction=True)
    assert len(np.unique(split.model.predict(load("digits").train.x))) == 10
    assert split.loss < 0.7 * average.loss


PARAMETERS = 3
STATISTICS = 2
SIZES = np.array([10, 30])
W = np.array([1, 2, 3, 10, 20], np.float32)


def report_statistics(broadcast: Broadcast, round_: int, statistics: int) -> TrainReport:
    """Two nodes with the same updates for any number of statistics."""
    rng = np.random.default_rng(round_)
    steps = rng.normal(size=(2, PARAMETERS)).astype(np.float32)
    measured = rng.normal(size=(2, STATISTICS)).astype(np.float32)
    w = np.concatenate([broadcast.w[:PARAMETERS] + steps, measured[:, :statistics]], axis=1)
    numbers: dict[str, Any] = {name: np.zeros(2) for name in broadcast.report.numbers}
    numbers |= {"losses": np.ones(2) / round_, "best_losses": np.ones(2)}
    return train_report(w, sizes=SIZES, round=broadcast.round, **numbers)


def run_statistics(rule: Any, statistics: int, *, correct_drift: bool) -> list[Broadcast]:
    method = Method(
        FixedTau(2),
        FixedStep(0.1),
        rule,
        WeightedMean(),
        correct_drift=correct_drift,
        delta="parameters",
    )
    cost = Costs(np.ones(1), np.ones(1))
    budget = Budget.parse(["time=1000s"])
    start = W[: PARAMETERS + statistics]
    aggregator = Aggregator(
        start, method=method, budget=budget, expected=cost, statistics=statistics
    )
    broadcasts = [aggregator.start()]
    for round_ in range(1, 7):
        answer = aggregator.receive(
            report_statistics(broadcasts[-1], round_, statistics), cost
        )
        assert isinstance(answer, Broadcast)
        broadcasts.append(answer)
        assert aggregator.state.statistics == statistics
    return broadcasts


@pytest.mark.parametrize("name", UPDATE_RULES)
@pytest.mark.parametrize("correct_drift", [False, True])
def test_statistics_are_averaged_by_samples(name: str, correct_drift: bool) -> None:
    """Parameters move as without statistics; statistics are averaged by samples."""
    rule = UPDATE_RULES[name]()
    ours = run_statistics(rule, STATISTICS, correct_drift=correct_drift)
    theirs = run_statistics(rule, 0, correct_drift=correct_drift)
    for round_, (one, other) in enumerate(zip(ours[1:], theirs[1:], strict=True), start=1):
        np.testing.assert_array_equal(one.w[:PARAMETERS], other.w)
        measured = report_statistics(ours[round_ - 1], round_, STATISTICS).w
        expected = (SIZES @ measured[:, PARAMETERS:].astype(np.float64)) / SIZES.sum()
        np.testing.assert_allclose(one.w[PARAMETERS:], expected, rtol=1e-6)
        assert sends_mean(one) == sends_mean(other)
        if correct_drift:
            assert one.catch_up is not None
            missed = one.catch_up.part(DriftCatchUp)
            assert missed is not None
            assert missed.mean[PARAMETERS:].tolist() == [0, 0]  # no drift


def sends_mean(broadcast: Broadcast) -> bool:
    """Whether the combined w_i is sent in addition to w."""
    drift = broadcast.part(DriftPart)
    return drift is not None and drift.mean is not None


@pytest.mark.parametrize("shape", [(5,), (2, 5)])
def test_with_statistics_of_other_w(shape: tuple[int, ...]) -> None:
    other, w = W.copy(), np.zeros(shape, np.float32)
    found = with_statistics_of(other, w, 2)
    assert found.reshape(-1, 5)[-1].tolist() == [0, 0, 0, 10, 20]
    assert not w.any()
    assert with_statistics_of(other, w, 0) is w


def test_statistics_of_equal_parameters() -> None:
    w: Float32 = np.append(W[:3], np.zeros(2, np.float32)).astype(np.float32)
    assert with_statistics_of(W, w, 2) is W


def test_without_statistics() -> None:
    assert without_statistics(W, 2).tolist() == [1, 2, 3]
    assert without_statistics(W, 0).tolist() == W.tolist()
