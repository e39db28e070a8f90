"""Data that a program gives from Python: arrays, DataFrames, or samples of any kind that are read when needed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from fedbudget.arrays import Int64
from fedbudget.data.dataset import Dataset, Part
from fedbudget.data.files import ArrayShard, from_arrays, from_tables
from fedbudget.data.read_tables import PLAIN, from_frame, is_frame, read_alike
from fedbudget.data.samples import LABELS, SampleSequence, SampleStore, SeveralInputs
from fedbudget.data.tables import TableOptions, require_usable
from fedbudget.errors import UserError

Shard: TypeAlias = ArrayShard | tuple[Mapping[str, Any] | tuple[Any, ...], Any] | SampleSequence
"""One node's samples: (x, y) as arrays, y None where there is nothing to predict; with several inputs, x a mapping or a
tuple of arrays; a DataFrame; or any sequence of samples, such as a map-style Dataset of PyTorch or a list."""


def from_shards(
    shards: Sequence[Shard],
    test: Shard | None,
    options: TableOptions = PLAIN,
    *,
    standardise: bool | None = None,
    names: Sequence[str] = (),
) -> Dataset:
    """A dataset from each node's samples; the test samples are those given, or none.

    Args:
      options: of DataFrames.
      standardise: whether features of arrays and DataFrames are standardised; those of DataFrames when not given.
      names: what to call the shards in errors.
    """
    names = names or [f"shard {number}" for number in range(len(shards))]
    if any(map(is_frame, shards)):
        return _of_frames("shards", shards, names, test, options, standardise=standardise)
    options.require_none(names[0] if names else "shards")
    if all(map(_is_arrays, shards)) and (test is None or _is_arrays(test)):
        dataset = from_arrays(shards, test, options, names)  # type: ignore[arg-type]
        if standardise is None:
            return dataset.checked_scales()
        return dataset.standardised() if standardise else dataset
    if standardise:
        raise UserError("`standardise` is for arrays and DataFrames; samples of another kind are used as they are")
    sequences = [_sequence(name, shard) for shard, name in zip(shards, names, strict=True)]
    return _dataset("shards", sequences, test, files=tuple(map(len, sequences)))


def from_samples(
    samples: SampleSequence,
    test: Shard | None,
    options: TableOptions = PLAIN,
    *,
    test_share: float = 0.0,
    standardise: bool | None = None,
) -> Dataset:
    """A dataset of samples that are to be given to nodes: by their classes, where targets are whole numbers.

    Args:
      options, test_share, standardise: of a DataFrame.
    """
    if is_frame(samples):
        share: Any = {"test_share": test_share, "standardise": standardise}
        return replace(_of_frames("DataFrame", [samples], ["DataFrame"], test, options, **share), files=())
    name = "samples" if isinstance(samples, list) else type(samples).__name__
    labels = _labels(samples)
    classes = () if labels is None else tuple(map(str, np.unique(labels).tolist()))
    return _dataset(name, [_sequence(name, samples)], test, labels=labels, classes=classes)


def _of_frames(
    name: str,
    frames: Sequence[Any],
    names: Sequence[str],
    test: Any,
    options: TableOptions,
    *,
    test_share: float = 0.0,
    standardise: bool | None,
) -> Dataset:
    given = {**dict(zip(names, frames, strict=True)), **({} if test is None else {"test": test})}
    for each, frame in given.items():
        if not is_frame(frame):
            raise UserError(f"{each} is no DataFrame, and others are; give all of one kind")
    tables = read_alike([partial(from_frame, frame, each) for each, frame in given.items()], options)
    require_usable(tables, name)
    trained, held = tables[: len(frames)], None if test is None else tables[-1]
    dataset = from_tables(name, trained, options, test=held, test_share=test_share)
    return dataset if standardise is False else dataset.standardised()


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
