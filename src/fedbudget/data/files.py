"""The user's own data: a `.npz`, a `.csv`, or a folder with one such file per node.

Whole numbers and words as targets are classes, other numbers real targets. uint8 features are taken for pixels and
scaled to [0, 1]. Of tables (a `.csv`, a DataFrame) the features, and a real target, are standardised; arrays are used
as they are. How the columns of tables become features is the same in all files, and found from training rows alone.

Data that a program gives from Python: arrays, DataFrames, or samples of any kind that are read when needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from fedbudget.arrays import Int64
from fedbudget.data.agreement import (
    TableDescription,
    agree_on_layout,
    classes_of_some,
    in_order,
)
from fedbudget.data.columns import Columns, category_name, checked, class_name, read_npz
from fedbudget.data.dataset import Dataset, Part, hold_out
from fedbudget.data.read_tables import PLAIN, from_frame, is_frame, read_alike, read_csv
from fedbudget.data.shards import LABELS, SampleSequence, SampleStore, SeveralInputs
from fedbudget.data.tables import Layout, RawTable, TableOptions, require_usable
from fedbudget.errors import UserError

_MOST_CLASSES = (
    50  # whole numbers with more different values than this are not taken for classes
)

ArrayShard = tuple[ArrayLike, ArrayLike | None]
"""One node's samples: features [samples, ...] and targets [samples], None where there is nothing to predict."""


def load(
    path: Path,
    options: TableOptions = PLAIN,
    *,
    test_share: float = 0.2,
    standardise: bool | None = None,
) -> Dataset:
    """Reads a file, or a folder whose files are the nodes' shards.

    Args:
      options: of tables, and which classes there are.
      test_share: how much to hold out for testing, where the data has no test samples of its own.
      standardise: whether features are standardised; those of a `.csv` when not given.
    """
    paths = _files_of(path)
    tables = paths[0].suffix == ".csv"
    if tables:
        dataset = from_tables(
            path.name, read_tables(paths, options, path), options, test_share=test_share
        )
    else:
        options.require_none(str(path))
        read = list(map(_read_npz, paths))
        names = [each.name for each in paths]
        dataset = from_columns(
            path.name, read, test_share=test_share, names=names, options=options
        )
    if not path.is_dir():
        dataset = replace(dataset, files=())
    wanted = tables if standardise is None else standardise
    return (
        dataset.standardised()
        if wanted
        else dataset
        if standardise is False
        else dataset.checked_scales()
    )


def read_tables(
    paths: Sequence[Path], options: TableOptions, whole: Path, *, labelled: bool = True
) -> list[RawTable]:
    """The tables in some files; one error has all that is wrong with them.

    Args:
      whole: what to call them together.
      labelled: whether they must have the target.
    """
    tables = read_alike(
        [partial(read_csv, each, labelled=labelled) for each in paths], options
    )
    require_usable(tables, str(whole))
    return tables


def require_columns(tables: Sequence[RawTable], options: TableOptions, whole: str) -> None:
    """Refuses to drop, or to take for a category, what is in none of the tables."""
    known = {
        name for table in tables for name in (*table.columns, *table.dropped, table.target)
    }
    for option in ("drop", "categorical"):
        for name in getattr(options, option):
            if name not in known:
                raise UserError(
                    f"{whole} has no column {name!r} to `{option}`; it has {', '.join(tables[0].columns)}"
                )


def from_tables(
    name: str,
    tables: Sequence[RawTable],
    options: TableOptions,
    *,
    test: RawTable | None = None,
    test_share: float = 0.0,
) -> Dataset:
    """A dataset from tables, one for each node.

    Args:
      test: the test samples; a share of every table when not given.
    """
    require_columns(tables, options, name)
    rows = [hold_out(len(table), test_share if test is None else 0.0) for table in tables]
    trained = [table.rows(kept) for table, (kept, _) in zip(tables, rows, strict=True)]
    tested = [table.rows(held) for table, (_, held) in zip(tables, rows, strict=True)]
    if test is not None:
        tested[0] = test
    names = [Path(table.name).name for table in tables]
    layout, _ = agree_on_layout(
        [TableDescription.of(table, options.impute) for table in trained], names
    )
    pairs = zip(trained, tested, strict=True)
    read = [
        (one.samples(layout.encode(one)), other.samples(layout.encode(other)))
        for one, other in pairs
    ]
    dataset = from_columns(name, read, test_share=0.0, names=names, options=options)
    remarks = dict.fromkeys(remark for table in tables for remark in table.remarks)
    return replace(dataset, layout=layout, remarks=(*remarks, *dataset.remarks))


def from_columns(
    name: str,
    read: Sequence[tuple[Columns, Columns | None]],
    *,
    test_share: float,
    names: Sequence[str] = (),
    options: TableOptions = PLAIN,
) -> Dataset:
    """A dataset from the samples of several files, each with its own test samples or some held out.

    Args:
      names: of the files.
    """
    everything = [columns for pair in read for columns in pair if columns is not None]
    _require_alike(name, everything)
    classes = (
        _classes(everything)
        if options.classes is None
        else tuple(map(category_name, options.classes))
    )
    trained: list[Part] = []
    tested: list[Part] = []
    for number, (train, test) in enumerate(read):
        file = names[number] if names else name
        part = _part(file, train, classes)
        if test is None:
            kept, held = hold_out(len(part), test_share)
            trained.append(part.rows(kept))
            tested.append(part.rows(held))
        else:
            trained.append(part)
            tested.append(_part(file, test, classes))
    first = everything[0]
    sizes = tuple(map(len, trained))
    rest = Part.join(tested) if any(map(len, tested)) else None
    integers = all(columns.integers for columns in everything)
    own = (
        {
            file: set(pair[0].class_names or ())
            for file, pair in zip(names, read, strict=False)
        }
        if classes
        else {}
    )
    remark = classes_of_some(own)
    return Dataset(
        name,
        Part.join(trained),
        rest,
        classes,
        _scale(first),
        shape=first.shape,
        files=sizes,
        integers=integers,
        remarks=() if remark is None else (remark,),
    )


def from_arrays(
    shards: Sequence[ArrayShard],
    test: ArrayShard | None,
    options: TableOptions = PLAIN,
    names: Sequence[str] = (),
) -> Dataset:
    """A dataset from arrays in memory, one shard per node; the test samples are those given, or none.

    Args:
      options: which classes there are.
      names: what to call the shards in errors.
    """
    if not shards:
        raise UserError("shards must have at least one node's data")
    names = names or [f"shard {number}" for number in range(len(shards))]
    nodes = [_columns(name, shard) for name, shard in zip(names, shards, strict=True)]
    no_test = nodes[0].none()
    read: list[tuple[Columns, Columns | None]] = [(columns, no_test) for columns in nodes]
    if test is not None:
        read[0] = (nodes[0], _columns("test", test))
    return from_columns("shards", read, test_share=0.0, options=options)


def load_all(
    path: Path,
    options: TableOptions = PLAIN,
    *,
    classes: tuple[str, ...],
    layout: Layout | None = None,
) -> Dataset:
    """All samples of a file, or its test samples where it names some, with the class numbers of a trained model.

    Args:
      layout: the model's, for tables; its columns are found by their names.
    """
    paths = _files_of(path)
    if paths[0].suffix == ".csv":
        read = _all_of_tables(paths, options, path, layout)
    else:
        read = [test or train for train, test in map(_read_npz, paths)]
    parts = [
        _part(str(each), columns, classes)
        for each, columns in zip(paths, read, strict=True)
    ]
    first = read[0]
    return Dataset(
        path.name,
        Part.join(parts),
        classes=classes,
        scale=_scale(first),
        shape=first.shape,
        layout=layout,
    )


def _all_of_tables(
    paths: Sequence[Path], options: TableOptions, whole: Path, layout: Layout | None
) -> list[Columns]:
    if layout is None:
        tables = read_tables(paths, options, whole)
        described = [TableDescription.of(table, options.impute) for table in tables]
        layout, _ = agree_on_layout(described, list(map(str, paths)))
    else:
        tables = read_tables(paths, layout.options_for(options), whole)
    return [table.samples(layout.encode(table)) for table in tables]


def _columns(name: str, shard: ArrayShard) -> Columns:
    try:
        x, y = (None if each is None else np.asarray(each) for each in shard)
    except ValueError:
        raise UserError(
            f"{name}: samples of different shapes are no array; give them as a list, one by one"
        ) from None
    assert x is not None
    return checked(name, x, y)


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix in (".csv", ".npz"))
        if not files:
            raise UserError(
                f"{path} has no .csv or .npz file; a folder must hold one file per node"
            )
        if len({each.suffix for each in files}) > 1:
            raise UserError(
                f"{path} has .csv and .npz files; a folder must hold one kind, one file per node"
            )
        return files
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if path.suffix not in (".csv", ".npz"):
        raise UserError(f"{path}: only .csv and .npz files can be read")
    return [path]


def _read_npz(path: Path) -> tuple[Columns, Columns | None]:
    try:
        return read_npz(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _require_alike(name: str, files: Sequence[Columns]) -> None:
    kinds = {(columns.numbers is None, columns.words is None) for columns in files}
    if len(kinds) != 1:
        raise UserError(
            f"{name}: targets must be numbers in all files, words in all, or in none"
        )
    shapes = {
        (columns.shape or columns.x.shape[1:], str(columns.x.dtype)) for columns in files
    }
    if len(shapes) != 1:
        variants = " and ".join(
            f"{' x '.join(map(str, shape))} of {dtype}" for shape, dtype in sorted(shapes)
        )
        raise UserError(f"{name}: features must be the same everywhere, found {variants}")


def _classes(files: Sequence[Columns]) -> tuple[str, ...]:
    """The names of the classes in order, or nothing where the target is a real number or missing."""
    if files[0].words is not None:
        return tuple(
            sorted(
                {name for columns in files for name in columns.class_names or ()},
                key=in_order,
            )
        )
    if files[0].numbers is None:
        return ()
    values = np.unique(
        np.concatenate(
            [columns.numbers for columns in files if columns.numbers is not None]
        )
    )
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
    return Part(
        columns.x,
        np.array([number[label] for label in names], dtype=np.int64),
        columns.numbers,
    )


def _scale(columns: Columns) -> float:
    return 1 / 255 if columns.x.dtype == np.uint8 else 1.0


Shard: TypeAlias = (
    ArrayShard | tuple[Mapping[str, Any] | tuple[Any, ...], Any] | SampleSequence
)
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
        raise UserError(
            "`standardise` is for arrays and DataFrames; samples of another kind are used as they are"
        )
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
        return replace(
            _of_frames("DataFrame", [samples], ["DataFrame"], test, options, **share),
            files=(),
        )
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
    given = {
        **dict(zip(names, frames, strict=True)),
        **({} if test is None else {"test": test}),
    }
    for each, frame in given.items():
        if not is_frame(frame):
            raise UserError(f"{each} is no DataFrame, and others are; give all of one kind")
    tables = read_alike(
        [partial(from_frame, frame, each) for each, frame in given.items()], options
    )
    require_usable(tables, name)
    trained = tables[: len(frames)]
    held = None if test is None else tables[-1]
    dataset = from_tables(name, trained, options, test=held, test_share=test_share)
    return dataset if standardise is False else dataset.standardised()


def _dataset(
    name: str,
    sequences: Sequence[SampleSequence],
    test: Shard | None,
    *,
    labels: Int64 | None = None,
    **known: Any,
) -> Dataset:
    held = [] if test is None else [_sequence("test", test)]
    store = SampleStore([*sequences, *held])
    end = sum(map(len, sequences))
    places = np.arange(len(store))[:, None]
    return Dataset(
        name,
        Part(places[:end], labels),
        Part(places[end:]) if held else None,
        store=store,
        **known,
    )


def _is_arrays(shard: Shard) -> bool:
    return (
        type(shard) is tuple
        and len(shard) == 2
        and not isinstance(shard[0], Mapping | tuple)
    )


def _sequence(name: str, shard: Shard) -> SampleSequence:
    if type(shard) is tuple and len(shard) == 2 and isinstance(shard[0], Mapping | tuple):
        return SeveralInputs(*shard)
    if isinstance(shard, str | tuple | Mapping | np.ndarray) or not hasattr(
        shard, "__getitem__"
    ):
        kind = type(shard).__name__
        raise UserError(
            f"{name} must be (x, y), or a sequence of samples such as a Dataset or a list, not a {kind}"
        )
    try:
        size = len(shard)
    except TypeError:
        raise UserError(
            f"{name} has no length: mini-batches are drawn by number, from a map-style Dataset"
        ) from None
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
