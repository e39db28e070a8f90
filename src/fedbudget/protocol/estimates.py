"""Estimates ρ̂, β̂ and δ̂: what nodes measure for them, and how the aggregator combines
it.

**At the aggregator** (`next_estimates`), ρ̂ and β̂ are means of the nodes' values,
weighted by D_i. δ̂ comes from the nodes' gradients, as in the paper, or from the w_i(t):
δ̂_i = ‖w_i(t) - w(t)‖ / ητ, the divergence of the mean gradients over the interval. If no
controller uses δ̂, nodes report it for the previous interval (drift.py), and the
aggregator need not keep their reports. A value that is not finite or not plausible never
reaches the controller: the previous estimate stays.

**Probe points** (`probe_points`). A node whose w_i(t₀) is w(t₀) itself compares gradients
at w and at a point one step away. The first point is the previous w. Later points lie in
the direction in which the gradient changed most before. As in power iteration, this turns
towards the steepest direction.

**Small mini-batches** (`gather`). An adaptive step size follows the loss and the
smoothness at w(t₀). One or two samples are too few for both: the loss may be 0 on one
sample and large on the next, and β̂_i may belong to the flattest sample, while η must suit
the steepest. Nodes with mini-batches of fewer than `ENOUGH` samples therefore evaluate
several mini-batches, and report the mean loss and the largest β̂_i. If nodes hold the same
data (Case 3) they draw the same samples, so other nodes do not compensate.

**The first step size** (`first_steepness`). A β̂ between two nearly equal points is local.
A β̂ between distant points in a flat region is too small. Before its first update a node
therefore tries steps along its own gradient, each ten times the one before, at one
gradient each. Let

    β(s) = ‖∇F_i(w - s g) - g‖ / s‖g‖,      g = ∇F_i(w).

The largest s with s β(s) ≤ ½, after which the gradient has changed by less than half of
itself, is a stable step that is long enough to measure. β̂_i is the larger of β(s) and
β(10 s), limited such that the step 1/β̂_i lies between s and 10 s.

This describes the start of the run only. A network with several layers often starts in a
flat region, because small layers hide one another, and becomes steeper later: β(s) rises
with s without limit. For linear models and for one hidden layer it falls or stays. A step
must therefore also suit the point that many steps lead to: it is at most s/300 for the s
with s β(s) = 300. With the current gradient, 300 updates lead that far, and there each of
them would change the gradient by its own length.
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

ENOUGH = 32
"""Samples that suffice for a loss and a smoothness."""
STEPS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Step lengths among which the first one is searched."""

_FAR = (100.0, 1000.0)  # further step lengths, only for the limit of 300 updates
_BEYOND = 3.0  # the first step is at most this multiple of the last of STEPS
_UPDATES = 300  # updates after which the first η must still be stable
_CHUNK = 2**16  # numbers per part, because a whole copy in float64 would take much memory
_NO_W = np.empty((0, 0), np.float32)  # replaces a large w that is not needed


def next_estimates(
    previous: Estimates | None,
    reports: Reports,
    broadcast: Broadcast,
    mean: Float32,
    *,
    from_nodes: bool = False,
) -> tuple[Estimates | None, tuple[str, ...]]:
    """Compute the estimates after a round.

    Args:
      previous: the estimates before it; None until a round has produced all three.
      reports: the reports of the round.
      broadcast: the broadcast of the round.
      mean: the combined w_i(t), without statistics, [parameters].
      from_nodes: whether nodes report δ̂ for the previous interval.

    Returns:
      The estimates, and the names of those that keep their previous value.
    """
    sums = reports.sums
    totals = sums.totals
    fresh = {}
    if from_nodes:
        delta = _delta_from_nodes(sums, broadcast)
    else:
        delta = _delta(reports, broadcast, mean)
    if sums.slopes:
        fresh["rho"] = _ratio(totals.rho, totals.rho_of)
        fresh["beta"] = _ratio(totals.beta, totals.beta_of)
    elif delta == 0:
        # Nodes do not differ in the first round: G then does not depend on ρ and β.
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
    center = sums.mean(sums.gradients)
    distances = float(sums.total(reports.distance_sums("gradients", center))[0])
    return _ratio(distances, sums.totals.used)


def _delta_from_nodes(sums: Sums, broadcast: Broadcast) -> float | None:
    if broadcast.drift is None or broadcast.round == 1:
        return None
    totals = sums.totals
    divergence = totals.corrected if broadcast.drift.correct else totals.plain
    return _ratio(divergence, totals.data)


def _ratio(amount: float, of: float) -> float:
    return amount / of if of else math.nan


def probe_points(w: Float32, way: Float32, steepest: Float32 | None, nodes: int) -> Float32:
    """Points one step away from w, [nodes, parameters].

    Args:
      w: [parameters].
      way: the vector of one step, [parameters].
      steepest: the last change of each node's gradient, [nodes, parameters]; None at
        first.
      nodes: number of nodes.
    """
    if steepest is None:
        return np.repeat((w + way)[None], nodes, axis=0)
    length = np.linalg.norm(way.astype(np.float64))
    lengths = norms(steepest)[:, None]
    points = np.empty_like(steepest)
    with np.errstate(divide="ignore", invalid="ignore"):
        for first in range(0, len(w), _CHUNK):
            some = slice(first, first + _CHUNK)
            direction = steepest[:, some] / lengths
            finite = np.where(np.isfinite(direction), direction, 0)
            points[:, some] = w[some] + length * finite
    return points


@dataclass(frozen=True)
class Evidence:
    """Measurements on several mini-batches.

    Args:
      losses, best_losses: mean F_i at w(t₀) and at w^f, [nodes].
      loss_change: mean change of F_i between w(t₀) and the probe points, [nodes].
      steepest: largest change of ∇F_i between them, [nodes, parameters].
    """

    losses: Float64
    best_losses: Float64
    loss_change: Float64
    steepest: Float32


def mini_batches(batch: int | None) -> int:
    """Return how many mini-batches to evaluate; 1 is the first one of the round itself."""
    return 1 if batch is None else -(-ENOUGH // batch)


def one_of(indices: BatchIndices, number: int) -> BatchIndices:
    """Return one of the mini-batches; contiguous, so that kernels are not compiled
    twice."""
    positions = np.ascontiguousarray(indices.positions[:, number : number + 1])
    return BatchIndices(positions, indices.group)


def gather(
    model: Model,
    shards: Shards,
    indices: BatchIndices,
    w: Float32,
    best: Float32,
    points: Float32,
) -> Evidence:
    """Evaluate all mini-batches of `indices`.

    Args:
      model: the model.
      shards: data of the nodes.
      indices: the mini-batches.
      w, best: w(t₀) and w^f, [parameters].
      points: probe points, [nodes, parameters].
    """
    losses, best_losses, change = np.zeros((3, len(shards)))
    steepest = np.zeros_like(points)
    size = np.zeros(len(shards))
    with np.errstate(over="ignore", invalid="ignore"):  # a diverged node has no estimate
        for number in range(indices.updates):
            one = one_of(indices, number)
            here = replace(model.descend(w[None], shards, one, 0.0, best), w=_NO_W)
            there = replace(model.descend(points, shards, one, 0.0), w=_NO_W)
            assert here.best_losses is not None
            losses += here.losses
            best_losses += here.best_losses
            change += np.abs(there.losses - here.losses)

            gradient_change = there.gradients - here.gradients
            del here, there  # frees the memory of large gradients
            squares = squared_norms(gradient_change)
            steeper = squares > size
            steepest[steeper] = gradient_change[steeper]
            size = np.fmax(squares, size)
            del gradient_change
    count = indices.updates
    return Evidence(losses / count, best_losses / count, change / count, steepest)


def first_steepness(
    model: Model, shards: Shards, indices: BatchIndices, w: Float32, gradients: Float32
) -> Float64:
    """Search β̂_i of each node along its gradient, [nodes]; NaN if the gradient is 0.

    Args:
      model: the model.
      shards: data of the nodes.
      indices: the mini-batch of each node on which its gradient was computed.
      w: [parameters].
      gradients: gradients at w, [nodes, parameters].
    """
    lengths = norms(gradients)
    tried = []
    with np.errstate(all="ignore"):  # a far too long step overflows, and counts as too long
        for step in STEPS + _FAR:
            points = w - np.float32(step) * gradients
            there = model.descend(points, shards, indices, 0.0).gradients
            beta = norms(there, gradients) / (step * lengths)
            tried.append(np.where(np.isfinite(beta), beta, np.inf))
    far = _far_steepness(np.array(tried))

    slopes = np.array(tried[: len(STEPS)])
    steps = np.array(STEPS)
    stable = np.logical_and.accumulate(steps[:, None] * slopes <= 0.5, axis=0)
    short = stable.sum(axis=0)
    last = np.maximum(short - 1, 0)
    node = np.arange(len(lengths))
    here = slopes[last, node]
    beyond = slopes[np.minimum(last + 1, len(STEPS) - 1), node]
    steep = np.where(np.isfinite(beyond), np.maximum(here, beyond), here)

    longest = steps[last] * np.where(last + 1 < len(STEPS), 10.0, _BEYOND)
    within = np.clip(steep, 1 / longest, 1 / steps[last])
    beta = np.maximum(np.where(short > 0, within, slopes[0]), far)
    return np.where(lengths > 0, beta, np.nan)


def _far_steepness(slopes: Float64) -> Float64:
    """300/s of each node for the least s with s β(s) = 300, [nodes]; 0 if there is none.

    Args:
      slopes: β(s) of each step and node, [steps, nodes]; s is interpolated between steps.
    """
    steps = np.array(STEPS + _FAR)
    # Relative change of the gradient after each step.
    turns = np.clip(steps[:, None] * slopes, 1e-30, 1e30)
    beyond = turns > _UPDATES
    after = np.maximum(beyond.argmax(axis=0), 1)
    node = np.arange(slopes.shape[1])
    lower = turns[after - 1, node]
    upper = turns[after, node]
    with np.errstate(all="ignore"):  # for nodes without such an s
        part = np.clip(np.log(_UPDATES / lower) / np.log(upper / lower), 0.0, 1.0)
        far = steps[after - 1] * (steps[after] / steps[after - 1]) ** part
    return np.where(beyond.any(axis=0), _UPDATES / far, 0.0)


def searched_steepness(
    model: Model, shards: Shards, indices: BatchIndices, w: Float32
) -> Float64:
    """Compute β̂_i of nodes that have no w_i(t₀) to compare with, [nodes]."""
    gradients = model.descend(w[None], shards, indices, 0.0).gradients
    return first_steepness(model, shards, indices, w, gradients)


def own_steps(steepness: Float64, eta: float) -> Float32:
    """η_i of each node in the first round, [nodes]: 1/β̂_i, or η without a β̂_i."""
    known = np.isfinite(steepness) & (steepness > 0)
    steps = np.full(len(known), eta)
    return np.asarray(np.divide(1.0, steepness, where=known, out=steps), np.float32)
