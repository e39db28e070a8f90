"""Metrics summed over nodes, compared with scikit-learn on all samples together."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import softmax
from sklearn import metrics as sk
from torch import nn

from fedbudget.arrays import Float32
from fedbudget.data.dataset import Standardization
from fedbudget.data.shards import Table
from fedbudget.evaluation.metrics import ClassCounts, Tally, metric_names, spread
from fedbudget.models.base import Model, loss_over
from fedbudget.models.builtin import LinearRegression, Softmax, SquaredSvm
from fedbudget.models.own import FunctionModel
from fedbudget.models.torch.model import TorchModel
from support.problems import problem

FEATURES = 6


def samples(seed: int, count: int, classes: int | None) -> Table:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, FEATURES)).astype(np.float32)
    scores = x @ rng.normal(size=(FEATURES, classes or 1)) + rng.normal(
        size=(count, classes or 1)
    )
    if classes is None:
        return Table(x, scores[:, 0].astype(np.float32), labels=False)
    y = scores.argmax(axis=1) if classes > 2 else np.sign(scores[:, 0])
    return Table(x, y.astype(np.float32))


def split_over_nodes(table: Table, nodes: int, seed: int = 0) -> list[Table]:
    """Split a table into one part per node, with different class shares."""
    order = np.argsort(table.y + np.random.default_rng(seed).normal(size=len(table)))
    return [
        Table(table.x[rows], table.y[rows], labels=table.labels)
        for rows in np.array_split(order, nodes)
    ]


def tally_over_nodes(
    model: Model, w: Float32, table: Table, units: Standardization | None = None
) -> Tally:
    return Tally.total(
        [Tally.of(model, w, part, units) for part in split_over_nodes(table, 4)]
    )


def class_metrics(actual: NDArray[Any], predicted: NDArray[Any]) -> dict[str, float]:
    return {
        "accuracy": sk.accuracy_score(actual, predicted),
        "balanced_accuracy": sk.balanced_accuracy_score(actual, predicted),
        "f1": sk.f1_score(actual, predicted, average="macro"),
    }


@pytest.mark.parametrize("seed", range(3))
class TestAgainstScikitLearn:
    def test_two_classes(self, seed: int) -> None:
        table, model = samples(seed, 400, 2), SquaredSvm(FEATURES)
        w = np.random.default_rng(seed).normal(size=FEATURES).astype(np.float32)
        tally, scores = tally_over_nodes(model, w, table), table.x @ w
        expected = class_metrics(table.y > 0, scores >= 0)
        expected["f1_binary"] = sk.f1_score(table.y > 0, scores >= 0)
        result, classes = tally.metrics(), tally.classes
        assert {name: result[name] for name in expected} == pytest.approx(
            expected, rel=1e-12
        )
        assert classes is not None
        assert 0 < auc_resolution(classes) < 1e-3
        assert result["auc"] == pytest.approx(
            sk.roc_auc_score(table.y, scores), abs=auc_resolution(classes)
        )
        assert tally.to_beat() == {
            "accuracy": max(np.mean(table.y > 0), np.mean(table.y < 0))
        }
        assert tally.loss == pytest.approx(loss_over(model, w, table), rel=1e-6)

    def test_many_classes(self, seed: int) -> None:
        table, model = samples(seed, 600, 5), Softmax(FEATURES, 5)
        w = np.random.default_rng(seed).normal(size=model.parameters).astype(np.float32)
        outputs, tally = model.outputs(w, table), tally_over_nodes(model, w, table)
        expected, result = (class_metrics(table.y, outputs.argmax(axis=1)), tally.metrics())
        assert {name: result[name] for name in expected} == pytest.approx(
            expected, rel=1e-12
        )
        area = sk.roc_auc_score(
            table.y, softmax(outputs.astype(np.float64), axis=1), multi_class="ovr"
        )
        assert tally.classes is not None
        assert result["auc"] == pytest.approx(area, abs=auc_resolution(tally.classes))
        assert "f1_binary" not in result

    def test_real_targets_in_original_units(self, seed: int) -> None:
        table, model = samples(seed, 300, None), LinearRegression(FEATURES)
        w = np.random.default_rng(seed).normal(size=FEATURES).astype(np.float32)
        units = Standardization(np.zeros(FEATURES), np.ones(FEATURES), 5e4, 30.0)
        tally = tally_over_nodes(model, w, table, units)
        y, predicted = (
            5e4 + 30.0 * values.astype(np.float64) for values in (table.y, table.x @ w)
        )
        expected = {
            "rmse": math.sqrt(sk.mean_squared_error(y, predicted)),
            "mae": sk.mean_absolute_error(y, predicted),
            "r2": sk.r2_score(y, predicted),
        }
        assert tally.metrics() == pytest.approx(expected, rel=1e-6)
        assert tally.to_beat() == {"rmse": pytest.approx(float(y.std()), rel=1e-9)}

    def test_node_order_changes_no_bit(self, seed: int) -> None:
        model = LinearRegression(FEATURES)
        w = np.random.default_rng(seed).normal(size=FEATURES).astype(np.float32)
        parts = [
            Tally.of(model, w, part)
            for part in split_over_nodes(samples(seed, 90, None), 4)
        ]
        assert (
            len({str(Tally.total(order)) for order in itertools.permutations(parts)}) == 1
        )


def auc_resolution(counts: ClassCounts) -> float:
    """Largest error of the AUC: half the share of pairs in one histogram bin."""
    pairs = counts.complete_histograms
    return 0.5 * float(
        np.mean([np.dot(*pair) / np.prod(pair.sum(axis=1)) for pair in pairs])
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 200), st.sampled_from([0.01, 1.0, 30.0]))
def test_auc_error_bounded_by_resolution(seed: int, count: int, scale: float) -> None:
    """The error is at most the share of pairs in one histogram bin."""
    rng = np.random.default_rng(seed)
    actual = np.append(rng.integers(0, 2, count), [0, 1])
    scores = scale * (rng.normal(size=count + 2) + actual)
    counts = ClassCounts.of(actual, (scores >= 0).astype(np.int64), 2, scores[:, None])
    area = sk.roc_auc_score(actual, scores)
    assert abs(counts.metrics()["auc"] - area) <= auc_resolution(counts) + 1e-12


def test_auc_separates_saturated_scores() -> None:
    """All probabilities round to 0 or 1, and the order of the scores still counts."""
    actual = np.array([0, 1, 2] * 2)
    outputs = np.array(
        [[90, 0, 0], [0, 90, 0], [0, 0, 90], [0, 60, 50], [50, 0, 60], [60, 50, 0]],
        np.float32,
    )
    model = Softmax(3, 3)
    w = np.zeros((3, 4), np.float32)
    w[:, :3] = np.eye(3)
    result = Tally.of(model, w.ravel(), Table(outputs, actual.astype(np.float32))).metrics()
    assert result["accuracy"] == 0.5
    by_hand = [np.mean([z > other for z in own for other in others]) for own, others in (
        ([90, -60], [-90, -90, -10, 10]),
        ([90, -60], [-90, -90, 10, -10]),
        ([90, -60], [-90, -90, -10, 10]),
    )]  # fmt: skip
    assert result["auc"] == pytest.approx(np.mean(by_hand), abs=1e-12)


def test_absent_classes_do_not_count() -> None:
    counts = ClassCounts.of(np.array([0, 0, 2]), np.array([0, 2, 2]), 4)
    assert counts.metrics() == pytest.approx(
        {"accuracy": 2 / 3, "balanced_accuracy": 0.75, "f1": 2 / 3}
    )


def test_function_model_class_metrics() -> None:
    table = Table(
        np.array([[0], [1], [1], [7]], np.float32), np.array([0, 1, 2, 2], np.float32)
    )

    def errors(predicted: Float32, y: Float32) -> float:
        return float(np.sum(predicted != y))

    model = FunctionModel(
        lambda w, x, y: (0.5, 0 * w),
        initial=[0.0],
        predict=lambda w, x: x[:, 0],
        metrics={"errors": errors},
    )
    tally = Tally.of(model, model.initial(0), table)
    assert tally.metrics() == pytest.approx(
        {"accuracy": 0.5, "balanced_accuracy": 2 / 3, "f1": 5 / 12, "errors": 2.0}
    )
    assert tally.loss == 0.5


def test_custom_metrics_weighted_by_samples() -> None:
    model = TorchModel(
        nn.Linear(FEATURES, 1),
        target="real",
        metrics={"bias": lambda output, y: (output - y).mean()},
    )
    table, w = samples(1, 50, None), model.initial(0)
    parts = [
        Table(table.x[rows], table.y[rows], labels=False)
        for rows in (slice(0, 10), slice(10, None))
    ]
    result = Tally.total([Tally.of(model, w, part) for part in parts]).metrics()
    outputs = model.outputs(w, table)
    assert outputs is not None
    assert result["bias"] == pytest.approx(
        float((outputs[:, 0] - table.y).mean()), abs=1e-6
    )
    assert result["rmse"] == pytest.approx(
        float(np.sqrt(np.square(outputs[:, 0] - table.y).mean())), rel=1e-6
    )


@pytest.mark.parametrize("name", ["svm", "softmax", "linear", "kmeans"])
def test_accuracy_equals_model_accuracy(name: str) -> None:
    case = problem(name, seed=3)
    w = case.start(5)
    tally = Tally.of(case.model, w, case.table)
    assert tally.metrics().get("accuracy") == case.model.accuracy(w, case.table)
    assert {*tally.metrics()} <= {*metric_names(case.model, classes=case.table.labels)}


def test_diverged_model_has_no_metrics() -> None:
    model, table = LinearRegression(FEATURES), samples(0, 20, None)
    tally = Tally.of(model, np.full(FEATURES, np.inf, np.float32), table)
    assert not math.isfinite(tally.loss)
    assert tally.metrics() == {}
    assert spread([tally]) == {}


def test_spread_over_nodes() -> None:
    nodes = [
        Tally(10, 0.0, ClassCounts(*np.array([[10, 0], [right, 10 - right], [right, 0]])))
        for right in range(11)
    ]
    assert spread(nodes) == pytest.approx(
        {"nodes": 11, "worst": 0.0, "tenth": 0.1, "median": 0.5}
    )
    model, w = LinearRegression(FEATURES), np.zeros(FEATURES, np.float32)
    x, targets = (
        np.ones((4, FEATURES), np.float32),
        [np.full(4, error, np.float32) for error in range(11)],
    )
    tallies = [Tally.of(model, w, Table(x, y, labels=False)) for y in targets]
    assert spread(tallies) == pytest.approx(
        {"nodes": 11, "worst": 10.0, "tenth": 9.0, "median": 5.0}
    )
