"""Evaluation on the nodes over gRPC: metrics equal those of scikit-learn on all samples
together, and evaluation costs are charged.

The nodes are threads of this process.
"""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn import metrics as sk
from torch import Tensor, nn

import fedbudget
from fedbudget.errors import UserError
from fedbudget.models import TorchModel
from fedbudget.result import Result
from fedbudget.runs.folder import Run

LONG = 60.0  # timeout in seconds, never reached
FEATURES, CLASSES = 5, 3
Arrays = tuple[NDArray[np.float32], NDArray[Any]]


def make_samples(seed: int, count: int, *, real: bool = False) -> Arrays:
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(count, FEATURES)) + seed % 3 / 3).astype(np.float32)
    scores = x @ np.random.default_rng(7).normal(size=(FEATURES, CLASSES)) + rng.normal(
        size=(count, CLASSES)
    )
    return (x, 10 * scores[:, 0]) if real else (x, scores.argmax(axis=1))


def wrong(output: Tensor, y: Tensor) -> Tensor:
    return (output.argmax(dim=1) != y).double().mean()


SHARDS = [make_samples(seed, 60) for seed in range(4)]
TESTS = [make_samples(10 + seed, 40 + 5 * seed) for seed in range(4)]


@pytest.fixture
def nodes() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def serve(pool: ThreadPoolExecutor, each: list[dict[str, Any]], **more: Any) -> Result:
    """Run an aggregator and one node per entry, and return the result."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    joining: Any = {"give_up_after": LONG, "quiet": True, "seeded_batches": True}
    parts = [
        pool.submit(fedbudget.join, address, name=f"n{i}", **joining, **own)
        for i, own in enumerate(each)
    ]
    options = {
        "model": "softmax",
        "budget": "time=1000000s",
        "rounds": 12,
        "seed": 3,
        "batch_size": 8,
        **more,
    }
    result = fedbudget.serve(address, nodes=len(each), quiet=True, **options)
    for part in parts:
        assert part.result(LONG) >= len(result.rounds)
    return result


def test_metrics_match_scikit_learn(nodes: ThreadPoolExecutor, tmp_path: Path) -> None:
    """Evaluation leaves w unchanged, to the bit."""
    shards: list[dict[str, Any]] = [{"data": shard} for shard in SHARDS]
    tested = [{**shard, "test": test} for shard, test in zip(shards, TESTS, strict=True)]
    result = serve(
        nodes,
        tested,
        out=tmp_path / "run",
        costs="simulated",
        budget="time=3s",
        rounds=None,
    )
    without = serve(nodes, shards, costs="simulated", budget="time=3s", rounds=None)
    assert result.w.tobytes() == without.w.tobytes()
    assert (without.accuracy, dict(without.metrics), dict(without.spread)) == (None, {}, {})

    x, y = (np.concatenate(part) for part in zip(*TESTS, strict=True))
    outputs = (
        x @ result.w.reshape(CLASSES, -1)[:, :-1].T + result.w.reshape(CLASSES, -1)[:, -1]
    )
    predicted = outputs.argmax(axis=1)
    scores = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    assert result.accuracy == sk.accuracy_score(y, predicted)
    assert result.metrics["balanced_accuracy"] == pytest.approx(
        sk.balanced_accuracy_score(y, predicted), rel=1e-12
    )
    assert result.metrics["f1"] == pytest.approx(
        sk.f1_score(y, predicted, average="macro"), rel=1e-12
    )
    area = sk.roc_auc_score(
        y, scores / scores.sum(axis=1, keepdims=True), multi_class="ovr"
    )
    assert result.metrics["auc"] == pytest.approx(area, abs=1e-3)
    assert result.to_beat == {"accuracy": np.bincount(y).max() / len(y)}
    ends = np.cumsum([len(actual) for _, actual in TESTS])[:-1]
    per_node = [np.mean(right) for right in np.split(predicted == y, ends)]
    expected = dict(
        zip(("worst", "tenth", "median"), np.quantile(per_node, [0, 0.1, 0.5]), strict=True)
    )
    assert result.spread == pytest.approx({"nodes": 4, **expected})

    evaluated = [record for record in result.rounds if record.metrics]
    assert 5 < len(evaluated) <= 51
    assert evaluated[0].round == 1
    assert evaluated[-1].tau == 0
    assert [record.metrics for record in Run.open(tmp_path / "run").rounds] == [
        each.metrics for each in result.rounds
    ]


def test_regression_metrics_have_original_units(
    nodes: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """A .csv is standardised over all nodes, without the test samples."""
    files: list[dict[str, Any]] = []
    trained, tested = [], []
    for seed in range(3):
        x, y = make_samples(seed, 80, real=True)
        rows = np.column_stack([x, 5000 + 40 * y])
        order = np.random.default_rng(0).permutation(80)
        trained.append(rows[order[20:]])
        tested.append(rows[order[:20]])
        path = tmp_path / f"{seed}.csv"
        path.write_text(
            "a,b,c,d,e,y\n"
            + "".join(",".join(map(repr, row)) + "\n" for row in rows.tolist())
        )
        files.append({"data": str(path), "test_share": 0.25})
    result = serve(nodes, files, model="linear")
    assert result.accuracy is None
    known, new = np.concatenate(trained), np.concatenate(tested)
    mean, deviation = known.mean(axis=0), known.std(axis=0)
    predicted = mean[-1] + deviation[-1] * (((new - mean) / deviation)[:, :-1] @ result.w)
    expected = {
        "rmse": np.sqrt(sk.mean_squared_error(new[:, -1], predicted)),
        "mae": sk.mean_absolute_error(new[:, -1], predicted),
        "r2": sk.r2_score(new[:, -1], predicted),
    }
    assert result.metrics == pytest.approx(expected, rel=1e-5)
    assert result.to_beat == {"rmse": pytest.approx(new[:, -1].std(), rel=1e-6)}
    per_node = [np.sqrt(np.mean((part[:, -1] - guess) ** 2)) for part, guess in
                zip(tested, np.split(predicted, 3), strict=True)]  # fmt: skip
    assert result.spread["worst"] == pytest.approx(max(per_node), rel=1e-5)
    assert result.spread["median"] == pytest.approx(np.median(per_node), rel=1e-5)


def test_evaluation_cost_is_charged_separately(
    nodes: ThreadPoolExecutor,
) -> None:
    tested: list[dict[str, Any]] = [
        {"data": SHARDS[0], "test": TESTS[0]},
        {"data": SHARDS[1]},
    ]
    result = serve(nodes, tested, budget=["time=1000000s", "bytes=1GB"])
    before = dict.fromkeys(result.budget, 0.0)
    for record in result.rounds:
        for name, spent in record.spent.items():
            extra = (
                spent - before[name] - max(1, record.tau) * record.c[name] - record.b[name]
            )
            assert (extra > 1e-6 * (spent - before[name])) == bool(record.metrics)
        before = record.spent
    assert result.spread["nodes"] == 1


def test_run_stops_at_federated_target(nodes: ThreadPoolExecutor) -> None:
    tested: list[dict[str, Any]] = [
        {"data": data, "test": test} for data, test in zip(SHARDS, TESTS, strict=True)
    ]
    result = serve(
        nodes,
        tested[:3],
        rounds=400,
        until="balanced-accuracy=0.6",
        costs="simulated",
        budget="time=100s",
    )
    assert (result.stopped_by, result.until) == ("target", {"balanced_accuracy=0.6": True})
    assert result.metrics["balanced_accuracy"] >= 0.6
    assert result.metrics == result.rounds[-1].metrics


def test_custom_metric_is_the_sample_mean(nodes: ThreadPoolExecutor) -> None:
    """It also works as a target: it must fall from its value for w(0)."""
    model = TorchModel(lambda: nn.Linear(FEATURES, CLASSES), metrics={"wrong": wrong})
    tested: list[dict[str, Any]] = [
        {"data": shard, "test": test, "model": model}
        for shard, test in zip(SHARDS, TESTS, strict=True)
    ]
    result = serve(
        nodes,
        tested,
        model=model,
        until="wrong=0.45",
        rounds=400,
        costs="simulated",
        budget="time=100s",
    )
    assert (result.stopped_by, result.metrics["wrong"] <= 0.45) == ("target", True)
    assert result.metrics["wrong"] == pytest.approx(1 - (result.accuracy or 0), rel=1e-12)


def test_unknown_metric_is_refused(
    nodes: ThreadPoolExecutor,
) -> None:
    tested: list[dict[str, Any]] = [{"data": SHARDS[0], "test": TESTS[0]}]
    with pytest.raises(UserError, match="unknown metric of until 'rmse'"):
        serve(nodes, tested, until="rmse=0.6")


def test_too_few_test_samples_are_refused() -> None:
    x, y = SHARDS[0]
    with pytest.raises(UserError, match="6 samples of data are too few to test on"):
        fedbudget.join("127.0.0.1:1", data=(x, y), test_share=0.1)
    with pytest.raises(UserError, match="give test or test_share, not both"):
        fedbudget.join("127.0.0.1:1", data=(x, y), test_share=0.5, test=(x, y))
