"""Losses and gradients against Table I in float64, finite differences and hand
computation.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float32
from fedbudget.data.sampling import BatchIndices, Sampler
from fedbudget.data.shards import Shards, Table
from fedbudget.models import KMeans, LinearRegression, Softmax, SquaredSvm, base, loss_over
from fedbudget.models.base import Descent, Model
from support.problems import MODELS, Problem, finite_differences, kmeans_distances, problem

DTYPES = (np.uint8, np.float32, np.float64)


def at(model: Model, w: Float32, shards: Shards) -> Descent:
    """F_i and ∇F_i at w."""
    return model.descend(w[None], shards, BatchIndices.whole(len(shards)), 0.0)


def away_from_ties(case: Problem, w: Float32) -> Shards:
    """All rows; for K-means only rows clearly nearest to one centre, because the loss has
    no gradient at a tie.
    """
    if case.model.name != "kmeans":
        return Shards.whole(case.table)
    two = np.sort(kmeans_distances(w.astype(np.float64), case.x), axis=1)[:, :2]
    return Shards.of(case.table, [np.flatnonzero(two[:, 1] - two[:, 0] > 1e-3)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), regularization=st.sampled_from([0.0, 0.1, 2.0]))
def test_loss_and_gradient_match_table_1(
    name: str, dtype: type[np.generic], seed: int, regularization: float
) -> None:
    case = problem(name, seed, samples=63, dtype=dtype, regularization=regularization)
    w = case.start(seed)
    shards = away_from_ties(case, w)
    rows = shards.rows_of(0)
    x, y, exact = case.x[rows], case.y[rows], w.astype(np.float64)
    result = at(case.model, w, shards)
    slope = finite_differences(lambda v: case.loss(v, x, y), exact)
    assert result.losses[0] == pytest.approx(case.loss(exact, x, y), rel=1e-5)
    np.testing.assert_allclose(
        result.gradients[0], slope, atol=2e-5 * (1 + np.abs(slope).max())
    )
    np.testing.assert_allclose(
        case.gradient(exact, x, y), slope, atol=1e-5 * (1 + np.abs(slope).max())
    )


@pytest.mark.parametrize("name", MODELS)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_node_loss_uses_own_shard(name: str, seed: int) -> None:
    case = problem(name, seed)
    shards = Shards.of(case.table, [np.arange(0, 7), np.arange(7, 40), np.arange(40, 60)])
    w = case.start(seed)
    exact = [
        case.loss(w.astype(np.float64), case.x[rows], case.y[rows])
        for rows in map(shards.rows_of, range(3))
    ]
    np.testing.assert_allclose(
        case.model.losses(w[None], shards, BatchIndices.whole(3)), exact, rtol=1e-5
    )
    np.testing.assert_allclose(at(case.model, w, shards).losses, exact, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_loss_over_table_is_mean(name: str) -> None:
    case = problem(name, seed=8)
    w = case.start(8)
    assert loss_over(case.model, w, case.table) == pytest.approx(
        case.loss(w.astype(np.float64), case.x, case.y), rel=1e-5
    )


@pytest.mark.parametrize("name", MODELS)
def test_updates_match_plain_gradient_descent(name: str) -> None:
    case = problem(name, seed=5)
    w = case.start(5)
    result = case.model.descend(
        w[None], Shards.whole(case.table), BatchIndices.whole(1, updates=10), 0.1
    )
    plain = w.astype(np.float64)
    for _ in range(10):
        plain = plain - 0.1 * case.gradient(plain, case.x, case.y)
    np.testing.assert_allclose(result.w[0], plain, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("compiled", [True, False], ids=["kernels", "numpy"])
def test_per_node_steps_match_separate_calls(
    name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call with τ_i and η_i per node computes the same bits as one call per node."""
    if not compiled:
        monkeypatch.setattr(base, "compiled_kernels", lambda: None)
    case = problem(name, seed=6)
    counts = np.array([4, 1, 7])
    etas = np.array([0.1, 0.3, 0.05], np.float32)
    shards = Shards.of(case.table, [np.arange(20), np.arange(20, 40), np.arange(40, 60)])
    w = case.start(6)
    drawn = Sampler(shards.size, 6, seed=2).round(7)
    shift = 0.1 * np.stack([case.start(node + 20) for node in range(3)])
    together = case.model.descend(
        w[None], shards, replace(drawn, counts=counts), etas, w, shift
    )
    for node in range(3):
        own = BatchIndices(
            drawn.positions[:, : counts[node]].copy(), drawn.group[node : node + 1]
        )
        alone = case.model.descend(
            w[None],
            shards.only([node]),
            own,
            float(etas[node]),
            w,
            np.ascontiguousarray(shift[node : node + 1]),
        )
        assert alone.w[0].tobytes() == together.w[node].tobytes()
        assert alone.losses[0] == together.losses[node]
        assert alone.gradients[0].tobytes() == together.gradients[node].tobytes()


def one_row(x: list[float], y: float) -> Shards:
    return Shards.whole(Table(np.array([x], np.float32), np.array([y], np.float32)))


class TestByHand:
    def test_svm(self) -> None:
        # slack 1 - (-1)(1·1 + 2·0.5) = 3: loss 4.5 + 0.1/2 · 1.25,
        # gradient slack · x + 0.1 w
        result = at(SquaredSvm(2), np.array([1.0, 0.5], np.float32), one_row([1, 2], -1))
        assert result.losses[0] == pytest.approx(4.5625)
        assert result.gradients[0] == pytest.approx([3.1, 6.05])

    def test_svm_beyond_margin_only_penalty(self) -> None:
        result = at(SquaredSvm(2), np.array([1.0, 0.5], np.float32), one_row([1, 2], 1))
        assert result.losses[0] == pytest.approx(0.0625)
        assert result.gradients[0] == pytest.approx([0.1, 0.05])

    def test_linear(self) -> None:
        result = at(
            LinearRegression(2), np.array([1.0, -1.0], np.float32), one_row([3, 1], 5)
        )
        assert result.losses[0] == pytest.approx(4.5)  # ½ (2 - 5)²
        assert result.gradients[0] == pytest.approx([-9, -3])

    def test_kmeans_moves_only_nearest_centre(self) -> None:
        result = at(KMeans(2, 2), np.array([0, 0, 4, 4], np.float32), one_row([3, 3], 0))
        assert result.losses[0] == pytest.approx(1)
        assert result.gradients[0] == pytest.approx([0, 0, 1, 1])

    def test_kmeans_tie_moves_first_centre(self) -> None:
        result = at(KMeans(1, 2), np.array([2, 2], np.float32), one_row([3], 0))
        assert result.gradients[0] == pytest.approx([-1, 0])

    def test_softmax_at_zero_is_uniform(self) -> None:
        result = at(Softmax(1, 4), np.zeros(8, np.float32), one_row([2], 1))
        assert result.losses[0] == pytest.approx(np.log(4))
        assert result.gradients[0] == pytest.approx(
            [0.5, 0.25, -1.5, -0.75, 0.5, 0.25, 0.5, 0.25]
        )

    def test_softmax_does_not_overflow(self) -> None:
        result = at(Softmax(1, 2), np.array([1e4, 0, 0, 0], np.float32), one_row([1], 1))
        assert result.losses[0] == pytest.approx(1e4)
        assert result.gradients[0] == pytest.approx([1, 1, -1, -1])


class TestStart:
    def test_parameters(self) -> None:
        models = (SquaredSvm(7), LinearRegression(7), KMeans(7, 4), Softmax(7, 10))
        assert [model.parameters for model in models] == [7, 7, 28, 80]

    @pytest.mark.parametrize("model", [SquaredSvm(3), LinearRegression(3), Softmax(3, 2)])
    def test_convex_models_start_at_zero(self, model: Model) -> None:
        assert model.initial(4).tolist() == [0] * model.parameters

    def test_kmeans_start_is_seeded_uniform(self) -> None:
        start = KMeans(50, 4).initial(4)
        assert start.dtype == np.float32
        assert 0 <= start.min() < 0.1
        assert 0.9 < start.max() < 1
        np.testing.assert_array_equal(start, KMeans(50, 4).initial(4))
        assert (start != KMeans(50, 4).initial(5)).any()


class TestAccuracy:
    def test_svm_accuracy_by_sign(self) -> None:
        case = problem("svm", seed=1, samples=300)
        w = case.start(1)
        expected = np.mean(np.where(case.x @ w >= 0, 1, -1) == case.y)
        assert case.model.accuracy(w, case.table) == pytest.approx(expected)

    def test_softmax_accuracy_by_largest_logit(self) -> None:
        case = problem("softmax", seed=1, samples=300)
        w = case.start(1)
        logits = np.column_stack([case.x, np.ones(300)]) @ w.reshape(3, 6).T
        assert case.model.accuracy(w, case.table) == pytest.approx(
            np.mean(logits.argmax(axis=1) == case.y)
        )

    @pytest.mark.parametrize("name", ["linear", "kmeans"])
    def test_linear_and_kmeans_have_none(self, name: str) -> None:
        case = problem(name, seed=1)
        assert case.model.accuracy(case.start(1), case.table) is None


@pytest.mark.parametrize("name", MODELS)
def test_loss_follows_from_outputs(name: str) -> None:
    case = problem(name, seed=3, regularization=0.0)
    table, w = case.table, case.start(1)
    outputs = case.model.outputs(w, table)
    assert outputs is not None
    own = outputs[np.arange(len(table)), table.y.astype(int) if name == "softmax" else 0]
    losses: dict[str, Float32] = {
        "svm": 0.5 * np.square(np.maximum(0, 1 - table.y * own)),
        "linear": 0.5 * np.square(own - table.y),
        "kmeans": -outputs.max(axis=1),
        "softmax": np.log(np.exp(outputs).sum(axis=1)) - own,
    }
    assert loss_over(case.model, w, table) == pytest.approx(losses[name].mean(), rel=1e-4)
