"""Derivatives over shards, compared with finite differences in float64."""

import numpy as np
import pytest

from fedbudget.arrays import Float32, Float64
from fedbudget.data.shards import Table
from fedbudget.models import KMeans, LinearRegression, Softmax, SquaredSvm
from fedbudget.models.base import Model
from fedbudget.models.curvature import (
    Directions,
    curvature,
    directions_of,
    packed,
    unpacked,
)

ROWS = np.arange(3, 40, dtype=np.int32)
MODELS: dict[str, Model] = {
    "linear": LinearRegression(4),
    "svm": SquaredSvm(4),
    "softmax": Softmax(4, 3),
    "two classes": Softmax(4, 2, 0.2),
    "weighted": Softmax(4, 3, weights=(1.0, 5.0, 0.5)),
}


def table_of(model: Model, seed: int) -> Table:
    rng = np.random.default_rng(seed)
    y = rng.normal(size=50)
    if model.target == "binary":
        y = np.sign(y)
    if isinstance(model, Softmax):
        y = rng.integers(0, model.classes, 50).astype(float)
    return Table(rng.normal(size=(50, 4)), y.astype(np.float32), scale=0.5)


def loss_of(model: Model, table: Table, w: Float64) -> float:
    """The mean loss over `ROWS`, in float64."""
    x = np.asarray(table.x[ROWS], np.float64) * table.scale
    y = np.asarray(table.y[ROWS], np.float64)
    if isinstance(model, Softmax):
        weights = w.reshape(model.classes, -1)
        scores = x @ weights[:, :-1].T + weights[:, -1]
        labels = y.astype(int)
        losses = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(y)), labels]
        if model.weights:
            losses = losses * np.array(model.weights)[labels]
    elif isinstance(model, SquaredSvm):
        losses = 0.5 * np.maximum(0, 1 - y * (x @ w)) ** 2
    else:
        losses = 0.5 * (y - x @ w) ** 2
    return float(losses.mean() + 0.5 * getattr(model, "regularization", 0.0) * w @ w)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_equals_finite_differences(name: str, seed: int) -> None:
    model = MODELS[name]
    directions = directions_of(model)
    assert directions is not None
    table = table_of(model, seed)
    start = np.random.default_rng(seed).normal(size=directions.size).astype(np.float32)
    w = directions.parameters(start.astype(np.float64)).astype(np.float32)
    found = curvature(model, w, table, ROWS)
    u = directions.of(w)

    def loss(u: Float64) -> float:
        return loss_of(model, table, directions.parameters(u))

    step = 1e-5
    unit = step * np.eye(directions.size)
    slopes = [(loss(u + each) - loss(u - each)) / (2 * step) for each in unit]
    np.testing.assert_allclose(found.gradient, slopes, atol=1e-7)
    bends = []
    for each in unit:
        ahead = curvature(model, _at(directions, u + 1e3 * each), table, ROWS).gradient
        behind = curvature(model, _at(directions, u - 1e3 * each), table, ROWS).gradient
        bends.append((ahead - behind) / 2e3 / step)
    if name == "linear":  # the others are only nearly quadratic over so long a step
        np.testing.assert_allclose(found.hessian, bends, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.hessian, found.hessian.T, atol=1e-15)
    assert np.linalg.eigvalsh(found.hessian).min() > -1e-12
    short = 1e-3 * np.random.default_rng(9).normal(size=directions.size)
    second = loss(u + short) + loss(u - short) - 2 * loss(u)
    if name != "svm":  # its second derivative has jumps
        assert second == pytest.approx(short @ found.hessian @ short, rel=1e-3)


def _at(directions: Directions, u: Float64) -> Float32:
    return directions.parameters(u).astype(np.float32)


@pytest.mark.parametrize("outputs", [1, 2, 3, 7])
def test_coordinates_leave_out_common_shift(outputs: int) -> None:
    directions = Directions(outputs, 3, bias=True)
    u = np.random.default_rng(1).normal(size=directions.size)
    w = directions.parameters(u)
    np.testing.assert_allclose(directions.of(w.astype(np.float32)), u, atol=1e-6)
    if outputs > 1:
        np.testing.assert_allclose(w.reshape(outputs, 3).sum(axis=0), 0, atol=1e-12)
        shifted = (w.reshape(outputs, 3) + np.ones(3)).astype(np.float32)
        np.testing.assert_allclose(directions.of(shifted.ravel()), u, atol=1e-6)


def test_blocks_of_rows_add_up() -> None:
    """More rows than one block: the sums equal those of numpy over all rows."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(3000, 30))
    table = Table(x, rng.normal(size=3000).astype(np.float32))
    model = LinearRegression(30)
    rows = np.arange(3000, dtype=np.int32)
    found = curvature(model, np.zeros(30, np.float32), table, rows)
    np.testing.assert_allclose(found.hessian, x.T @ x / 3000, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(
        found.gradient, -x.T @ table.y.astype(float) / 3000, rtol=1e-9
    )


def test_packed_matrix_is_restored() -> None:
    matrix = np.random.default_rng(0).normal(size=(5, 5))
    symmetric = matrix + matrix.T
    assert len(packed(symmetric)) == 15
    np.testing.assert_array_equal(unpacked(packed(symmetric), 5), symmetric)


def test_other_models_have_none() -> None:
    assert directions_of(KMeans(3, 2)) is None
