"""The trained model on disk: `model.safetensors`, ready to apply to new samples.

The tensors are those of the model, by name, so any safetensors reader can load the weights.
The rest is one JSON text in the metadata, under the key `fedbudget`:

    model            name, net.py:NAME, or the class in Python
    options          options of the model, such as the number of clusters
    tensors, rows    names and shapes of the tensors, in the order of w
    samples          shape of a sample's features, and how they are stored and scaled
    features, layout names of the features, and how a table's columns become features
                     (data/tables.py)
    classes          names of the classes 0, 1, ...
    standardization  mean and deviation of each feature and of a real target
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedbudget.arrays import Float32
from fedbudget.data.dataset import Dataset, Part, Standardization
from fedbudget.data.shards import SampleStore
from fedbudget.data.tables import Layout
from fedbudget.errors import UserError
from fedbudget.models.base import ModelOptions
from fedbudget.models.description import NamedTensors

_ANY_KIND = "samples"  # storage of samples that are not rows of an array


@dataclass(frozen=True)
class SavedModel:
    """w^f, and how to apply it.

    Args:
      w: parameters, [parameters].
      model: name, `net.py:NAME`, or the class in Python.
      samples: description of the training data, without samples.
      tensors: names and shapes of the tensors in w.
      options: options of a model with a name.
      complete: whether the file describes samples; files of earlier versions do not.
    """

    w: Float32
    model: str
    samples: Dataset
    tensors: NamedTensors
    options: ModelOptions = field(default_factory=dict)
    complete: bool = True

    @property
    def classes(self) -> tuple[str, ...]:
        return self.samples.classes

    @property
    def standardization(self) -> Standardization | None:
        return self.samples.standardization

    @property
    def layout(self) -> Layout | None:
        return self.samples.layout

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        description = {
            "model": self.model,
            "options": dict(self.options),
            "tensors": self.tensors.shapes,
            "rows": self.tensors.rows,
            **_described(self.samples),
        }
        # One key, because the order of several keys is not fixed.
        return save(self.tensors.split(self.w), {"fedbudget": json.dumps(description)})

    @classmethod
    def load(cls, path: Path) -> "SavedModel":
        """Read a file; raise `UserError` if it is damaged or of another kind."""
        try:
            with safe_open(path, framework="numpy") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                description = json.loads(file.metadata()["fedbudget"])
            if "tensors" not in description:
                return cls._of_earlier_version(tensors, description)
            shapes = {name: tuple(shape) for name, shape in description["tensors"].items()}
            named = NamedTensors(shapes, description["rows"])
            return cls(
                named.join(tensors),
                description["model"],
                _dataset(description),
                named,
                description["options"],
            )
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{path}: the trained model cannot be read: {error}") from None

    @classmethod
    def _of_earlier_version(
        cls, tensors: Mapping[str, Any], description: Mapping[str, Any]
    ) -> "SavedModel":
        """Read a file that has w as one tensor and describes little of the samples."""
        how = None
        w = tensors["w"]
        if "feature_mean" in tensors:
            how = Standardization(
                tensors["feature_mean"],
                tensors["feature_deviation"],
                *tensors["target"].tolist(),
            )
        part = Part(np.empty((0, 1 if how is None else len(how.mean))))
        samples = Dataset(
            "samples", part, classes=tuple(description["classes"]), standardization=how
        )
        return cls(
            w, description["model"], samples, NamedTensors({"w": w.shape}), complete=False
        )


def _described(samples: Dataset) -> dict[str, Any]:
    """Describe samples by plain values."""
    how = samples.standardization
    return {
        "samples": {
            "shape": samples.shape or (samples.features,),
            "stored": str(samples.train.x.dtype) if samples.store is None else _ANY_KIND,
            "scale": samples.scale,
            "integers": samples.integers,
            "parity": samples.parity,
            "values": samples.train.values is not None,
        },
        "features": None if samples.layout is None else samples.layout.feature_names,
        "layout": None if samples.layout is None else samples.layout.to_json(),
        "classes": samples.classes,
        "standardization": how
        and {name: np.asarray(value).tolist() for name, value in vars(how).items()},
    }


def _dataset(description: Mapping[str, Any]) -> Dataset:
    """Return an empty dataset with the described samples."""
    like = description["samples"]
    how = description["standardization"]
    any_kind = like["stored"] == _ANY_KIND
    shape = tuple(like["shape"])
    x = np.empty((0, prod(shape)), np.int64 if any_kind else np.dtype(like["stored"]))
    labels = np.empty(0, np.int64) if description["classes"] else None
    return Dataset(
        "samples",
        Part(x, labels, np.empty(0) if like["values"] else None),
        classes=tuple(description["classes"]),
        scale=like["scale"],
        parity=like["parity"],
        shape=shape if len(shape) > 1 else (),
        standardization=how and _standardization(**how),
        integers=like["integers"],
        store=SampleStore([]) if any_kind else None,
        layout=None
        if description["layout"] is None
        else Layout.from_json(description["layout"]),
    )


def _standardization(
    mean: list[float], deviation: list[float], **target: float
) -> Standardization:
    return Standardization(np.array(mean), np.array(deviation), **target)
