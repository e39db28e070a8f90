"""Norms of vectors without copies of them: squares and sums are made in float64, a part at a time.

The parts are those that numpy's own sum is made of (halves of halves, of a multiple of eight numbers), and so the sum
is numpy's to the bit, whatever the parts' size.
"""

import numpy as np

from fedbudget.arrays import Float32, Float64

SAME = 1e-10
"""Below this distance w_i(t) and w(t) count as equal, and ρ̂_i and β̂_i as 0."""

_PART = 2**16  # numbers


def norms(vectors: Float32, others: Float32 | None = None) -> Float64:
    """‖v_i - o_i‖ of each node, [nodes]; what diverged gives no number, and so no estimate.

    Args:
      vectors: [nodes, parameters].
      others: the same, or one for all; 0 when not given.
    """
    return np.asarray(np.sqrt(squared_norms(vectors, others)))


def squared_norms(vectors: Float32, others: Float32 | None = None) -> Float64:
    """The squares of `norms`."""
    nodes, parameters = vectors.shape
    rows = max(1, _PART // max(1, parameters))
    if nodes <= rows and parameters <= _PART:
        return _squared_norms(vectors, others)
    others = None if others is None else np.broadcast_to(others, vectors.shape)
    parts = [slice(first, first + rows) for first in range(0, nodes, rows)]
    return np.concatenate([_squared_norms(vectors[part], None if others is None else others[part]) for part in parts])


def slope(change: Float64, distance: Float64) -> Float64:
    """change / distance, [nodes], 0 where the distance counts as none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(distance <= SAME, 0.0, change / distance)


def _squared_norms(vectors: Float32, others: Float32 | None) -> Float64:
    parameters = vectors.shape[1]
    if parameters > _PART:
        half = parameters // 2
        half -= half % 8
        first, second = (slice(None), slice(half)), (slice(None), slice(half, None))
        return _squared_norms(vectors[first], None if others is None else others[first]) + _squared_norms(
            vectors[second], None if others is None else others[second]
        )
    with np.errstate(over="ignore", invalid="ignore"):
        apart = vectors if others is None else vectors - others
        return np.asarray(np.square(apart, dtype=np.float64).sum(axis=1))
