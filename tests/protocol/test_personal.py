"""Personal models: what a node chooses, and what its figures are."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from fedbudget.arrays import Float32
from fedbudget.data.shards import Shards, Table
from fedbudget.models.builtin import LinearRegression, Softmax
from fedbudget.protocol.messages import PersonalRound
from fedbudget.protocol.personal import (
    FEWEST_ROWS,
    Personal,
    alone,
    figures_of,
    personalise,
    report_of,
)

FEATURES = 4


def classes(rows: int, seed: int, weights: Sequence[float]) -> Table:
    """Two classes that a linear score separates, with noise."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, FEATURES)).astype(np.float32)
    y = (x @ np.array(weights) + 0.5 * rng.standard_normal(rows) > 0).astype(np.float32)
    return Table(x, y)


def softmax_w(weights: Sequence[float]) -> Float32:
    """Parameters of softmax regression whose second class has this score."""
    w = np.zeros((2, FEATURES + 1), np.float32)
    w[1, :-1] = weights
    return w.ravel()


def personal(
    table: Table, w: Float32, model: Softmax | LinearRegression | None = None
) -> Personal:
    """Return the personal model of one node that held out every fourth row."""
    rows = np.arange(len(table))
    trained = Shards.of(table, [rows[rows % 4 > 0]])
    (found,) = personalise(
        model or Softmax(FEATURES, 2), Shards.whole(table), trained, w, seed=1
    )
    return found


def test_right_model_stays_global() -> None:
    """Most of the weight stays on a global model that fits the node."""
    figures = personal(classes(200, 1, (4, 0, 0, 0)), softmax_w((8, 0, 0, 0))).figures
    assert figures.weights[0] > 0.7
    assert sum(figures.weights) == pytest.approx(1)


def test_wrong_model_is_replaced() -> None:
    """A node whose labels are the other way round does not use the global model."""
    figures = personal(classes(200, 1, (-4, 0, 0, 0)), softmax_w((8, 0, 0, 0))).figures
    assert figures.weights[0] < 0.01
    assert figures.shared is not None
    assert figures.personal is not None
    assert figures.shared.value < 0.2
    assert figures.personal.value > 0.8
    assert figures.correction is not None
    assert figures.correction.value > 5 * figures.correction.error
    assert not figures.served


def test_figures_are_of_held_out_rows() -> None:
    figures = personal(classes(200, 2, (4, 0, 0, 0)), softmax_w((8, 0, 0, 0))).figures
    assert (figures.rows, figures.measured, figures.held_out) == (200, 50, True)


@pytest.mark.parametrize(
    ("table", "kept"),
    [
        (classes(FEWEST_ROWS - 1, 1, (4, 0, 0, 0)), "few rows"),
        (Table(classes(60, 1, (4, 0, 0, 0)).x, np.ones(60, np.float32)), "one class"),
        (classes(1, 1, (4, 0, 0, 0)), "few rows"),
    ],
    ids=["few rows", "one class", "one row"],
)
def test_node_keeps_the_global_model(table: Table, kept: str) -> None:
    w = softmax_w((-8, 0, 0, 0))
    shards = Shards.whole(table)
    (found,) = personalise(Softmax(FEATURES, 2), shards, shards, w, seed=1)
    assert found.figures.kept == kept
    assert found.w.tobytes() == w.tobytes()
    assert found.figures.alone is None


def test_constant_feature_is_not_corrected() -> None:
    """The shift of the output absorbs the difference, not the coefficient."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((300, FEATURES)).astype(np.float32)
    x[:, 0] = 0.25
    y = (x[:, 1] + 3 + 0.1 * rng.standard_normal(300)).astype(np.float32)
    table = Table(x, y, labels=False)
    w = np.array([0.5, 1, 0, 0], np.float32)
    found = personal(table, w, LinearRegression(FEATURES))
    assert 0 <= found.w[0] <= w[0]  # `alone` has 0, corrections have that of w
    np.testing.assert_allclose(x @ found.w + found.shift, x[:, 1] + 3, atol=0.05)


class TestAlone:
    def test_noise_free_line(self) -> None:
        """With many rows the penalty is negligible: least squares with an intercept."""
        rng = np.random.default_rng(5)
        x = rng.standard_normal((400, FEATURES)).astype(np.float32)
        y = (x @ np.array([1, -2, 0, 0.5]) + 3).astype(np.float32)
        table = Table(x, y, labels=False)
        ((w, shift),) = alone(LinearRegression(FEATURES), Shards.whole(table), seed=1)
        np.testing.assert_allclose(w, [1, -2, 0, 0.5], atol=0.02)
        assert shift == pytest.approx(3, abs=0.02)

    def test_nodes_do_not_influence_each_other(self) -> None:
        table = classes(300, 6, (4, 0, 0, 0))
        rows = np.arange(300)
        model = Softmax(FEATURES, 2)
        both = alone(model, Shards.of(table, [rows[:100], rows[100:]]), seed=1)
        (single,) = alone(model, Shards.of(table, [rows[:100]]), seed=1)
        assert both[0][0].tobytes() == single[0].tobytes()
        assert both[1][0].tobytes() != single[0].tobytes()

    def test_few_rows_of_one_class(self) -> None:
        """A node with three rows of one class predicts this class."""
        table = Table(classes(3, 1, (4, 0, 0, 0)).x, np.ones(3, np.float32))
        ((w, _),) = alone(Softmax(FEATURES, 2), Shards.whole(table), seed=1)
        weights = w.reshape(2, -1)
        scores = table.x @ weights[:, :-1].T + weights[:, -1]
        assert (scores[:, 1] > scores[:, 0]).all()


def test_identical_shards_share_a_model() -> None:
    table = classes(80, 1, (4, 0, 0, 0))
    rows = np.arange(80)
    shards = Shards.of(table, [rows, rows, rows[:40]])
    first, second, third = personalise(
        Softmax(FEATURES, 2), shards, shards, softmax_w((1, 0, 0, 0)), seed=1
    )
    assert first is second
    assert third.figures.rows == 40


class TestReport:
    def test_figures_survive(self) -> None:
        w = softmax_w((1, 0, 0, 0))
        found = personal(classes(100, 1, (4, 0, 0, 0)), w)
        request = PersonalRound(round=3, w=w)
        report = report_of(request, np.array([7]), np.array([100]), [found])
        report.require_answers(request)
        assert figures_of(report) == {7: found.figures}

    def test_kept_figures_are_missing(self) -> None:
        request = PersonalRound(round=3, w=softmax_w((1, 0, 0, 0)))
        report = report_of(request, np.array([7]), np.array([100]), ())
        report.require_answers(request)
        assert figures_of(report) == {}

    @pytest.mark.parametrize(
        ("name", "value"),
        [("metric", 17), ("metric", -1), ("rows", math.inf), ("shared", math.nan)],
    )
    def test_impossible_figures_are_ignored(self, name: str, value: float) -> None:
        w = softmax_w((1, 0, 0, 0))
        found = personal(classes(100, 1, (4, 0, 0, 0)), w)
        request = PersonalRound(round=3, w=w)
        report = report_of(request, np.array([7]), np.array([100]), [found])
        report.numbers[name][0] = value
        assert figures_of(report) == {}
