"""The user's own data: a `.npz`, a `.csv`, or a folder with one such file per node.

Whole numbers and words as targets are classes, other numbers real targets. uint8 features are taken for pixels and
scaled to [0, 1]. Of a `.csv` the features, and a real target, are standardised; a `.npz` is used as it is.
"""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from fedbudget.data.dataset import Dataset, Part, hold_out
from fedbudget.data.tables import Columns, checked, class_name, read_csv, read_npz
from fedbudget.errors import UserError

_MOST_CLASSES = 50  # whole numbers with more different values than this are not taken for classes

ArrayShard = tuple[ArrayLike, ArrayLike | None]
"""One node's samples: features [samples, ...] and targets [samples], None where there is nothing to predict."""


def load(path: Path, *, target: str | None = None, test_share: float = 0.2, standardise: bool | None = None) -> Dataset:
    """Reads a file, or a folder whose files are the nodes' shards.

    Args:
      target: the CSV column to predict; the last one when not given.
      test_share: how much to hold out for testing, where the data has no test samples of its own.
      standardise: whether features are standardised; those of a `.csv` when not given.
    """
    paths = _files_of(path)
    dataset = from_columns(path.name, [_read(each, target) for each in paths], test_share=test_share)
    if not path.is_dir():
        dataset = replace(dataset, files=())
    standardise = paths[0].suffix == ".csv" if standardise is None else standardise
    return dataset.standardised() if standardise else dataset


def from_columns(name: str, read: Sequence[tuple[Columns, Columns | None]], *, test_share: float) -> Dataset:
    """A dataset from the samples of several files, each with its own test samples or some held out."""
    everything = [columns for pair in read for columns in pair if columns is not None]
    _require_alike(name, everything)
    classes = _classes(everything)
    trained: list[Part] = []
    tested: list[Part] = []
    for train, test in read:
        part = _part(name, train, classes)
        if test is None:
            kept, held = hold_out(part, test_share)
            trained.append(part.rows(kept))
            tested.append(part.rows(held))
        else:
            trained.append(part)
            tested.append(_part(name, test, classes))
    first, sizes = everything[0], tuple(map(len, trained))
    rest = Part.join(tested) if any(map(len, tested)) else None
    integers = all(columns.integers for columns in everything)
    return Dataset(
        name, Part.join(trained), rest, classes, _scale(first), shape=first.shape, files=sizes, integers=integers
    )


def from_arrays(shards: Sequence[ArrayShard], test: ArrayShard | None) -> Dataset:
    """A dataset from arrays in memory, one shard per node; the test samples are those given, or none."""
    if not shards:
        raise UserError("shards must have at least one node's data")
    nodes = [_columns(f"shard {number}", shard) for number, shard in enumerate(shards)]
    no_test = nodes[0].none()
    read: list[tuple[Columns, Columns | None]] = [(columns, no_test) for columns in nodes]
    if test is not None:
        read[0] = (nodes[0], _columns("test", test))
    return from_columns("shards", read, test_share=0.0)


def load_all(path: Path, *, target: str | None, classes: tuple[str, ...]) -> Dataset:
    """All samples of a file, or its test samples where it names some, with the class numbers of a trained model."""
    paths = _files_of(path)
    parts = []
    for each in paths:
        train, test = _read(each, target)
        parts.append(_part(str(each), test or train, classes))
    return Dataset(path.name, Part.join(parts), classes=classes, scale=_scale(train), shape=train.shape)


def _columns(name: str, shard: ArrayShard) -> Columns:
    try:
        x, y = (None if each is None else np.asarray(each) for each in shard)
    except ValueError:
        raise UserError(f"{name}: samples of different shapes are no array; give them as a list, one by one") from None
    assert x is not None
    return checked(name, x, y)


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix in (".csv", ".npz"))
        if not files:
            raise UserError(f"{path} has no .csv or .npz file; a folder must hold one file per node")
        return files
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if path.suffix not in (".csv", ".npz"):
        raise UserError(f"{path}: only .csv and .npz files can be read")
    return [path]


def _read(path: Path, target: str | None) -> tuple[Columns, Columns | None]:
    try:
        return (read_csv(path, target), None) if path.suffix == ".csv" else read_npz(path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _require_alike(name: str, files: Sequence[Columns]) -> None:
    kinds = {(columns.numbers is None, columns.words is None) for columns in files}
    if len(kinds) != 1:
        raise UserError(f"{name}: targets must be numbers in all files, words in all, or in none")
    shapes = {(columns.shape or columns.x.shape[1:], str(columns.x.dtype)) for columns in files}
    if len(shapes) != 1:
        variants = " and ".join(f"{' x '.join(map(str, shape))} of {dtype}" for shape, dtype in sorted(shapes))
        raise UserError(f"{name}: features must be the same everywhere, found {variants}")


def _classes(files: Sequence[Columns]) -> tuple[str, ...]:
    """The names of the classes in order, or nothing where the target is a real number or missing."""
    if files[0].words is not None:
        return tuple(sorted({name for columns in files for name in columns.class_names or ()}))
    if files[0].numbers is None:
        return ()
    values = np.unique(np.concatenate([columns.numbers for columns in files if columns.numbers is not None]))
    if len(values) > _MOST_CLASSES or (values != np.round(values)).any():
        return ()
    return tuple(class_name(value) for value in values)


def _part(name: str, columns: Columns, classes: tuple[str, ...]) -> Part:
    names = columns.class_names
    if not classes or names is None:
        return Part(columns.x, None, columns.numbers)
    number = {label: index for index, label in enumerate(classes)}
    unknown = sorted(set(names) - set(number))
    if unknown:
        raise UserError(f"{name}: class {unknown[0]!r} is not one of {', '.join(classes)}")
    return Part(columns.x, np.array([number[label] for label in names], dtype=np.int64), columns.numbers)


def _scale(columns: Columns) -> float:
    return 1 / 255 if columns.x.dtype == np.uint8 else 1.0
