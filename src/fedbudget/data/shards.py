"""A fleet's data: one table of samples, and the row numbers of every node's shard.

- Rows are never copied. Shards may overlap or be identical (Case 3). Identical shards share
  one list of row numbers, so 500 nodes with the same 60,000 images need no more memory than
  one node.
- Samples that are not rows of an array live in a `SampleStore` and are read when needed. A
  list or a map-style Dataset of PyTorch is a sequence of such samples.
"""

import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedbudget.arrays import Float32, Int64, Samples
from fedbudget.errors import UserError

TARGET_KEYS = ("labels", "label", "y")
"""Keys of the target in a sample that is a mapping; the first one present counts."""


class SampleSequence(Protocol):
    """Samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class SampleStore:
    """Several sequences of samples, concatenated."""

    def __init__(self, parts: Sequence[SampleSequence]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Any:
        part = bisect_right(self._ends, index)
        start = self._ends[part - 1] if part else 0
        return self._parts[part][index - start]


class MultiInputSamples:
    """Samples with several inputs, from one array per input.

    Args:
      inputs: arrays by name, or in order.
      y: targets, [samples].

    >>> samples = MultiInputSamples({"left": [[1, 2], [3, 4]], "right": [[5], [6]]}, [0, 1])
    >>> samples[1]
    ({'left': array([3, 4]), 'right': array([6])}, np.int64(1))
    """

    def __init__(
        self, inputs: Mapping[str, ArrayLike] | Sequence[ArrayLike], y: ArrayLike
    ) -> None:
        self._names = list(inputs) if isinstance(inputs, Mapping) else None
        self._y = np.asarray(y)
        arrays = inputs.values() if isinstance(inputs, Mapping) else inputs
        self._inputs: list[NDArray[Any]] = [np.asarray(each) for each in arrays]
        for each in self._inputs:
            if not each.ndim or len(each) != len(self._y):
                raise UserError(
                    f"an input has shape {each.shape}, but there are {len(self._y)} targets"
                )

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, index: int) -> Any:
        inputs = tuple(each[index] for each in self._inputs)
        target = self._y[index]
        if self._names is None:
            return inputs, target
        return dict(zip(self._names, inputs, strict=True)), target


@dataclass(frozen=True)
class Table:
    """Samples with their targets.

    Args:
      x: features as stored, [samples, features], uint8, float32 or float64.
      y: targets in the model's form, [samples]: class numbers, ±1 or real values; zeros if
        the model needs none.
      scale: factor of stored features (1/255 for pixels). Kernels apply it; x is unchanged.
      shape: of one sample's features, such as (1, 28, 28); empty for a flat row.
      integers: features are whole numbers, such as word indices.
      labels: y are class numbers, not real numbers.
      store: of samples that are not rows of an array; x contains their indices,
        [samples, 1], and y is unused.
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
                "samples must be [samples, features] with one target each, "
                f"not {self.x.shape} and {self.y.shape}"
            )
        if self.x.dtype not in (np.uint8, np.float32, np.float64) and self.store is None:
            raise UserError(
                f"features must be uint8, float32 or float64, not {self.x.dtype}"
            )

    def __len__(self) -> int:
        return len(self.x)

    def scaled(self, rows: NDArray[Any] | slice) -> Float32:
        """Return a scaled float32 copy of some rows, [rows, features]."""
        self.require_arrays()
        return np.asarray(self.x[rows], dtype=np.float32) * np.float32(self.scale)

    def require_arrays(self) -> None:
        """Refuse samples that are not rows of an array."""
        if self.store is not None:
            raise UserError(
                "only a PyTorch model accepts samples that are read one by one; "
                "pass arrays (x, y)"
            )

    def fingerprint(self) -> str:
        """Return a checksum of all samples; for a store, of their number."""
        form = f"{self.x.dtype.str} {self.x.shape} {self.scale!r} {self.shape}"
        checksum = zlib.crc32(form.encode())
        for values in (self.x, self.y):
            checksum = zlib.crc32(np.ascontiguousarray(values).data, checksum)
        return f"{checksum:08x}"


@dataclass(frozen=True)
class Shards:
    """The shards of n nodes over one table.

    Args:
      table: the samples.
      rows: row numbers of all shards, concatenated, int32.
      start, size: position and length of each node's shard in `rows`, [nodes].
    """

    table: Table
    rows: NDArray[np.int32]
    start: Int64
    size: Int64

    def __post_init__(self) -> None:
        empty = np.flatnonzero(self.size < 1)
        if len(empty):
            raise UserError(f"node {empty[0]} has no samples; use fewer nodes or more data")

    @classmethod
    def of(cls, table: Table, rows: Sequence[NDArray[Any]]) -> "Shards":
        """Create shards from each node's row numbers; the same array is stored once."""
        starts: dict[int, int] = {}
        parts: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
        total = 0
        for part in rows:
            if id(part) not in starts:
                starts[id(part)] = total
                parts.append(np.asarray(part, dtype=np.int32))
                total += len(part)
        return cls(
            table,
            np.concatenate(parts),
            np.array([starts[id(part)] for part in rows], dtype=np.int64),
            np.array([len(part) for part in rows], dtype=np.int64),
        )

    @classmethod
    def whole(cls, table: Table) -> "Shards":
        """Return all rows of a table as one shard."""
        return cls.of(table, [np.arange(len(table))])

    def only(self, nodes: Sequence[int]) -> "Shards":
        """Return the shards of some nodes."""
        chosen = np.asarray(nodes, dtype=np.int64)
        return Shards(self.table, self.rows, self.start[chosen], self.size[chosen])

    def rows_of(self, node: int) -> NDArray[np.int32]:
        """Return the row numbers of one node's shard."""
        return self.rows[self.start[node] : self.start[node] + self.size[node]]

    @cached_property
    def kernel_arrays(self) -> tuple[Any, ...]:
        """All arrays of these shards, in the order in which kernels take them."""
        table = self.table
        table.require_arrays()
        scale = np.float32(table.scale)
        return table.x, table.y, scale, self.rows, self.start, self.size

    def __len__(self) -> int:
        return len(self.size)
