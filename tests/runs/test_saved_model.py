"""model.safetensors: written and read, also by other programs, and files of earlier
versions.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save

from fedbudget.data.dataset import Dataset, Part, Standardization
from fedbudget.data.shards import SampleStore
from fedbudget.data.tables import Layout, LayoutColumn
from fedbudget.errors import UserError
from fedbudget.models.description import NamedTensors
from fedbudget.runs.saved_model import SavedModel

STANDARDIZATION = Standardization(
    np.array([1.0, 1 / 3, 1e300]), np.array([3.0, 0.1, 5e-324]), 5.0, 6.0
)
LAYOUT = Layout((LayoutColumn("é", fill=0.1), LayoutColumn("b", ("x", "y"))), "z", ("id",))
CLASSES = ("café", 'a "b"', "")
TABLE = Dataset(
    "table",
    Part(np.empty((0, 3), np.float32), np.empty(0, np.int64)),
    classes=CLASSES,
    standardization=STANDARDIZATION,
    layout=LAYOUT,
)
IMAGES = Dataset(
    "images",
    Part(np.empty((0, 6), np.uint8), values=np.empty(0)),
    scale=1 / 255,
    parity=True,
    shape=(1, 2, 3),
)
WORDS = Dataset(
    "words",
    Part(np.empty((0, 3), np.float32), np.empty(0, np.int64)),
    classes=("1",),
    integers=True,
)
ANY = Dataset("any", Part(np.empty((0, 1), np.int64)), store=SampleStore([]))


def write_model(path: Path, samples: Dataset = TABLE) -> SavedModel:
    saved = SavedModel(
        np.array([0.1, -2.5e-30, 2, 3, 4, 5, 6, 7], np.float32),
        "softmax",
        samples,
        NamedTensors({"weight": (2, 3), "bias": (2,)}, rows=2),
        {"clusters": 7},
    )
    path.write_bytes(saved.to_bytes())
    return saved


@pytest.mark.parametrize("samples", [TABLE, IMAGES, WORDS, ANY], ids=lambda each: each.name)
def test_round_trip(tmp_path: Path, samples: Dataset) -> None:
    saved = write_model(tmp_path / "m", samples)
    loaded = SavedModel.load(tmp_path / "m")
    assert loaded.w.tobytes() == saved.w.tobytes()
    assert loaded.model == saved.model
    assert loaded.options == saved.options
    assert loaded.tensors == saved.tensors
    for name in ("classes", "scale", "parity", "shape", "integers", "layout", "features"):
        assert getattr(loaded.samples, name) == getattr(samples, name), name
    assert loaded.samples.train.x.dtype == samples.train.x.dtype
    assert (loaded.samples.store is None) == (samples.store is None)
    for name in ("labels", "values"):
        assert (getattr(loaded.samples.train, name) is None) == (
            getattr(samples.train, name) is None
        ), name
    standardization = loaded.standardization
    assert (standardization is None) == (samples.standardization is None)
    if standardization is not None:
        assert standardization.mean.tobytes() == STANDARDIZATION.mean.tobytes()
        assert standardization.deviation.tobytes() == STANDARDIZATION.deviation.tobytes()
        assert (standardization.target_mean, standardization.target_deviation) == (5, 6)


def test_file_is_reproducible(tmp_path: Path) -> None:
    assert (
        write_model(tmp_path / "m").to_bytes() == SavedModel.load(tmp_path / "m").to_bytes()
    )


def test_safetensors_package_reads_the_file(
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "m")
    tensors = load_file(tmp_path / "m")
    assert tensors.keys() == {"weight", "bias"}
    assert tensors["weight"][1].tolist() == [4, 5, 6]
    assert tensors["bias"].tolist() == [3, 7]
    with safe_open(tmp_path / "m", framework="numpy") as file:
        header = json.loads(file.metadata()["fedbudget"])
    assert header["features"] == ["é", "b=x", "b=y"]
    assert (header["classes"], header["layout"]["target"]) == (list(CLASSES), "z")
    assert header["standardization"]["deviation"] == [3.0, 0.1, 5e-324]


@pytest.mark.parametrize("content", [None, b"", b"nonsense", json.dumps({"w": 1}).encode()])
def test_missing_or_damaged_file(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "m").write_bytes(content)
    with pytest.raises(UserError, match="the trained model cannot be read"):
        SavedModel.load(tmp_path / "m")


@pytest.mark.parametrize(
    "missing", ["tensors", "samples", "rows", "layout", "model", "standardization"]
)
def test_incomplete_header(tmp_path: Path, missing: str) -> None:
    write_model(tmp_path / "m")
    with safe_open(tmp_path / "m", framework="numpy") as file:
        header = json.loads(file.metadata()["fedbudget"])
    del header[missing]
    (tmp_path / "m").write_bytes(
        save(load_file(tmp_path / "m"), {"fedbudget": json.dumps(header)})
    )
    with pytest.raises(UserError, match="the trained model cannot be read"):
        SavedModel.load(tmp_path / "m")
