"""ρ̂, β̂ and δ̂ of a round, from the nodes' reports.

ρ̂ and β̂ are the nodes' own, weighted by D_i. δ̂ is from their gradients, as in the paper, or from the w_i(t) that are
here anyway: δ̂_i = ‖w_i(t) - w(t)‖ / ητ, the divergence of what the nodes stepped along, averaged over the interval.
Where no τ is chosen by it, it is what nodes say of the interval before (drift.py), and reports need not be kept for it.
What is not a finite, sane number never reaches the controller: that estimate stays what it was.

Where a node looks aside, to measure β̂_i: for one whose w_i(t₀) is w(t₀) itself.

A point lies a step's length from w, where the gradient changed the most the last time: done again and again, as in
power iteration, this turns to the steepest direction of all. The first time it lies where w came from.

More mini-batches than one to judge by, where mini-batches are small.

A step size that adapts goes by the loss and the smoothness at w(t₀). On a mini-batch of a sample or two both say
little: the loss may be 0 where the next sample's is not, and β̂_i may be that of the flattest sample of all, while η
must suit the steepest. So nodes whose mini-batches have fewer than `ENOUGH` samples look at several, and report the
mean of the losses and the largest β̂_i. Where nodes hold the same data (Case 3), they draw the same samples, and no
other node makes up for it.

How steep a node's loss is before any step was made, so that the first one has the right size.

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

import math
from dataclasses import dataclass, replace

import numpy as np

from fedbudget.arrays import Float32, Float64
from fedbudget.budget.control import Estimates
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards
from fedbudget.models.base import Model
from fedbudget.protocol.messages import Broadcast
from fedbudget.protocol.sums import ABSURD, Reports, Sums, norms, squared_norms


def next_estimates(
    previous: Estimates | None,
    reports: Reports,
    broadcast: Broadcast,
    mean: Float32,
    *,
    from_nodes: bool = False,
) -> tuple[Estimates | None, tuple[str, ...]]:
    """The estimates after a round, and the names of those that had to stay.

    Args:
      previous: those before it; None until a round has given all three.
      mean: what the w_i(t) were combined to, without statistics, [parameters].
      from_nodes: whether δ̂ is what nodes say of the interval before.
    """
    totals = reports.sums.totals
    fresh = {}
    delta = (
        _delta_from_nodes(reports.sums, broadcast)
        if from_nodes
        else _delta(reports, broadcast, mean)
    )
    if reports.sums.slopes:
        fresh["rho"] = _ratio(totals.rho, totals.rho_of)
        fresh["beta"] = _ratio(totals.beta, totals.beta_of)
    elif (
        delta == 0
    ):  # in the first round, of nodes that do not differ: then ρ and β have no part in G
        fresh["rho"] = fresh["beta"] = 0.0
    if delta is not None:
        fresh["delta"] = delta
    good = {name: value for name, value in fresh.items() if 0 <= value < ABSURD}
    kept = tuple(name for name in fresh if name not in good)
    if previous is not None:
        return replace(previous, **good), kept
    return Estimates(**good) if len(good) == 3 else None, kept


def _delta(reports: Reports, broadcast: Broadcast, mean: Float32) -> float | None:
    sums = reports.sums
    if not broadcast.request.gradient:
        distances = float(sums.total(reports.distance_sums("w", mean))[0])
        return _ratio(distances, sums.totals.used) / broadcast.span
    if sums.gradients is None:
        return None
    if not sums.totals.used:
        return math.nan
    distances = float(
        sums.total(reports.distance_sums("gradients", sums.mean(sums.gradients)))[0]
    )
    return _ratio(distances, sums.totals.used)


def _delta_from_nodes(sums: Sums, broadcast: Broadcast) -> float | None:
    if broadcast.drift is None or broadcast.round == 1:
        return None
    return _ratio(
        sums.totals.corrected if broadcast.drift.correct else sums.totals.plain,
        sums.totals.data,
    )


def _ratio(amount: float, of: float) -> float:
    return amount / of if of else math.nan


_PART = 2**16  # numbers at a time, because a copy in float64 would be much memory


def probe_points(w: Float32, way: Float32, steepest: Float32 | None, nodes: int) -> Float32:
    """Points a step's length from w, [nodes, parameters].

    Args:
      way: of one step, [parameters].
      steepest: by how much each node's gradient changed the last time, [nodes, parameters]; None at first.
    """
    if steepest is None:
        return np.repeat((w + way)[None], nodes, axis=0)
    length = np.linalg.norm(way.astype(np.float64))
    lengths = norms(steepest)[:, None]
    points = np.empty_like(steepest)
    with np.errstate(divide="ignore", invalid="ignore"):
        for first in range(0, len(w), _PART):
            some = slice(first, first + _PART)
            direction = steepest[:, some] / lengths
            points[:, some] = w[some] + length * np.where(
                np.isfinite(direction), direction, 0
            )
    return points


ENOUGH = 32

_NOWHERE = np.empty(
    (0, 0), np.float32
)  # in place of a w that nobody needs, and that may be large


@dataclass(frozen=True)
class Evidence:
    """What several mini-batches say.

    Args:
      losses, best_losses: mean F_i at w(t₀) and at w^f, [nodes].
      loss_change: mean change of F_i between w(t₀) and other points, [nodes].
      steepest: the largest change of ∇F_i between them, [nodes, parameters].
    """

    losses: Float64
    best_losses: Float64
    loss_change: Float64
    steepest: Float32


def mini_batches(batch: int | None) -> int:
    """How many to look at; 1 is the one that a round begins with anyway."""
    return 1 if batch is None else -(-ENOUGH // batch)


def one_of(indices: BatchIndices, number: int) -> BatchIndices:
    """One of the mini-batches; contiguous like all of them, or the kernels would be compiled a second time."""
    return BatchIndices(
        np.ascontiguousarray(indices.positions[:, number : number + 1]), indices.group
    )


def gather(
    model: Model,
    shards: Shards,
    indices: BatchIndices,
    w: Float32,
    best: Float32,
    points: Float32,
) -> Evidence:
    """Looks at all mini-batches of `indices`.

    Args:
      w, best: [parameters].
      points: where the loss and gradient are compared with those at w, [nodes, parameters].
    """
    losses, best_losses, change = np.zeros((3, len(shards)))
    steepest = np.zeros_like(points)
    size = np.zeros(len(shards))
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # what diverged gives no number, and so no estimate
        for number in range(indices.updates):
            one = one_of(indices, number)
            here = replace(model.descend(w[None], shards, one, 0.0, best), w=_NOWHERE)
            there = replace(model.descend(points, shards, one, 0.0), w=_NOWHERE)
            assert here.best_losses is not None
            losses += here.losses
            best_losses += here.best_losses
            change += np.abs(there.losses - here.losses)
            change_of_gradient = there.gradients - here.gradients
            del here, there
            squares = squared_norms(change_of_gradient)
            steeper = squares > size
            steepest[steeper] = change_of_gradient[steeper]
            size = np.fmax(squares, size)
            del change_of_gradient
    count = indices.updates
    return Evidence(losses / count, best_losses / count, change / count, steepest)


STEPS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
_FAR = (100.0, 1000.0)
_BEYOND = 3.0
"""How many times longer than the last of these a step may be."""
_UPDATES = 300
"""After how many updates an η must still do, with the gradient of now."""


def first_steepness(
    model: Model, shards: Shards, indices: BatchIndices, w: Float32, gradients: Float32
) -> Float64:
    """β̂_i of each node, [nodes]; NaN where the gradient is 0.

    Args:
      indices: the mini-batch of each node that its gradient is of.
      gradients: at w, [nodes, parameters].
    """
    lengths = norms(gradients)
    found = []
    with np.errstate(all="ignore"):  # a step far too long gives no number, and so is one
        for step in STEPS + _FAR:
            there = model.descend(
                w - np.float32(step) * gradients, shards, indices, 0.0
            ).gradients
            beta = norms(there, gradients) / (step * lengths)
            found.append(np.where(np.isfinite(beta), beta, np.inf))
    far = _far_steepness(np.array(found))
    slopes = np.array(found[: len(STEPS)])
    steps = np.array(STEPS)
    short = np.logical_and.accumulate(steps[:, None] * slopes <= 0.5, axis=0).sum(
        axis=0
    )  # how many are short enough
    last = np.maximum(short - 1, 0)
    node = np.arange(len(lengths))
    beyond = slopes[np.minimum(last + 1, len(STEPS) - 1), node]
    steep = np.where(
        np.isfinite(beyond), np.maximum(slopes[last, node], beyond), slopes[last, node]
    )
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
    turns = np.clip(
        steps[:, None] * slopes, 1e-30, 1e30
    )  # by how much of itself a gradient has changed
    beyond = turns > _UPDATES
    after = np.maximum(beyond.argmax(axis=0), 1)
    node = np.arange(slopes.shape[1])
    lower = turns[after - 1, node]
    upper = turns[after, node]
    with np.errstate(all="ignore"):  # where there is no such s
        part = np.clip(np.log(_UPDATES / lower) / np.log(upper / lower), 0.0, 1.0)
        far = steps[after - 1] * (steps[after] / steps[after - 1]) ** part
    return np.where(beyond.any(axis=0), _UPDATES / far, 0.0)


def searched_steepness(
    model: Model, shards: Shards, indices: BatchIndices, w: Float32
) -> Float64:
    """β̂_i of nodes that have no w_i(t₀) to compare with, [nodes]: along their own gradient."""
    gradients = model.descend(w[None], shards, indices, 0.0).gradients
    return first_steepness(model, shards, indices, w, gradients)


def own_steps(steepness: Float64, eta: float) -> Float32:
    """η_i of each node in the first round, [nodes]: 1/β̂_i, or η where there is no β̂_i."""
    known = np.isfinite(steepness) & (steepness > 0)
    return np.asarray(
        np.divide(1.0, steepness, where=known, out=np.full(len(known), eta)), np.float32
    )
