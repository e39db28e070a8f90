"""Drift correction: keeps local updates from drifting apart, without an additional byte.

Between two aggregations a node follows ∇F_i, which leads away from the path of ∇F if the
nodes' data differ. A node can compute the difference. An interval of τ updates from w(t₀),
which ended at its own w_i(t) and at the common w(t), yields its own mean gradient and that
of all nodes. With P the share of all data whose nodes took part,

    c_i ← (w(t₀) - w_i(t)) / ητ - s_i,      c ← (1-P) c + P (w(t₀) - w(t)) / ητ,      s_i =
    c - c_i

In the next interval the node steps along ∇F_i(w) + s_i. All start with c_i = c = 0. An
absent node keeps its c_i and receives c later. A new node starts with c_i = c. These are
the control variates of SCAFFOLD (Karimireddy et al., ICML 2020), in a form that needs no
additional data on the wire.

c is always the mean of all c_i, Σ D_i c_i = D c, so the shifts cancel in the average of
all nodes. Proof. It holds at the start, and if a node joins with c_i = c. Let it hold
before an interval with nodes S, P = Σ_S D_i / D. With w(t) = Σ_S D_i w_i(t) / Σ_S D_i,

    Σ D_i c_i' = Σ_S D_i ((w(t₀) - w_i(t)) / ητ - c + c_i) + Σ_others D_i c_i
               = P D (w(t₀) - w(t)) / ητ - P D c + Σ_all D_i c_i
               = P D (w(t₀) - w(t)) / ητ + (1-P) D c = D c'.

**Intervals without correction.** Such an interval begins with all c_i = c = 0, also at
absent nodes. The proof then still holds: shifts are 0, and the next c and c_i are correct.
The same applies if nodes leave permanently, or return without their state. Their c_i are
lost, and c is no longer the mean of the rest. An interval without correction restarts with
the current nodes, whose data alone are then D.

**When to correct.** A shift removes the deviation of a node's gradient in the previous
interval. If that was mostly noise, of small mini-batches for example, the shift adds
noise. After each interval a node reports how far its mean gradient deviated from the
common one, without and with the shift that it had, used or not: ‖s_i'‖ and ‖s_i' - s_i‖,
with s_i' the shift after the interval. The aggregator corrects if the second is not
larger. Both are averaged over nodes, and over intervals with equal weights for old and
new. A single interval of small mini-batches is too noisy, and an interval wrongly left
uncorrected drifts.

**Partial correction.** A share α of the shift can be used, s_i = α (c - c_i). The
deviation due to different data persists from one interval to the next, the deviation due
to noise does not. α is the persistent share,

    α = Σ D_i <s_i', s_i> / Σ D_i ‖s_i‖²      = -Σ D_i <c_i', s_i> / Σ D_i ‖s_i‖²,

averaged with equal weights for old and new, and limited to [0, 1]. A node knows all terms
of the second form when it reports; the forms agree because shifts cancel, Σ D_i <c', s_i>
= 0. While all nodes take part, the proof holds for any α. If some are absent it needs α =
1, because their c_i are missing in the sum. After a partly corrected interval with absent
nodes, correction therefore restarts, and while nodes are absent it is all or nothing.

**Momentum at nodes** (momentum.py). An interval starts from an extrapolated w.
The nodes' gradients cover the way from there, so the extrapolated w replaces w(t₀) in all
formulas above.

**Compression** (compression.py). c_i and c are computed from the received vectors. The
w(t) that nodes receive is then not the exact mean of their reports. c is biased, and so is
the mean of all shifts, in every later round. The aggregator tracks the bias,
s̄ ← α s̄ + P (w(t) - received w(t)) / ητ, and subtracts ητ α s̄ from w(t) after the next
interval. Only the bias of the last round then remains in c.

**Different numbers of updates** (workload.py). Nodes report as if they had made τ_eff
updates, and τ_eff replaces τ in all formulas above: (w(t₀) - w_i(t)) / ητ_eff is the mean
gradient of a node's τ_i updates, and the proof holds.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64, require_shape
from fedbudget.frozen import updated
from fedbudget.models.base import Model
from fedbudget.protocol.features.feature import (
    MOST_BEYOND,
    Feature,
    FeatureState,
    FleetState,
    LocalRound,
    NodeMemory,
    Reported,
    RoundResult,
    register_feature,
)
from fedbudget.protocol.messages import Broadcast, PeerError, Report, RoundPart, TrainRound
from fedbudget.protocol.sums import LARGEST, Sums, norms, squared_norms
from fedbudget.protocol.update import with_statistics_of

_NOTHING = np.empty((0, 0), np.float32)
"""Replaces c_i that nodes can compute again."""


@dataclass(frozen=True)
class DriftPart(RoundPart):
    """Drift correction of a round.

    Args:
      correct: whether to correct in this round.
      share: P of the previous round, the share of all data whose nodes contributed to w(t).
      strength: α, the fraction of the shift to apply; None applies all of it.
      mean: the combined w_i of the previous round, [parameters], if it differs from w.
    """

    correct: bool
    share: float
    strength: float | None = None
    mean: Float32 | None = None

    @property
    def used(self) -> float:
        """Fraction of the shift applied in this round; 0 without correction."""
        if not self.correct:
            return 0.0
        return 1.0 if self.strength is None else self.strength

    @property
    def remembered(self) -> "DriftPart":
        return self if self.mean is None else replace(self, mean=None)

    def require_possible(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"the share of a round is {self.share}")
        # A longer shift of one node with a memory would outweigh the updates of the others.
        if self.strength is not None and not 0 <= self.strength <= 1:
            raise ValueError(f"the strength of the correction is {self.strength}")


@dataclass(frozen=True)
class DriftCatchUp(RoundPart):
    """Drift correction for a node that missed the previous round.

    Args:
      mean: c, [parameters].
      since: the last uncorrected round before this one; older c_i are void.
    """

    mean: Float32
    since: int

    def require_possible(self) -> None:
        if self.since < 0:
            raise ValueError(f"the last uncorrected round is {self.since}")


def combined_of(broadcast: Broadcast) -> Float32:
    """Return the combined w_i of the previous round, [parameters]."""
    part = broadcast.by_kind.get(DriftPart)
    return broadcast.w if part is None or part.mean is None else part.mean


def corrects(states: Mapping[str, FeatureState]) -> bool:
    """Whether the coming round is corrected, from the states of all features."""
    drift = states.get(DriftCorrection.name)
    return isinstance(drift, DriftState) and drift.coming.correct


def mean_gradient(start: Float32, end: Float32, span: float) -> Float32:
    """Mean gradient of an interval of τ updates, (w(t₀) - w(t)) / ητ, for any shape of
    w(t).

    Args:
      start: w(t₀).
      end: w(t).
      span: ητ.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # a diverged node is left out later
        gradient: Float32 = (start - end) / np.float32(span)
    return gradient


def next_mean(mean: Float32 | None, gradient: Float32, share: float) -> Float32:
    """c after an interval.

    Args:
      mean: c before it; None for an interval without correction.
      gradient: mean gradient of the interval.
      share: P.
    """
    if share == 1:
        return gradient
    new: Float32 = np.float32(share) * gradient
    return new if mean is None else np.float32(1 - share) * mean + new


@dataclass(frozen=True)
class Divergence:
    """Mean distance of the nodes' mean gradients, without correction and with it."""

    plain: float
    corrected: float

    def then(self, fresh: "Divergence") -> "Divergence":
        """Average with a new divergence."""
        return Divergence(
            (self.plain + fresh.plain) / 2, (self.corrected + fresh.corrected) / 2
        )

    @property
    def possible(self) -> bool:
        """Whether the numbers are plausible; those of diverged or malicious nodes may not
        be."""
        return 0 <= self.plain <= LARGEST and 0 <= self.corrected <= LARGEST

    @property
    def correct(self) -> bool:
        """Whether correction does not increase the divergence."""
        return self.corrected <= self.plain


@dataclass(frozen=True)
class DriftState(FeatureState):
    """Drift correction at the aggregator, between two rounds.

    Args:
      mean: c, [parameters].
      coming: drift correction of the next broadcast.
      divergence: average divergence of the nodes' gradients; None before the first round.
      uncorrected: the last round without correction.
      nodes, sizes: numbers and D_i of all nodes that took part, except forgotten ones,
        [n].
      lasting: α before it is limited to [0, 1]; None before the first.
      bias: mean shift of the nodes, [parameters], if vectors are compressed.
    """

    mean: Float32
    coming: DriftPart
    divergence: Divergence | None
    uncorrected: int
    nodes: Int64
    sizes: Int64
    lasting: float | None = None
    bias: Float32 | None = None

    @property
    def sent_vectors(self) -> tuple[Float32, ...]:
        return () if self.coming.mean is None else (self.coming.mean,)

    @classmethod
    def first(cls, w: Float32) -> "DriftState":
        empty = np.empty(0, np.int64)
        coming = DriftPart(correct=True, share=1.0)
        return cls(np.zeros_like(w), coming, None, 0, empty, empty)

    def join(self, report: Report) -> "DriftState":
        """Add the nodes of a report."""
        same = np.array_equal(report.nodes, self.nodes)
        if same and np.array_equal(report.sizes, self.sizes):
            return self
        nodes, first = np.unique(np.append(report.nodes, self.nodes), return_index=True)
        return replace(self, nodes=nodes, sizes=np.append(report.sizes, self.sizes)[first])

    def forget(self, nodes: Collection[int]) -> "DriftState":
        """Remove nodes; returns the same object if none of them is known."""
        kept = ~np.isin(self.nodes, np.array(sorted(nodes), np.int64))
        if kept.all():
            return self
        return replace(self, nodes=self.nodes[kept], sizes=self.sizes[kept])

    def uncorrected_next(self) -> "DriftState":
        """Return the state with the coming round uncorrected."""
        return replace(self, coming=replace(self.coming, correct=False))

    @property
    def data(self) -> float:
        """D, the number of samples of all nodes."""
        return float(np.add.reduce(self.sizes))

    def after(
        self,
        broadcast: TrainRound,
        mean: Float32,
        share: float,
        fresh: Divergence,
        *,
        partly: bool,
        restart: bool,
        start: Float32,
        lasted: float,
    ) -> "DriftState":
        """Return the state after an interval.

        Args:
          broadcast: the broadcast of the interval.
          mean: the combined w_i, [parameters].
          share: P.
          fresh: the nodes' divergences, averaged.
          partly: whether only the persistent part of shifts is applied.
          restart: whether the next interval is not corrected, and all c_i restart.
          start: start of the interval, [parameters].
          lasted: α of this interval; NaN if unknown.
        """
        part = broadcast.by_kind.get(DriftPart)
        corrected = part is not None and part.correct
        gradient = mean_gradient(start, mean, broadcast.span)
        divergence = fresh if self.divergence is None else self.divergence.then(fresh)
        coming = DriftPart(divergence.correct and not restart, share)
        lasting = self.lasting
        if partly and (share >= 1 or restart):
            if np.isfinite(lasted):
                lasting = lasted if lasting is None else (lasting + lasted) / 2
            strength = 1.0 if lasting is None else min(1.0, max(0.0, lasting))
            coming = DriftPart(not restart, share, strength)
        elif partly and part is not None and part.strength is not None:
            # Some nodes were absent: correction restarts if it was partial.
            coming = DriftPart(correct=False, share=share)
        return updated(
            self,
            mean=next_mean(self.mean if corrected else None, gradient, share),
            coming=coming,
            divergence=divergence,
            uncorrected=self.uncorrected if corrected else broadcast.round,
            lasting=lasting,
        )

    @property
    def coming_delta(self) -> float | None:
        """Expected δ of the coming interval, from recent ones with or without
        correction."""
        if self.divergence is None:
            return None
        return self.divergence.corrected if self.coming.correct else self.divergence.plain

    def require_possible(self, w: Float32) -> None:
        if self.mean.shape != w.shape:
            raise ValueError(f"c has shape {self.mean.shape}, and w {w.shape}")
        self.coming.require_possible()
        sent = self.coming.mean
        if sent is not None and (sent.shape != w.shape or not np.isfinite(sent).all()):
            raise ValueError("the combined w_i is not finite, or has another length")
        if not 0 <= self.uncorrected < 2**63:
            raise ValueError(f"the last uncorrected round is {self.uncorrected}")
        if self.nodes.ndim != 1 or self.sizes.shape != self.nodes.shape:
            raise ValueError(
                f"nodes and sizes have shapes {self.nodes.shape} and {self.sizes.shape}"
            )
        ascending = (np.diff(self.nodes) > 0).all() and (self.nodes >= 0).all()
        if not ascending or (self.sizes < 1).any():
            raise ValueError("nodes are not in order, or have no samples")


@dataclass(frozen=True)
class Correction(NodeMemory):
    """Drift correction of the n nodes of a fleet.

    Args:
      mean: c, [parameters].
      own: c_i, [n, parameters].
      shift: s_i = c - c_i, [n, parameters].
      plain, corrected: ‖s_i'‖ and ‖s_i' - s_i‖ of the last interval, [n].
      learned: whether all c_i follow from the last updates.
    """

    mean: Float32
    own: Float32
    shift: Float32
    plain: Float64
    corrected: Float64
    learned: bool = False

    def require_shapes(self, nodes: int, parameters: int, held_out: Any) -> None:
        require_shape(self.mean, parameters)
        require_shape(self.own, nodes, parameters)
        require_shape(self.shift, nodes, parameters)
        require_shape(self.plain, nodes)
        require_shape(self.corrected, nodes)

    @classmethod
    def first(cls, nodes: int, mean: Float32) -> "Correction":
        """Return the correction of new nodes, which start with c_i = c."""
        own = np.repeat(mean[None], nodes, axis=0)
        return cls(mean, own, np.zeros_like(own), np.zeros(nodes), np.zeros(nodes))

    def used(self, drift: DriftPart) -> Float32 | None:
        """Return the addition to gradients in an interval, [n, parameters]; None if there
        is none."""
        if not drift.correct:
            return None
        strength = drift.strength
        if strength is None or strength == 1:
            return self.shift
        return np.float32(strength) * self.shift

    def learn(self, gradients: Float32, drift: DriftPart) -> "Correction":
        """Set c_i from the mean gradients of an interval; non-finite ones are ignored.

        Args:
          gradients: mean gradients including the shifts, [n, parameters]; overwritten.
          drift: drift correction of the interval.
        """
        shift = self.used(drift)
        if shift is not None:
            gradients -= shift
        finite = np.asarray(np.isfinite(gradients).all(axis=1))
        if finite.all():
            return updated(self, own=gradients, learned=True)
        return updated(self, own=np.where(finite[:, None], gradients, self.own))

    @property
    def persistence(self) -> tuple[Float64, Float64]:
        """-<c_i', s_i> and ‖s_i‖², the terms of α, [n] each."""
        with np.errstate(over="ignore", invalid="ignore"):
            product = -np.einsum("ij,ij->i", self.own, self.shift, dtype=np.float64)
            return product, squared_norms(self.shift)

    def forget(self) -> "Correction":
        """Set c_i = 0, after nodes missed an interval without correction."""
        return replace(self, own=np.zeros_like(self.own))

    def with_mean(self, mean: Float32) -> "Correction":
        """Set c, and with it the shifts of the coming interval."""
        shift = mean - self.own
        return updated(
            self,
            mean=mean,
            shift=shift,
            plain=norms(shift),
            corrected=norms(shift, self.shift),
            learned=False,
        )


@register_feature
@dataclass(frozen=True)
class DriftCorrection(Feature):
    """Drift correction.

    Args:
      partly: whether only the persistent part of shifts is applied, instead of all or
        nothing.
    """

    name: ClassVar[str] = "drift"
    types: ClassVar[tuple[type, ...]] = (DriftPart, DriftCatchUp, DriftState, Correction)
    partly: bool = False

    def reported(self, first: bool) -> Reported:
        norms = dict.fromkeys(["plain", "corrected"], MOST_BEYOND)
        if not self.partly:
            return Reported(norms)
        # Products of two vectors: their ratio to the median is that of lengths, squared.
        # `lasting` has either sign, so its median may be near 0.
        products = dict.fromkeys(["lasting", "shifted"], MOST_BEYOND**2)
        return Reported({**norms, **products}, floors={"lasting": "shifted"})

    # Nodes.

    def begin(self, local: LocalRound) -> None:
        """Compute c from the previous interval, or take it from the catch-up."""
        part = local.broadcast.by_kind.get(DriftPart)
        if part is None:
            return
        last = local.last
        before: Correction | None = local.memories.get(self.name)
        catch_up = local.broadcast.catch_up
        sent = None if catch_up is None else catch_up.part(DriftCatchUp)
        after_final = last is not None and not isinstance(last.broadcast, TrainRound)
        if before is not None and after_final and not local.missed:
            return  # c is known from before the final round of a run that was extended
        if before is None or last is None or last.w is None:
            mean = np.zeros_like(local.broadcast.w) if sent is None else sent.mean
            local.memories[self.name] = Correction.first(len(local.numbers), mean)
        elif not local.missed:
            mean = _mean_of_interval(local, last, before, part.share)
            local.memories[self.name] = before.with_mean(mean)
        elif sent is None:
            raise PeerError(
                f"round {local.broadcast.round} after round {last.broadcast.round}, "
                "without the mean of all corrections"
            )
        else:
            if sent.since > last.broadcast.round:
                before = before.forget()
            local.memories[self.name] = before.with_mean(sent.mean)

    def common(self, local: LocalRound) -> Sequence[Float32]:
        part = local.broadcast.by_kind.get(DriftPart)
        correction: Correction | None = local.memories.get(self.name)
        if part is None or correction is None or not part.correct:
            return ()
        return (correction.mean,)

    def shift(self, local: LocalRound) -> Float32 | None:
        part = local.broadcast.by_kind.get(DriftPart)
        correction: Correction | None = local.memories.get(self.name)
        if part is None or correction is None:
            return None
        shift = correction.used(part)
        if "gradients" in local.broadcast.report.vectors:  # reported without the shift
            local.scratch[self.name] = shift
        return shift

    def end(self, local: LocalRound) -> None:
        correction: Correction | None = local.memories.get(self.name)
        broadcast = local.broadcast
        if correction is None or local.w is None or not isinstance(broadcast, TrainRound):
            return
        local.memories[self.name] = _learned(
            correction, broadcast, local.start, local.w, local.statistics
        )

    def report(self, local: LocalRound) -> Mapping[str, Float64]:
        correction: Correction | None = local.memories.get(self.name)
        assert correction is not None
        numbers = {"plain": correction.plain, "corrected": correction.corrected}
        if self.partly:
            numbers["lasting"], numbers["shifted"] = correction.persistence
        return numbers

    def compact(self, state: FleetState) -> FleetState:
        correction = state.memories.get(self.name)
        if not isinstance(correction, Correction) or not correction.learned:
            return state
        smaller = replace(correction, own=_NOTHING)
        return replace(state, memories={**state.memories, self.name: smaller})

    def expand(self, state: FleetState, model: Model) -> FleetState:
        correction = state.memories.get(self.name)
        broadcast = state.broadcast
        if not isinstance(correction, Correction) or state.w is None:
            return state
        if correction.own.size:
            return state
        assert isinstance(broadcast, TrainRound)
        assert state.start is not None
        whole = _learned(correction, broadcast, state.start, state.w, model.statistics)
        return replace(state, memories={**state.memories, self.name: whole})

    # Aggregator.

    def first(self, w: Float32) -> DriftState:
        return DriftState.first(w)

    def message(self, state: DriftState) -> RoundPart:
        return state.coming

    def catch_up(self, state: DriftState) -> RoundPart:
        return DriftCatchUp(state.mean, state.uncorrected)

    def unbias(self, state: DriftState, broadcast: TrainRound, mean: Float32) -> Float32:
        """Remove the effect of shifts that do not cancel from the combined w_i."""
        used = state.coming.used
        if state.bias is None or not used:
            return mean
        return mean + np.float32(used * broadcast.span) * state.bias

    def after(self, state: DriftState, result: RoundResult) -> DriftState:
        """Update c, and decide whether and how strongly the next round is corrected."""
        sums = result.sums
        totals = sums.totals
        # c would not be the mean of the c_i if reports were capped.
        restart = result.recover or result.capped
        if sums.report is not None:
            state = state.join(sums.report)
        data = sums.all_data or state.data or totals["data"]
        share = 0.0 if restart else totals["used"] / data
        fresh = Divergence(sums.weighted_mean("plain"), sums.weighted_mean("corrected"))
        if not fresh.possible:
            fresh = state.divergence or Divergence(0.0, 0.0)
        sent = _sent_mean(result)
        received = result.w if sent is None else sent
        after = state.after(
            result.broadcast,
            with_statistics_of(result.start, received, result.statistics),
            share,
            fresh,
            partly=self.partly,
            restart=restart,
            start=result.start,
            lasted=_persistent_share(sums) if self.partly else np.nan,
        )
        bias = None
        if result.quantize is not None:
            bias = _next_bias(state, after.coming.share, received, result)
        return replace(after, coming=replace(after.coming, mean=sent), bias=bias)

    def recorded(self, state: DriftState, result: RoundResult | None) -> Mapping[str, Any]:
        part = None if result is None else result.broadcast.by_kind.get(DriftPart)
        corrected = part is not None and part.correct
        return {"corrected": corrected, "divergence": state.divergence}

    def forget(
        self,
        state: DriftState,
        nodes: Collection[int],
        states: Mapping[str, FeatureState],
        broadcast: Broadcast,
    ) -> DriftState:
        after = state.forget(nodes)
        return state if after is state else after.uncorrected_next()

    def recovered(self, state: DriftState) -> DriftState:
        """Return the state without everything learned from gradients."""
        return replace(
            state,
            mean=np.zeros_like(state.mean),
            coming=DriftPart(correct=False, share=1.0),
            divergence=None,
        )


def _mean_of_interval(
    local: LocalRound, last: FleetState, before: Correction, share: float
) -> Float32:
    """Return c after the previous interval, [parameters]."""
    start = last.start
    interval = last.broadcast
    part = interval.by_kind.get(DriftPart)
    assert start is not None
    assert isinstance(interval, TrainRound)
    corrected = part is not None and part.correct
    combined = combined_of(local.broadcast)
    if local.statistics:
        combined = with_statistics_of(start, combined, local.statistics)
    gradient = mean_gradient(start, combined, interval.span)
    return next_mean(before.mean if corrected else None, gradient, share)


def _learned(
    correction: Correction,
    broadcast: TrainRound,
    start: Float32,
    w: Float32,
    statistics: int,
) -> Correction:
    """Return the correction with the c_i of an interval that ended at w."""
    part = broadcast.by_kind.get(DriftPart)
    if part is None:
        return correction
    if statistics:
        w = with_statistics_of(start, w, statistics)
    return correction.learn(mean_gradient(start, w, broadcast.span), part)


def _persistent_share(sums: Sums) -> float:
    """α, the share of the shifts that persisted; NaN without shifts."""
    shifted = sums.totals["shifted"]
    return sums.totals["lasting"] / shifted if 0 < shifted < np.inf else np.nan


def _sent_mean(result: RoundResult) -> Float32 | None:
    """Return the combined w_i as nodes receive them, if they differ from w."""
    if result.mean is result.w:
        return None
    if result.quantize is None:
        return result.mean
    return result.quantize(result.mean, result.w)


def _next_bias(
    state: DriftState, share: float, received: Float32, result: RoundResult
) -> Float32 | None:
    """Return the mean of the coming shifts, if compression changes the combined w_i.

    Args:
      state: the state before the round.
      share: P of the round.
      received: the combined w_i as nodes receive them, [parameters].
      result: the round.
    """
    mean = result.combined
    if mean is None or received is mean:
        return None
    gradient = mean_gradient(received, mean, -result.broadcast.span)
    bias = np.float32(share) * gradient
    used = state.coming.used
    if state.bias is not None and used:
        bias += np.float32(used) * state.bias
    return with_statistics_of(np.zeros_like(bias), bias, result.statistics)
