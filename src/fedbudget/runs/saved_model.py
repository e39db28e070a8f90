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
    privacy          ε, δ, unit, adjacency and source of the noise; only of private runs
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedbudget.arrays import Float32
from fedbudget.data.dataset import Dataset, Standardization
from fedbudget.data.tables import Layout
from fedbudget.errors import UserError
from fedbudget.file_contents import parsed_json, require_tensors
from fedbudget.models.base import ModelOptions
from fedbudget.models.description import NamedTensors
from fedbudget.resources.privacy import PrivacyGuarantee

Count = Annotated[int, Meta(ge=0, le=2**40)]


@dataclass(frozen=True)
class _Samples:
    """What a file says about samples."""

    shape: tuple[Count, ...]
    stored: str
    scale: float
    integers: bool
    parity: bool
    values: bool


@dataclass(frozen=True)
class _Standardization:
    """Statistics of columns and of a real target."""

    mean: list[float]
    deviation: list[float]
    target_mean: float
    target_deviation: float


@dataclass(frozen=True)
class _Description:
    """The metadata of a file."""

    model: str
    options: dict[str, Any]
    tensors: dict[str, tuple[Count, ...]]
    rows: Count
    samples: _Samples
    classes: tuple[str, ...]
    standardization: _Standardization | None
    layout: Layout | None
    privacy: PrivacyGuarantee | None = None

    def dataset(self) -> Dataset:
        """Return an empty dataset with the described samples."""
        how: Standardization | None = None
        own = self.standardization
        if own is not None:
            columns = np.array(own.mean), np.array(own.deviation)
            how = Standardization(*columns, own.target_mean, own.target_deviation)
        return Dataset.without_samples(
            "samples",
            **vars(self.samples),
            classes=self.classes,
            standardization=how,
            layout=self.layout,
        )


@dataclass(frozen=True)
class SavedModel:
    """w^f, and how to apply it.

    Args:
      w: parameters, [parameters].
      model: name, `net.py:NAME`, or the class in Python.
      samples: description of the training data, without samples.
      tensors: names and shapes of the tensors in w.
      options: options of a model with a name.
      privacy: guarantee of a private run.
    """

    w: Float32
    model: str
    samples: Dataset
    tensors: NamedTensors
    options: ModelOptions = field(default_factory=dict)
    privacy: PrivacyGuarantee | None = None

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
        if self.privacy is not None:
            description["privacy"] = self.privacy.to_json()
        # One key, because the order of several keys is not fixed.
        return save(self.tensors.split(self.w), {"fedbudget": json.dumps(description)})

    @classmethod
    def load(cls, path: Path) -> "SavedModel":
        """Read a file; raise `UserError` if it is damaged or of another kind."""
        try:
            require_tensors(path)
            with safe_open(path, framework="numpy") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                description = parsed_json(file.metadata()["fedbudget"])
            if "tensors" not in description:
                raise ValueError("it was written by an earlier version of fedbudget")
            described = msgspec.convert(description, _Description)
            named = NamedTensors(described.tensors, described.rows)
            return cls(
                named.join(tensors),
                described.model,
                described.dataset(),
                named,
                described.options,
                described.privacy,
            )
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{path}: the trained model cannot be read: {error}") from None


def _described(samples: Dataset) -> dict[str, Any]:
    """Describe samples by plain values."""
    how = samples.standardization
    return {
        "samples": {
            "shape": samples.shape or (samples.features,),
            "stored": samples.stored,
            "scale": samples.scale,
            "integers": samples.integers,
            "parity": samples.parity,
            "values": samples.train.values is not None,
        },
        "features": None if samples.layout is None else samples.layout.feature_names,
        "layout": None if samples.layout is None else msgspec.to_builtins(samples.layout),
        "classes": samples.classes,
        "standardization": how
        and {name: np.asarray(value).tolist() for name, value in vars(how).items()},
    }
