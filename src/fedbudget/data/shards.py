"""Samples that are no rows of one array: of any kind, read when they are needed.

A map-style Dataset of PyTorch is a sequence of such samples, and so is a list. Nothing here looks inside of a sample.

A fleet's data: one table of samples, and for every node the numbers of the rows that are its shard.

Rows are never copied. Shards may overlap or be the same (Case 3): shards with the same rows share one list of row
numbers, so 500 nodes that all hold 60,000 images need no more memory than one.
"""

import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedbudget.arrays import Float32, Int64, Samples
from fedbudget.errors import UserError

LABELS = ("labels", "label", "y")
"""Where a sample that is a mapping has its target: under the first of these that is there."""


class SampleSequence(Protocol):
    """Samples by their place."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> Any: ...


class SampleStore:
    """Several sequences of samples, one after the other."""

    def __init__(self, parts: Sequence[SampleSequence]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, place: int) -> Any:
        part = bisect_right(self._ends, place)
        return self._parts[part][place - (self._ends[part - 1] if part else 0)]


class SeveralInputs:
    """Samples with several inputs each, from an array for each of these; by name, or in order.

    >>> samples = SeveralInputs({"left": [[1, 2], [3, 4]], "right": [[5], [6]]}, [0, 1])
    >>> samples[1]
    ({'left': array([3, 4]), 'right': array([6])}, np.int64(1))
    """

    def __init__(
        self, inputs: Mapping[str, ArrayLike] | Sequence[ArrayLike], y: ArrayLike
    ) -> None:
        names = list(inputs) if isinstance(inputs, Mapping) else None
        self._names, self._y = names, np.asarray(y)
        values = inputs.values() if isinstance(inputs, Mapping) else inputs
        self._inputs: list[NDArray[Any]] = [np.asarray(each) for each in values]
        for each in self._inputs:
            if not each.ndim or len(each) != len(self._y):
                raise UserError(
                    f"an input of shape {each.shape} beside {len(self._y)} targets"
                )

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, place: int) -> Any:
        own = tuple(each[place] for each in self._inputs)
        return (
            own if self._names is None else dict(zip(self._names, own, strict=True))
        ), self._y[place]


@dataclass(frozen=True)
class Table:
    """Samples with their targets.

    Args:
      x: features as stored, [samples, features], uint8, float32 or float64.
      y: targets, [samples]: class numbers, ±1 or real values, as the model wants them; zeros where it wants none.
      scale: what a stored feature is multiplied with (1/255 for pixels); kernels do it, x stays as it is.
      shape: of one sample's features, for models that see more than a flat row in them; nothing for a flat row.
      integers: features are whole numbers, such as those of words, for models that tell them from others.
      labels: y are class numbers, for models that predict either these or real numbers.
      store: of samples that are no rows of an array; x has their places in it, [samples, 1], and y says nothing.
    """

    x: Samples
    y: Float32
    scale: float = 1.0
    shape: tuple[int, ...] = ()
    integers: bool = False
    labels: bool = True
    store: SampleStore | None = None

    def __post_init__(self) -> None:
        if self.x.ndim != 2 or self.y.shape != (len(self.x),):
            raise UserError(
                f"samples must be [samples, features] with one target each, not {self.x.shape} and {self.y.shape}"
            )
        if self.x.dtype not in (np.uint8, np.float32, np.float64) and self.store is None:
            raise UserError(
                f"features must be uint8, float32 or float64, not {self.x.dtype}"
            )

    def __len__(self) -> int:
        return len(self.x)

    def scaled(self, rows: NDArray[Any] | slice) -> Float32:
        """The features of some rows, as numbers: a float32 copy [rows, features]."""
        self.require_arrays()
        return np.asarray(self.x[rows], dtype=np.float32) * np.float32(self.scale)

    def require_arrays(self) -> None:
        """Refuses samples that are no rows of an array."""
        if self.store is not None:
            raise UserError(
                "only a PyTorch model takes samples that are read one by one; give arrays (x, y)"
            )

    def fingerprint(self) -> str:
        """A short text that is another when anything of the samples is; of a store, when their number is."""
        checksum = zlib.crc32(
            f"{self.x.dtype.str} {self.x.shape} {self.scale!r} {self.shape}".encode()
        )
        for values in (self.x, self.y):
            checksum = zlib.crc32(np.ascontiguousarray(values).data, checksum)
        return f"{checksum:08x}"


@dataclass(frozen=True)
class Shards:
    """The shards of n nodes over one table.

    Args:
      table: the samples.
      rows: row numbers, shard after shard, int32.
      start, size: where each node's shard lies in `rows`, [nodes].
    """

    table: Table
    rows: NDArray[np.int32]
    start: Int64
    size: Int64

    def __post_init__(self) -> None:
        for number, size in enumerate(self.size):
            if size < 1:
                raise UserError(
                    f"node {number} has no samples; use fewer nodes or more data"
                )

    @classmethod
    def of(cls, table: Table, rows: Sequence[NDArray[Any]]) -> "Shards":
        """From the row numbers of each node; the same array given twice is stored once."""
        starts: dict[int, int] = {}
        parts: list[NDArray[np.int32]] = []
        total = 0
        for part in rows:
            if id(part) not in starts:
                starts[id(part)] = total
                parts.append(np.asarray(part, dtype=np.int32))
                total += len(part)
        return cls(
            table,
            np.concatenate(parts) if parts else np.empty(0, np.int32),
            np.array([starts[id(part)] for part in rows], dtype=np.int64),
            np.array([len(part) for part in rows], dtype=np.int64),
        )

    @classmethod
    def whole(cls, table: Table) -> "Shards":
        """All of a table as one shard."""
        return cls.of(table, [np.arange(len(table))])

    def only(self, nodes: Sequence[int]) -> "Shards":
        """The shards of some of the nodes, as a fleet of their own."""
        chosen = np.asarray(nodes, dtype=np.int64)
        return Shards(self.table, self.rows, self.start[chosen], self.size[chosen])

    def rows_of(self, node: int) -> NDArray[np.int32]:
        return self.rows[self.start[node] : self.start[node] + self.size[node]]

    def __len__(self) -> int:
        return len(self.size)
