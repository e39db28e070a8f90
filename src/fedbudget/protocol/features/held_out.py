"""Held-out rows of nodes (validation.py), in blocks whose losses are independent.

A `share` of the rows is held out: 15 %, and more if all nodes together have few rows
(`share_for`). A node with n rows holds out `share` of them, at most `MOST_ROWS`, and
none if that is fewer than `FEWEST_ROWS`: a mean over fewer rows is too noisy, and reveals
too much of each row. The positions depend on n and the seed alone. So nodes with identical
shards hold out the same rows, and a node holds out the same rows on every engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards
from fedbudget.models.base import Model
from fedbudget.protocol.sums import LARGEST
from fedbudget.randomness import Stream, generator

SHARE = 0.15
LARGEST_SHARE = 0.3
ENOUGH_ROWS = 150
"""Share of rows that is held out: more of few rows, up to `LARGEST_SHARE`, to have
`ENOUGH_ROWS` rows over all nodes. With fewer, chance decides which w looks best."""

FEWEST_ROWS = 10
MOST_ROWS = 1000
"""Limits of a node's held-out rows."""

BLOCKS = 8
BLOCK_ROWS = 5
"""Largest number of blocks of a node's held-out rows, and fewest rows of a block."""


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows of n nodes, in blocks.

    Args:
      blocks: the rows of each block.
      owner: index of each block's node, [blocks].
      weights: share of each block in the rows of its node, [blocks].
      rows: number of held-out rows of each node, [n].
      whole: selects every row of each block.
      correction: k/(k-1) for k blocks of a node, [n].
    """

    blocks: Shards
    owner: Int64
    weights: Float64
    rows: Int64
    whole: BatchIndices
    correction: Float64

    @classmethod
    def of(cls, shards: Shards, held_out: Sequence[Int64]) -> "HeldOut":
        """Divide each node's held-out rows into blocks."""
        parts = []
        owner = []
        for node, rows in enumerate(held_out):
            if len(rows):
                blocks = min(BLOCKS, max(1, len(rows) // BLOCK_ROWS))
                parts += np.array_split(rows, blocks)
                owner += [node] * blocks
        sizes = np.array([len(rows) for rows in held_out], np.int64)
        owners = np.array(owner, np.int64)
        divided = Shards.of(shards.table, parts)
        counts = np.bincount(owners, minlength=len(sizes))
        return cls(
            divided,
            owners,
            divided.size / sizes[owners],
            sizes,
            BatchIndices.whole(len(owners)),
            counts / np.maximum(1, counts - 1),
        )

    def losses(self, model: Model, w: Float32) -> Float64:
        """Return the loss of w on each block, [blocks]; finite, also if w diverged."""
        if not len(self.owner):
            return np.zeros(0)
        with np.errstate(over="ignore", invalid="ignore"):
            losses = model.losses(w[None], self.blocks, self.whole)
        return np.where(np.isnan(losses), LARGEST, losses).clip(-LARGEST, LARGEST)

    def compare(self, losses: Float64, best: Float64) -> dict[str, Float64]:
        """Return figures of each node, [n], from the block losses of w and of w^v.

        `loss` and `best` are means over rows. `variance` is the squared standard error of
        their difference.
        """
        nodes = len(self.rows)
        gaps = losses - best
        loss = np.bincount(self.owner, self.weights * losses, nodes)
        best_loss = np.bincount(self.owner, self.weights * best, nodes)
        gap = np.bincount(self.owner, self.weights * gaps, nodes)
        squares = np.square(self.weights * (gaps - gap[self.owner]))
        variance = np.bincount(self.owner, squares, nodes) * self.correction
        figures = {"loss": loss, "best": best_loss, "variance": variance}
        return {name: np.asarray(each, np.float64) for name, each in figures.items()}


def share_for(rows: int) -> float:
    """Return the share to hold out of all rows of a run.

    >>> share_for(300), share_for(750), share_for(10_000)
    (0.3, 0.2, 0.15)
    """
    return min(LARGEST_SHARE, max(SHARE, ENOUGH_ROWS / max(1, rows)))


def held_out_rows(rows: int, share: float = SHARE) -> int:
    """Return how many of a node's rows are held out.

    >>> held_out_rows(60), held_out_rows(100), held_out_rows(100_000)
    (0, 15, 1000)
    """
    held_out = min(round(share * rows), MOST_ROWS)
    return held_out if FEWEST_ROWS <= held_out < rows else 0


def split(shards: Shards, share: float, seed: int) -> tuple[Shards, HeldOut]:
    """Split the shards of nodes into rows to train on and held-out rows.

    Args:
      shards: all rows of the nodes.
      share: share to hold out.
      seed: seed of the run.

    Returns:
      the rows to train on, and the held-out rows.
    """
    if not any(held_out_rows(int(size), share) for size in shards.size):
        return shards, HeldOut.of(shards, [np.empty(0, np.int64)] * len(shards))
    known: dict[tuple[int, int], tuple[Any, Any]] = {}
    train = []
    held_out = []
    for node in range(len(shards)):
        key = int(shards.start[node]), int(shards.size[node])
        if key not in known:
            rows = shards.rows_of(node)
            count = held_out_rows(len(rows), share)
            order = generator(seed, Stream.VALIDATION, len(rows)).permutation(len(rows))
            known[key] = rows[np.sort(order[count:])], rows[order[:count]]
        kept, out = known[key]
        train.append(kept)
        held_out.append(out)
    return Shards.of(shards.table, train), HeldOut.of(shards, held_out)
