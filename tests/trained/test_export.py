"""Exported files: their contents, and models that cannot be exported. See also
test_agreement.py.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedbudget
from fedbudget.errors import UserError
from fedbudget.models import TorchModel
from fedbudget.trained import ExportFormat

SHORT: dict[str, Any] = {"rounds": 2, "budget": "time=1h", "batch_size": "full"}
X = np.random.default_rng(0).normal(0, 1, (40, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)


def trained(model: Any, shard: Any = (X, Y)) -> fedbudget.TrainedModel:
    return fedbudget.train(model=model, shards=[shard], **SHORT).model


def test_numpy_file_is_complete(tmp_path: Path) -> None:
    """Predictions are computed again from the file alone."""
    price = 5 * X[:, 0] - X[:, 1] + 100
    (tmp_path / "t.csv").write_text(
        "a,b,c,price\n"
        + "".join(
            f"{a},{b},{c},{p}\n" for (a, b, c), p in zip(X.tolist(), price, strict=True)
        )
    )
    model = fedbudget.train(dataset=str(tmp_path / "t.csv"), nodes=1, **SHORT).model
    fedbudget.export(model, "numpy", tmp_path / "m.npz")
    with np.load(tmp_path / "m.npz") as result:
        score = ((X - result["feature_mean"]) / result["feature_deviation"]) @ result[
            "weight"
        ]
        values = score * result["target_deviation"] + result["target_mean"]
        assert result["feature_names"].tolist() == ["a", "b", "c"]
    np.testing.assert_allclose(values, model.predict(X), rtol=1e-6)


def test_column_named_like_an_output(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("prediction,b,y\n" + "1.5,2,a\n0.5,1,b\n" * 20)
    model = fedbudget.train(dataset=str(tmp_path / "t.csv"), nodes=1, **SHORT).model
    message = "column prediction has the name of an output of the graph"
    with pytest.raises(UserError, match=message):
        fedbudget.export(model, "onnx", tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_python_code_is_rejected(tmp_path: Path, to: ExportFormat) -> None:
    own = fedbudget.FunctionModel(lambda w, x, y: (float(w @ w), 2 * w), initial=np.ones(2))
    message = "is Python code, which cannot be exported; export its tensors to numpy"
    with pytest.raises(UserError, match=message):
        fedbudget.export(trained(own), to, tmp_path / "m")
    fedbudget.export(trained(own), "numpy", tmp_path / "m.npz")


def test_local_statistics_are_rejected(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = trained(TorchModel(module, statistics="local"))
    message = "normalizes by the statistics of a node's own samples"
    with pytest.raises(UserError, match=message):
        fedbudget.export(model, "onnx", tmp_path / "m.onnx")


@pytest.mark.parametrize("wrap", [lambda data: data, DataLoader], ids=["set", "loader"])
def test_tensor_dataset_has_a_shape(wrap: Any, tmp_path: Path) -> None:
    data = wrap(TensorDataset(torch.tensor(X), torch.tensor(Y)))
    path = tmp_path / "m.onnx"
    model = trained(nn.Linear(3, 2), data)
    fedbudget.export(model, "onnx", path)
    session = onnxruntime.InferenceSession(path)
    (labels, *_) = session.run(None, {session.get_inputs()[0].name: X})
    np.testing.assert_array_equal(labels.ravel(), model.predict(X))


def test_pairs_with_targets_are_no_features() -> None:
    data = TensorDataset(torch.tensor(X), torch.tensor(Y))
    model = trained(nn.Linear(3, 2), data)
    with pytest.raises(UserError, match="pass the features alone, without targets"):
        model.predict(data)


def test_samples_without_shape_are_rejected(tmp_path: Path) -> None:
    model = trained(nn.Linear(3, 2), list(zip(X, Y.tolist(), strict=True)))
    with pytest.raises(UserError, match="was trained on samples that are not arrays"):
        fedbudget.export(model, "onnx", tmp_path / "m.onnx")


def test_unknown_format_suggests_similar(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown format 'onx'; did you mean onnx"):
        fedbudget.export(trained("softmax"), "onx", tmp_path / "m")  # type: ignore[arg-type]
