"""Samples as a PyTorch module sees them: batches by row numbers, from arrays or read one by one. Needs PyTorch.

Of arrays, whatever is bytes stays bytes until it is used. Samples of any other kind (a map-style Dataset, a list) are
read when their mini-batch comes, here or by worker processes, and put together by `collate`. What a Dataset's
transforms draw at random follows from the mini-batch's places in its shard alone: the same run with any number of
workers, and wherever the shard lies.
"""

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from torch.utils.data import Dataset as MapDataset

from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import LABELS, SampleStore, Shards, Table
from fedbudget.errors import UserError
from fedbudget.models.base import Target

Collate = Callable[[list[Any]], Any]
"""Samples of a mini-batch to (inputs, y), (input, input, ..., y), or a mapping that has y under `labels`."""

Batch = tuple[Any, Tensor]
"""What the module is called with, a tensor, a tuple or a mapping; and y."""

Rows = NDArray[np.int32]

Picked = tuple[Rows, int]
"""The rows of a batch, and what is random in it is seeded by."""

_Places = tuple[list[int], int]  # of samples in a store, and the seed

_KEPT = 4  # tables kept as tensors, and stores with workers


class BatchReader:
    """Makes batches of tables.

    Args:
      target: what y holds.
      collate: puts samples together that are no rows of arrays.
      workers: processes that read them; 0 for this one.
    """

    def __init__(
        self, target: Target, device: torch.device, *, collate: Collate | None, workers: int
    ) -> None:
        self._target = target
        self._device = device
        self._collate = collate or default_collate
        self._workers = workers
        self._tables: dict[int, tuple[Table, Tensor, Tensor]] = {}
        self._loaders: dict[int, tuple[DataLoader[Any], _Plan]] = {}

    def batches(self, table: Table, plan: Iterable[Picked]) -> Iterator[Batch]:
        """A batch for each of these, one after the other."""
        if table.store is None:
            yield from (self.batch(table, rows) for rows, _ in plan)
            return
        places = ((table.x[rows, 0].astype(np.int64).tolist(), seed) for rows, seed in plan)
        for found in self._read(table.store, places):
            inputs, y = _inputs_and_target(found)
            yield self._on_device(inputs), self._typed(self._on_device(y))

    def of_updates(
        self,
        shards: Shards,
        indices: BatchIndices,
        updates: Sequence[tuple[int, int]],
        at_once: int,
    ) -> Iterator[tuple[Rows, Iterator[tuple[Rows, Batch]]]]:
        """Of each (node, update) the positions in the shard, and these in parts with the batch of each; it is read when
        it is used.
        """

        def positions(node: int, update: int) -> Rows:
            return indices.of(node, update, int(shards.size[node]))

        every = (
            (shards.rows_of(node), in_parts(positions(node, update), at_once))
            for node, update in updates
        )
        picked = ((rows[part], seed_of(part)) for rows, parts in every for part in parts)
        read = self.batches(shards.table, picked)
        for each in updates:
            yield (
                positions(*each),
                zip(in_parts(positions(*each), at_once), read, strict=False),
            )

    def batch(self, table: Table, rows: Rows) -> Batch:
        """Some rows of arrays."""
        if id(table) not in self._tables:
            while len(self._tables) >= _KEPT:
                del self._tables[next(iter(self._tables))]
            y = self.tensor(table.y)
            classes = self._target == "classes" or (self._target == "auto" and table.labels)
            self._tables[id(table)] = (
                table,
                self.tensor(table.x),
                y.to(torch.int64 if classes else torch.float32),
            )
        _, every_x, every_y = self._tables[id(table)]
        index = torch.from_numpy(rows.astype(np.int64)).to(self._device)
        x = every_x[index].to(torch.int64 if table.integers else torch.float32)
        if table.scale != 1:
            x *= table.scale
        return x.view(len(rows), *table.shape) if table.shape else x, every_y[index]

    def first(self, table: Table, batch: int | None, at_once: int) -> tuple[Rows, Batch]:
        """A batch as it is in training: of so many samples, repeated where there are fewer, and in parts.

        Args:
          batch: None for all samples.
        """
        rows = np.resize(np.arange(len(table), dtype=np.int32), batch or len(table))
        part = next(in_parts(rows, at_once))
        (found,) = self.batches(table, [(part, seed_of(part))])
        return part, found

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """On a CPU the very same memory, where it may be written to; a tensor promises that."""
        return torch.from_numpy(array if array.flags.writeable else array.copy()).to(
            self._device
        )

    def _read(self, store: SampleStore, places: Iterable[_Places]) -> Iterator[Any]:
        if not self._workers:
            samples = _SeededSamples(store)
            for some in places:
                with _random_numbers_kept():
                    found = self._collate(samples.__getitems__(some))
                yield found
            return
        if id(store) not in self._loaders:
            while len(self._loaders) >= _KEPT:
                del self._loaders[next(iter(self._loaders))]
            plan = _Plan()
            loader = DataLoader(
                _SeededSamples(store),
                batch_sampler=plan,
                collate_fn=self._collate,
                num_workers=self._workers,
                persistent_workers=True,
            )
            self._loaders[id(store)] = loader, plan
        loader, plan = self._loaders[id(store)]
        plan.places = places
        yield from loader

    def _on_device(self, part: Any) -> Any:
        """Tensors on the device, and real numbers as float32."""
        if isinstance(part, Tensor):
            return part.to(
                self._device, torch.float32 if part.dtype == torch.float64 else part.dtype
            )
        if isinstance(part, Mapping):
            return {name: self._on_device(each) for name, each in part.items()}
        if type(part) in (tuple, list):
            return tuple(self._on_device(each) for each in part)
        return (
            part.to(self._device) if hasattr(part, "to") else part
        )  # such as a PackedSequence

    def _typed(self, y: Any) -> Tensor:
        """Targets as the loss wants them; with `auto`, whole numbers are classes and others are real."""
        if not isinstance(y, Tensor):
            raise UserError(
                f"the target of a mini-batch must be a tensor, not a {type(y).__name__}"
            )
        if self._target == "auto":
            return y if y.is_floating_point() else y.long()
        return y.long() if self._target == "classes" else y.float()


def call(module: nn.Module, inputs: Any) -> Any:
    """The module's output; several inputs are several arguments, and those of a mapping go by name."""
    if isinstance(inputs, Mapping):
        output = module(**inputs)
    else:
        output = module(*inputs) if type(inputs) is tuple else module(inputs)
    return (
        output if isinstance(output, Tensor) else getattr(output, "logits", output)
    )  # as models of transformers


def seed_of(positions: Rows) -> int:
    """Of a mini-batch, for what is random in it.

    Args:
      positions: within the shard, which are the same where the shard is a table of its own.
    """
    return zlib.crc32(np.asarray(positions, np.int32).tobytes())


def seed_random(device: torch.device, seed: int) -> None:
    """Of what is random in a module."""
    # Seeding everything keeps a printed stack for every kind of device that is not here: slower than a small step.
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def in_parts(rows: Rows, size: int) -> Iterator[Rows]:
    """Of this size; one row that is left is with those before it, because a layer may normalize by the others."""
    last = len(rows) - 1 if len(rows) > size and len(rows) % size == 1 else len(rows)
    starts = range(0, last, size)
    return (rows[start : start + size if start < starts[-1] else None] for start in starts)


def _inputs_and_target(found: Any) -> tuple[Any, Any]:
    if isinstance(found, Mapping):
        label = next((name for name in LABELS if name in found), None)
        if label is None:
            raise UserError(
                f"a mini-batch that is a mapping needs its target as `labels`; it has {', '.join(found)}"
            )
        return {name: each for name, each in found.items() if name != label}, found[label]
    if not isinstance(found, tuple | list) or len(found) < 2:
        raise UserError(
            f"a mini-batch must be (inputs, target) or a mapping with `labels`, not a {_kind(found)}"
        )
    *inputs, y = found
    return inputs[0] if len(inputs) == 1 else tuple(inputs), y


def _kind(found: Any) -> str:
    return (
        f"{type(found).__name__} of {len(found)}"
        if isinstance(found, tuple | list)
        else type(found).__name__
    )


class _SeededSamples(MapDataset[Any]):
    """The samples of a store, with what their transforms draw seeded by the mini-batch."""

    def __init__(self, store: SampleStore) -> None:
        self._store = store

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, place: int) -> Any:
        return self._store[place]

    def __getitems__(self, picked: _Places) -> list[Any]:
        places, seed = picked
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - transforms draw from it
        return [self._store[place] for place in places]


class _Plan:
    """The mini-batches that workers are to read next."""

    places: Iterable[_Places] = ()

    def __iter__(
        self,
    ) -> Iterator[
        Any
    ]:  # a DataLoader's type wants lists, and takes whatever its Dataset does
        return iter(self.places)


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Python's and numpy's, which are the program's own; PyTorch's are whoever calls' to keep."""
    python = random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002 (the program's own state)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def all_in_parts(table: Table, size: int) -> Iterator[Picked]:
    """All rows of a table, to predict."""
    rows = np.arange(len(table), dtype=np.int32)
    return ((part, seed_of(part)) for part in in_parts(rows, size))
