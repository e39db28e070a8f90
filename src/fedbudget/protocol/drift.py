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

**Momentum at nodes** (messages.py, `momentum`). An interval starts from an extrapolated w.
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

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.protocol.messages import Broadcast, Drift, Report
from fedbudget.protocol.sums import LARGEST, norms, squared_norms

NOTHING = np.empty((0, 0), np.float32)
"""Replaces c_i that nodes can compute again."""


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
class DriftState:
    """Drift correction at the aggregator, between two rounds.

    Args:
      mean: c, [parameters].
      coming: drift correction of the next broadcast.
      divergence: average divergence of the nodes' gradients; None before the first round.
      uncorrected: the last round without correction.
      nodes, sizes: numbers and D_i of all nodes that took part, except forgotten ones,
        [n].
      lasting: α before it is limited to [0, 1]; None before the first.
    """

    mean: Float32
    coming: Drift
    divergence: Divergence | None
    uncorrected: int
    nodes: Int64
    sizes: Int64
    lasting: float | None = None

    @classmethod
    def first(cls, w: Float32) -> "DriftState":
        empty = np.empty(0, np.int64)
        coming = Drift(correct=True, share=1.0)
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

    def reset(self) -> "DriftState":
        """Return the state without everything learned from gradients."""
        return replace(
            self,
            mean=np.zeros_like(self.mean),
            coming=Drift(correct=False, share=1.0),
            divergence=None,
        )

    @property
    def data(self) -> float:
        """D, the number of samples of all nodes."""
        return float(np.add.reduce(self.sizes))

    def after(
        self,
        broadcast: Broadcast,
        mean: Float32,
        share: float,
        fresh: Divergence,
        *,
        recover: bool,
        start: Float32 | None = None,
        lasted: float | None = None,
    ) -> "DriftState":
        """Return the state after an interval.

        Args:
          broadcast: the broadcast of the interval.
          mean: the combined w_i, [parameters].
          share: P.
          fresh: the nodes' divergences, averaged.
          recover: whether the run returns to w^f: the next interval is then not corrected.
          start: start of the interval, [parameters]; w(t₀) if not given.
          lasted: α of this interval; NaN if unknown.
        """
        corrected = broadcast.drift is not None and broadcast.drift.correct
        start = broadcast.w if start is None else start
        gradient = mean_gradient(start, mean, broadcast.span)
        divergence = fresh if self.divergence is None else self.divergence.then(fresh)
        after = replace(
            self,
            mean=next_mean(self.mean if corrected else None, gradient, share),
            coming=Drift(divergence.correct and not recover, share),
            divergence=divergence,
            uncorrected=self.uncorrected if corrected else broadcast.round,
        )
        if not broadcast.request.partly:
            return after
        if share >= 1 or recover:
            return after._with_strength(lasted, recover=recover)
        # Some nodes were absent: correction restarts if it was partial.
        whole = broadcast.drift is None or broadcast.drift.strength is None
        return after if whole else replace(after, coming=Drift(correct=False, share=share))

    def _with_strength(self, lasted: float | None, *, recover: bool) -> "DriftState":
        lasting = self.lasting
        if lasted is not None and np.isfinite(lasted):
            lasting = lasted if lasting is None else (lasting + lasted) / 2
        strength = 1.0 if lasting is None else min(1.0, max(0.0, lasting))
        coming = Drift(not recover, self.coming.share, strength)
        return replace(self, lasting=lasting, coming=coming)

    @property
    def coming_delta(self) -> float | None:
        """Expected δ of the coming interval, from recent ones with or without
        correction."""
        if self.divergence is None:
            return None
        return self.divergence.corrected if self.coming.correct else self.divergence.plain

    def require_possible(self, w: Float32) -> None:
        """Raise ValueError for values that no run produces; a file may be damaged."""
        if self.mean.shape != w.shape:
            raise ValueError(f"c has shape {self.mean.shape}, and w {w.shape}")
        if not 0 <= self.coming.share <= 1 or not 0 <= self.uncorrected < 2**63:
            raise ValueError(
                f"P is {self.coming.share}, the last uncorrected round {self.uncorrected}"
            )
        if self.nodes.ndim != 1 or self.sizes.shape != self.nodes.shape:
            raise ValueError(
                f"nodes and sizes have shapes {self.nodes.shape} and {self.sizes.shape}"
            )
        ascending = (np.diff(self.nodes) > 0).all() and (self.nodes >= 0).all()
        if not ascending or (self.sizes < 1).any():
            raise ValueError("nodes are not in order, or have no samples")


@dataclass(frozen=True)
class Correction:
    """Drift correction of the n nodes of a fleet.

    Args:
      mean: c, [parameters].
      own: c_i, [n, parameters].
      shift: s_i = c - c_i, [n, parameters].
      plain, corrected: ‖s_i'‖ and ‖s_i' - s_i‖ of the last interval, [n].
    """

    mean: Float32
    own: Float32
    shift: Float32
    plain: Float64
    corrected: Float64

    @classmethod
    def first(cls, nodes: int, mean: Float32) -> "Correction":
        """Return the correction of new nodes, which start with c_i = c."""
        own = np.repeat(mean[None], nodes, axis=0)
        return cls(mean, own, np.zeros_like(own), np.zeros(nodes), np.zeros(nodes))

    def used(self, drift: Drift) -> Float32 | None:
        """Return the addition to gradients in an interval, [n, parameters]; None if there
        is none."""
        if not drift.correct:
            return None
        if drift.strength is None:
            return self.shift
        return np.float32(drift.strength) * self.shift

    def learn(self, gradients: Float32, drift: Drift) -> "Correction":
        """Set c_i from the mean gradients of an interval; non-finite ones are ignored.

        Args:
          gradients: mean gradients including the shifts, [n, parameters]; overwritten.
          drift: drift correction of the interval.
        """
        shift = self.used(drift)
        if shift is not None:
            gradients -= shift
        finite = np.asarray(np.isfinite(gradients).all(axis=1))
        if not finite.all():
            gradients = np.where(finite[:, None], gradients, self.own)
        return replace(self, own=gradients)

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
        return replace(
            self,
            mean=mean,
            shift=shift,
            plain=norms(shift),
            corrected=norms(shift, self.shift),
        )
