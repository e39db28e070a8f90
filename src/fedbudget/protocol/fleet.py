"""Algorithm 3 for n ≥ 1 nodes at once. An edge device is a fleet of one.

A round has three parts, so that an engine can read its meters between them. Only `update`
makes local updates; the rest counts as aggregation, as in the paper:

    receive(broadcast)   store w(t₀), draw mini-batches, measure what precedes the updates
    update()             τ local updates from w(t₀)
    report()             w_i(t), the losses, and what features measured

All that changes is one frozen value, `state`, which a round replaces when it reports. A
round may fail: a report is late, or the aggregator resumes from an earlier round. The fleet
then continues from a `fork` taken before it. A fleet whose process ends passes its `memory`
to the next fleet of the same nodes.

Rules of this file:

- The loss and gradient at w(t₀) are a by-product of the first local update, and the loss at
  w^f comes from the same pass over its mini-batch.
- Features (features/feature.py) prepare a round, add to gradients, scale steps, and report.
  The fleet knows none of them by name.
- All nodes draw as many mini-batches as the node with the most updates. So nodes draw the
  same ones in one fleet or in many.
- If vectors are compressed (features/compression.py), w_i is the vector that will arrive,
  also in all that follows here.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedbudget.arrays import Float32, Float64, require_shape
from fedbudget.data.sampling import BatchIndices, Sampler
from fedbudget.data.shards import Shards
from fedbudget.models.base import Descent, Model
from fedbudget.protocol.features.compression import SentVectors
from fedbudget.protocol.features.estimates import one_of
from fedbudget.protocol.features.feature import (
    Feature,
    FleetState,
    LocalRound,
    NodeNoise,
    defining,
)
from fedbudget.protocol.messages import (
    Broadcast,
    LocalError,
    LocalUpdates,
    LossRound,
    PeerError,
    Private,
    Report,
)
from fedbudget.protocol.personal import Sites
from fedbudget.protocol.update import scaled_from


class Fleet:
    """n nodes with their shards.

    Args:
      model: the model to train.
      shards: the nodes' data.
      batch: samples in a mini-batch; None for whole shards (deterministic gradient
        descent).
      seed: seed of the mini-batches; the same for all nodes of all fleets.
      batch_secret: mixed into that seed, see data/sampling.py.
      features: features of the run, in its order.
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
        batch_secret: int | None = None,
        features: Sequence[Feature] = (),
        numbers: Sequence[int] | None = None,
        noise: NodeNoise | None = None,
    ) -> None:
        self.model = model
        self.sizes = shards.size
        self.all_shards = shards  # with held-out rows
        self.held_out: dict[str, Any] = {}
        for feature in defining(features, "hold_out"):
            shards, self.held_out[feature.name] = feature.hold_out(shards, seed)
        self.shards = shards
        chosen = range(len(shards)) if numbers is None else numbers
        self.numbers = np.asarray(chosen, dtype=np.int64)
        if len(self.numbers) != len(shards) or (np.diff(self.numbers) <= 0).any():
            raise ValueError("a fleet's nodes need one number each, in rising order")
        self.sampler = Sampler(shards.size, batch, seed, batch_secret)
        self.sent = SentVectors()  # compressed vectors of the last report
        self.state: FleetState | None = None
        self._compacted = False
        self._seed = seed
        self._features = features
        self._noise = noise
        self._statistics = model.statistics
        self._local: LocalRound | None = None  # the round that is being made
        self._sites: Sites | None = None
        self._begin = defining(features, "begin")
        self._common = defining(features, "common")
        self._measure = defining(features, "measure")
        self._shift = defining(features, "shift")
        self._pull = defining(features, "pull")
        self._own_descent = defining(features, "descend")
        self._end = defining(features, "end")
        self._report = defining(features, "report")
        self._report_finally = defining(features, "reported_finally")

    def fork(self) -> "Fleet":
        """Return an independent copy of the fleet; model and shards are shared."""
        twin = copy.copy(self)
        twin.sampler = self.sampler.fork()
        return twin

    def compact(self) -> None:
        """Drop vectors that the next round can recompute, to save memory."""
        if self.state is not None:
            for feature in self._features:
                self.state = feature.compact(self.state)
            self._compacted = True

    def memory(self) -> FleetState:
        """Return the state to resume from, after a round."""
        if self.state is None:
            raise LocalError("a fleet has no memory before its first round")
        self.state = self._expanded(self.state)
        self._compacted = False
        return replace(self.state, position=self.sampler.position, lost=self.sent.lost)

    def recall(self, memory: FleetState) -> None:
        """Resume from the memory of a fleet of the same nodes."""
        nodes = len(self.shards)
        parameters = self.model.parameters
        try:
            for vector in (memory.best, memory.start, memory.broadcast.w):
                if vector is not None:
                    require_shape(vector, parameters)
            for rows in (memory.w, memory.lost):
                if rows is not None:
                    require_shape(rows, nodes, parameters)
            for numbers in (memory.losses, memory.best_known):
                if numbers is not None:
                    require_shape(numbers, nodes)
            for name, each in memory.memories.items():
                each.require_shapes(nodes, parameters, self.held_out.get(name))
        except ValueError as error:
            raise LocalError(f"the memory is of other nodes: {error}") from None
        if memory.position is None:
            raise LocalError("the memory has no position of the mini-batch sampler")
        self.state = memory
        self.sent = SentVectors(memory.lost)
        self.sampler.restore(memory.position)

    def sites(self, w: Float32) -> Sites:
        """Return the nodes as sites that correct w; fits are kept for the next call."""
        self._require_length(w)
        if self._sites is None or not np.array_equal(self._sites.w, w):
            known = self.all_shards, self.shards
            self._sites = Sites(self.model, *known, w.copy(), self._seed)
        return self._sites

    def answer(self, broadcast: Broadcast) -> Report:
        """Make a whole round and return its report."""
        self.receive(broadcast)
        self.update()
        return self.report()

    def receive(self, broadcast: Broadcast) -> None:
        """Begin a round: draw its mini-batches and evaluate what precedes the updates."""
        local = self._begin_local(broadcast)
        for feature in self._begin:
            feature.begin(local)
        local.indices = self.sampler.round(
            local.draws, fresh=local.fresh, epoch=local.epoch
        )
        if local.counts is not None:
            local.indices = replace(local.indices, counts=local.counts)
        for feature in self._measure:
            feature.measure(local)
        self._local = local

    @property
    def common(self) -> list[Float32]:
        """Vectors that all nodes of the begun round share, in addition to the broadcast.

        These are w^f, if it is not w, and those of features.
        """
        local = self._local
        if local is None:
            raise LocalError("nodes share nothing before receive")
        of_features = [each for kind in self._common for each in kind.common(local)]
        best = [] if local.best is local.broadcast.w else [local.best]
        return [*best, *of_features]

    def update(self) -> None:
        """Make τ local updates, eq. (4); in a final round, evaluate the loss at w."""
        local = self._local
        if local is None:
            raise LocalError("update and report come once after each receive")
        broadcast = local.broadcast
        best: Float32 | None = None
        if local.best_known is None and local.best is not broadcast.w:
            best = local.best if "best_losses" in broadcast.report.numbers else None
        if isinstance(broadcast, LocalUpdates):
            descent = self._descend(local, best)
            local.w = descent.w
            if broadcast.compress != "none" or self.sent.vectors:
                self.sent, local.w = self.sent.next(
                    broadcast.compress, descent.w, broadcast.w
                )
            local.losses = descent.losses
            local.best_losses = descent.best_losses
            local.gradients = descent.gradients
        elif isinstance(broadcast, LossRound):
            local.losses = self._losses_at(broadcast.w, local.indices)
            if best is not None:
                local.best_losses = self._losses_at(best, local.indices)
        for feature in self._end:
            feature.end(local)
        if local.best_losses is None:
            same = local.best is broadcast.w
            local.best_losses = local.losses if same else local.best_known

    def report(self) -> Report:
        """Return the report of the round, and keep the state after it."""
        local = self._local
        if local is None:
            raise LocalError("update and report come once after each receive")
        broadcast = local.broadcast
        values: dict[str, Any] = {
            "losses": local.losses,
            "best_losses": local.best_losses,
            "w": local.w,
        }
        final = isinstance(broadcast, LossRound)
        for feature in self._report_finally if final else self._report:
            values |= feature.report(local)
        layout = broadcast.report
        for name in layout.vectors[1:]:
            self.sent, values[name] = self.sent.with_field(name, values[name])
        self._local = None
        self._compacted = False
        self.state = self._state_after(local)
        if missing := [name for name in layout.numbers if values.get(name) is None]:
            raise PeerError(f"this node cannot report {', '.join(missing)}")
        return broadcast.answer(
            round=broadcast.round,
            nodes=self.numbers,
            sizes=self.sizes,
            numbers={name: values[name] for name in layout.numbers},
            vectors={name: values[name] for name in layout.vectors},
        )

    def _expanded(self, state: FleetState) -> FleetState:
        for feature in reversed(self._features):
            state = feature.expand(state, self.model)
        return state

    def _begin_local(self, broadcast: Broadcast) -> LocalRound:
        """Return the new round; refuse a broadcast that this fleet cannot answer."""
        self._require_length(broadcast.w)
        if isinstance(broadcast, LocalUpdates) and broadcast.tau < 1:
            raise PeerError(f"tau is {broadcast.tau}")
        last = self.state
        if last is not None and self._compacted:
            last = self._expanded(last)
        missed = last is None or broadcast.round != last.broadcast.round + 1
        if last is not None and missed and broadcast.catch_up is None:
            raise PeerError(
                f"round {broadcast.round} after round {last.broadcast.round}, "
                "without a catch-up"
            )
        best, best_known = self._follow_best(broadcast, last, missed)
        local = LocalRound(
            broadcast,
            self.model,
            self.shards,
            self.numbers,
            self.sampler,
            last,
            missed,
            start=broadcast.w,
            best=best,
            best_known=best_known,
            noise=self._noise,
            memories={} if last is None else dict(last.memories),
            statistics=self._statistics,
            draws=0,
            held_out=self.held_out,
        )
        if isinstance(broadcast, LocalUpdates):
            local.draws = broadcast.tau
            local.eta = broadcast.eta
        return local

    def _require_length(self, w: Float32) -> None:
        model = self.model
        if w.shape != (model.parameters,):
            raise PeerError(
                f"w has shape {w.shape}; {model.name} has {model.parameters} parameters"
            )

    def _follow_best(
        self, broadcast: Broadcast, last: FleetState | None, missed: bool
    ) -> tuple[Float32, Float64 | None]:
        """Return w^f, and its loss if that is known."""
        if last is None or missed:
            catch_up = broadcast.catch_up
            best = broadcast.w if catch_up is None else catch_up.best
            known = None
        elif broadcast.best:
            best = last.broadcast.w
            known = None if self.sampler.batch else last.losses
        else:
            best = last.best
            known = last.best_known
        # After a recovery w is w^f. One array for both: their losses are equal to the bit.
        if np.array_equal(best, broadcast.w):
            best = broadcast.w
        return best, known

    def _losses_at(self, w: Float32, indices: BatchIndices) -> Float64:
        return self.model.losses(w[None], self.shards, indices)

    def _descend(self, local: LocalRound, best: Float32 | None) -> Descent:
        """Make the local updates, and scale the nodes' steps."""
        for feature in self._own_descent:
            if (own := feature.descend(local)) is not None:
                return own
        shift = self._total_shift(local)
        if self._pull:
            descent = self._descend_one_by_one(local, best, shift)
        else:
            w = local.broadcast.w[None]
            descent = local.model.descend(
                w, self.shards, local.indices, local.eta, best, shift
            )
        if local.scale is None:
            return descent
        w = scaled_from(local.start, descent.w, local.scale, local.statistics)
        return replace(descent, w=w)

    def _total_shift(self, local: LocalRound) -> Float32 | None:
        """Return the sum of all constant additions to gradients, [nodes, parameters]."""
        total = None
        for feature in self._shift:
            shift = feature.shift(local)
            if shift is not None:
                total = shift if total is None else total + shift
        nodes = len(self.numbers)
        if total is None or len(total) == nodes:
            return total
        return np.repeat(total, nodes, axis=0)

    def _descend_one_by_one(
        self, local: LocalRound, best: Float32 | None, shift: Float32 | None
    ) -> Descent:
        """Make the local updates one by one, each for all nodes at once.

        A model adds the same vector in all updates of a call, but `pull` depends on w.
        """
        indices = local.indices
        first: Descent | None = None
        w = local.broadcast.w[None]
        for number in range(indices.updates):
            added = self._total_pull(local, w, shift)
            one = one_of(indices, number)
            asked = None if number else best
            fresh = local.model.descend(w, self.shards, one, local.eta, asked, added)
            first = first or fresh
            active = indices.updates_of > number
            w = fresh.w if active.all() else np.where(active[:, None], fresh.w, w)
        assert first is not None
        return replace(first, w=w)

    def _total_pull(
        self, local: LocalRound, w: Float32, shift: Float32 | None
    ) -> Float32 | None:
        """Return the sum of all additions to the gradients at w, [nodes, parameters]."""
        total = shift
        own = w if len(w) == len(self.shards) else np.repeat(w, len(self.shards), axis=0)
        for feature in self._pull:
            pull = feature.pull(local, own)
            if pull is not None:
                total = pull if total is None else pull + total
        return total

    def _state_after(self, local: LocalRound) -> FleetState:
        if isinstance(local.broadcast, Private):  # nothing that it protects is kept
            local.w = local.losses = local.best_losses = None
        before = None if local.last is None else local.last.w
        return FleetState(
            broadcast=local.broadcast.remembered,
            start=local.start,
            w=before if local.w is None else local.w,
            best=local.best,
            losses=local.losses,
            best_known=local.best_losses if self.sampler.batch is None else None,
            memories=local.memories,
        )
