"""Held-out rows of nodes (validation.py), in blocks whose losses are independent."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards
from fedbudget.models.base import Model
from fedbudget.protocol.sums import LARGEST

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
