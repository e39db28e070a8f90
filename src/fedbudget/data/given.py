"""Data that a program gives from Python: arrays, or samples of any kind that are read when they are needed."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from fedbudget.arrays import Int64
from fedbudget.data.dataset import Dataset, Part
from fedbudget.data.files import ArrayShard, from_arrays
from fedbudget.data.samples import LABELS, SampleSequence, SampleStore, SeveralInputs
from fedbudget.errors import UserError

Shard: TypeAlias = ArrayShard | tuple[Mapping[str, Any] | tuple[Any, ...], Any] | SampleSequence
"""One node's samples: (x, y) as arrays, y None where there is nothing to predict; with several inputs, x a mapping or a
tuple of arrays; or any sequence of samples, such as a map-style Dataset of PyTorch or a list."""


def from_shards(shards: Sequence[Shard], test: Shard | None) -> Dataset:
    """A dataset from each node's samples; the test samples are those given, or none."""
    if all(map(_is_arrays, shards)) and (test is None or _is_arrays(test)):
        return from_arrays(shards, test)  # type: ignore[arg-type]
    sequences = [_sequence(f"shard {number}", shard) for number, shard in enumerate(shards)]
    return _dataset("shards", sequences, test, files=tuple(map(len, sequences)))


def from_samples(samples: SampleSequence, test: Shard | None) -> Dataset:
    """A dataset of samples that are to be given to nodes: by their classes, where targets are whole numbers."""
    name = "samples" if isinstance(samples, list) else type(samples).__name__
    labels = _labels(samples)
    classes = () if labels is None else tuple(map(str, np.unique(labels).tolist()))
    return _dataset(name, [_sequence(name, samples)], test, labels=labels, classes=classes)


def _dataset(
    name: str, sequences: Sequence[SampleSequence], test: Shard | None, *, labels: Int64 | None = None, **known: Any
) -> Dataset:
    held = [] if test is None else [_sequence("test", test)]
    store, end = SampleStore([*sequences, *held]), sum(map(len, sequences))
    places = np.arange(len(store))[:, None]
    return Dataset(name, Part(places[:end], labels), Part(places[end:]) if held else None, store=store, **known)


def _is_arrays(shard: Shard) -> bool:
    return type(shard) is tuple and len(shard) == 2 and not isinstance(shard[0], Mapping | tuple)


def _sequence(name: str, shard: Shard) -> SampleSequence:
    if type(shard) is tuple and len(shard) == 2 and isinstance(shard[0], Mapping | tuple):
        return SeveralInputs(*shard)
    if isinstance(shard, str | tuple | Mapping | np.ndarray) or not hasattr(shard, "__getitem__"):
        kind = type(shard).__name__
        raise UserError(f"{name} must be (x, y), or a sequence of samples such as a Dataset or a list, not a {kind}")
    try:
        size = len(shard)
    except TypeError:
        raise UserError(f"{name} has no length: mini-batches are drawn by number, from a map-style Dataset") from None
    if not size:
        raise UserError(f"{name} has no samples")
    return shard


def _labels(samples: SampleSequence) -> Int64 | None:
    """The classes of all samples, where targets are whole numbers: from `targets` if there are such, or by reading."""
    targets = getattr(samples, "targets", None)
    if targets is None or len(targets) != len(samples):
        targets = [_target(samples[place]) for place in range(len(samples))]
    try:
        found = np.asarray(targets)
    except ValueError:  # of different shapes
        return None
    return found.astype(np.int64) if found.ndim == 1 and found.dtype.kind in "iub" else None


def _target(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return next((sample[name] for name in LABELS if name in sample), None)
    return np.asarray(sample[-1]) if isinstance(sample, tuple | list) and sample else None
