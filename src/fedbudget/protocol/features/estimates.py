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

A gradient may have almost no part along the steepest direction, for example if features
are collinear. Local updates would then explode along it. Two more gradients therefore
continue as power iteration (`_steepest`): the change of the gradient at the step s is the
next direction, at the same distance from w. β̂_i is the largest slope found. K-means is left
out: its gradient jumps, so slopes over short distances have no meaning.

This describes the start of the run only. A network with several layers often starts in a
flat region, because small layers hide one another, and becomes steeper later: β(s) rises
with s without limit. For linear models and for one hidden layer it falls or stays. A step
must therefore also suit the point that many steps lead to: it is at most s/300 for the s
with s β(s) = 300. With the current gradient, 300 updates lead that far, and there each of
them would change the gradient by its own length.

**Step sizes of steep nodes** (`_take_own_steps`). η suits the mean loss. The loss of one
node may be so much steeper that its own updates diverge with η. Such a node uses

    η_i = min(η, 1.5/β̄_i),      β̄_i ← max(β̂_i, β̂_i^0.1 β̄_i^0.9),

and reports w(t₀) - ητ times its mean gradient, like all others: drift correction and the
fixed point of the mean stay the same. In the first round η_i is 1/β̂_i at all nodes.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from fedbudget.arrays import Float32, Float64, require_shape
from fedbudget.budget.control import Estimates
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards
from fedbudget.models.base import Model
from fedbudget.protocol.features.drift import (
    DriftCorrection,
    DriftPart,
    DriftState,
    combined_of,
)
from fedbudget.protocol.features.feature import (
    Feature,
    FeatureState,
    FleetState,
    LocalRound,
    NodeMemory,
    Reported,
    RoundResult,
    register_feature,
)
from fedbudget.protocol.messages import Broadcast, TrainRound
from fedbudget.protocol.sums import (
    ABSURD,
    SAME,
    Sums,
    norms,
    ratio,
    slope,
    squared_norms,
)
from fedbudget.protocol.update import with_statistics_of, without_statistics

ENOUGH = 32
"""Samples that suffice for a loss and a smoothness."""
STEPS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Step lengths among which the first one is searched."""

_FAR = (100.0, 1000.0)  # further step lengths, only for the limit of 300 updates
_BEYOND = 3.0  # the first step is at most this multiple of the last of STEPS
_UPDATES = 300  # updates after which the first η must still be stable
_TURNS = 2  # gradients of power iteration in the first search
_LONGEST = 1.5  # largest η_i β̄_i; at 2, updates no longer converge
_KEPT = 0.9  # weight of log β̄_i while it falls
_CHUNK = 2**16  # numbers per part, because a whole copy in float64 would take much memory
_NO_W = np.empty((0, 0), np.float32)  # replaces a large w that is not needed


@dataclass(frozen=True)
class EstimatesState(FeatureState):
    """Estimates at the aggregator.

    Args:
      values: ρ̂, β̂, δ̂; None until a round has produced all three.
      kept: names of the estimates that the last round could not renew.
    """

    values: Estimates | None = None
    kept: tuple[str, ...] = ()

    def require_possible(self, w: Float32) -> None:
        values = self.values
        if values is not None and not (
            0 <= values.rho < math.inf and 0 <= values.beta < math.inf
        ):
            raise ValueError(f"estimates are {values}")


@dataclass(frozen=True)
class Steepness(NodeMemory):
    """What nodes know of their own β.

    Args:
      beta: β̄_i, [nodes]; NaN before the first β̂_i.
      change: change of ∇F_i along its steepest known direction, [nodes, parameters]; None
        before the first probe.
    """

    beta: Float64
    change: Float32 | None = None

    def then(self, beta: Float64) -> "Steepness":
        """Follow new β̂_i, [nodes]; β̄_i stays where they are not finite."""
        known = np.isfinite(self.beta)
        before = np.where(known, self.beta, beta)
        after = np.maximum(beta, beta ** (1 - _KEPT) * before**_KEPT)
        return replace(self, beta=np.where(np.isfinite(beta), after, self.beta))

    def require_shapes(self, nodes: int, parameters: int, held_out: Any) -> None:
        require_shape(self.beta, nodes)
        if self.change is not None:
            require_shape(self.change, nodes, parameters)


@dataclass
class _Measured:
    """Measurements of the nodes within a round.

    Args:
      several: mini-batches to measure on; None for the first one of the round.
      evidence: measurements on several mini-batches.
      losses, gradients: F_i and ∇F_i at the points, on the first mini-batch.
      searched: β̂_i of nodes that have no w_i(t₀) to compare with.
      distance: distances of the points from w(t₀), [nodes].
      probes: whether some points are probe points.
      change: change of ∇F_i between w(t₀) and the points, [nodes, parameters].
    """

    several: BatchIndices | None = None
    evidence: "Evidence | None" = None
    losses: Float64 | None = None
    gradients: Float32 | None = None
    searched: Float64 | None = None
    distance: Float64 | None = None
    probes: bool = False
    change: Float32 | None = None


@register_feature
@dataclass(frozen=True)
class EstimateSlopes(Feature):
    """Estimates of ρ, β and δ.

    Args:
      gradient: whether nodes send gradients, from which δ̂ follows; otherwise δ̂ follows
        from the w_i(t).
      from_nodes: whether nodes report δ̂ of the previous interval, with drift correction.
      curvature: whether the step size adapts: β̂_i is measured also if w_i equals w, on
        enough samples.
      one_step: whether β̂_i is measured over one local update. A node searches its first
        β̂_i. It may use its own step size η_i, and then reports the w_i that η would have
        reached.
    """

    name: ClassVar[str] = "estimates"
    types: ClassVar[tuple[type, ...]] = (EstimatesState, Steepness)
    gradient: bool = False
    from_nodes: bool = False
    curvature: bool = False
    one_step: bool = False

    def reported(self, first: bool) -> Reported:
        if first and not self.one_step:
            return Reported()
        vectors = ("gradients",) if self.gradient else ()
        return Reported({"rho": 1e4, "beta": 100.0}, optional=True, vectors=vectors)

    # Nodes.

    def begin(self, local: LocalRound) -> None:
        measured = _Measured()
        local.scratch[self.name] = measured
        local.fresh = self.curvature
        batch = local.sampler.batch
        if self.curvature and batch is not None and batch < ENOUGH:
            measured.several = local.sampler.round(mini_batches(batch), fresh=True)

    def measure(self, local: LocalRound) -> None:
        measured: _Measured = local.scratch[self.name]
        model = local.model
        w = local.broadcast.w
        last = local.last
        training = isinstance(local.broadcast, TrainRound)
        if last is None or last.w is None:
            if self.one_step and training:
                first = one_of(local.indices, 0)
                measured.searched = searched_steepness(model, local.shards, first, w)
                self._take_own_steps(local, measured.searched)
            return
        memory: Steepness | None = local.memories.get(self.name)
        if self.one_step and training and memory is not None:
            self._take_own_steps(local, memory.beta)
        points = self._points(local, last, last.w, measured)
        if measured.several is not None:
            measured.evidence = gather(
                model, local.shards, measured.several, w, local.best, points
            )
        elif training:
            first = one_of(local.indices, 0)
            there = model.descend(points, local.shards, first, 0.0)
            measured.losses = there.losses
            measured.gradients = there.gradients

    def _take_own_steps(self, local: LocalRound, steepness: Float64) -> None:
        """Use η_i, and report the w_i that η would have reached."""
        eta = float(local.eta)
        if local.broadcast.round == 1:
            etas = own_steps(steepness, eta)
        else:
            etas = np.fmin(own_steps(steepness / _LONGEST, eta), np.float32(eta))
            if (etas == np.float32(eta)).all():
                return
        local.eta = etas
        with np.errstate(over="ignore"):  # a node that diverged is left out later
            local.scale_by(np.float32(eta) / etas)

    def _points(
        self, local: LocalRound, last: FleetState, own: Float32, measured: _Measured
    ) -> Float32:
        """Return the points to compare loss and gradient at w(t₀) with, [n, parameters].

        A point is w_i(t₀). With `one_step` it is as far from w(t₀) as one update of the
        node deviates from the mean update. For the step size, a node whose w_i(t₀) equals
        w(t₀) probes another point.
        """
        w = local.broadcast.w
        before = last.broadcast
        steps = np.float32(1)
        if isinstance(before, TrainRound):
            steps = np.float32(max(1, before.effective))
        statistics = local.statistics
        if self.one_step:
            own = w + (own - combined_of(local.broadcast)) / steps
        if statistics:
            own = with_statistics_of(w, own, statistics)
        distance = norms(own, w)
        measured.distance = distance
        same = distance <= SAME
        measured.probes = self.curvature and bool(same.any())
        if not measured.probes:
            return own
        way = (w - with_statistics_of(w, before.w, statistics)) / steps
        memory: Steepness | None = local.memories.get(self.name)
        steepest = None if memory is None else memory.change
        probes = probe_points(w, way, steepest, len(own))
        points = np.where(same[:, None], probes, own)
        measured.distance = norms(points, w)
        return points

    def end(self, local: LocalRound) -> None:
        evidence = local.scratch[self.name].evidence
        if evidence is not None:
            local.losses = evidence.losses
            local.best_losses = evidence.best_losses

    def report(self, local: LocalRound) -> Mapping[str, Float64 | Float32]:
        if "rho" not in local.broadcast.report.numbers:
            return {}
        measured: _Measured = local.scratch[self.name]
        rho, beta = self._slopes(local, measured)
        self._remember(local, measured, beta)
        values: dict[str, Float64 | Float32] = {"rho": rho, "beta": beta}
        if self.gradient:
            assert local.gradients is not None
            shift = local.scratch.get(DriftCorrection.name)
            gradients = local.gradients if shift is None else local.gradients + shift
            values["gradients"] = gradients
        return values

    def _remember(self, local: LocalRound, measured: _Measured, beta: Float64) -> None:
        if not (self.one_step or measured.probes):
            return
        memory: Steepness | None = local.memories.get(self.name)
        if memory is None:
            memory = Steepness(np.full(len(beta), np.nan))
        memory = memory.then(beta)
        if measured.probes:
            memory = replace(memory, change=measured.change)
        local.memories[self.name] = memory

    def _slopes(self, local: LocalRound, measured: _Measured) -> tuple[Float64, Float64]:
        """Return ρ̂_i and β̂_i between w_i(t₀) and w(t₀); NaN if a node has no w_i(t₀)."""
        with np.errstate(over="ignore", invalid="ignore"):  # of nodes that diverged
            if measured.evidence is not None:
                losses = measured.evidence.loss_change
                gradients = measured.evidence.steepest
            elif measured.losses is not None and measured.gradients is not None:
                assert local.losses is not None
                assert local.gradients is not None
                losses = np.abs(measured.losses - local.losses)
                gradients = measured.gradients - local.gradients
            else:
                none = np.full(len(local.numbers), np.nan)
                return none, none if measured.searched is None else measured.searched
        measured.change = gradients
        distance = measured.distance
        assert distance is not None
        rho, beta = slope(np.stack([losses, norms(gradients)]), distance)
        return rho, beta

    # Aggregator.

    def first(self, w: Float32) -> EstimatesState:
        return EstimatesState()

    def after(self, state: EstimatesState, result: RoundResult) -> EstimatesState:
        after = self._next(state, result)
        return _with_coming_delta(
            after, result.states, result.broadcast.by_kind.get(DriftPart)
        )

    def _next(self, state: EstimatesState, result: RoundResult) -> EstimatesState:
        sums = result.sums
        fresh = {}
        delta = self._delta(sums, result)
        if "rho" in sums.totals:
            fresh["rho"] = sums.weighted_mean("rho")
            fresh["beta"] = sums.weighted_mean("beta")
        elif delta == 0:
            # Nodes do not differ in the first round: G then does not depend on ρ and β.
            fresh["rho"] = fresh["beta"] = 0.0
        if delta is not None:
            fresh["delta"] = delta
        good = {name: value for name, value in fresh.items() if 0 <= value < ABSURD}
        kept = tuple(name for name in fresh if name not in good)
        values = state.values
        if values is not None:
            values = replace(values, **good)
        elif len(good) == 3:
            values = Estimates(**good)
        return EstimatesState(values, kept)

    def _delta(self, sums: Sums, result: RoundResult) -> float | None:
        broadcast = result.broadcast
        if self.from_nodes:
            part = broadcast.by_kind.get(DriftPart)
            if part is None or broadcast.round == 1:
                return None
            return sums.weighted_mean("corrected" if part.correct else "plain")
        used = sums.totals["used"]
        if not self.gradient:
            mean = without_statistics(result.mean, result.statistics)
            distances = float(sums.total(sums.distance_sums("w", mean))[0])
            return ratio(distances, used) / broadcast.span
        if "gradients" not in sums.vectors:
            return None
        if not used:
            return math.nan
        center = sums.mean("gradients")
        distances = float(sums.total(sums.distance_sums("gradients", center))[0])
        return ratio(distances, used)

    def recorded(
        self, state: EstimatesState, result: RoundResult | None
    ) -> Mapping[str, Any]:
        kept = () if result is None else state.kept
        return {"estimates": state.values, "kept": kept}

    def forget(
        self,
        state: EstimatesState,
        nodes: Collection[int],
        states: Mapping[str, FeatureState],
        broadcast: Broadcast,
    ) -> EstimatesState:
        return _with_coming_delta(state, states, broadcast.by_kind.get(DriftPart))

    def recovered(self, state: EstimatesState) -> EstimatesState:
        return EstimatesState()


def _with_coming_delta(
    state: EstimatesState, states: Mapping[str, FeatureState], last: DriftPart | None
) -> EstimatesState:
    """Replace δ̂ when drift correction is switched on or off for the coming round.

    Args:
      last: drift correction of the last round.
    """
    drift = states.get(DriftCorrection.name)
    if state.values is None or last is None or not isinstance(drift, DriftState):
        return state
    delta = drift.coming_delta
    if delta is None or last.correct == drift.coming.correct:
        return state
    return replace(state, values=replace(state.values, delta=delta))


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
    short = np.zeros(len(lengths), np.int64)  # number of stable steps
    with np.errstate(all="ignore"):  # a far too long step overflows, and counts as too long
        for number, step in enumerate(STEPS + _FAR):
            points = w - np.float32(step) * gradients
            there = model.descend(points, shards, indices, 0.0).gradients
            beta = norms(there, gradients) / (step * lengths)
            tried.append(np.where(np.isfinite(beta), beta, np.inf))
            if number == 0:
                change = there - gradients
            if number < len(STEPS):
                stable = (short == number) & (step * tried[-1] <= 0.5)
                short += stable
                change[stable] = there[stable] - gradients[stable]
    far = _far_steepness(np.array(tried))

    slopes = np.array(tried[: len(STEPS)])
    steps = np.array(STEPS)
    last = np.maximum(short - 1, 0)
    node = np.arange(len(lengths))
    here = slopes[last, node]
    beyond = slopes[np.minimum(last + 1, len(STEPS) - 1), node]
    steep = np.where(np.isfinite(beyond), np.maximum(here, beyond), here)

    longest = steps[last] * np.where(last + 1 < len(STEPS), 10.0, _BEYOND)
    within = np.clip(steep, 1 / longest, 1 / steps[last])
    beta = np.maximum(np.where(short > 0, within, slopes[0]), far)
    if getattr(model, "smooth", True):
        distances = steps[last] * lengths
        across = _steepest(model, shards, indices, w, gradients, change, distances)
        beta = np.maximum(beta, across)
    return np.where(lengths > 0, beta, np.nan)


def _steepest(
    model: Model,
    shards: Shards,
    indices: BatchIndices,
    w: Float32,
    gradients: Float32,
    change: Float32,
    distances: Float64,
) -> Float64:
    """Largest slope of ∇F_i that power iteration finds, [nodes]; 0 if there is none.

    Args:
      model: the model.
      shards: data of the nodes.
      indices: the mini-batch of each node on which its gradient was computed.
      w: [parameters].
      gradients: gradients at w, [nodes, parameters].
      change: change of the gradient at the first point, [nodes, parameters].
      distances: distance of all points from w, [nodes].
    """
    largest = np.zeros(len(gradients))
    with np.errstate(all="ignore"):  # a gradient that does not change has no direction
        for _ in range(_TURNS):
            lengths = (distances / norms(change)).astype(np.float32)
            points = w + lengths[:, None] * change
            change = model.descend(points, shards, indices, 0.0).gradients - gradients
            slopes = norms(change) / distances
            largest = np.fmax(largest, np.where(np.isfinite(slopes), slopes, 0))
    return largest


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
