"""A node's data, from files: all of one, or its share of a dataset; and what is tested on."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbudget import data, python_file
from fedbudget.arrays import Int64
from fedbudget.data import files
from fedbudget.data.dataset import Dataset, hold_out
from fedbudget.data.given import Shard, from_shards
from fedbudget.data.images import from_idx
from fedbudget.data.partition import Rows
from fedbudget.data.read_tables import PLAIN, from_frame, is_frame
from fedbudget.data.tables import RawTable, TableOptions, require_usable
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.errors import UserError, explained
from fedbudget.launch.inputs import distribute, load_dataset
from fedbudget.settings import Settings

OwnData = NodeData | Dataset | Shard | Callable[[], NodeData | Dataset | Shard]
"""A node's samples as a person may have them: (x, y), y None where there is nothing to predict, or what gives them."""


def from_value(
    given: OwnData,
    name: str = "data",
    options: TableOptions = PLAIN,
    standardise: bool | None = None,
    *,
    test_share: float = 0.0,
    test: Any = None,
) -> NodeData:
    """All samples that a person gives from Python, as one node's.

    Args:
      name: what to call them in errors.
      options: of a DataFrame.
      standardise: whether features are, together with those of all nodes; those of a DataFrame when not given.
      test_share: of them, how many are held back to evaluate on.
      test: others to evaluate on, in the same ways, or in a file.
    """
    value: Any = given() if callable(given) else given
    if is_frame(value):
        value = _from_table(from_frame(value, name, options), options, standardise)
    if isinstance(value, NodeData):
        return _with_test(value, test_share, test, options, standardise)
    if not isinstance(value, Dataset):
        value = replace(from_shards([value], None, options, names=[name]), name=name)
    if standardise is not None:
        value = replace(value, warnings=())
    data = NodeData(value, [np.arange(len(value.train))], standardise=bool(standardise))
    return _with_test(data, test_share, test, options, standardise)


def from_file(
    path: Path,
    options: TableOptions = PLAIN,
    *,
    labels: Path | None = None,
    standardise: bool | None = None,
    test_share: float = 0.0,
    test: Any = None,
) -> NodeData:
    """All samples of a `.csv`, a `.npz`, a pair of IDX files, or what a name in a Python file stands for, as one
    node's.

    Args:
      options: of tables.
      standardise: whether features are, together with those of all nodes; those of tables when not given.
      test_share: of them, how many are held back to evaluate on.
      test: others to evaluate on, in any of these ways.
    """
    held_back: Any = {"test_share": test_share, "test": test}
    if python_file.is_reference(str(path)):
        given = python_file.load(str(path))
        with explained(f"{path} gives no samples"):
            return from_value(given, str(path), options, standardise, **held_back)
    if "idx" in path.name:
        return from_value(from_idx(path, labels), standardise=standardise, **held_back)
    if path.is_dir():
        raise UserError(f"{path} is a folder; a node has a file of its own")
    if path.suffix == ".csv":
        data = _from_table(files.read_tables([path], options, path)[0], options, standardise)
        return _with_test(data, test_share, test, options, standardise)
    return from_value(files.load(path, options, test_share=0.0), standardise=standardise, **held_back)


def _from_table(table: RawTable, options: TableOptions, standardise: bool | None) -> NodeData:
    require_usable([table])
    name = Path(table.name).name
    dataset = replace(files.from_tables(name, [table], options), files=(), raw=table)
    rows = [np.arange(len(table))]
    return NodeData(dataset, rows, standardise=standardise is not False, impute=options.impute)


def _with_test(data: NodeData, share: float, test: Any, options: TableOptions, standardise: bool | None) -> NodeData:
    """The same with samples to evaluate on: others, or a share of its own that it then does not train on."""
    if test is not None:
        if share:
            raise UserError("give `test` or `test_share`, not both")
        if isinstance(test, str | os.PathLike):
            return replace(data, test=from_file(Path(test), options, standardise=standardise).dataset)
        return replace(data, test=from_value(test, "test", options, standardise).dataset)
    if not share:
        return data
    kept, held_back = hold_out(len(data.dataset.train), share)
    return replace(
        data,
        dataset=_only(data.dataset, kept),
        rows=[np.arange(len(kept))],
        test=_only(data.dataset, held_back),
    )


def _only(dataset: Dataset, rows: Int64) -> Dataset:
    """Some of a dataset's training samples."""
    raw = None if dataset.raw is None else dataset.raw.rows(rows)
    return replace(dataset, train=dataset.train.rows(rows), raw=raw)


def from_dataset(settings: Settings, shard: str) -> NodeData:
    """A share of a dataset, as `fedbudget run` would give it to a node, for trials.

    Args:
      settings: the dataset, how it is given to nodes, and the seed.
      shard: 2/5 for the second of five nodes, 1-3/5 for the first three of them together.
    """
    first, last, nodes = _parse_shard(shard)
    dataset, rows = all_shares(settings, nodes)
    return NodeData(dataset, rows[first - 1 : last])


def all_shares(settings: Settings, nodes: int) -> tuple[Dataset, Rows]:
    """The dataset, and the rows of each of so many nodes."""
    dataset = load_dataset(settings).sample(settings.train_samples, settings.test_samples, settings.seed)
    return dataset, distribute(replace(settings, nodes=nodes), dataset)[1]


def dataset_to_test_on(name: str, settings: Settings) -> Dataset:
    """Samples to test on: those of a dataset, or all of a file that names none."""
    if name in data.DATASETS:
        return load_dataset(replace(settings, dataset=name))
    options = settings.table_options()
    if python_file.is_reference(name) or Path(name).suffix == ".csv":
        return from_file(Path(name), options).dataset
    return files.load(Path(name), options, test_share=0.0, standardise=False)


def _parse_shard(text: str) -> tuple[int, int, int]:
    """
    >>> _parse_shard("2/5"), _parse_shard("1-3/5")
    ((2, 2, 5), (1, 3, 5))
    """
    which, _, count = text.partition("/")
    first, _, last = which.partition("-")
    try:
        numbers = int(first), int(last or first), int(count)
    except ValueError:
        raise UserError(f"shard {text!r} is not understood; write I/N, such as 2/5 for the second of five") from None
    if not 1 <= numbers[0] <= numbers[1] <= numbers[2]:
        raise UserError(f"shard {text}: of {numbers[2]} shards there are 1 to {numbers[2]}")
    return numbers
