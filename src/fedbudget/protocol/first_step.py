"""How steep a node's loss is before any step was made, so that the first ones have the right size.

A β̂ between two points that are hardly apart is that of a point, and one between points far apart, on a loss that is
flat there, is too small. So a node tries steps along its own gradient, at the cost of a gradient each: ten times as
long as the one before, and then between the last that was short enough and the next. Short enough is one after which
the gradient has changed by less than half of itself, s β(s) ≤ ½ with

    β(s) = ‖∇F_i(w - s g) - g‖ / s‖g‖,      g = ∇F_i(w):

one that gradient descent can make and that is long enough to tell. What it gives is the larger of β(s) and that of the
next step tried, and no step 1/β̂ shorter than s, nor longer than ten times s.
"""

import numpy as np

from fedbudget.arrays import Float32, Float64
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards
from fedbudget.models.base import Model
from fedbudget.protocol.drift import norms

STEPS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
BETWEEN = 10 ** (1 / 3)
"""How many times longer than the last that was short enough further steps are; two of these fit before the next."""
_BEYOND = 3.0
"""How many times longer than the last of all a step may be."""


def first_steepness(model: Model, shards: Shards, indices: BatchIndices, w: Float32, gradients: Float32) -> Float64:
    """β̂_i of each node, [nodes]; NaN where the gradient is 0.

    Args:
      indices: the mini-batch of each node that its gradient is of.
      gradients: at w, [nodes, parameters].
    """
    lengths = norms(gradients)

    def slopes(steps: Float64) -> Float64:
        """β(s) with a step of each node; infinite where it was far too long."""
        with np.errstate(all="ignore"):
            points = w - steps.astype(np.float32)[:, None] * gradients
            change = model.descend(points, shards, indices, 0.0).gradients - gradients
            beta = norms(change) / (steps * lengths)
        return np.where(np.isfinite(beta), beta, np.inf)

    step, slope, beyond = np.zeros((3, len(lengths)))  # the last that was short enough, and β of the next
    going = np.ones(len(lengths), dtype=bool)
    for longer in STEPS:
        tried = slopes(np.full_like(step, longer))
        if longer == STEPS[0]:
            at_least = tried
        short = going & (longer * tried <= 0.5)
        beyond = np.where(going & ~short, tried, beyond)
        step, slope, going = np.where(short, longer, step), np.where(short, tried, slope), short
    longest = np.where(going, _BEYOND, 10.0)
    refining = ~going & (step > 0)
    for _ in range(2):
        longer_steps = np.where(refining, step * BETWEEN, step)
        tried = slopes(np.maximum(longer_steps, STEPS[0]))
        short = refining & (longer_steps * tried <= 0.5)
        beyond = np.where(refining & ~short, tried, beyond)
        step, slope, refining = np.where(short, longer_steps, step), np.where(short, tried, slope), short
    steep = np.where(np.isfinite(beyond), np.maximum(slope, beyond), slope)
    with np.errstate(divide="ignore", invalid="ignore"):
        beta = np.where(step > 0, np.clip(steep, 1 / (longest * step), 1 / step), at_least)
    return np.where(lengths > 0, beta, np.nan)
