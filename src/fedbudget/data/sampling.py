"""Which samples a mini-batch takes.

The rules are the paper's. All nodes start from the same seed, so shards of the same size are sampled at the same
positions: with identical shards (Case 3) mini-batches are identical too. Because of that, positions are drawn once per
shard size and not once per node. Within an epoch no sample comes twice; what is left at its end and does not fill
a mini-batch is skipped. A shard that is smaller than a mini-batch gives all of its samples to each, and to fill it some
of them once more than others.

A new mini-batch is drawn for every local update, except that the first one after an aggregation reuses the last one
before it; with τ=1 that would be the same one for ever, so there it is used at most twice. Whoever estimates nothing
from it, or has other ways to, asks for a new one every time.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Int64
from fedbudget.errors import UserError
from fedbudget.randomness import Stream, generator


@dataclass(frozen=True)
class BatchIndices:
    """The mini-batches of one round, as positions within a shard.

    Args:
      positions: [groups, updates, batch], int32; a batch of 0 stands for the whole shard.
      group: which of the groups a node belongs to, [nodes].
      counts: how many of the updates a node makes, the first ones, [nodes]; all of them where nothing is said.
    """

    positions: NDArray[np.int32]
    group: Int64
    counts: Int64 | None = None

    @property
    def updates(self) -> int:
        """Of the node that makes most."""
        return int(self.positions.shape[1])

    @property
    def updates_of(self) -> Int64:
        """Of each node, [nodes]."""
        return (
            np.full(len(self.group), self.updates) if self.counts is None else self.counts
        )

    @classmethod
    def whole(cls, nodes: int, updates: int = 1) -> "BatchIndices":
        """Every sample of every shard, in every update: deterministic gradient descent."""
        return cls(np.empty((1, updates, 0), np.int32), np.zeros(nodes, np.int64))

    def of(self, node: int, update: int, size: int) -> NDArray[np.int32]:
        """The positions that one node takes in one update."""
        chosen = self.positions[self.group[node], update]
        return chosen if chosen.size else np.arange(size, dtype=np.int32)


@dataclass(frozen=True)
class Position:
    """Where a sampler has come to.

    Args:
      generators: the state of each shard size's generator, as numpy tells it: names, numbers and such mappings.
      left: the mini-batches that are left of each one's epoch, [mini-batches, batch].
      last: the mini-batches that were drawn last, [groups, batch].
      last_used: how often they were used.
    """

    generators: tuple[Mapping[str, Any], ...]
    left: tuple[NDArray[np.int32], ...]
    last: NDArray[np.int32] | None
    last_used: int


class Sampler:
    """Draws a round's mini-batches, all at once.

    Args:
      sizes: samples of each node, [nodes].
      batch: samples in a mini-batch, or None for the whole shard.
      seed: the same for every node.
    """

    def __init__(self, sizes: Int64, batch: int | None, seed: int) -> None:
        if batch is not None and batch < 1:
            raise UserError(f"`batch_size` must be at least 1, not {batch}")
        self.batch = batch
        self._nodes = len(sizes)
        distinct, self._group = np.unique(sizes, return_inverse=True)
        self._streams = (
            [_Stream(int(size), batch, seed) for size in distinct] if batch else []
        )
        self._last: NDArray[np.int32] | None = None
        self._last_used = 0

    def round(
        self, updates: int, *, anew: bool = False, epoch: bool = False
    ) -> BatchIndices:
        """The mini-batches of a round with so many updates; with none, the last one again, to evaluate on.

        Args:
          anew: every update has a new one, the first after an aggregation too.
          epoch: a new epoch begins, whatever is left of the one before.
        """
        if self.batch is None:
            return BatchIndices.whole(self._nodes, max(1, updates))
        for stream in self._streams if epoch else ():
            stream.left = stream.left[:0]
        positions = np.empty((len(self._streams), max(1, updates), self.batch), np.int32)
        reused = 0
        if self._last is not None and (
            updates == 0 or (not anew and (updates > 1 or self._last_used < 2))
        ):
            positions[:, 0] = self._last
            reused = 1
        for stream, own in zip(self._streams, positions, strict=True):
            stream.fill(own[reused:])
        if updates > 0:
            self._last_used = self._last_used + 1 if updates == reused else 1
            self._last = positions[:, -1]
        return BatchIndices(positions, self._group)

    def fork(self) -> "Sampler":
        """Another sampler that draws from here on what this one would, whatever this one does."""
        twin = copy.copy(self)  # positions are never changed in place
        twin._streams = [stream.fork() for stream in self._streams]
        return twin

    @property
    def position(self) -> Position:
        states = [stream.state for stream in self._streams]
        left = [stream.left for stream in self._streams]
        return Position(tuple(states), tuple(left), self._last, self._last_used)

    def go_to(self, position: Position) -> None:
        """Draws from here on what the sampler would that was at this position; it is of shards of the same sizes."""
        for stream, state, left in zip(
            self._streams, position.generators, position.left, strict=True
        ):
            stream.go_to(state, left)
        self._last = position.last
        self._last_used = position.last_used


class _Stream:
    """The mini-batches of shards of one size, epoch after epoch."""

    def __init__(self, size: int, batch: int, seed: int) -> None:
        self._rng = generator(seed, Stream.MINI_BATCHES)
        self._shared = False  # with a fork, that must not notice when we draw
        self._size = size
        # of which one is 1
        self._per_epoch = max(1, size // batch)
        self._epochs = -(-batch // size)
        self.left = np.empty(
            (0, batch), np.int32
        )  # what is left of this epoch, [mini-batches, batch]

    def fill(self, out: NDArray[np.int32]) -> None:
        """The next mini-batches, [mini-batches, batch]."""
        done = 0
        while done < len(out):
            if not len(self.left):
                if self._shared:
                    self._rng, self._shared = copy.deepcopy(self._rng), False
                orders = [self._rng.permutation(self._size) for _ in range(self._epochs)]
                order = np.concatenate(orders).astype(np.int32)
                self.left = order[: self._per_epoch * out.shape[1]].reshape(
                    self._per_epoch, -1
                )
            taken = self.left[: len(out) - done]
            out[done : done + len(taken)] = taken
            self.left = self.left[len(taken) :]
            done += len(taken)

    @property
    def state(self) -> Mapping[str, Any]:
        return self._rng.bit_generator.state

    def go_to(self, state: Mapping[str, Any], left: NDArray[np.int32]) -> None:
        self._rng = generator(0, Stream.MINI_BATCHES)
        self._shared = False
        self._rng.bit_generator.state = dict(state)
        self.left = left

    def fork(self) -> "_Stream":
        self._shared = (
            True  # to copy the generator here would take longer than all the rest of a fork
        )
        return copy.copy(self)
