"""Datasets from the user's own data: files, folders, arrays, DataFrames, other samples.

- A file is a table (`.csv`, `.parquet` and others) or a `.npz`. In a folder, each file is
  the shard of one node.
- Tables with a column of sites are split by it: each site is the shard of one node,
  whatever file its rows are in. Sites are sorted, numbers by size.
- Whole numbers and texts as targets are classes. Other numbers are real targets.
- uint8 features are pixels, scaled to [0, 1].
- Features and a real target of tables are standardised by default. Arrays are used
  unchanged.
- All tables of a dataset share one layout, computed from training rows only, or given by
  a public schema. A schema also gives the scale of features.
- Samples of other kinds are read when they are needed.
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
    class_sort_key,
    describe_uneven_classes,
)
from fedbudget.data.columns import (
    Columns,
    category_name,
    check_arrays,
    class_name,
    class_numbers,
    read_npz,
)
from fedbudget.data.dataset import Dataset, Part, Standardization, hold_out
from fedbudget.data.read_tables import (
    PLAIN,
    TABLES,
    by_site,
    from_frame,
    is_frame,
    is_table,
    read_consistently,
    read_file,
)
from fedbudget.data.shards import (
    TARGET_KEYS,
    MultiInputSamples,
    SampleSequence,
    SampleStore,
)
from fedbudget.data.tables import (
    Layout,
    RawTable,
    TableOptions,
    centre,
    require_usable,
)
from fedbudget.errors import UserError
from fedbudget.settings.option import choices_text

ENDINGS = (*TABLES, ".npz")
"""Endings of the files that can be read."""

_MOST_CLASSES = 50  # whole numbers with more distinct values are real targets

ArrayShard = tuple[ArrayLike, ArrayLike | None]
"""One node's features [samples, ...] and targets [samples]; None without targets."""

Shard: TypeAlias = (
    ArrayShard | tuple[Mapping[str, Any] | tuple[Any, ...], Any] | SampleSequence
)
"""One node's samples, in one of these forms:

- (x, y) as arrays; y is None without targets;
- (x, y) with several inputs: x is a mapping or a tuple of arrays;
- a DataFrame or an Arrow table with the target, or (DataFrame, y);
- a sequence of samples, such as a list, a map-style Dataset of PyTorch or its DataLoader;
- a Dataset of Hugging Face: a table if `target` names a column, otherwise its samples.
"""


def load(
    path: Path,
    options: TableOptions = PLAIN,
    *,
    test_share: float = 0.2,
    standardise: bool | None = None,
) -> Dataset:
    """Read a file, or a folder whose files are the nodes' shards.

    Args:
      options: for tables, and the classes.
      test_share: fraction to hold out for testing if the data has no test samples.
      standardise: whether to standardise features; by default only those of tables.
    """
    paths = paths_of(path)
    tables = is_table(paths[0])
    if tables:
        raw = read_tables(paths, options, path)
        dataset = from_tables(path.name, raw, options, test_share=test_share)
    else:
        options.require_unused(str(path))
        read = [_with_test(read_npz(each), test_share) for each in paths]
        names = [each.name for each in paths]
        dataset = from_columns(path.name, read, options, names)
    if path.is_dir() and options.site is None:
        dataset = replace(dataset, sites=tuple(each.stem for each in paths))
    elif options.site is None:
        dataset = replace(dataset, files=())
    return _scaled(dataset, options, standardise, by_default=tables)


def load_all(
    path: Path,
    options: TableOptions = PLAIN,
    *,
    classes: tuple[str, ...],
    layout: Layout | None = None,
) -> Dataset:
    """Read all samples of a file to evaluate a model on, or only its test samples if any.

    Args:
      classes: of the model; labels receive their numbers.
      layout: of the model, for tables.
    """
    paths = paths_of(path)
    if not is_table(paths[0]):
        read = [test or train for train, test in map(read_npz, paths)]
    else:
        if layout is not None:
            options = layout.options_for(options)
        tables = read_tables(paths, options, path)
        used = layout or _layout(tables, list(map(str, paths)), options)
        read = [table.samples(used.encode(table)) for table in tables]

    pairs = zip(paths, read, strict=True)
    train = Part.join([_part(str(each), columns, classes) for each, columns in pairs])
    scale = _scale(read[0])
    shape = read[0].shape
    return Dataset(
        path.name, train, classes=classes, scale=scale, shape=shape, layout=layout
    )


def from_shards(
    shards: Sequence[Shard],
    test: Shard | None,
    options: TableOptions = PLAIN,
    *,
    test_share: float = 0.0,
    standardise: bool | None = None,
    names: Sequence[str] = (),
) -> Dataset:
    """Create a dataset from each node's samples.

    Args:
      test: the test samples, if any.
      options: for DataFrames.
      test_share: fraction of each shard to hold out if there are no test samples.
      standardise: whether to standardise arrays and DataFrames; by default only the latter.
      names: of the shards, for errors.
    """
    if isinstance(shards, Mapping):
        raise UserError("`shards` must be a list with the data of each node, not a mapping")
    if not shards:
        raise UserError("shards must have at least one node's data")
    if test is not None and test_share:
        raise UserError("give `test` or `test_share`, not both")
    names = names or [f"shard {number}" for number in range(len(shards))]
    shards = [
        readable(shard, name, options) for shard, name in zip(shards, names, strict=True)
    ]
    test = None if test is None else readable(test, "test", options)
    if any(map(is_frame, shards)):
        dataset = _from_frames("shards", shards, names, test, options, test_share)
        return _scaled(dataset, options, standardise, by_default=True)
    options.require_unused(names[0])
    if all(map(_is_arrays, shards)) and (test is None or _is_arrays(test)):
        nodes = [
            _with_test((_columns(name, shard), None), test_share)
            for name, shard in zip(names, shards, strict=True)
        ]
        if test is not None:
            nodes[0] = (nodes[0][0], _columns("test", test))
        dataset = from_columns("shards", nodes, options)
        if test is not None:
            dataset = replace(dataset, test_files=())
        return _scaled(dataset, options, standardise, by_default=False)
    if standardise:
        raise UserError(
            "`standardise` is for arrays and DataFrames; other samples are used unchanged"
        )
    sequences = [_sequence(name, shard) for shard, name in zip(shards, names, strict=True)]
    dataset = _from_sequences("shards", sequences, test, test_share)
    return replace(dataset, files=dataset.files or tuple(map(len, sequences)))


def from_samples(
    samples: Shard,
    test: Shard | None,
    options: TableOptions = PLAIN,
    *,
    test_share: float = 0.0,
    standardise: bool | None = None,
) -> Dataset:
    """Create a dataset of samples that will be distributed over simulated nodes.

    Whole numbers as targets are classes, by which the samples can be distributed.

    Args:
      samples: in a form of `Shard`.
      test: the test samples, if any.
      options: for a DataFrame.
      test_share: fraction to hold out if there are no test samples; not of other samples
        than DataFrames and arrays.
      standardise: whether to standardise a DataFrame or arrays; by default only the former.
    """
    samples = readable(samples, "dataset", options)
    test = None if test is None else readable(test, "test", options)
    if is_frame(samples):
        name = "DataFrame"
        dataset = _from_frames(name, [samples], [name], test, options, test_share)
        if options.site is None:
            dataset = replace(dataset, files=())
        return _scaled(dataset, options, standardise, by_default=True)
    if _is_arrays(samples):
        name = "arrays"
        options.require_unused(name)
        held = None if test is None else _columns("test", test)
        pair = _with_test((_columns("dataset", samples), held), test_share)
        dataset = replace(from_columns(name, [pair], options), files=())
        return _scaled(dataset, options, standardise, by_default=False)
    name = "samples" if isinstance(samples, list) else type(samples).__name__
    options.require_unused(name)
    dataset = _from_sequences(name, [_sequence("dataset", samples)], test)
    labels = None if _is_pair(samples) else _labels(samples)
    if labels is None:
        return dataset
    classes = tuple(map(str, np.unique(labels).tolist()))
    return replace(dataset, train=replace(dataset.train, labels=labels), classes=classes)


def read_tables(
    paths: Sequence[Path], options: TableOptions, whole: Path
) -> list[RawTable]:
    """Read the tables in some files; one error lists all their problems.

    Args:
      whole: the file or folder that contains all of them, for errors.
    """
    tables = read_consistently([partial(read_file, each) for each in paths], options)
    require_usable(tables, str(whole))
    return tables


def from_tables(
    name: str,
    tables: Sequence[RawTable],
    options: TableOptions,
    *,
    test: RawTable | None = None,
    test_share: float = 0.0,
    seed: int = 0,
) -> Dataset:
    """Create a dataset from tables, one per node, or with a column of sites.

    Args:
      test: the test samples; by default `test_share` of every table or site.
      seed: draws the test samples.
    """
    schema = options.schema
    if schema is None:
        _require_columns(tables, options, name)
    else:
        tables = [schema.fitted(table) for table in tables]
        test = None if test is None else schema.fitted(test)
    remarks = dict.fromkeys(remark for table in tables for remark in table.remarks)
    names = [Path(table.name).name for table in tables]
    sites: tuple[str, ...] = ()
    if options.site is not None:
        if schema is None:
            _layout(tables, names, options)  # refuses tables that do not fit together
        tables = by_site(name, tables, options.site)
        names = [table.name for table in tables]
        sites = tuple(names)
    trained = []
    tested = []
    for table in tables:
        kept, held = hold_out(len(table), test_share if test is None else 0.0, seed)
        trained.append(table.rows(kept))
        tested.append(table.rows(held))
    if test is not None:
        tested[0] = test
    layout = _layout(trained, names, options) if schema is None else schema.layout
    layout = replace(layout, missing=options.missing)
    read = [
        (train.samples(layout.encode(train)), other.samples(layout.encode(other)))
        for train, other in zip(trained, tested, strict=True)
    ]
    dataset = from_columns(name, read, options, names)
    return replace(
        dataset,
        layout=layout,
        remarks=(*remarks, *dataset.remarks),
        sites=sites,
        site_column=options.site,
        test_files=dataset.test_files if test is None else (),
    )


def from_columns(
    name: str,
    read: Sequence[tuple[Columns, Columns]],
    options: TableOptions,
    names: Sequence[str] = (),
) -> Dataset:
    """Create a dataset from the training and test samples of several files.

    Args:
      options: the classes.
      names: of the files.
    """
    everything = [columns for pair in read for columns in pair]
    _require_same_kind(name, everything)
    if options.classes is None:
        classes = classes_of(everything)
    else:
        classes = tuple(map(category_name, options.classes))

    trained = []
    tested = []
    for number, (train, test) in enumerate(read):
        file = names[number] if names else name
        trained.append(_part(file, train, classes))
        tested.append(_part(file, test, classes))

    remark = None
    if classes:
        pairs = zip(names, read, strict=False)
        own = {file: set(train.class_names or ()) for file, (train, _) in pairs}
        remark = describe_uneven_classes(own)
    first = everything[0]
    return Dataset(
        name,
        Part.join(trained),
        Part.join(tested) if any(map(len, tested)) else None,
        classes,
        _scale(first),
        shape=first.shape,
        files=tuple(map(len, trained)),
        test_files=tuple(map(len, tested)),
        integers=all(columns.integers for columns in everything),
        remarks=() if remark is None else (remark,),
    )


def _from_frames(
    name: str,
    frames: Sequence[Any],
    names: Sequence[str],
    test: Any,
    options: TableOptions,
    test_share: float = 0.0,
) -> Dataset:
    given = dict(zip(names, frames, strict=True))
    if test is not None:
        given["test"] = test
    for each, frame in given.items():
        if not is_frame(frame):
            raise UserError(
                f"{each} is not a DataFrame, but others are; pass the same kind for all"
            )
    readers = [partial(from_frame, frame, each) for each, frame in given.items()]
    tables = read_consistently(readers, options)
    require_usable(tables, name)
    held = None if test is None else tables[-1]
    trained = tables[: len(frames)]
    return from_tables(name, trained, options, test=held, test_share=test_share)


def _from_sequences(
    name: str,
    sequences: Sequence[SampleSequence],
    test: Shard | None,
    test_share: float = 0.0,
) -> Dataset:
    held = [] if test is None else [_sequence("test", test)]
    store = SampleStore([*sequences, *held])
    indices = np.arange(len(store))[:, None]
    end = sum(map(len, sequences))
    if not test_share:
        test_part = Part(indices[end:]) if held else None
        return Dataset(name, Part(indices[:end]), test_part, store=store)
    kept = []
    tested = []
    start = 0
    for sequence in sequences:
        train, test_rows = hold_out(len(sequence), test_share)
        kept.append(start + train)
        tested.append(start + test_rows)
        start += len(sequence)
    sizes = tuple(map(len, kept))
    train_part = Part(indices[np.concatenate(kept)])
    test_part = Part(indices[np.concatenate(tested)])
    return Dataset(name, train_part, test_part, store=store, files=sizes)


def _scaled(
    dataset: Dataset, options: TableOptions, standardise: bool | None, *, by_default: bool
) -> Dataset:
    if standardise or (standardise is None and by_default):
        return dataset.standardised(public_scale(options))
    return dataset if standardise is False else dataset.with_scale_warning()


def public_scale(options: TableOptions) -> Standardization | None:
    """Return the standardisation by the ranges of a schema; None without a schema."""
    schema = options.schema
    if schema is None:
        return None
    return Standardization(*schema.scale, *centre(schema.target_range))


def _layout(
    tables: Sequence[RawTable], names: Sequence[str], options: TableOptions
) -> Layout:
    described = [TableDescription.of(table, options.impute) for table in tables]
    return agree_on_layout(described, names)[0]


def _require_columns(tables: Sequence[RawTable], options: TableOptions, name: str) -> None:
    """Refuse names in `drop` and `categorical` that no table has."""
    known = {
        column
        for table in tables
        for column in (*table.columns, *table.dropped, table.target)
    }
    for option in ("drop", "categorical"):
        for column in getattr(options, option):
            if column not in known:
                columns = ", ".join(tables[0].columns)
                raise UserError(
                    f"{name} has no column {column!r} to `{option}`; it has {columns}"
                )


def _with_test(
    read: tuple[Columns, Columns | None], share: float
) -> tuple[Columns, Columns]:
    """Hold out a share of the training samples, unless there are test samples."""
    train, test = read
    if test is not None:
        return train, test
    kept, held = hold_out(len(train.x), share)
    return train.rows(kept), train.rows(held)


def readable(value: Any, name: str, options: TableOptions) -> Any:
    """Return samples in a form of `Shard` that is read here, whatever holds them."""
    if hasattr(value, "batch_sampler") and hasattr(value, "collate_fn"):  # a DataLoader
        if getattr(value.collate_fn, "__name__", "") != "default_collate":
            raise UserError(
                f"{name} is a DataLoader with its own collate_fn: pass its dataset, and "
                "TorchModel(..., collate=...)"
            )
        value = value.dataset
    tensors: Any = getattr(value, "tensors", ())
    if type(value).__name__ == "TensorDataset" and len(tensors) == 2:
        x, y = tensors
        plain = str(x.dtype) == "torch.float32" and str(y.dtype) == "torch.int64"
        if plain and x.ndim > 1 and y.ndim == 1:  # what arrays would become in PyTorch
            return x.numpy(force=True), y.numpy(force=True)
    if hasattr(value, "column_names") and hasattr(value, "with_format") and options.target:
        return value.with_format("arrow")[:]  # of Hugging Face
    return value


def _columns(name: str, shard: Any) -> Columns:
    if not _is_pair(shard):
        raise UserError(f"{name} must be (x, y), like the other samples")
    x, y = shard
    if hasattr(x, "toarray"):
        raise UserError(f"{name}: x is a sparse matrix; pass x.toarray()")
    try:
        features = np.asarray(x)
        targets = None if y is None else np.asarray(y)
    except ValueError:
        raise UserError(
            f"{name}: samples have different shapes; pass a list of samples, not arrays"
        ) from None
    return check_arrays(name, features, targets)


def paths_of(path: Path) -> list[Path]:
    """Return the file, or the files in a folder, sorted."""
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix.lower() in ENDINGS)
        if not files:
            raise UserError(
                f"{path} has no {choices_text(ENDINGS)} file; a folder must hold one file "
                "per node"
            )
        kinds = sorted({each.suffix for each in files})
        if len(kinds) > 1:
            raise UserError(
                f"{path} has {' and '.join(kinds)} files; a folder must hold one kind, "
                "one file per node"
            )
        return files
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if path.suffix.lower() not in ENDINGS:
        raise UserError(f"{path}: only {choices_text(ENDINGS)} files can be read")
    return [path]


def _require_same_kind(name: str, files: Sequence[Columns]) -> None:
    kinds = {columns.targets is None or columns.targets.dtype.kind for columns in files}
    if len(kinds) != 1:
        raise UserError(
            f"{name}: targets must be numbers in all files, text in all, or in none"
        )
    shapes = {
        (columns.shape or columns.x.shape[1:], str(columns.x.dtype)) for columns in files
    }
    if len(shapes) != 1:
        variants = [
            f"{' x '.join(map(str, shape))} of {dtype}" for shape, dtype in sorted(shapes)
        ]
        raise UserError(
            f"{name}: features must be the same everywhere, found {' and '.join(variants)}"
        )


def classes_of(files: Sequence[Columns]) -> tuple[str, ...]:
    """Return the class names in order; empty for real targets or without targets."""
    if files[0].targets is None:
        return ()
    numbers = [columns.numbers for columns in files if columns.numbers is not None]
    if not numbers:
        names = {name for columns in files for name in columns.class_names or ()}
        return tuple(sorted(names, key=class_sort_key))
    values = np.unique(np.concatenate(numbers))
    if len(values) > _MOST_CLASSES or (values != np.round(values)).any():
        return ()
    return tuple(class_name(value) for value in values)


def _part(name: str, columns: Columns, classes: tuple[str, ...]) -> Part:
    names = columns.class_names if classes else None
    if names is None:
        return Part(columns.x, None, columns.numbers)
    return Part(columns.x, class_numbers(name, classes, names), columns.numbers)


def _scale(columns: Columns) -> float:
    return 1 / 255 if columns.x.dtype == np.uint8 else 1.0


def _is_pair(shard: Any) -> bool:
    return type(shard) is tuple and len(shard) == 2


def _is_arrays(shard: Any) -> bool:
    return (
        _is_pair(shard)
        and not isinstance(shard[0], Mapping | tuple)
        and not is_frame(shard)
    )


def _sequence(name: str, shard: Any) -> SampleSequence:
    if _is_pair(shard) and isinstance(shard[0], Mapping | tuple):
        return MultiInputSamples(*shard)
    refused = isinstance(shard, str | tuple | Mapping | np.ndarray)
    if isinstance(shard, list) and len(shard) == 2:
        x, y = map(np.ndim, shard)
        if x > 1 and y == 1 and len(shard[0]) == len(shard[1]):
            raise UserError(f"{name} is a list of two arrays; pass the tuple (x, y)")
    if refused or not hasattr(shard, "__getitem__"):
        raise UserError(
            f"{name} must be (x, y), or a sequence of samples such as a Dataset or a list, "
            f"not a {type(shard).__name__}"
        )
    try:
        size = len(shard)
    except TypeError:
        raise UserError(
            f"{name} has no length; mini-batches need a map-style Dataset"
        ) from None
    if not size:
        raise UserError(f"{name} has no samples")
    samples: SampleSequence = shard
    return samples


def _labels(samples: SampleSequence) -> Int64 | None:
    """Return the targets if they are whole numbers, from `targets` or each sample."""
    targets = getattr(samples, "targets", None)
    if targets is None or len(targets) != len(samples):
        targets = [_target(samples[index]) for index in range(len(samples))]
    try:
        labels = np.asarray(targets)
    except ValueError:  # the shapes differ
        return None
    whole = labels.ndim == 1 and labels.dtype.kind in "iub"
    return labels.astype(np.int64) if whole else None


def _target(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return next((sample[name] for name in TARGET_KEYS if name in sample), None)
    return np.asarray(sample[-1]) if isinstance(sample, tuple | list) and sample else None
