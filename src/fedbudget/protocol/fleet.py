"""Algorithm 3 for n ≥ 1 nodes at once. An edge device is a fleet of one.

A round has three parts, so that an engine can read its meters between them. Only `update`
makes local updates; the rest counts as aggregation, as in the paper:

    receive(broadcast)   store w(t₀), update drift correction from the previous interval,
                         evaluate what the estimates need at w_i(t₀)
    update()             τ local updates from w(t₀)
    report()             w_i(t), the losses, and ρ̂_i, β̂_i, ∇F_i(w(t₀)) if requested

A round may fail: a report is late, or the aggregator resumes from an earlier round. The
fleet then continues from a `fork` taken before it. A fleet whose process ends passes its
`memory` to the next fleet of the same nodes.

Rules of this file:

- The loss and gradient at w(t₀) are a by-product of the first local update, and the loss at
  w^f comes from the same pass over its mini-batch. Only those at w_i(t₀) need an evaluation
  of their own. All of them use that one mini-batch.
- If the step size adapts, three things differ. That mini-batch is a new one, not the last
  of the previous round. Small mini-batches are replaced by several (estimates.py). A node
  whose w_i(t₀) equals w(t₀) probes another point for its β̂_i.
- If nodes search β̂_i in the first round (estimates.py), a node uses its own step size
  η_i = 1/β̂_i in that round. It reports the w_i that η would have reached,
  w_i ← w + η/η_i (w_i - w), and the aggregator rescales it.
- With momentum, nodes repeat a part of the last step of w: each update adds a τ-th of it to
  its step along the gradient. Gradients are then evaluated close to the coming w.
- If nodes make different numbers of updates (workload.py), each makes its own τ_i and
  reports the w_i that τ_eff updates would have reached. All draw as many mini-batches as
  the node with the most updates. So nodes draw the same ones in one fleet or in many.
- If vectors are compressed (compression.py), w_i is the vector that will arrive, also in
  all that follows here.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedbudget.arrays import Float32, Float64
from fedbudget.data.sampling import BatchIndices, Sampler
from fedbudget.data.shards import Shards
from fedbudget.models.base import Descent, Model
from fedbudget.protocol.compression import SentVectors
from fedbudget.protocol.drift import NOTHING, Correction, mean_gradient, next_mean
from fedbudget.protocol.estimates import (
    Evidence,
    gather,
    mini_batches,
    one_of,
    own_steps,
    probe_points,
    searched_steepness,
)
from fedbudget.protocol.messages import Broadcast, Drift, LocalError, PeerError, Report
from fedbudget.protocol.sample_privacy import NodeNoise, SampleUpdates
from fedbudget.protocol.state import FleetState, extrapolated
from fedbudget.protocol.sums import SAME, norms, slope
from fedbudget.protocol.update import descend_near, scaled_from, with_statistics_of


class Fleet:
    """n nodes with their shards.

    Args:
      model: the model to train.
      shards: the nodes' data.
      batch: samples in a mini-batch; None for whole shards (deterministic gradient
        descent).
      seed: seed of the mini-batches; the same for all nodes of all fleets.
      numbers: the nodes' numbers among all nodes of the run; 0..n-1 by default.
      noise: noise of the nodes, for per-sample privacy.
    """

    def __init__(
        self,
        model: Model,
        shards: Shards,
        *,
        batch: int | None,
        seed: int,
        numbers: Sequence[int] | None = None,
        noise: NodeNoise | None = None,
    ) -> None:
        self.model = model
        self.shards = shards
        chosen = range(len(shards)) if numbers is None else numbers
        self.numbers = np.asarray(chosen, dtype=np.int64)
        if len(self.numbers) != len(shards) or (np.diff(self.numbers) <= 0).any():
            raise ValueError("a fleet's nodes need one number each, in rising order")
        self.sampler = Sampler(shards.size, batch, seed)
        self.sent = SentVectors()  # compressed vectors of the last report
        self._private = SampleUpdates(model, shards, self.numbers, noise)

        # Memory between rounds. Arrays are replaced, never changed in place.
        self._broadcast: Broadcast | None = None
        self._w: Float32 | None = None  # w_i(t) of the last updates, [nodes, parameters]
        self._start: Float32 | None = None  # w(t₀), extrapolated by momentum, [parameters]
        self._before: Float32 | None = None  # the w before w(t₀), if `_start` needs it
        self._best: Float32 | None = None  # w^f
        self._best_known: Float64 | None = None  # F_i(w^f) on whole shards
        self._losses: Float64 | None = None  # F_i(w(t₀))
        self._steepest: Float32 | None = None  # change of ∇F_i, [nodes, parameters]
        self._correction: Correction | None = None
        self._learned = False  # c_i of all nodes follow from the last updates

        # Values within a round.
        self._indices: BatchIndices | None = None
        self._local: tuple[Float64, Float32] | None = None  # F_i and ∇F_i at w_i(t₀)
        self._evidence: Evidence | None = None  # the same over several mini-batches
        self._searched: Float64 | None = None  # β̂_i of nodes that have just joined
        self._distance: Float64 | None = None  # ‖w_i(t₀) - w(t₀)‖
        self._probes = False  # some nodes probe another point
        self._descent: Descent | None = None
        self._best_losses: Float64 | None = None  # F_i(w^f)

    def fork(self) -> "Fleet":
        """Return an independent copy of the fleet; model and shards are shared."""
        twin = copy.copy(self)
        twin.sampler = self.sampler.fork()
        return twin

    def compact(self) -> None:
        """Drop vectors that the next round can recompute, to save memory."""
        if self._before is not None:
            self._start = None
        if self._correction is not None and self._learned:
            self._correction = replace(self._correction, own=NOTHING)

    def _expand(self) -> None:
        """Undo `compact`, to the bit."""
        last = self._broadcast
        if last is None:
            return
        if self._start is None and self._before is not None:
            self._start = self._extrapolated(last, self._before)
        correction = self._correction
        if self._w is not None and correction is not None and not correction.own.size:
            self._learn_drift(last, self._w)

    def memory(self) -> FleetState:
        """Return the state to resume from, after a round."""
        self._expand()
        broadcast = self._broadcast
        best = self._best
        losses = self._losses
        if broadcast is None or best is None or losses is None:
            raise LocalError("a fleet has no memory before its first round")
        return FleetState(
            broadcast=broadcast,
            w=self._w,
            best=best,
            losses=losses,
            best_known=self._best_known,
            steepest=self._steepest,
            correction=self._correction,
            position=self.sampler.position,
            start=None if self._start is broadcast.w else self._start,
            lost=self.sent.lost,
        )

    def recall(self, memory: FleetState) -> None:
        """Resume from the memory of a fleet of the same nodes."""
        nodes = len(self.shards)
        parameters = self.model.parameters
        if memory.losses.shape != (nodes,) or memory.best.shape != (parameters,):
            raise LocalError(
                f"the memory has {len(memory.losses)} nodes and {memory.best.size} "
                f"parameters, the fleet {nodes} and {parameters}"
            )
        self._broadcast = memory.broadcast
        self._w = memory.w
        self._best = memory.best
        self._losses = memory.losses
        self._best_known = memory.best_known
        self._steepest = memory.steepest
        self._correction = memory.correction
        self._start = memory.broadcast.w if memory.start is None else memory.start
        self._before = None
        self._learned = False
        self.sent = SentVectors(memory.lost)
        self.sampler.restore(memory.position)

    def answer(self, broadcast: Broadcast) -> Report:
        """Make a whole round and return its report."""
        self.receive(broadcast)
        self.update()
        return self.report()

    def receive(self, broadcast: Broadcast) -> None:
        """Begin a round: draw its mini-batches and evaluate what precedes the updates."""
        self._require_valid(broadcast)
        self._expand()
        self._follow_best(broadcast)
        before = self._broadcast
        if broadcast.drift is not None:
            self._follow_drift(broadcast, broadcast.drift)
        self._start = self._start_of(broadcast)
        self._broadcast = broadcast.remembered
        self._descent = None
        self._losses = None
        self._best_losses = None
        self._local = None
        self._distance = None
        self._evidence = None
        self._searched = None

        request = broadcast.request
        work = broadcast.work
        several = None
        if request.curvature:
            count = mini_batches(self.sampler.batch)
            several = self.sampler.round(count, fresh=True) if count > 1 else None
        self._indices = self.sampler.round(
            broadcast.tau if work is None else work.most,
            fresh=request.curvature or not request.estimate,
            epoch=request.per_sample,
        )
        if work is not None:
            self._indices = replace(self._indices, counts=np.array(work.updates))

        if not request.estimate or self._w is None or before is None:
            if request.one_step and broadcast.tau > 0:
                self._searched = searched_steepness(
                    self.model, self.shards, one_of(self._indices, 0), broadcast.w
                )
            return
        points, self._distance = self._points(self._w, broadcast, before)
        if several is not None and self._best is not None:
            self._evidence = gather(
                self.model, self.shards, several, broadcast.w, self._best, points
            )
        elif broadcast.tau > 0:
            local = self.model.descend(points, self.shards, one_of(self._indices, 0), 0.0)
            self._local = local.losses, local.gradients

    def _require_valid(self, broadcast: Broadcast) -> None:
        model = self.model
        if broadcast.w.shape != (model.parameters,):
            raise PeerError(
                f"w has shape {broadcast.w.shape}; "
                f"{model.name} has {model.parameters} parameters"
            )
        if broadcast.tau < 0:
            raise PeerError(f"tau is {broadcast.tau}")
        work = broadcast.work
        if work is not None and not (
            len(work.updates) == len(self.shards)
            and min(work.updates) >= 1
            and max(work.updates) <= work.most
        ):
            raise PeerError(
                f"{len(self.shards)} nodes cannot make {work.updates} updates "
                f"of at most {work.most}"
            )

    def _points(
        self, own: Float32, broadcast: Broadcast, before: Broadcast
    ) -> tuple[Float32, Float64]:
        """Return the points to compare loss and gradient at w(t₀) with, and the distances.

        A point is w_i(t₀). With `one_step` it is as far from w(t₀) as one update of the
        node deviates from the mean update. For the step size, a node whose w_i(t₀) equals
        w(t₀) probes another point.

        Returns:
          Points, [nodes, parameters], and their distances from w(t₀), [nodes].
        """
        w = broadcast.w
        steps = np.float32(max(1, before.effective))
        statistics = self.model.statistics
        if broadcast.request.one_step:
            own = w + (own - broadcast.combined) / steps
        own = with_statistics_of(w, own, statistics)
        distance = norms(own, w)
        same = distance <= SAME
        self._probes = broadcast.request.curvature and bool(same.any())
        if not self._probes:
            return own, distance
        way = (w - with_statistics_of(w, before.w, statistics)) / steps
        probes = probe_points(w, way, self._steepest, len(own))
        points = np.where(same[:, None], probes, own)
        return points, norms(points, w)

    def _follow_best(self, broadcast: Broadcast) -> None:
        """Update w^f, and its loss if that is known."""
        last = self._broadcast
        catch_up = broadcast.catch_up
        if self._missed(broadcast):
            self._best = broadcast.w if catch_up is None else catch_up.best
            self._best_known = None
        elif broadcast.best and last is not None:
            self._best = last.w
            self._best_known = None if self.sampler.batch else self._losses
        # After a recovery w is w^f. One array for both: their losses are equal to the bit.
        if self._best is not None and np.array_equal(self._best, broadcast.w):
            self._best = broadcast.w

    def _missed(self, broadcast: Broadcast) -> bool:
        """Whether the fleet missed the previous round."""
        last = self._broadcast
        if last is None:
            return True
        missed = broadcast.round != last.round + 1
        if missed and broadcast.catch_up is None:
            raise PeerError(
                f"round {broadcast.round} after round {last.round}, without a catch-up"
            )
        return missed

    def _start_of(self, broadcast: Broadcast) -> Float32:
        """Return the starting point of the gradients: w(t₀), extrapolated by momentum."""
        self._before = None
        if not broadcast.momentum:
            return broadcast.w
        last = self._broadcast
        catch_up = broadcast.catch_up
        before = None if catch_up is None else catch_up.before
        if last is not None and not self._missed(broadcast):
            if last.tau == 0 and self._start is not None:
                return self._start  # from before the final round of a run that was extended
            before = last.w
        if before is None:
            raise PeerError(
                f"round {broadcast.round} has momentum, and this node lacks the previous w"
            )
        self._before = before
        return self._extrapolated(broadcast, before)

    def _extrapolated(self, broadcast: Broadcast, before: Float32) -> Float32:
        statistics = self.model.statistics
        return extrapolated(broadcast.w, before, broadcast.momentum, statistics)

    def _follow_drift(self, broadcast: Broadcast, drift: Drift) -> None:
        """Compute c from the previous interval, or take it from the catch-up."""
        last = self._broadcast
        correction = self._correction
        sent = None if broadcast.catch_up is None else broadcast.catch_up.mean
        missed = self._missed(broadcast)
        no_interval = last is not None and last.tau == 0
        if correction is not None and no_interval and not missed:
            return  # c is known from before the final round of a run that was extended
        if correction is None or last is None or last.drift is None or self._w is None:
            mean = np.zeros_like(broadcast.w) if sent is None else sent
            self._correction = Correction.first(len(self.shards), mean)
            self._learned = False
            return
        if not missed:
            start = self._start
            assert start is not None
            before = correction.mean if last.drift.correct else None
            combined = with_statistics_of(start, broadcast.combined, self.model.statistics)
            gradient = mean_gradient(start, combined, last.span)
            mean = next_mean(before, gradient, drift.share)
        elif broadcast.catch_up is None or sent is None:
            raise PeerError(
                f"round {broadcast.round} after round {last.round}, "
                "without the mean of all corrections"
            )
        else:
            mean = sent
            if broadcast.catch_up.since > last.round:
                correction = correction.forget()
        self._correction = correction.with_mean(mean)
        self._learned = False

    def update(self) -> None:
        """Make τ local updates, eq. (4); with τ=0, evaluate the loss at w."""
        if self._broadcast is None or self._indices is None or self._losses is not None:
            raise LocalError("update comes once after each receive")
        broadcast = self._broadcast
        best = self._best_to_evaluate(broadcast)
        if broadcast.tau == 0:
            self._losses = self._losses_at(broadcast.w, self._indices)
            if best is not None:
                self._best_losses = self._losses_at(best, self._indices)
        else:
            descent = self._descend(broadcast, self._indices, best)
            compress = broadcast.compress or "none"
            self.sent, w = self.sent.next(compress, descent.w, broadcast.w)
            self._descent = descent if w is descent.w else replace(descent, w=w)
            self._w = w
            self._losses = descent.losses
            self._best_losses = descent.best_losses
            self._learn_drift(broadcast, w)

        if self._evidence is not None:
            self._losses = self._evidence.losses
            self._best_losses = self._evidence.best_losses
        if self._best_losses is None:
            same = self._best is broadcast.w
            self._best_losses = self._losses if same else self._best_known
        if self.sampler.batch is None:
            self._best_known = self._best_losses

    def _best_to_evaluate(self, broadcast: Broadcast) -> Float32 | None:
        """Return w^f, or None if its loss is known."""
        known = self._best_known is not None or self._best is broadcast.w
        return None if known else self._best

    def _losses_at(self, w: Float32, indices: BatchIndices) -> Float64:
        return self.model.losses(w[None], self.shards, indices)

    def _descend(
        self, broadcast: Broadcast, indices: BatchIndices, best: Float32 | None
    ) -> Descent:
        """Make the local updates, and rescale w_i to η and τ_eff."""
        eta: float | Float32 = broadcast.eta
        scale = None
        private = broadcast.private is not None
        if self._searched is not None and (broadcast.round == 1 or private):
            eta = own_steps(self._searched, broadcast.eta)
            scale = None if private else np.float32(broadcast.eta) / eta
        descent = self._local_updates(broadcast, indices, eta, best)
        if broadcast.work is not None:
            own = indices.updates_of.astype(np.float32)
            counted = np.float32(broadcast.work.effective) / own
            scale = counted if scale is None else scale * counted
        if scale is None or self._start is None:
            return descent
        w = scaled_from(self._start, descent.w, scale, self.model.statistics)
        return replace(descent, w=w)

    def _local_updates(
        self,
        broadcast: Broadcast,
        indices: BatchIndices,
        eta: float | Float32,
        best: Float32 | None,
    ) -> Descent:
        """Make the updates of a round, with everything that is added to gradients."""
        model = self.model
        shards = self.shards
        w = broadcast.w
        proximal = broadcast.request.proximal
        if broadcast.request.per_sample:
            return self._private.descend(broadcast, indices)
        shift = self._shift(broadcast)
        if proximal is None:
            return model.descend(w[None], shards, indices, eta, best, shift)

        def update(
            own: Float32, one: BatchIndices, added: Float32 | None, first: bool
        ) -> Descent:
            return model.descend(own, shards, one, eta, best if first else None, added)

        return descend_near(update, w, indices, proximal, shift, model.statistics)

    def _shift(self, broadcast: Broadcast) -> Float32 | None:
        """Return the shift of gradients for drift and momentum, [nodes, parameters]."""
        start = self._start
        shift = self._drift_shift(broadcast)
        if start is None or start is broadcast.w:
            return shift
        motion = motion_of(broadcast, start)
        if shift is not None:
            return shift + motion
        return np.repeat(motion, len(self.shards) // len(motion), axis=0)

    def _drift_shift(self, broadcast: Broadcast) -> Float32 | None:
        """Return the shift of gradients against drift, [nodes, parameters]."""
        if broadcast.drift is None or self._correction is None:
            return None
        return self._correction.used(broadcast.drift)

    def _learn_drift(self, broadcast: Broadcast, own: Float32) -> None:
        """Compute c_i of this interval."""
        if broadcast.drift is None or self._correction is None or self._start is None:
            return
        own = with_statistics_of(self._start, own, self.model.statistics)
        gradients = mean_gradient(self._start, own, broadcast.span)
        self._correction = self._correction.learn(gradients, broadcast.drift)
        self._learned = self._correction.own is gradients

    def report(self) -> Report:
        """Return the report of the round."""
        broadcast = self._broadcast
        losses = self._losses
        best_losses = self._best_losses
        drawn = self._indices is not None
        if broadcast is None or not drawn or losses is None or best_losses is None:
            raise LocalError("report comes after update")
        report = self._report(broadcast, losses, best_losses)
        self._indices = None  # a fleet holds fewer vectors between rounds
        self._descent = None
        self._local = None
        self._evidence = None
        return report

    def _report(
        self, broadcast: Broadcast, losses: Float64, best_losses: Float64
    ) -> Report:
        descent = self._descent
        w = None if descent is None else descent.w
        if broadcast.private is not None:
            return self._private.report(broadcast, broadcast.private, w)
        report = Report(
            broadcast.round, self.numbers, self.shards.size, losses, best_losses, w
        )
        if descent is None:
            return report
        wanted = broadcast.report_fields
        correction = self._correction
        if "rho" in wanted:
            rho, beta = self._slopes(descent)
            report = replace(report, rho=rho, beta=beta)
        if "gradients" in wanted:
            shift = self._drift_shift(broadcast)
            gradients = descent.gradients if shift is None else descent.gradients + shift
            self.sent, gradients = self.sent.with_field("gradients", gradients)
            report = replace(report, gradients=gradients)
        if correction is not None and "plain" in wanted:
            plain = correction.plain
            report = replace(report, plain=plain, corrected=correction.corrected)
        if correction is not None and "lasting" in wanted:
            lasting, shifted = correction.persistence
            report = replace(report, lasting=lasting, shifted=shifted)
        return report

    def _slopes(self, descent: Descent) -> tuple[Float64, Float64]:
        """Return ρ̂_i and β̂_i between w_i(t₀) and w(t₀); NaN if a node has no w_i(t₀)."""
        with np.errstate(over="ignore", invalid="ignore"):  # of nodes that diverged
            if self._evidence is not None:
                losses = self._evidence.loss_change
                gradients = self._evidence.steepest
            elif self._local is not None:
                losses = np.abs(self._local[0] - descent.losses)
                gradients = self._local[1] - descent.gradients
            else:
                none = np.full(len(self.shards), np.nan)
                return none, none if self._searched is None else self._searched
        assert self._distance is not None
        if self._probes:
            self._steepest = gradients
        return slope(losses, self._distance), slope(norms(gradients), self._distance)


def motion_of(broadcast: Broadcast, start: Float32) -> Float32:
    """Return what added to gradients moves the updates from `start` to w(t₀).

    The shape is [nodes, parameters], or [1, parameters] if all nodes make τ updates.
    """
    way = broadcast.w - start
    if broadcast.work is None:
        return np.asarray(way / np.float32(broadcast.eta * broadcast.tau))[None]
    spans = np.float32(broadcast.eta) * np.array(broadcast.work.updates, np.float32)
    return np.asarray(way / spans[:, None])
