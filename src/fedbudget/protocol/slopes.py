"""By how much a loss or a gradient changes between two points: what ρ̂_i and β̂_i are made of."""

import numpy as np

from fedbudget.arrays import Float32, Float64
from fedbudget.protocol.drift import norms

SAME = 1e-10
"""Below this distance w_i(t) and w(t) count as equal, and ρ̂_i and β̂_i as 0."""


def distances(ours: Float32, theirs: Float32) -> Float64:
    """‖ours_i - theirs_i‖ of each node."""
    with np.errstate(over="ignore", invalid="ignore"):
        return norms(ours - theirs)


def slope(change: Float64, distance: Float64) -> Float64:
    """change / distance, 0 where the distance counts as none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(distance <= SAME, 0.0, change / distance)
