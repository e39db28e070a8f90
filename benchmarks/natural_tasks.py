"""Tasks whose nodes come from the data itself, and image tasks that a rule distributes.

    FEDBUDGET_DATA=FOLDER python -m benchmarks.natural_tasks

The data folder has a subfolder `natural` with one folder per dataset, and the folders of
`fedbudget data get`. A task is the training and test samples of every node:

| name | nodes | target |
|---|---|---|
| heart-disease | 4 hospitals | heart disease or not |
| tcga-brca | 6 regions | death within five years, or alive after five years |
| beijing-air | 12 stations | log(1 + PM2.5) from the weather, the hour and the month |
| parkinsons | 42 patients | motor UPDRS from the voice, age and sex |
| shakespeare | 20 largest roles | the next character from the eight characters before it |
| digits | 5, Dirichlet(0.5) | digit |
| mnist | 5, Case 2 | digit; 5,000 images of 14x14 pixels |
| fashion-mnist | 5, Case 1 | kind of clothing; 5,000 images of 14x14 pixels |

Rules for all tasks:

- Each node holds out a fifth of its rows, at least one, drawn by the seed.
- Missing numbers become the mean of all training rows.
- Columns of tables and real targets are standardised by all training rows. Pixels are
  scaled to [0, 1] and one-hot characters stay 0 or 1, because standardisation would turn a
  rare character or a pixel at the border into a very large number.
- Rows are held out at random. A patient's recordings of one day, or neighbouring hours, can
  be on both sides of the split, so a held-out loss is for known patients and stations.
"""

import csv
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from fedbudget.arrays import Flags, Float32, Float64, Int64, Samples
from fedbudget.data.builtin import DATASETS
from fedbudget.data.dataset import Part
from fedbudget.data.natural import FEDERATIONS
from fedbudget.data.partition import Partition, split
from fedbudget.data.read_tables import by_site
from fedbudget.data.tables import RawTable, TextColumn
from fedbudget.errors import UserError
from fedbudget.randomness import Stream, generator

Kind = Literal["classes", "real"]
"""Class numbers 0, 1, ... or real numbers."""

Shard = tuple[Float32, Samples]
"""Features [rows, features], and class numbers (int64) or numbers (float32), [rows]."""

_HELD_OUT = 0.2
_CONTEXT = 8
"""Characters before the one to predict."""


@dataclass(frozen=True)
class Task:
    """A federated task with held-out samples.

    Args:
      name: a key of `TASKS`.
      kind: kind of the target.
      nodes: name of each node.
      train, test: samples of each node, in the same order.
      outputs: number of classes; 1 for a real target.
    """

    name: str
    kind: Kind
    nodes: tuple[str, ...]
    train: tuple[Shard, ...]
    test: tuple[Shard, ...]
    outputs: int

    def __repr__(self) -> str:
        rows = sum(len(y) for _, y in self.train)
        return f"Task({self.name!r}, {self.kind!r}, {len(self.nodes)} nodes, {rows} rows)"

    @property
    def features(self) -> int:
        """The number of features."""
        return int(self.train[0][0].shape[1])

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, for the setting `classes`; None for a real target.

        Without this setting, `fedbudget.train` takes more than 50 class numbers for real
        targets, and leaves out classes without samples.
        """
        return None if self.kind == "real" else tuple(map(str, range(self.outputs)))


@dataclass(frozen=True)
class _Node:
    """All rows of one node before the split; NaN is a missing value."""

    name: str
    x: Samples
    y: Float64


@dataclass(frozen=True)
class _Source:
    """How a task is made.

    Args:
      outputs: number of classes; 1 for a real target.
      read: (data folder, seed) to the nodes.
      most: largest number of rows per node, training and test together.
      encode: rows as read to features.
      standardise: whether to standardise the features.
    """

    outputs: int
    read: Callable[[Path, int], Sequence[_Node]]
    most: int | None = None
    encode: Callable[[Samples], Samples] | None = None
    standardise: bool = True

    @property
    def kind(self) -> Kind:
        return "real" if self.outputs == 1 else "classes"


def load(name: str, seed: int = 0, folder: str | Path | None = None) -> Task:
    """Load a task.

    Args:
      name: a key of `TASKS`.
      seed: draws the rows, the held-out rows, and the distribution of images.
      folder: the data folder; the environment variable FEDBUDGET_DATA by default.

    Returns:
      the samples of every node.
    """
    if name not in TASKS:
        raise UserError(f"task {name!r} does not exist; choose from {', '.join(TASKS)}")
    source = TASKS[name]
    nodes = source.read(_data_folder(folder), seed)
    rng = np.random.default_rng([seed, 100])
    parts = [_held_out(len(node.y), source.most, rng) for node in nodes]
    train = [(node.x[rows], node.y[rows]) for node, (rows, _) in _zip(nodes, parts)]
    test = [(node.x[rows], node.y[rows]) for node, (_, rows) in _zip(nodes, parts)]
    if source.encode is not None:
        train = [(source.encode(x), y) for x, y in train]
        test = [(source.encode(x), y) for x, y in test]
    features = _Scaling.of(np.concatenate([x for x, _ in train]), source.standardise)
    target = None
    if source.kind == "real":
        target = _Scaling.of(np.concatenate([y for _, y in train])[:, None], True)
    return Task(
        name,
        source.kind,
        tuple(node.name for node in nodes),
        tuple((features.apply(x), _targets(y, target)) for x, y in train),
        tuple((features.apply(x), _targets(y, target)) for x, y in test),
        source.outputs,
    )


def pooled(shards: Sequence[Shard]) -> Shard:
    """Return the samples of all nodes as one.

    Args:
      shards: samples of each node.

    Returns:
      features and targets.
    """
    x = np.concatenate([x for x, _ in shards])
    y = np.concatenate([y for _, y in shards])
    return x, y


def hold_out(
    shards: Sequence[Shard], share: float, seed: int
) -> tuple[list[Shard], list[Shard]]:
    """Hold out validation rows at every node.

    Args:
      shards: samples of each node.
      share: fraction of the rows; a node keeps at least one row.
      seed: draws the rows.

    Returns:
      the remaining samples and the held-out samples of each node. The latter are empty at
      nodes with too few rows.
    """
    rng = np.random.default_rng([seed, 101])
    kept = []
    held = []
    for x, y in shards:
        order = rng.permutation(len(y))
        count = min(round(share * len(y)), len(y) - 1)
        held.append((x[order[:count]], y[order[:count]]))
        kept.append((x[order[count:]], y[order[count:]]))
    return kept, held


@dataclass(frozen=True)
class _Scaling:
    """Means of training rows, and the factors by which columns are standardised."""

    mean: Float64
    shift: Float64
    deviation: Float64

    @classmethod
    def of(cls, x: Samples, standardise: bool) -> "_Scaling":
        present = ~np.isnan(x)
        count = np.maximum(present.sum(axis=0), 1)
        mean = np.where(present, x, 0.0).sum(axis=0) / count
        if not standardise:
            return cls(mean, np.zeros_like(mean), np.ones_like(mean))
        deviation = np.where(present, x, mean).std(axis=0)
        return cls(mean, mean, np.where(deviation > 1e-9, deviation, 1.0))

    def apply(self, x: Samples) -> Float32:
        filled = np.where(np.isnan(x), self.mean, x)
        return ((filled - self.shift) / self.deviation).astype(np.float32)


def _zip(
    nodes: Sequence[_Node], parts: Sequence[tuple[Int64, Int64]]
) -> list[tuple[_Node, tuple[Int64, Int64]]]:
    return list(zip(nodes, parts, strict=True))


def _held_out(size: int, most: int | None, rng: np.random.Generator) -> tuple[Int64, Int64]:
    """Return the rows to train on and to test on."""
    order = rng.permutation(size)[:most]
    tested = max(1, round(_HELD_OUT * len(order)))
    return np.sort(order[tested:]), np.sort(order[:tested])


def _targets(y: Float64, scaling: _Scaling | None) -> Samples:
    """Return standardised numbers, or class numbers without a scaling."""
    if scaling is None:
        return y.astype(np.int64)
    return scaling.apply(y[:, None])[:, 0]


def _data_folder(folder: str | Path | None) -> Path:
    given = os.environ.get("FEDBUDGET_DATA") if folder is None else folder
    if not given:
        raise UserError("pass the data folder, or set FEDBUDGET_DATA")
    return Path(given).expanduser()


def _natural(folder: Path, *names: str) -> Path:
    path = folder.joinpath("natural", *names)
    if not path.exists():
        raise UserError(f"{path} does not exist; it is needed for this task")
    return path


def _number(cell: str) -> float:
    """Return NaN for a missing cell."""
    return math.nan if cell.strip() in ("", "?", "NA", "NaN") else float(cell)


def _one_hot(column: Float64, values: Sequence[float]) -> list[Float64]:
    """Return one column per value; a missing value is 0 in all of them."""
    return [(column == value).astype(np.float64) for value in values]


@cache
def _heart_disease(folder: Path, _: int) -> list[_Node]:
    """Read the four hospitals.

    The columns `ca` and `thal` are left out, because more than half of their cells are
    missing. A cholesterol or a blood pressure of 0 is missing too: all patients in
    Switzerland have it. Columns with more missing cells also become an indicator.
    """
    nodes = []
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        path = _natural(folder, "heart-disease", f"processed.{hospital}.data")
        with path.open(newline="") as file:
            cells = [[_number(cell) for cell in row] for row in csv.reader(file) if row]
        columns = np.array(cells).T
        age, sex, pain, pressure, cholesterol, sugar, ecg = columns[:7]
        rate, angina, depression, slope = columns[7:11]
        pressure = np.where(pressure == 0, np.nan, pressure)
        cholesterol = np.where(cholesterol == 0, np.nan, cholesterol)
        measured = [pressure, cholesterol, sugar, rate, angina, depression]
        features = [
            age,
            sex,
            *measured,
            *(np.isnan(column).astype(np.float64) for column in measured),
            *_one_hot(pain, (1, 2, 3, 4)),
            *_one_hot(ecg, (0, 1, 2)),
            *_one_hot(slope, (1, 2, 3)),
        ]
        ill = (columns[13] > 0).astype(np.float64)
        nodes.append(_Node(hospital, np.column_stack(features), ill))
    return nodes


def _federation(name: str) -> Callable[[Path, int], list[_Node]]:
    """Return a reader of a natural federation of fedbudget, without categories."""
    federation = FEDERATIONS[name]

    @cache
    def read(folder: Path, _: int) -> list[_Node]:
        table = federation.table(name, folder)
        nodes = []
        for site in by_site(name, [table], federation.site):
            x = np.column_stack([np.asarray(each) for each in site.columns.values()])
            nodes.append(_Node(site.name, x, _class_or_number(site)))
        return nodes

    return read


def _class_or_number(site: RawTable) -> Float64:
    """Return the targets, 0 for no and 1 for yes."""
    targets = site.targets
    if isinstance(targets, TextColumn):
        return np.array([text == "yes" for text in targets.texts], np.float64)
    assert targets is not None
    return targets


@cache
def _shakespeare(folder: Path, _: int) -> list[_Node]:
    """Read the 20 roles with the most text; x are the numbers of characters."""
    text = _natural(folder, "shakespeare-roles", "input.txt").read_text("ascii")
    speeches: dict[str, list[str]] = {}
    for block in text.split("\n\n"):
        role, colon, speech = block.strip().partition(":\n")
        if colon and "\n" not in role:
            speeches.setdefault(role, []).append(speech)
    numbers = {symbol: number for number, symbol in enumerate(sorted(set(text)))}
    texts = {role: "\n".join(parts) for role, parts in speeches.items()}
    nodes = []
    for role in sorted(texts, key=lambda role: (-len(texts[role]), role))[:20]:
        codes = np.array([numbers[symbol] for symbol in texts[role]], np.float64)
        windows = np.lib.stride_tricks.sliding_window_view(codes, _CONTEXT + 1)
        nodes.append(_Node(role, windows[:, :-1], windows[:, -1]))
    return nodes


_SYMBOLS = 65
"""Different characters in the text."""


def _one_hot_symbols(codes: Samples) -> Samples:
    """Return a column per position and character, [rows, positions * characters]."""
    hot: Flags = codes[:, :, None] == np.arange(_SYMBOLS)
    return hot.reshape(len(codes), -1).astype(np.float64)


def _images(
    dataset: str, partition: str, nodes: int = 5
) -> Callable[[Path, int], list[_Node]]:
    """Return a reader that distributes the images of a built-in dataset over nodes."""

    def read(folder: Path, seed: int) -> list[_Node]:
        x, y, scale = _built_in(dataset, folder)
        rng = generator(seed, Stream.PARTITION)
        shares = split(Partition.parse(partition), y, nodes, rng)
        return [
            _Node(f"node {number}", x[rows] * scale, y[rows].astype(np.float64))
            for number, rows in enumerate(shares)
        ]

    return read


@cache
def _built_in(dataset: str, folder: Path) -> tuple[Samples, Int64, float]:
    """Return pixels, labels, and the factor of pixels; of digits, all samples."""
    data = DATASETS[dataset](folder)
    part = data.train
    if dataset == "digits" and data.test is not None:
        part = Part.join([data.train, data.test])
    assert part.labels is not None
    return part.x, part.labels, data.scale


TASKS: Mapping[str, _Source] = {
    "heart-disease": _Source(2, _heart_disease),
    "tcga-brca": _Source(2, _federation("tcga-brca")),
    "beijing-air": _Source(1, _federation("beijing-air"), most=2500),
    "parkinsons": _Source(1, _federation("parkinsons")),
    "shakespeare": _Source(
        _SYMBOLS, _shakespeare, most=1500, encode=_one_hot_symbols, standardise=False
    ),
    "digits": _Source(10, _images("digits", "dirichlet:0.5"), standardise=False),
    "mnist": _Source(10, _images("mnist-small", "case:2"), standardise=False),
    "fashion-mnist": _Source(
        10, _images("fashion-mnist-small", "case:1"), standardise=False
    ),
}
"""The tasks by name."""


def main() -> None:
    """Print the size of every task."""
    for name in TASKS:
        task = load(name)
        sizes = [len(y) for _, y in task.train]
        held = sum(len(y) for _, y in task.test)
        print(
            f"{name}: {len(sizes)} nodes with {min(sizes)} to {max(sizes)} training rows, "
            f"{sum(sizes)} in all, {held} held out, {task.features} features, "
            f"{task.outputs} outputs"
        )


if __name__ == "__main__":
    main()
