"""Algorithm 3 for n ≥ 1 nodes at once. An edge device is a fleet of one.

A round has three parts, so that an engine can read its meters between them; only the middle one is a local update, and
the rest counts as aggregation, as in the paper:

    receive(broadcast)   take w(t₀), and what the interval before tells of drift; evaluate what the estimates need at
                         w_i(t₀), before it is given up
    update()             τ local updates from w(t₀)
    report()             w_i(t), the losses, and ρ̂_i, β̂_i, ∇F_i(w(t₀)) where they are wanted

A round may come to nothing: a report is late, or the aggregator goes on from an earlier round. Then a fleet goes back
to a fork from before it. A fleet whose process does not last gives its `memory` to the next one, of the same nodes.

The loss and gradient at w(t₀) are the by-product of the first local update, and the loss at w^f is taken in the same
pass over its mini-batch; only those at w_i(t₀) are evaluated for themselves. All of them use that one mini-batch.

Where the step size adapts, three things differ: that mini-batch is a new one and not the last of the round before,
small mini-batches are judged by several (evidence.py), and a node whose w_i(t₀) is w(t₀) looks aside for its β̂_i.

Where β̂_i is searched for in the first round (first_step.py), a node makes the updates of that round with its own
η_i = 1/β̂_i, and says where η would have taken it: w_i ← w + η/η_i (w_i - w), which the aggregator makes good for later.

Where w is in motion, nodes go on with a part of the last move of w (messages.py, `momentum`): each update makes a τ-th
of it, besides its step along the gradient. So gradients are those of where w will be, and stop what goes too far.

Where nodes make different numbers of updates (workload.py), each makes its own, τ_i, and says where τ_eff of them would
have taken it. All draw as many mini-batches as the node that makes most: so nodes draw the same, in one fleet or many.
Where vectors are sent with fewer bits (compression.py), w_i is what will arrive of it, in all that follows here too.
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
from fedbudget.protocol.state import FleetState, gone_on, motion_of
from fedbudget.protocol.sums import SAME, norms, slope
from fedbudget.protocol.update import descend_near, scaled_from, with_statistics_of


class Fleet:
    """n nodes with their shards.

    Args:
      model: what is trained.
      shards: the nodes' data.
      batch: samples in a mini-batch; None for whole shards, that is deterministic gradient descent.
      seed: of the mini-batches; the same for all nodes of all fleets.
      numbers: the nodes' numbers among all nodes of the run; 0..n-1 when left out.
      noise: of the nodes' own, where single samples are to be protected.
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
        self.numbers = np.asarray(
            range(len(shards)) if numbers is None else numbers, dtype=np.int64
        )
        if len(self.numbers) != len(shards) or (np.diff(self.numbers) <= 0).any():
            raise ValueError("a fleet's nodes need one number each, in rising order")
        self.sampler = Sampler(shards.size, batch, seed)
        self._private = SampleUpdates(model, shards, self.numbers, noise)
        self._broadcast: Broadcast | None = None
        self._indices: BatchIndices | None = None
        self._w: Float32 | None = None  # w_i(t), [nodes, parameters], from the last updates
        self._start: Float32 | None = (
            None  # w(t₀) and what was gone once more of the last way, [parameters]
        )
        self._before: Float32 | None = (
            None  # the w that this way began at, where it is known
        )
        self._learned = False  # c_i of all nodes follow from the last updates
        self._correction: Correction | None = None
        self._best: Float32 | None = None  # our copy of w^f
        self._best_known: Float64 | None = None  # F_i(w^f) on whole shards
        self._local: tuple[Float64, Float32] | None = None  # F_i and ∇F_i at w_i(t₀)
        self._evidence: Evidence | None = None  # the same and more, of several mini-batches
        self._searched: Float64 | None = None  # β̂_i of nodes that have just joined
        self._distance: Float64 | None = None  # ‖w_i(t₀) - w(t₀)‖
        self._descent: Descent | None = None
        self._probes = False  # some nodes do
        self._steepest: Float32 | None = (
            None  # by how much ∇F_i changed there, [nodes, parameters]
        )
        self._losses: Float64 | None = None  # F_i(w(t₀))
        self._best_losses: Float64 | None = None  # F_i(w^f)
        self.sent = SentVectors()  # the last report's, where they are sent with fewer bits

    def fork(self) -> "Fleet":
        """Another fleet with the same memory, that goes its own way from here on; model and shards are shared."""
        twin = copy.copy(self)  # arrays are replaced, never changed in place
        twin.sampler = self.sampler.fork()
        return twin

    def compact(self) -> None:
        """Lets go of vectors that the next round can make again of others, where many fleets are remembered."""
        if self._before is not None:
            self._start = None
        if self._correction is not None and self._learned:
            self._correction = replace(self._correction, own=NOTHING)

    def _expand(self) -> None:
        """As before `compact`, to the bit."""
        last = self._broadcast
        if last is not None and self._start is None and self._before is not None:
            self._start = gone_on(
                last.w, self._before, last.momentum, self.model.statistics
            )
        if (
            last is not None
            and self._w is not None
            and self._correction is not None
            and not self._correction.own.size
        ):
            self._learn_drift(last, self._w)

    def memory(self) -> FleetState:
        """All that is needed to go on from here, once a round was made."""
        self._expand()
        broadcast = self._broadcast
        best = self._best
        losses = self._losses
        if broadcast is None or best is None or losses is None:
            raise LocalError("a fleet has something to remember after a round")
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
        """Goes on from here as the fleet would that `memory` was taken from: one of the same nodes."""
        shape = (len(self.shards), self.model.parameters)
        if memory.losses.shape != shape[:1] or memory.best.shape != shape[1:]:
            known = f"{len(memory.losses)} nodes and {memory.best.size} parameters"
            raise LocalError(f"a memory of {known} is not of {shape}")
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
        self.sampler.go_to(memory.position)

    def answer(self, broadcast: Broadcast) -> Report:
        """A whole round at once."""
        self.receive(broadcast)
        self.update()
        return self.report()

    def receive(self, broadcast: Broadcast) -> None:
        if broadcast.w.shape != (self.model.parameters,):
            model = self.model
            raise PeerError(
                f"w has shape {broadcast.w.shape}; {model.name} has {model.parameters} parameters"
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
                f"{len(self.shards)} nodes are to make {work.updates} of {work.most} updates"
            )
        self._expand()
        self._follow_best(broadcast)
        before = self._broadcast
        if broadcast.drift is not None:
            self._follow_drift(broadcast, broadcast.drift)
        self._start = self._start_of(broadcast)
        self._broadcast = broadcast.remembered
        more = mini_batches(self.sampler.batch) if broadcast.request.curvature else 1
        several = self.sampler.round(more, anew=True) if more > 1 else None
        anew = broadcast.request.curvature or not broadcast.request.estimate
        made = broadcast.tau if work is None else work.most
        epoch = broadcast.request.per_sample
        self._indices = self.sampler.round(made, anew=anew, epoch=epoch)
        if work is not None:
            self._indices = replace(self._indices, counts=np.array(work.updates))
        self._descent = self._losses = self._best_losses = self._local = self._distance = (
            self._evidence
        ) = None
        self._searched = None
        if not broadcast.request.estimate or self._w is None or before is None:
            if broadcast.request.one_step and broadcast.tau > 0:
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

    def _points(
        self, own: Float32, broadcast: Broadcast, before: Broadcast
    ) -> tuple[Float32, Float64]:
        """Where loss and gradient are compared with those at w(t₀), [nodes, parameters], and how far from there it is.

        It is w_i(t₀), or as far from w(t₀) as one of its updates on average went another way than everyone's. For the
        step size, a node whose w_i(t₀) is w(t₀) looks aside instead.
        """
        if broadcast.request.one_step:
            own = broadcast.w + (own - broadcast.combined) / np.float32(
                max(1, before.effective)
            )
        own = with_statistics_of(broadcast.w, own, self.model.statistics)
        distance = norms(own, broadcast.w)
        same = distance <= SAME
        self._probes = broadcast.request.curvature and bool(same.any())
        if not self._probes:
            return own, distance
        w = broadcast.w
        steps = np.float32(max(1, before.effective))
        way = (w - with_statistics_of(w, before.w, self.model.statistics)) / steps
        points = np.where(
            same[:, None], probe_points(w, way, self._steepest, len(own)), own
        )
        return points, norms(points, w)

    def _follow_best(self, broadcast: Broadcast) -> None:
        """Keeps our copy of w^f, and of its loss where that is always the same."""
        last = self._broadcast
        if self._missed(broadcast):
            self._best = (
                broadcast.w if broadcast.catch_up is None else broadcast.catch_up.best
            )
            self._best_known = None
        elif broadcast.best and last is not None:
            self._best = last.w
            self._best_known = None if self.sampler.batch else self._losses
        best = self._best
        if (
            best is not None
            and best is not broadcast.w
            and np.array_equal(best, broadcast.w)
        ):  # gone back to, say
            self._best = (
                broadcast.w
            )  # and so w^f has its loss, to the bit, also where w came over a network

    def _missed(self, broadcast: Broadcast) -> bool:
        """Whether we were not in the round before."""
        last = self._broadcast
        if (
            last is not None
            and broadcast.round != last.round + 1
            and broadcast.catch_up is None
        ):
            raise PeerError(
                f"round {broadcast.round} after round {last.round}, without what happened in between"
            )
        return last is None or broadcast.round != last.round + 1

    def _start_of(self, broadcast: Broadcast) -> Float32:
        """Where gradients start from in a round: w(t₀), and as much of the last way as is gone once more."""
        self._before = None
        if not broadcast.momentum:
            return broadcast.w
        last = self._broadcast
        catch_up = broadcast.catch_up
        before = None if catch_up is None else catch_up.before
        if last is not None and not self._missed(broadcast):
            if last.tau == 0 and self._start is not None:
                return self._start  # known since the end that was not the last
            before = last.w
        if before is None:
            raise PeerError(
                f"round {broadcast.round} goes on from a w that this node does not know"
            )
        self._before = before
        return gone_on(broadcast.w, before, broadcast.momentum, self.model.statistics)

    def _follow_drift(self, broadcast: Broadcast, drift: Drift) -> None:
        """Learns c from the interval before, or as we are told it where we missed it."""
        last = self._broadcast
        correction = self._correction
        catch_up = broadcast.catch_up
        missed = self._missed(broadcast)
        no_interval = last is not None and last.tau == 0
        if correction is not None and no_interval and not missed:
            return  # all was learned at the end that was not the last
        if correction is None or last is None or last.drift is None or self._w is None:
            mean = (
                np.zeros_like(broadcast.w)
                if catch_up is None or catch_up.mean is None
                else catch_up.mean
            )
            self._correction = Correction.first(len(self.shards), mean)
            self._learned = False
            return
        if not missed:
            assert self._start is not None
            before = correction.mean if last.drift.correct else None
            combined = with_statistics_of(
                self._start, broadcast.combined, self.model.statistics
            )
            mean = next_mean(
                before, mean_gradient(self._start, combined, last.span), drift.share
            )
        elif catch_up is None or catch_up.mean is None:
            raise PeerError(
                f"round {broadcast.round} after round {last.round}, without the mean of all corrections"
            )
        else:
            mean = catch_up.mean
            correction = correction.forget() if catch_up.since > last.round else correction
        self._correction = correction.with_mean(mean)
        self._learned = False

    def update(self) -> None:
        """τ local updates, eq. (4); with τ=0 the loss at w."""
        if self._broadcast is None or self._indices is None or self._losses is not None:
            raise LocalError("update comes once after each receive")
        broadcast = self._broadcast
        best = self._best_to_evaluate()
        if broadcast.tau == 0:
            self._losses = self.model.losses(broadcast.w[None], self.shards, self._indices)
            if best is not None:
                self._best_losses = self.model.losses(
                    best[None], self.shards, self._indices
                )
        else:
            descent = self._descend(broadcast, self._indices, best)
            self.sent, w = self.sent.next(
                broadcast.compress or "none", descent.w, broadcast.w
            )
            self._descent = descent if w is descent.w else replace(descent, w=w)
            self._w = w
            self._losses = descent.losses
            self._best_losses = descent.best_losses
            self._learn_drift(broadcast, w)
        if self._evidence is not None:
            self._losses = self._evidence.losses
            self._best_losses = self._evidence.best_losses
        if self._best_losses is None:
            self._best_losses = (
                self._losses if self._best is broadcast.w else self._best_known
            )
        if self.sampler.batch is None:
            self._best_known = self._best_losses

    def _descend(
        self, broadcast: Broadcast, indices: BatchIndices, best: Float32 | None
    ) -> Descent:
        eta = broadcast.eta
        start = self._start
        private = broadcast.private is not None
        own = None
        scale = None
        if self._searched is not None and (broadcast.round == 1 or private):
            own = own_steps(self._searched, eta)
            scale = None if private else np.float32(eta) / own
        descent = self._local_updates(broadcast, indices, eta if own is None else own, best)
        if broadcast.work is not None:
            counted = np.float32(broadcast.work.effective) / indices.updates_of.astype(
                np.float32
            )
            scale = counted if scale is None else scale * counted
        if scale is None or start is None:
            return descent
        return replace(
            descent, w=scaled_from(start, descent.w, scale, self.model.statistics)
        )

    def _local_updates(
        self,
        broadcast: Broadcast,
        indices: BatchIndices,
        eta: float | Float32,
        best: Float32 | None,
    ) -> Descent:
        """The updates of a round, with all that is added to gradients."""
        model = self.model
        shards = self.shards
        w = broadcast.w
        proximal = broadcast.request.proximal
        if broadcast.request.per_sample:
            return self._private.descend(broadcast, indices)
        if proximal is None:
            return model.descend(w[None], shards, indices, eta, best, self._shift())

        def update(
            own: Float32, one: BatchIndices, shift: Float32 | None, first: bool
        ) -> Descent:
            return model.descend(own, shards, one, eta, best if first else None, shift)

        return descend_near(update, w, indices, proximal, self._shift(), model.statistics)

    def _learn_drift(self, broadcast: Broadcast, own: Float32) -> None:
        """c_i of this interval."""
        if broadcast.drift is None or self._correction is None or self._start is None:
            return
        own = with_statistics_of(self._start, own, self.model.statistics)
        gradients = mean_gradient(self._start, own, broadcast.span)
        self._correction = self._correction.learn(gradients, broadcast.drift)
        self._learned = self._correction.own is gradients

    def report(self) -> Report:
        if (
            self._broadcast is None
            or self._indices is None
            or self._losses is None
            or self._best_losses is None
        ):
            raise LocalError("report comes after update")
        report = self._report(self._broadcast, self._losses, self._best_losses)
        self._indices = self._descent = self._local = self._evidence = (
            None  # what a fleet remembers has fewer vectors
        )
        return report

    def _report(
        self, broadcast: Broadcast, losses: Float64, best_losses: Float64
    ) -> Report:
        descent = self._descent
        w = None if self._descent is None else self._descent.w
        if broadcast.private is not None:
            return self._private.report(broadcast, broadcast.private, w)
        report = Report(
            broadcast.round, self.numbers, self.shards.size, losses, best_losses, w
        )
        if descent is None:
            return report
        if "rho" in (wanted := broadcast.report_fields):
            rho, beta = self._slopes(descent)
            report = replace(report, rho=rho, beta=beta)
        if "gradients" in wanted:
            shift = self._correcting()
            gradients = descent.gradients if shift is None else descent.gradients + shift
            self.sent, gradients = self.sent.besides("gradients", gradients)
            report = replace(report, gradients=gradients)
        if "plain" in wanted and self._correction is not None:
            report = replace(
                report, plain=self._correction.plain, corrected=self._correction.corrected
            )
        if "lasting" in wanted and self._correction is not None:
            lasting, shifted = self._correction.lasting
            report = replace(report, lasting=lasting, shifted=shifted)
        return report

    def _slopes(self, descent: Descent) -> tuple[Float64, Float64]:
        """ρ̂_i and β̂_i between w_i(t₀) and w(t₀); NaN of nodes that have just joined and have no w_i(t₀)."""
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # what diverged gives no number, and so no estimate
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

    def _shift(self) -> Float32 | None:
        """What is added to gradients in this round, [nodes, parameters]: against drift, and to go on."""
        broadcast = self._broadcast
        start = self._start
        shift = self._correcting()
        if broadcast is None or start is None or start is broadcast.w:
            return shift
        motion = motion_of(broadcast, start)
        return (
            np.repeat(motion, len(self.shards) // len(motion), axis=0)
            if shift is None
            else shift + motion
        )

    def _correcting(self) -> Float32 | None:
        """What is added to gradients against drift, [nodes, parameters]."""
        drift = None if self._broadcast is None else self._broadcast.drift
        return (
            None
            if drift is None or self._correction is None
            else self._correction.used(drift)
        )

    def _best_to_evaluate(self) -> Float32 | None:
        """w^f, unless its loss is known: whole shards give the same as ever, and w(t₀) may be w^f itself."""
        known = (
            self._best_known is not None
            or self._broadcast is None
            or self._best is self._broadcast.w
        )
        return None if known else self._best
