"""Where a node looks aside, to measure β̂_i: for one whose w_i(t₀) is w(t₀) itself.

A point lies a step's length from w, where the gradient changed the most the last time: done again and again, as in
power iteration, this turns to the steepest direction of all. The first time it lies where w came from.
"""

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.protocol.norms import norms

_PART = 2**16  # numbers at a time, because a copy in float64 would be much memory


def probe_points(w: Float32, way: Float32, steepest: Float32 | None, nodes: int) -> Float32:
    """Points a step's length from w, [nodes, parameters].

    Args:
      way: of one step, [parameters].
      steepest: by how much each node's gradient changed the last time, [nodes, parameters]; None at first.
    """
    if steepest is None:
        return np.repeat((w + way)[None], nodes, axis=0)
    length, lengths = np.linalg.norm(way.astype(np.float64)), norms(steepest)[:, None]
    points = np.empty_like(steepest)
    with np.errstate(divide="ignore", invalid="ignore"):
        for first in range(0, len(w), _PART):
            some = slice(first, first + _PART)
            direction = steepest[:, some] / lengths
            points[:, some] = w[some] + length * np.where(np.isfinite(direction), direction, 0)
    return points
