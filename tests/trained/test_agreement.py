"""Predictions in Python and in every exported file agree with `evaluate` to 1e-5, for every
model.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits

import fedbudget
from fedbudget import python_file
from fedbudget.arrays import Float64
from fedbudget.experiments.evaluate import evaluate, predict
from fedbudget.models.builtin import SquaredSvm
from fedbudget.runs.folder import Run

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
            nn.Linear(144, 10),
        )

    def forward(self, x):
        return self.layers(x)
"""
SCHEMA = """
[target]
name = "price"
range = [-20000, 20000]
[columns]
size = { range = [999998, 1000002] }
kind = { categories = ["house", "flat"] }
"""
"""Some sizes are outside, and huts are not listed."""
DIGITS = load_digits()
X, Y = DIGITS.data[1437:], DIGITS.target[1437:]
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def write_homes(path: Path, seed: int) -> None:
    """Write a table with a large, nearly constant number and a category."""
    rng = np.random.default_rng(seed)
    size, kind = rng.normal(1e6, 3, 150), rng.choice(["flat", "house", "hut"], 150)
    price = 3000 * (size - 1e6) + 9000 * (kind == "house") + rng.normal(0, 900, 150)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(
            [
                ("size", "kind", "price"),
                *zip(size.tolist(), kind, price.tolist(), strict=True),
            ]
        )


@dataclass(frozen=True)
class Case:
    """A model, its training options, and a second implementation of its loss."""

    name: str
    options: dict[str, Any]
    loss: Callable[[Float64, fedbudget.TrainedModel], float]


def cross_entropy(scores: Float64, _: fedbudget.TrainedModel) -> float:
    return float(
        np.mean(
            np.log(np.exp(scores - scores.max(1)[:, None]).sum(1))
            + scores.max(1)
            - scores[range(360), Y]
        )
    )


def squared_hinge(scores: Float64, model: fedbudget.TrainedModel) -> float:
    slack = np.maximum(0, 1 - np.where(Y % 2 == 0, 1, -1) * scores[:, 0])
    weights = model.w.astype(np.float64)
    return float(np.mean(slack**2) / 2 + SquaredSvm.regularization / 2 * weights @ weights)


def distance(nearness: Float64, _: fedbudget.TrainedModel) -> float:
    return float(-nearness.max(axis=1).mean())


def squared_error(values: Float64, model: fedbudget.TrainedModel) -> float:
    scaling = model.samples.standardization
    assert scaling is not None
    prices = np.array([float(row["price"]) for row in new_rows()])
    share = 0.5 if model.name == "linear" else 1.0
    return float(share * np.mean(((values[:, 0] - prices) / scaling.target_deviation) ** 2))


ON_DIGITS: dict[str, Any] = {"dataset": "digits", "rounds": 12, "budget": "time=1h"}
ON_HOMES: dict[str, Any] = {"dataset": "homes.csv", "rounds": 12, "budget": "time=1h"}
CASES = [
    Case("default", ON_DIGITS, cross_entropy),
    Case("svm", ON_DIGITS, squared_hinge),
    Case("kmeans", {**ON_DIGITS, "clusters": 7}, distance),
    pytest.param(Case("mlp", ON_DIGITS, cross_entropy), marks=pytest.mark.slow),
    pytest.param(
        Case("cnn", {**ON_DIGITS, "rounds": 2}, cross_entropy), marks=pytest.mark.slow
    ),
    Case("net.py:Net", {**ON_DIGITS, "rounds": 2, "train_samples": 300}, cross_entropy),
    Case("default", ON_HOMES, squared_error),
    Case("mlp", ON_HOMES, squared_error),
    Case("linear", {**ON_HOMES, "schema": "homes.toml"}, squared_error),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.name} {case.loss.__name__}"
)
def test_exports_agree_with_evaluate(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    Path("homes.toml").write_text(SCHEMA)
    for seed, name in enumerate(("homes.csv", "new.csv")):
        write_homes(Path(name), seed)
    result = fedbudget.train(
        model=None if case.name == "default" else case.name, out="run", **case.options
    )
    tables = case.options["dataset"] == "homes.csv"
    own = case.name if case.name.startswith("net.py") else None
    evaluated = evaluate(
        Run.open(Path("run")), "new.csv" if tables else "digits", model=own
    )
    loaded = fedbudget.load("run", model=own)
    x: Any = new_columns() if tables else X
    outputs = loaded.outputs(x).astype(np.float64)
    values = loaded.predict(x)[:, None] if tables else outputs
    assert case.loss(values, loaded) == pytest.approx(evaluated.loss, rel=1e-5)
    assert np.array_equal(loaded.predict(x), result.model.predict(x))
    if evaluated.accuracy is not None:
        right = Y if case.name != "svm" else np.where(Y % 2 == 0, "even", "odd")
        assert np.mean(loaded.predict(x) == right) == evaluated.accuracy
    if tables:
        from_file = [
            float(text) for text in predict(loaded, Path("new.csv")).columns["prediction"]
        ]
        np.testing.assert_allclose(from_file, values[:, 0], rtol=1e-6)

    fedbudget.export(loaded, "onnx", "model.onnx")
    exported = run_onnx(Path("model.onnx"), x)
    scaling = loaded.samples.standardization
    unit = 1.0 if scaling is None else scaling.target_deviation
    if tables:
        np.testing.assert_allclose(
            exported["prediction"] / unit, values[:, 0] / unit, **CLOSE
        )
    else:
        assert np.array_equal(exported["prediction"], loaded.predict(x))
    if "scores" in exported:
        np.testing.assert_allclose(exported["scores"], outputs, **CLOSE)
        np.testing.assert_allclose(
            exported["probabilities"], loaded.predict_proba(x), **CLOSE
        )
    if "score" in exported:
        np.testing.assert_allclose(exported["score"], outputs[:, 0], **CLOSE)

    fedbudget.export(loaded, "torch", "model.pt2")
    if case.name == "net.py:Net":
        module = python_file.load("net.py:Net")()
        module.load_state_dict(torch.load("model.pt2", weights_only=True))
        actual = module.eval()(torch.from_numpy(X / 16).float().reshape(-1, 1, 8, 8))
    else:
        program = torch.export.load("model.pt2").module()
        actual = program(
            torch.from_numpy(encoded(loaded) if tables else X.astype(np.float32))
        )
    np.testing.assert_allclose(actual.detach().numpy() / unit, values / unit, **CLOSE)


def new_rows() -> list[dict[str, str]]:
    return list(csv.DictReader(Path("new.csv").read_text().splitlines()))


def new_columns() -> dict[str, Any]:
    return {
        "kind": [row["kind"] for row in new_rows()],
        "size": [float(row["size"]) for row in new_rows()],
    }


def encoded(model: fedbudget.TrainedModel) -> Float64:
    """Features in the model's order."""
    columns = new_columns()
    kinds = np.array(columns["kind"])
    one_hot = {
        f"kind={name}": (kinds == name).astype(np.float64)
        for name in ("flat", "house", "hut")
    }
    sizes = np.array(columns["size"])
    if "kind=(other)" in model.feature_names:
        sizes = sizes.clip(999998, 1000002)
        one_hot["kind=(other)"] = one_hot.pop("kind=hut")
    by_name = {"size": sizes, **one_hot}
    return np.column_stack([by_name[name] for name in model.feature_names])


def run_onnx(path: Path, x: Any) -> dict[str, NDArray[Any]]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    kinds = {
        "tensor(double)": np.float64,
        "tensor(float)": np.float32,
        "tensor(string)": object,
    }
    given = {
        each.name: x if each.name == "features" else x[each.name]
        for each in session.get_inputs()
    }
    fed = {
        each.name: np.array(given[each.name], kinds[each.type])
        for each in session.get_inputs()
    }
    fed = {
        name: values if values.ndim == 2 else values[:, None]
        for name, values in fed.items()
    }
    return dict(
        zip(
            [each.name for each in session.get_outputs()],
            session.run(None, fed),
            strict=True,
        )
    )
