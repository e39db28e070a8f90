"""How steep a node's loss is before any step was made, so that the first one has the right size.

A β̂ between two points that are hardly apart is that of a point, and one between points far apart, on a loss that is
flat there, is too small. So a node tries steps along its own gradient, each ten times the one before, at the cost of a
gradient each. The largest s after which the gradient has changed by less than half of itself, s β(s) ≤ ½ with

    β(s) = ‖∇F_i(w - s g) - g‖ / s‖g‖,      g = ∇F_i(w),

is one that gradient descent can make and that is long enough to tell. What it gives is the larger of β(s) and β(10 s),
and no step 1/β̂ shorter than s, nor longer than the next.

That tells of where the run is, and not of where it goes. A network of several layers often begins where its loss is
flat, because small layers hide one another, and becomes the steeper the further it comes: β(s) rises with s, without
end, where that of a linear model or of one hidden layer falls or stays. So a step must do as well for where many of
them lead: it is no longer than s/300 for the s with s β(s) = 300. So far 300 updates take w with the gradient that it
has now, and there each of them would change the gradient by as much as all of it.
"""

import numpy as np

from fedbudget.arrays import Float32, Float64
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards
from fedbudget.models.base import Model
from fedbudget.protocol.norms import norms

STEPS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
_FAR = (100.0, 1000.0)
_BEYOND = 3.0
"""How many times longer than the last of these a step may be."""
_UPDATES = 300
"""After how many updates an η must still do, with the gradient of now."""


def first_steepness(model: Model, shards: Shards, indices: BatchIndices, w: Float32, gradients: Float32) -> Float64:
    """β̂_i of each node, [nodes]; NaN where the gradient is 0.

    Args:
      indices: the mini-batch of each node that its gradient is of.
      gradients: at w, [nodes, parameters].
    """
    lengths, found = norms(gradients), []
    with np.errstate(all="ignore"):  # a step far too long gives no number, and so is one
        for step in STEPS + _FAR:
            there = model.descend(w - np.float32(step) * gradients, shards, indices, 0.0).gradients
            beta = norms(there, gradients) / (step * lengths)
            found.append(np.where(np.isfinite(beta), beta, np.inf))
    far = _far_steepness(np.array(found))
    slopes, steps = np.array(found[: len(STEPS)]), np.array(STEPS)
    short = np.logical_and.accumulate(steps[:, None] * slopes <= 0.5, axis=0).sum(axis=0)  # how many are short enough
    last, node = np.maximum(short - 1, 0), np.arange(len(lengths))
    beyond = slopes[np.minimum(last + 1, len(STEPS) - 1), node]
    steep = np.where(np.isfinite(beyond), np.maximum(slopes[last, node], beyond), slopes[last, node])
    longest = steps[last] * np.where(last + 1 < len(STEPS), 10.0, _BEYOND)
    within = np.clip(steep, 1 / longest, 1 / steps[last])
    beta = np.maximum(np.where(short > 0, within, slopes[0]), far)
    return np.where(lengths > 0, beta, np.nan)


def _far_steepness(slopes: Float64) -> Float64:
    """300/s of each node, [nodes], for the least s with s β(s) = 300 among and between those tried; 0 where none is.

    Args:
      slopes: β(s) of each step and node, [steps, nodes].
    """
    steps = np.array(STEPS + _FAR)
    turns = np.clip(steps[:, None] * slopes, 1e-30, 1e30)  # by how much of itself a gradient has changed
    beyond = turns > _UPDATES
    after = np.maximum(beyond.argmax(axis=0), 1)
    node = np.arange(slopes.shape[1])
    lower, upper = turns[after - 1, node], turns[after, node]
    with np.errstate(all="ignore"):  # where there is no such s
        part = np.clip(np.log(_UPDATES / lower) / np.log(upper / lower), 0.0, 1.0)
        far = steps[after - 1] * (steps[after] / steps[after - 1]) ** part
    return np.where(beyond.any(axis=0), _UPDATES / far, 0.0)


def searched_steepness(model: Model, shards: Shards, indices: BatchIndices, w: Float32) -> Float64:
    """β̂_i of nodes that have no w_i(t₀) to compare with, [nodes]: along their own gradient."""
    gradients = model.descend(w[None], shards, indices, 0.0).gradients
    return first_steepness(model, shards, indices, w, gradients)


def own_steps(steepness: Float64, eta: float) -> Float32:
    """η_i of each node in the first round, [nodes]: 1/β̂_i, or η where there is no β̂_i."""
    known = np.isfinite(steepness) & (steepness > 0)
    return np.asarray(np.divide(1.0, steepness, where=known, out=np.full(len(known), eta)), np.float32)
