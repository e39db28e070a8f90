"""`model.safetensors`: what was trained, with all that is needed to apply it to new samples.

Its tensors are those of the model, by their names, and nothing else: any program that reads safetensors has its
weights. What they are for is one JSON text in the file's metadata, under the key `fedbudget`:

    model            its name, net.py:NAME, or what it was called in Python
    options          what was chosen of it, such as the number of clusters
    tensors, rows    the tensors' names and shapes in the order in which w is made of them (models/named_tensors.py)
    samples          what a sample is like: the shape of its features, how they are stored and scaled
    features, layout the features' names, and how they are made of a table's columns (data/layout.py)
    classes          what class number 0, 1, ... stands for
    standardization  mean and deviation of each feature, and of a real target, with which they were standardised
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

_ANY_KIND = "samples"  # how samples are stored that are no rows of an array


@dataclass(frozen=True)
class SavedModel:
    """w^f, with what is needed to apply it.

    Args:
      w: [parameters].
      model: its name, `net.py:NAME`, or what it was called in Python.
      samples: what it was trained on, without the samples.
      tensors: what w is made of.
      options: what was chosen of a model that goes by a name.
      complete: whether the file says what samples are like, which those of earlier versions do not.
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
        known = {
            "model": self.model,
            "options": dict(self.options),
            "tensors": self.tensors.shapes,
            "rows": self.tensors.rows,
            **_described(self.samples),
        }
        # One key, because several are written in any order.
        return save(self.tensors.split(self.w), {"fedbudget": json.dumps(known)})

    @classmethod
    def load(cls, path: Path) -> "SavedModel":
        try:
            with safe_open(path, framework="numpy") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                known = json.loads(file.metadata()["fedbudget"])
            if "tensors" not in known:
                return cls._of_earlier_version(tensors, known)
            shapes = {name: tuple(shape) for name, shape in known["tensors"].items()}
            named = NamedTensors(shapes, known["rows"])
            return cls(
                named.join(tensors),
                known["model"],
                _dataset(known),
                named,
                known["options"],
            )
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{path}: the trained model cannot be read: {error}") from None

    @classmethod
    def _of_earlier_version(
        cls, tensors: Mapping[str, Any], known: Mapping[str, Any]
    ) -> "SavedModel":
        """Of a file that has w as it is, and little of what samples are like."""
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
            "samples", part, classes=tuple(known["classes"]), standardization=how
        )
        return cls(w, known["model"], samples, NamedTensors({"w": w.shape}), complete=False)


def _described(samples: Dataset) -> dict[str, Any]:
    """What samples are like, as plain values."""
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


def _dataset(known: Mapping[str, Any]) -> Dataset:
    """A dataset of such samples that has none."""
    like = known["samples"]
    how = known["standardization"]
    any_kind = like["stored"] == _ANY_KIND
    shape = tuple(like["shape"])
    x = np.empty((0, prod(shape)), np.int64 if any_kind else np.dtype(like["stored"]))
    labels = np.empty(0, np.int64) if known["classes"] else None
    return Dataset(
        "samples",
        Part(x, labels, np.empty(0) if like["values"] else None),
        classes=tuple(known["classes"]),
        scale=like["scale"],
        parity=like["parity"],
        shape=shape if len(shape) > 1 else (),
        standardization=how and _standardization(**how),
        integers=like["integers"],
        store=SampleStore([]) if any_kind else None,
        layout=None if known["layout"] is None else Layout.from_json(known["layout"]),
    )


def _standardization(
    mean: list[float], deviation: list[float], **target: float
) -> Standardization:
    return Standardization(np.array(mean), np.array(deviation), **target)
