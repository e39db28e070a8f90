"""Metrics that add up over nodes, against scikit-learn on all samples together."""

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


def parts_of(table: Table, nodes: int, seed: int = 0) -> list[Table]:
    """At each node some, and not the same share of every class."""
    order = np.argsort(table.y + np.random.default_rng(seed).normal(size=len(table)))
    return [
        Table(table.x[rows], table.y[rows], labels=table.labels)
        for rows in np.array_split(order, nodes)
    ]


def over_nodes(
    model: Model, w: Float32, table: Table, units: Standardization | None = None
) -> Tally:
    return Tally.total([Tally.of(model, w, part, units) for part in parts_of(table, 4)])


def expected_of_classes(actual: NDArray[Any], predicted: NDArray[Any]) -> dict[str, float]:
    return {
        "accuracy": sk.accuracy_score(actual, predicted),
        "balanced_accuracy": sk.balanced_accuracy_score(actual, predicted),
        "f1": sk.f1_score(actual, predicted, average="macro"),
    }


@pytest.mark.parametrize("seed", range(3))
class TestOverNodesAsOnAllSamples:
    def test_of_two_classes_by_a_score(self, seed: int) -> None:
        table, model = samples(seed, 400, 2), SquaredSvm(FEATURES)
        w = np.random.default_rng(seed).normal(size=FEATURES).astype(np.float32)
        tally, scores = over_nodes(model, w, table), table.x @ w
        expected = expected_of_classes(table.y > 0, scores >= 0)
        expected["f1_binary"] = sk.f1_score(table.y > 0, scores >= 0)
        found, classes = tally.metrics(), tally.classes
        assert {name: found[name] for name in expected} == pytest.approx(
            expected, rel=1e-12
        )
        assert classes is not None
        assert 0 < classes.auc_resolution < 1e-3
        assert found["auc"] == pytest.approx(
            sk.roc_auc_score(table.y, scores), abs=classes.auc_resolution
        )
        assert tally.to_beat() == {
            "accuracy": max(np.mean(table.y > 0), np.mean(table.y < 0))
        }
        assert tally.loss == pytest.approx(loss_over(model, w, table), rel=1e-6)

    def test_of_many_classes(self, seed: int) -> None:
        table, model = samples(seed, 600, 5), Softmax(FEATURES, 5)
        w = np.random.default_rng(seed).normal(size=model.parameters).astype(np.float32)
        outputs, tally = model.outputs(w, table), over_nodes(model, w, table)
        expected, found = (
            expected_of_classes(table.y, outputs.argmax(axis=1)),
            tally.metrics(),
        )
        assert {name: found[name] for name in expected} == pytest.approx(
            expected, rel=1e-12
        )
        area = sk.roc_auc_score(
            table.y, softmax(outputs.astype(np.float64), axis=1), multi_class="ovr"
        )
        assert tally.classes is not None
        assert found["auc"] == pytest.approx(area, abs=tally.classes.auc_resolution)
        assert "f1_binary" not in found

    def test_of_real_targets_in_their_own_units(self, seed: int) -> None:
        table, model = samples(seed, 300, None), LinearRegression(FEATURES)
        w = np.random.default_rng(seed).normal(size=FEATURES).astype(np.float32)
        units = Standardization(np.zeros(FEATURES), np.ones(FEATURES), 5e4, 30.0)
        tally = over_nodes(model, w, table, units)
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

    def test_the_order_of_nodes_changes_no_bit(self, seed: int) -> None:
        model = LinearRegression(FEATURES)
        w = np.random.default_rng(seed).normal(size=FEATURES).astype(np.float32)
        parts = [Tally.of(model, w, part) for part in parts_of(samples(seed, 90, None), 4)]
        assert (
            len({str(Tally.total(order)) for order in itertools.permutations(parts)}) == 1
        )


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 200), st.sampled_from([0.01, 1.0, 30.0]))
def test_auc_is_off_by_the_pairs_in_one_bin_at_most(
    seed: int, count: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    actual = np.append(rng.integers(0, 2, count), [0, 1])
    scores = scale * (rng.normal(size=count + 2) + actual)
    counts = ClassCounts.of(actual, (scores >= 0).astype(np.int64), 2, scores[:, None])
    area = sk.roc_auc_score(actual, scores)
    assert abs(counts.metrics()["auc"] - area) <= counts.auc_resolution + 1e-12


def test_sure_scores_of_classes_are_told_apart() -> None:
    """Probabilities that all round to 0 or 1, in an order that is right."""
    actual = np.array([0, 1, 2] * 2)
    outputs = np.array(
        [[90, 0, 0], [0, 90, 0], [0, 0, 90], [0, 60, 50], [50, 0, 60], [60, 50, 0]],
        np.float32,
    )
    model = Softmax(3, 3)
    w = np.zeros((3, 4), np.float32)
    w[:, :3] = np.eye(3)
    found = Tally.of(model, w.ravel(), Table(outputs, actual.astype(np.float32))).metrics()
    assert found["accuracy"] == 0.5
    by_hand = [np.mean([z > other for z in own for other in others]) for own, others in (
        ([90, -60], [-90, -90, -10, 10]),
        ([90, -60], [-90, -90, 10, -10]),
        ([90, -60], [-90, -90, -10, 10]),
    )]  # fmt: skip
    assert found["auc"] == pytest.approx(np.mean(by_hand), abs=1e-12)


def test_classes_that_a_node_has_not_do_not_count_there() -> None:
    counts = ClassCounts.of(np.array([0, 0, 2]), np.array([0, 2, 2]), 4)
    assert counts.metrics() == pytest.approx(
        {"accuracy": 2 / 3, "balanced_accuracy": 0.75, "f1": 2 / 3}
    )


def test_a_function_gives_classes_by_their_numbers() -> None:
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


def test_own_metrics_are_means_by_samples() -> None:
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
    found = Tally.total([Tally.of(model, w, part) for part in parts]).metrics()
    outputs = model.outputs(w, table)
    assert outputs is not None
    assert found["bias"] == pytest.approx(float((outputs[:, 0] - table.y).mean()), abs=1e-6)
    assert found["rmse"] == pytest.approx(
        float(np.sqrt(np.square(outputs[:, 0] - table.y).mean())), rel=1e-6
    )


@pytest.mark.parametrize("name", ["svm", "softmax", "linear", "kmeans"])
def test_accuracy_is_the_models_own(name: str) -> None:
    case = problem(name, seed=3)
    w = case.start(5)
    tally = Tally.of(case.model, w, case.table)
    assert tally.metrics().get("accuracy") == case.model.accuracy(w, case.table)
    assert {*tally.metrics()} <= {*metric_names(case.model, classes=case.table.labels)}


def test_what_diverged_is_in_no_metric() -> None:
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
