"""A node's data, from files: all of one, or its share of a dataset; and what is tested on."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbudget import data, python_file
from fedbudget.data import files
from fedbudget.data.dataset import Dataset
from fedbudget.data.given import Shard, from_shards
from fedbudget.data.images import from_idx
from fedbudget.data.partition import Rows
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.errors import UserError, in_words
from fedbudget.launch.inputs import distribute, load_dataset
from fedbudget.settings import Settings

OwnData = NodeData | Dataset | Shard | Callable[[], NodeData | Dataset | Shard]
"""A node's samples as a person may have them: (x, y), y None where there is nothing to predict, or what gives them."""


def from_value(given: OwnData, name: str = "data") -> NodeData:
    """All samples that a person gives from Python, as one node's.

    Args:
      name: what to call them in errors.
    """
    value: Any = given() if callable(given) else given
    if isinstance(value, NodeData):
        return value
    if not isinstance(value, Dataset):
        try:
            value = replace(from_shards([value], None), name=name)
        except UserError as error:
            raise UserError(str(error).replace("shard 0", name)) from None
    return NodeData(value, [np.arange(len(value.train))])


def from_file(path: Path, *, labels: Path | None = None, target: str | None = None) -> NodeData:
    """All samples of a `.csv`, a `.npz`, a pair of IDX files, or what a name in a Python file stands for, as one
    node's.
    """
    if python_file.is_reference(str(path)):
        given = python_file.load(str(path))
        with in_words(f"{path} gives no samples"):
            return from_value(given, str(path))
    if "idx" in path.name:
        dataset = from_idx(path, labels)
        return NodeData(dataset, [np.arange(len(dataset.train))])
    if path.is_dir():
        raise UserError(f"{path} is a folder; a node has a file of its own")
    dataset = files.load(path, target=target, test_share=0.0, standardise=False)
    return NodeData(dataset, [np.arange(len(dataset.train))], standardise=path.suffix == ".csv")


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
    if python_file.is_reference(name):
        return from_file(Path(name)).dataset
    return files.load(Path(name), target=settings.target, test_share=0.0, standardise=False)


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
