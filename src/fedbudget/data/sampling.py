"""Mini-batch sampling, by the paper's rules.

- All nodes start from the same seed, so shards of the same size are sampled at the same
  positions. Identical shards (Case 3) have identical mini-batches. Positions are drawn once
  per shard size, not once per node.
- Within an epoch no sample is used twice. Samples at the end of an epoch that do not fill a
  mini-batch are skipped.
- A node on another machine mixes a secret of its own into the seed, unless its owner trusts
  the aggregator. Otherwise the aggregator, which chooses the seed, would know the samples
  of each mini-batch.
- If a shard is smaller than a mini-batch, every mini-batch contains all of its samples,
  some of them one time more than others.
- Every local update draws a new mini-batch. The exception is the first update after an
  aggregation, which reuses the last mini-batch; with τ=1, a mini-batch is used at most
  twice. The reuse serves the paper's estimates; callers can turn it off with `fresh`.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Int64, require_shape
from fedbudget.errors import UserError
from fedbudget.randomness import Stream, generator

Positions: TypeAlias = NDArray[np.int32]
"""Positions of samples within a shard."""


@dataclass(frozen=True)
class BatchIndices:
    """The mini-batches of one round, as positions within a shard.

    Args:
      positions: [groups, updates, batch], int32; a batch of 0 means the whole shard.
      group: index of each node's group, [nodes].
      counts: number of updates of each node, [nodes]; it makes the first ones. None if
        every node makes all updates.
    """

    positions: Positions
    group: Int64
    counts: Int64 | None = None

    @property
    def updates(self) -> int:
        """The largest number of updates of a node."""
        return int(self.positions.shape[1])

    @property
    def updates_of(self) -> Int64:
        """The number of updates of each node, [nodes]."""
        if self.counts is None:
            return np.full(len(self.group), self.positions.shape[1])
        return self.counts

    @classmethod
    def whole(cls, nodes: int, updates: int = 1) -> "BatchIndices":
        """Use every sample in every update: deterministic gradient descent."""
        return cls(np.empty((1, updates, 0), np.int32), np.zeros(nodes, np.int64))

    def of(self, node: int, update: int, size: int) -> Positions:
        """Return the positions of one node's mini-batch in one update.

        Args:
          size: of the node's shard.
        """
        chosen = self.positions[self.group[node], update]
        return chosen if chosen.size else np.arange(size, dtype=np.int32)


@dataclass(frozen=True)
class SamplerState:
    """The state of a sampler, for checkpoints.

    Args:
      generators: state of each shard size's numpy generator.
      left: remaining mini-batches of each shard size's epoch, [mini-batches, batch].
      last: the latest mini-batches, [groups, batch].
      last_used: number of times they were used.
    """

    generators: tuple[Mapping[str, Any], ...]
    left: tuple[Positions, ...]
    last: Positions | None
    last_used: int


class Sampler:
    """Draws all mini-batches of a round at once.

    Args:
      sizes: number of samples of each node, [nodes].
      batch: samples per mini-batch, or None for the whole shard.
      seed: the same for every node.
      secret: mixed into the seed; None for the paper's common positions.
    """

    def __init__(
        self, sizes: Int64, batch: int | None, seed: int, secret: int | None = None
    ) -> None:
        if batch is not None and batch < 1:
            raise UserError(f"`batch_size` must be at least 1, not {batch}")
        self.batch = batch
        self._nodes = len(sizes)
        distinct, self._group = np.unique(sizes, return_inverse=True)
        self._streams: list[_Stream] = []
        if batch is not None:
            own = () if secret is None else (secret,)
            rng = partial(generator, seed, Stream.MINI_BATCHES, *own)
            self._streams = [_Stream(size, batch, rng()) for size in distinct.tolist()]
        self._last: Positions | None = None
        self._last_used = 0

    def round(
        self, updates: int, *, fresh: bool = False, epoch: bool = False
    ) -> BatchIndices:
        """Draw the mini-batches of a round.

        Args:
          updates: number of local updates; 0 returns the last mini-batch to evaluate on.
          fresh: draw a new mini-batch also for the first update.
          epoch: start a new epoch.
        """
        if self.batch is None:
            return BatchIndices.whole(self._nodes, max(1, updates))
        if epoch:
            for stream in self._streams:
                stream.left = stream.left[:0]

        positions = np.empty((len(self._streams), max(1, updates), self.batch), np.int32)
        reuse = updates == 0 or (not fresh and (updates > 1 or self._last_used < 2))
        reused = 0
        if self._last is not None and reuse:
            positions[:, 0] = self._last
            reused = 1
        for stream, own in zip(self._streams, positions, strict=True):
            stream.fill(own[reused:])

        if updates > 0:
            self._last_used = self._last_used + 1 if updates == reused else 1
            self._last = positions[:, -1]
        return BatchIndices(positions, self._group)

    def fork(self) -> "Sampler":
        """Return an independent sampler that continues from the same state."""
        twin = copy.copy(self)  # positions are never changed in place
        twin._streams = [stream.fork() for stream in self._streams]
        return twin

    @property
    def position(self) -> SamplerState:
        """The current state; `restore` continues from it."""
        states = tuple(stream.state for stream in self._streams)
        left = tuple(stream.left for stream in self._streams)
        return SamplerState(states, left, self._last, self._last_used)

    def restore(self, position: SamplerState) -> None:
        """Continue from the state of a sampler for shards of the same sizes.

        Raises:
          ValueError: positions are not those of such a sampler, as in a damaged file.
        """
        last = position.last
        if last is not None:
            require_shape(last, len(self._streams), self.batch or 0)
            for stream, row in zip(self._streams, last, strict=True):
                stream.require_inside(row)
        for stream, state, left in zip(
            self._streams, position.generators, position.left, strict=True
        ):
            stream.restore(state, left)
        self._last = last
        self._last_used = position.last_used


class _Stream:
    """The mini-batches of shards of one size.

    Attributes:
      left: remaining mini-batches of the epoch, [mini-batches, batch].
    """

    def __init__(self, size: int, batch: int, rng: np.random.Generator) -> None:
        self._rng = rng
        self._shared = False  # with a fork, which must not see our draws
        self._size = size
        # One of the next two is 1.
        self._per_epoch = max(1, size // batch)
        self._epochs = -(-batch // size)
        self.left = np.empty((0, batch), np.int32)

    def fill(self, out: Positions) -> None:
        """Write the next mini-batches to `out`, [mini-batches, batch]."""
        done = 0
        while done < len(out):
            if not len(self.left):
                if self._shared:
                    self._rng = copy.deepcopy(self._rng)
                    self._shared = False
                orders = [self._rng.permutation(self._size) for _ in range(self._epochs)]
                order = np.concatenate(orders).astype(np.int32)
                used = order[: self._per_epoch * out.shape[1]]
                self.left = used.reshape(self._per_epoch, -1)
            taken = self.left[: len(out) - done]
            out[done : done + len(taken)] = taken
            self.left = self.left[len(taken) :]
            done += len(taken)

    @property
    def state(self) -> Mapping[str, Any]:
        return self._rng.bit_generator.state

    def require_inside(self, positions: Positions) -> None:
        """Raise ValueError for positions outside of the shard."""
        if positions.size and not 0 <= positions.min() <= positions.max() < self._size:
            raise ValueError(f"mini-batches have samples beyond {self._size}")

    def restore(self, state: Mapping[str, Any], left: Positions) -> None:
        require_shape(left, len(left), self.left.shape[1])
        self.require_inside(left)
        self._rng = generator(0, Stream.MINI_BATCHES)
        self._shared = False
        self._rng.bit_generator.state = dict(state)
        self.left = left

    def fork(self) -> "_Stream":
        # Copying the generator now would take longer than the rest of the fork.
        self._shared = True
        return copy.copy(self)
