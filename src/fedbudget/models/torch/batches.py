"""Batches for a PyTorch module, by row numbers, from arrays or from samples read one by
one.

Bytes in arrays stay bytes until they are used. Other samples (a map-style Dataset, a list)
are read when their mini-batch is needed, by this process or by workers, and joined by
`collate`. The random numbers of a Dataset's transforms depend only on the positions of the
mini-batch in its shard: a run is the same with any number of workers, and at any node that
has the shard.
"""

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from torch.utils.data import Dataset as MapDataset

from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import TARGET_KEYS, SampleStore, Shards, Table
from fedbudget.errors import UserError
from fedbudget.models.base import Rows, Target

Collate = Callable[[list[Any]], Any]
"""Samples to (inputs, y), (input, input, ..., y), or a mapping with y as `labels`."""

Batch = tuple[Any, Tensor]
"""Inputs of the module (a tensor, a tuple or a mapping), and y."""

Picked = tuple[Rows, int]
"""Rows of a batch, and the seed for its random operations."""

_PickedSamples = tuple[list[int], int]
"""Sample numbers in a store, and the seed."""

_KEPT = 4
"""Tables that are kept as tensors, and stores that keep their workers."""


@dataclass(eq=False)
class BatchReader:
    """Reads batches from tables.

    Args:
      target: meaning of y.
      device: device of the tensors.
      collate: joins samples that are not rows of arrays.
      workers: processes that read them; 0 for this process.
    """

    target: Target
    device: torch.device
    _: KW_ONLY
    collate: Collate | None
    workers: int

    def __post_init__(self) -> None:
        self._join = self.collate or default_collate
        self._tables: dict[int, tuple[Table, Tensor, Tensor]] = {}
        self._loaders: dict[int, tuple[DataLoader[Any], _Plan]] = {}

    def batches(self, table: Table, plan: Iterable[Picked]) -> Iterator[Batch]:
        """Yield the batches of a plan, in order."""
        if table.store is None:
            yield from (self.batch(table, rows) for rows, _ in plan)
            return
        picked = ((table.x[rows, 0].astype(np.int64).tolist(), seed) for rows, seed in plan)
        for samples in self._read(table.store, picked):
            inputs, y = _inputs_and_target(samples)
            yield self._on_device(inputs), self._typed(self._on_device(y))

    def of_updates(
        self,
        shards: Shards,
        indices: BatchIndices,
        updates: Sequence[tuple[int, int]],
        at_once: int,
    ) -> Iterator[tuple[Rows, Iterator[tuple[Rows, Batch]]]]:
        """Yield the mini-batches of some updates, in parts. A part is read when it is used.

        Args:
          updates: (node, update) of each mini-batch.
          at_once: samples in a part.

        Yields:
          Positions in the shard, and an iterator over (positions, batch) of each part.
        """

        def positions(node: int, update: int) -> Rows:
            return indices.of(node, update, int(shards.size[node]))

        picked = (
            (shards.rows_of(node)[part], seed_of(part))
            for node, update in updates
            for part in in_parts(positions(node, update), at_once)
        )
        batches = self.batches(shards.table, picked)
        for each in updates:
            parts = in_parts(positions(*each), at_once)
            yield positions(*each), zip(parts, batches, strict=False)

    def batch(self, table: Table, rows: Rows) -> Batch:
        """Return some rows of arrays."""
        if id(table) not in self._tables:
            _drop_oldest(self._tables)
            classes = self.target == "classes" or (self.target == "auto" and table.labels)
            y = self.tensor(table.y).to(torch.int64 if classes else torch.float32)
            self._tables[id(table)] = (table, self.tensor(table.x), y)
        _, every_x, every_y = self._tables[id(table)]
        index = torch.from_numpy(rows.astype(np.int64)).to(self.device)
        x = every_x[index].to(torch.int64 if table.integers else torch.float32)
        if table.scale != 1:
            x *= table.scale
        return x.view(len(rows), *table.shape) if table.shape else x, every_y[index]

    def first(self, table: Table, batch: int | None, at_once: int) -> tuple[Rows, Batch]:
        """Return the rows and the batch of a first part, as training would use it.

        Args:
          batch: samples in a mini-batch, repeated if the table has fewer; None for all.
          at_once: samples in a part.
        """
        rows = np.resize(np.arange(len(table), dtype=np.int32), batch or len(table))
        part = next(in_parts(rows, at_once))
        (first,) = self.batches(table, [(part, seed_of(part))])
        return part, first

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """Return a tensor that shares the memory of a writable array on a CPU."""
        writable = array if array.flags.writeable else array.copy()
        return torch.from_numpy(writable).to(self.device)

    def _read(self, store: SampleStore, plan: Iterable[_PickedSamples]) -> Iterator[Any]:
        if not self.workers:
            samples = _SeededSamples(store)
            for picked in plan:
                with _restored_random_state():
                    batch = self._join(samples.__getitems__(picked))
                yield batch
            return
        if id(store) not in self._loaders:
            _drop_oldest(self._loaders)
            sampler = _Plan()
            loader = DataLoader(
                _SeededSamples(store),
                batch_sampler=sampler,
                collate_fn=self._join,
                num_workers=self.workers,
                persistent_workers=True,
            )
            self._loaders[id(store)] = loader, sampler
        loader, sampler = self._loaders[id(store)]
        sampler.batches = plan
        yield from loader

    def _on_device(self, part: Any) -> Any:
        """Move tensors to the device, and float64 to float32."""
        if isinstance(part, Tensor):
            kind = torch.float32 if part.dtype == torch.float64 else part.dtype
            return part.to(self.device, kind)
        if isinstance(part, Mapping):
            return {name: self._on_device(each) for name, each in part.items()}
        if type(part) in (tuple, list):
            return tuple(self._on_device(each) for each in part)
        # Other types of PyTorch have the method too, such as PackedSequence.
        return part.to(self.device) if hasattr(part, "to") else part

    def _typed(self, y: Any) -> Tensor:
        """Convert targets to the type that the loss needs.

        `auto` takes integers as classes.
        """
        if not isinstance(y, Tensor):
            raise UserError(
                f"the target of a mini-batch must be a tensor, not a {type(y).__name__}"
            )
        if self.target == "auto":
            return y if y.is_floating_point() else y.long()
        return y.long() if self.target == "classes" else y.float()


def call(module: nn.Module, inputs: Any) -> Any:
    """Call a module. A tuple becomes its arguments, a mapping its keyword arguments."""
    if isinstance(inputs, Mapping):
        output = module(**inputs)
    else:
        output = module(*inputs) if type(inputs) is tuple else module(inputs)
    # Models of transformers return an object with `logits`.
    return output if isinstance(output, Tensor) else getattr(output, "logits", output)


def seed_of(positions: Rows) -> int:
    """Return the seed for the random operations of a mini-batch.

    Args:
      positions: positions within the shard. They do not depend on the table that holds it.
    """
    return zlib.crc32(np.asarray(positions, np.int32).tobytes())


def seed_random(device: torch.device, seed: int) -> None:
    """Seed the random operations of a module."""
    # On a CPU, torch.manual_seed is slower than a small step: it records a stack trace for
    # each type of device that is missing.
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def in_parts(rows: Rows, size: int) -> Iterator[Rows]:
    """Split rows into parts of this size.

    A single row at the end joins the part before it, because a layer may normalize by the
    batch.
    """
    last = len(rows) - 1 if len(rows) > size and len(rows) % size == 1 else len(rows)
    starts = range(0, last, size)
    return (rows[start : start + size if start < starts[-1] else None] for start in starts)


def all_in_parts(table: Table, size: int) -> Iterator[Picked]:
    """Return a plan of all rows of a table."""
    rows = np.arange(len(table), dtype=np.int32)
    return ((part, seed_of(part)) for part in in_parts(rows, size))


def _inputs_and_target(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        key = next((name for name in TARGET_KEYS if name in batch), None)
        if key is None:
            raise UserError(
                "a mini-batch that is a mapping needs its target as `labels`; it has "
                f"{', '.join(batch)}"
            )
        return {name: each for name, each in batch.items() if name != key}, batch[key]
    sequence = isinstance(batch, tuple | list)
    if not sequence or len(batch) < 2:
        kind = type(batch).__name__
        if sequence:
            kind = f"{kind} of {len(batch)}"
        raise UserError(
            "a mini-batch must be (inputs, target) or a mapping with `labels`, not a "
            f"{kind}"
        )
    *inputs, y = batch
    return inputs[0] if len(inputs) == 1 else tuple(inputs), y


def _drop_oldest(cache: dict[int, Any]) -> None:
    while len(cache) >= _KEPT:
        del cache[next(iter(cache))]


class _SeededSamples(MapDataset[Any]):
    """The samples of a store.

    The mini-batch seeds the random numbers of their transforms.
    """

    def __init__(self, store: SampleStore) -> None:
        self._store = store

    def __getitems__(self, picked: _PickedSamples) -> list[Any]:
        numbers, seed = picked
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 (transforms draw from it)
        return [self._store[number] for number in numbers]


class _Plan:
    """The mini-batches that workers read next."""

    batches: Iterable[_PickedSamples] = ()

    def __iter__(self) -> Iterator[Any]:  # DataLoader declares lists, and accepts any items
        return iter(self.batches)


@contextmanager
def _restored_random_state() -> Iterator[None]:
    """Restore the random state of Python and numpy, which belongs to the user's program.

    The caller restores the state of PyTorch.
    """
    python = random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002 (state of the user's program)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
