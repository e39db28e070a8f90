"""Drift correction: local updates that do not drift apart, at no extra byte.

Between two aggregations a node follows ∇F_i, which with data of its own kind leads away from where ∇F would. It can
know by how much: an interval of τ updates from w(t₀) that ended at its own w_i(t) and at everyone's w(t) tells it its
own mean gradient and, with P the share of all data whose nodes took part, that of all nodes,

    c_i ← (w(t₀) - w_i(t)) / ητ - s_i,      c ← (1-P) c + P (w(t₀) - w(t)) / ητ,      s_i = c - c_i

and in the next interval it steps along ∇F_i(w) + s_i. All start with c_i = c = 0. A node that was away keeps its c_i
and is told c; a new one starts with c_i = c. (These are the control variates of SCAFFOLD, Karimireddy et al., ICML
2020, in a form that needs nothing more on the wire.)

c is always the mean of all c_i, Σ D_i c_i = D c, so that shifts cancel in the average of all nodes. Proof. It holds at
the start, and when a node joins with c_i = c. Let it hold before an interval with nodes S, P = Σ_S D_i / D. Then

    Σ D_i c_i' = Σ_S D_i ((w(t₀) - w_i(t)) / ητ - c + c_i) + Σ_others D_i c_i
               = P D (w(t₀) - w(t)) / ητ - P D c + Σ_all D_i c_i              by w(t) = Σ_S D_i w_i(t) / Σ_S D_i
               = P D (w(t₀) - w(t)) / ητ + (1-P) D c = D c'.

An interval can also be made without the correction. It then begins with all c_i = c = 0, also of nodes that are away,
and so the proof holds on: shifts are 0, and what is learned in it is right for the next. This is also the way on when
nodes leave for good, or come back without their memory: their c_i are lost, so that c is no longer the mean of those
that are left, and an interval without the correction begins anew with the nodes that there are, who alone make up D.

Whether to correct is decided by what it does to the divergence. A shift takes away what a node's gradient was off by
in the interval before; where that was mostly noise, of small mini-batches say, it adds noise. After each interval a
node tells by how much its mean gradient was apart from everyone's, as it is and with the shift it had at hand, used or
not: ‖s_i'‖ and ‖s_i' - s_i‖, with s_i' what the interval gave. The aggregator corrects where the second is no larger.
Both are averaged over nodes, and over intervals, half old and half new: a single interval of small mini-batches is too
noisy to judge by, and an interval that is left uncorrected by mistake drifts.

Instead of all or nothing, a share α of the shift can be used, s_i = α (c - c_i): what was off by difference of data
stays from one interval to the next, and what was off by noise does not. With s_i' what an interval gave,

    α = Σ D_i <s_i', s_i> / Σ D_i ‖s_i‖²      = -Σ D_i <c_i', s_i> / Σ D_i ‖s_i‖²,

the share that stayed, averaged half old and half new, and held between 0 and 1. The second form needs nothing that a
node does not know when it reports, because shifts cancel: Σ D_i <c', s_i> = 0. While all nodes take part, the proof
above holds for any α: shifts still cancel. Where some do not it needs α = 1, because their c_i are not in the sum. So
after an interval that was partly corrected and that some missed, all begins anew, and while nodes are missing it is all
or nothing.

Where nodes go on with a part of the last move of w besides (messages.py, `momentum`), an interval starts from w(t₀) and
that part: what nodes' gradients have done is the way from there, and w(t₀) stands for it in all of the above.

Where fewer bits are sent (compression.py), c_i and c are made of what arrives. What nodes are told of w(t) is then not
the mean of what they have told: c is off, and with it the mean of all shifts, by which everyone would go astray, in
every round that follows. The aggregator knows it, s̄ ← α s̄ + P (w(t) - what is told of it) / ητ, and takes ητ α s̄ back
from w(t) after the next interval; then what is left of it in c is of the last round alone.

Where nodes make different numbers of updates (workload.py), what they report is as of τ_eff, which is τ in all of the
above: (w(t₀) - w_i(t)) / ητ_eff is then what the τ_i updates of a node went along on average, and the proof holds.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.protocol.messages import Broadcast, Drift, Report
from fedbudget.protocol.sums import LARGEST, norms, squared_norms

NOTHING = np.empty((0, 0), np.float32)
"""In place of the c_i of nodes that can be learned again."""


def mean_gradient(start: Float32, end: Float32, span: float) -> Float32:
    """What an interval of τ updates went along on average, (w(t₀) - w(t)) / ητ, for any shape of w(t).

    Args:
      span: ητ.
    """
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # of a node that diverged, and is left out
        gradient: Float32 = (start - end) / np.float32(span)
    return gradient


def next_mean(mean: Float32 | None, gradient: Float32, share: float) -> Float32:
    """c after an interval, from c before it, if that was used, the interval's mean gradient, and P."""
    if share == 1:
        return gradient
    new: Float32 = np.float32(share) * gradient
    return new if mean is None else np.float32(1 - share) * mean + new


@dataclass(frozen=True)
class Divergence:
    """By how much nodes' mean gradients are apart, without correction and with it."""

    plain: float
    corrected: float

    def then(self, fresh: "Divergence") -> "Divergence":
        """Half old and half new."""
        return Divergence(
            (self.plain + fresh.plain) / 2, (self.corrected + fresh.corrected) / 2
        )

    @property
    def possible(self) -> bool:
        """Whether these are numbers that can be; of nodes that diverge, or lie, they are not."""
        return 0 <= self.plain <= LARGEST and 0 <= self.corrected <= LARGEST

    @property
    def correct(self) -> bool:
        """Whether correction makes it smaller."""
        return self.corrected <= self.plain


@dataclass(frozen=True)
class DriftState:
    """What the aggregator knows of all nodes' corrections, between two rounds.

    Args:
      mean: c, [parameters].
      coming: what the next broadcast says of drift correction.
      divergence: of the nodes' gradients, without correction and with it; None before the first round.
      uncorrected: the last round without correction.
      nodes, sizes: the numbers and D_i of all nodes that ever took part, but for those forgotten, [n].
      lasting: α, not held between 0 and 1; None before there is one.
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
        nobody = np.empty(0, np.int64)
        return cls(
            np.zeros_like(w), Drift(correct=True, share=1.0), None, 0, nobody, nobody
        )

    def join(self, report: Report) -> "DriftState":
        """With the nodes of a report."""
        if np.array_equal(report.nodes, self.nodes) and np.array_equal(
            report.sizes, self.sizes
        ):
            return self
        nodes, first = np.unique(np.append(report.nodes, self.nodes), return_index=True)
        return replace(self, nodes=nodes, sizes=np.append(report.sizes, self.sizes)[first])

    def forget(self, nodes: Collection[int]) -> "DriftState":
        """Without these nodes; itself when none of them is known."""
        known = np.isin(self.nodes, np.array(sorted(nodes), np.int64))
        return (
            replace(self, nodes=self.nodes[~known], sizes=self.sizes[~known])
            if known.any()
            else self
        )

    def anew(self) -> "DriftState":
        """With nothing that was learned."""
        return replace(
            self,
            mean=np.zeros_like(self.mean),
            coming=Drift(correct=False, share=1.0),
            divergence=None,
        )

    @property
    def data(self) -> float:
        """D of all nodes."""
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
        """After an interval whose w_i were combined to `mean`.

        Args:
          share: P.
          fresh: the nodes' divergences, averaged.
          recover: whether the run goes back to w^f: then the next interval is not corrected.
          start: where the interval started from, [parameters]; w(t₀) when not given.
          lasted: α of this interval; NaN where it is not known.
        """
        corrected = broadcast.drift is not None and broadcast.drift.correct
        gradient = mean_gradient(
            broadcast.w if start is None else start, mean, broadcast.span
        )
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
        if share < 1 and not recover:  # some were missing
            whole = broadcast.drift is None or broadcast.drift.strength is None
            return (
                after if whole else replace(after, coming=Drift(correct=False, share=share))
            )
        return after._with_strength(lasted, recover=recover)

    def _with_strength(self, lasted: float | None, *, recover: bool) -> "DriftState":
        lasting = self.lasting
        if lasted is not None and np.isfinite(lasted):
            lasting = lasted if lasting is None else (lasting + lasted) / 2
        strength = 1.0 if lasting is None else min(1.0, max(0.0, lasting))
        return replace(
            self, lasting=lasting, coming=Drift(not recover, self.coming.share, strength)
        )

    @property
    def coming_delta(self) -> float | None:
        """δ of the coming interval, as the last ones were with or without correction."""
        if self.divergence is None:
            return None
        return self.divergence.corrected if self.coming.correct else self.divergence.plain

    def require_possible(self, w: Float32) -> None:
        """Refuses what no run comes to: raises ValueError."""
        if (
            self.mean.shape != w.shape
            or not 0 <= self.coming.share <= 1
            or not 0 <= self.uncorrected < 2**63
        ):
            raise ValueError(
                f"c has shape {self.mean.shape}, P is {self.coming.share}, since round {self.uncorrected}"
            )
        if self.nodes.ndim != 1 or self.sizes.shape != self.nodes.shape:
            raise ValueError(
                f"nodes and sizes have shapes {self.nodes.shape} and {self.sizes.shape}"
            )
        if (
            (np.diff(self.nodes) <= 0).any()
            or (self.nodes < 0).any()
            or (self.sizes < 1).any()
        ):
            raise ValueError("nodes are not in order, or have no samples")


@dataclass(frozen=True)
class Correction:
    """What the n nodes of a fleet know of each other's gradients.

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
        """Of nodes that join when c is this."""
        own = np.repeat(mean[None], nodes, axis=0)
        return cls(mean, own, np.zeros_like(own), np.zeros(nodes), np.zeros(nodes))

    def used(self, drift: Drift) -> Float32 | None:
        """What is added to gradients in an interval, [n, parameters]; nothing where it is not corrected."""
        if not drift.correct:
            return None
        return (
            self.shift
            if drift.strength is None
            else np.float32(drift.strength) * self.shift
        )

    def learn(self, gradients: Float32, drift: Drift) -> "Correction":
        """With c_i from the nodes' mean gradients over an interval; what is not finite teaches nothing.

        Args:
          gradients: along which the nodes went, with what was added to them, [n, parameters]; it is taken over.
        """
        shift = self.used(drift)
        if shift is not None:
            gradients -= shift
        finite = np.asarray(np.isfinite(gradients).all(axis=1))
        return replace(
            self,
            own=gradients
            if finite.all()
            else np.where(finite[:, None], gradients, self.own),
        )

    @property
    def lasting(self) -> tuple[Float64, Float64]:
        """-<c_i, s_i> with c_i as it was learned last, and ‖s_i‖², [n] each: see α above."""
        with np.errstate(over="ignore", invalid="ignore"):
            product = -np.einsum("ij,ij->i", self.own, self.shift, dtype=np.float64)
            return product, squared_norms(self.shift)

    def forget(self) -> "Correction":
        """With c_i = 0: there was an interval without correction that these nodes missed."""
        return replace(self, own=np.zeros_like(self.own))

    def with_mean(self, mean: Float32) -> "Correction":
        """With c as it is now, and so the shifts of the coming interval."""
        shift = mean - self.own
        return replace(
            self,
            mean=mean,
            shift=shift,
            plain=norms(shift),
            corrected=norms(shift, self.shift),
        )
