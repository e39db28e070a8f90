"""Minimisation with a proximal term, compared with exact solutions."""

import numpy as np
import pytest

from fedbudget.data.shards import Shards, Table
from fedbudget.models.builtin import LinearRegression, SquaredSvm
from fedbudget.models.minimise import minimise


def regression(rows: int = 120, features: int = 6) -> Table:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((rows, features)).astype(np.float32)
    y = x @ rng.standard_normal(features) + rng.standard_normal(rows)
    return Table(x, y.astype(np.float32), labels=False)


@pytest.mark.parametrize("strength", [0.01, 1.0, 100.0])
def test_ridge_matches_normal_equations(strength: float) -> None:
    table = regression()
    centre = np.linspace(-1, 1, 6, dtype=np.float32)
    found = minimise(
        LinearRegression(6), Shards.whole(table), centre[None], np.array([strength])
    )
    x = table.x.astype(np.float64)
    rows = len(table)
    matrix = x.T @ x / rows + strength * np.eye(6)
    exact = np.linalg.solve(matrix, x.T @ table.y / rows + strength * centre)
    np.testing.assert_allclose(found[0], exact, atol=5e-3)


def test_company_does_not_matter() -> None:
    """A problem has the same bits alone and among others."""
    table = regression()
    shards = Shards.of(table, [np.arange(40), np.arange(30, 120), np.arange(7)])
    centres = np.zeros((3, 6), np.float32)
    strengths = np.array([0.1, 0.01, 1.0])
    model = LinearRegression(6)
    together = minimise(model, shards, centres, strengths)
    for index in range(3):
        alone = minimise(model, shards.only([index]), centres[[index]], strengths[[index]])
        assert alone[0].tobytes() == together[index].tobytes()


def test_strong_term_keeps_the_centre() -> None:
    table = regression()
    labels = Table(table.x, np.sign(table.y))
    centre = np.ones((1, 6), np.float32)
    found = minimise(SquaredSvm(6), Shards.whole(labels), centre, np.array([1e9]))
    np.testing.assert_allclose(found, centre, atol=1e-6)


def test_non_finite_loss_keeps_the_centre() -> None:
    table = regression()
    broken = Table(np.full_like(table.x, np.inf), table.y, labels=False)
    centre = np.ones((1, 6), np.float32)
    found = minimise(LinearRegression(6), Shards.whole(broken), centre, np.array([1.0]))
    assert found.tobytes() == centre.tobytes()


def test_strengths_of_parameters() -> None:
    """An infinite penalty keeps a parameter at the centre."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((50, 3)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 3.0]) + rng.standard_normal(50)).astype(np.float32)
    table = Table(x, y, labels=False)
    centre = np.array([[0.5, 0.5, 0.5]], np.float32)
    strengths = np.array([[0.1, np.inf, 2.0]])
    model = LinearRegression(3)
    (found,) = minimise(model, Shards.whole(table), centre, strengths, 100)
    assert found[1] == np.float32(0.5)
    rows = x[:, [0, 2]].astype(np.float64)
    penalty = np.diag([0.1, 2.0])
    rest = y - 0.5 * x[:, 1]
    expected = np.linalg.solve(
        rows.T @ rows / 50 + penalty, rows.T @ rest / 50 + penalty @ [0.5, 0.5]
    )
    np.testing.assert_allclose(found[[0, 2]], expected, rtol=1e-3)
