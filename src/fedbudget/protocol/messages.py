"""Messages between the aggregator and fleets, and their sizes on the wire.

Messages are frozen. A report is a structure of arrays over the nodes of one fleet;
`Report.merge` joins the reports of several fleets in node order, in whatever order they
arrived. The broadcast decides which optional fields its report has:
`Broadcast.report_fields`. Sizes and merging follow from the fields themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.errors import FedbudgetError

_SCALAR = 8  # bytes of a number
_HEADER = 32  # bytes of all flags and of the fields below
_IN_HEADER = frozenset(
    {"round", "tau", "eta", "momentum", "work", "compress", "nodes", "sizes"}
)


class LocalError(FedbudgetError, RuntimeError):
    """This side called the protocol in a wrong order: a bug in the engine."""


class PeerError(FedbudgetError, ValueError):
    """The other side sent something that the protocol does not allow."""


@dataclass(frozen=True)
class Request:
    """What nodes report in every round of a run, in addition to the loss and w.

    Args:
      estimate: ρ̂_i and β̂_i.
      gradient: the gradient at w(t₀), with the estimates.
      curvature: β̂_i also if w_i equals w, measured between w and the previous w.
      drift: the divergences that decide on drift correction (drift.py).
      partly: the persistent part of the shift, for partial drift correction.
      one_step: β̂_i over one local update from w(t₀). A node searches its first β̂_i
        (estimates.py). In the first round it uses its own step size η_i = 1/β̂_i and
        reports the w_i that η would have reached.
      proximal: μ of FedProx, which keeps local updates close to w(t₀) (update.py).
      private: only what privacy.py allows; with `one_step`, nodes use their own η_i in
        every update.
      per_sample: single samples are protected, with noise of the nodes
        (sample_privacy.py).
    """

    estimate: bool = False
    gradient: bool = False
    curvature: bool = False
    drift: bool = False
    partly: bool = False
    one_step: bool = False
    proximal: float | None = None
    private: bool = False
    per_sample: bool = False


@dataclass(frozen=True)
class Private:
    """Settings of a private round (privacy.py).

    Args:
      clip: C, the largest norm of an update; 0 if the round only measures norms. With
        per-sample privacy, the largest norm of a sample's gradient.
      rho: privacy cost ρ of the round for each node, or for each sample.
      samples: with per-sample privacy, the number of samples of all nodes, as far as
        known; None with per-node privacy.
    """

    clip: float
    rho: float
    samples: int | None = None

    @property
    def per_sample(self) -> bool:
        """Whether single samples are protected, not nodes."""
        return self.samples is not None

    @property
    def measures(self) -> bool:
        """Whether the round only measures norms."""
        return self.clip == 0

    def at_cost(self, rho: float) -> "Private":
        """Return the same round with another ρ."""
        return replace(self, rho=rho)


@dataclass(frozen=True)
class Drift:
    """Settings of drift correction for a round (drift.py).

    Args:
      correct: whether to correct in this round.
      share: P of the previous round, the share of all data whose nodes contributed to w(t).
      strength: α, the fraction of the shift to apply; None applies all of it.
    """

    correct: bool
    share: float
    strength: float | None = None

    @property
    def used(self) -> float:
        """Fraction of the shift applied in this round; 0 without correction."""
        if not self.correct:
            return 0.0
        return 1.0 if self.strength is None else self.strength


@dataclass(frozen=True)
class Work:
    """Local updates of each node, if nodes make different numbers (workload.py).

    Args:
      effective: τ_eff, the number of local updates that the round's move of w represents.
      most: the largest number; every node draws this number of mini-batches, so that all
        nodes draw the same ones.
      updates: τ_i of the addressed nodes, in node order.
    """

    effective: float
    most: int
    updates: tuple[int, ...]

    def of(self, nodes: Int64, tau: int) -> "Work":
        """Select the work of some nodes from the work of all nodes, numbered from 0.

        Args:
          nodes: numbers of the nodes.
          tau: local updates of a node that has no entry.
        """
        known = len(self.updates)
        chosen = nodes.tolist()
        updates = [self.updates[node] if node < known else tau for node in chosen]
        return replace(self, updates=tuple(updates))

    def require_possible(self) -> None:
        """Raise ValueError for numbers that no run can reach."""
        fewest = min(self.updates, default=0)
        if not 0 < self.effective <= self.most < 2**31 or fewest < 1:
            raise ValueError(f"updates are {self.updates}, effectively {self.effective}")


@dataclass(frozen=True)
class CatchUp:
    """State for a node that missed the previous round.

    Args:
      best: w^f, [parameters].
      mean: c, [parameters], if drift is corrected.
      since: the last uncorrected round before this one; older c_i are void.
      before: the previous w, [parameters], if nodes use momentum.
    """

    best: Float32
    mean: Float32 | None = None
    since: int = 0
    before: Float32 | None = None


@dataclass(frozen=True)
class Broadcast:
    """Message from the aggregator to every node.

    Args:
      round: number of the round, from 1.
      w: w(t₀), [parameters].
      tau: local updates to make, by the slowest node if others make more; 0 requests only
        the loss at w (the final round).
      eta: step size.
      request: what to report.
      best: whether the w of the previous broadcast is the new w^f.
      stop: whether these are the last local updates.
      drift: settings of drift correction, if the request has it.
      catch_up: state for nodes that missed the previous round; others do not need it.
      mean: the combined w_i of the previous round, [parameters], if it differs from w and
        nodes need it.
      momentum: fraction of the last step of w that nodes repeat, spread over their updates.
      evaluate: whether nodes evaluate w on their test samples, and in the final round w^f.
      work: local updates of all nodes, if they differ; `to` selects those of some nodes.
      compress: compression of vectors in both directions, if chosen for each round.
      private: settings of a private round, if the request has it.
    """

    round: int
    w: Float32
    tau: int
    eta: float
    request: Request
    best: bool
    stop: bool
    drift: Drift | None = None
    catch_up: CatchUp | None = None
    mean: Float32 | None = None
    momentum: float = 0.0
    evaluate: bool = False
    work: Work | None = None
    compress: Literal["none", "16-bit", "8-bit"] | None = None
    private: Private | None = None

    def __post_init__(self) -> None:
        request = self.request
        if request.private != (self.private is not None):
            raise ValueError("`private` is set if the request is private, and only then")
        if self.private is not None and request.per_sample != self.private.per_sample:
            raise ValueError(
                "`private` and the request must both be of nodes or of samples"
            )
        if request.drift != (self.drift is not None):
            raise ValueError("`drift` is set if the request corrects drift, and only then")

    @classmethod
    def first(cls, w: Float32, eta: float, request: Request) -> "Broadcast":
        """Return a first broadcast with τ=1, such as for a trial round."""
        drift = Drift(correct=True, share=1.0) if request.drift else None
        private = None
        if request.private:
            private = Private(1.0, 1.0, 0 if request.per_sample else None)
        return cls(
            1, w, 1, eta, request, best=False, stop=False, drift=drift, private=private
        )

    def to(self, nodes: Int64) -> "Broadcast":
        """Return the broadcast as sent to the nodes with these numbers."""
        if self.work is None:
            return self
        return replace(self, work=self.work.of(nodes, self.tau))

    @property
    def remembered(self) -> "Broadcast":
        """The broadcast without the vectors that are used only once."""
        if self.mean is None and self.catch_up is None:
            return self
        return replace(self, mean=None, catch_up=None)

    @property
    def effective(self) -> float:
        """τ, or τ_eff if nodes make different numbers of updates."""
        return self.tau if self.work is None else self.work.effective

    @property
    def span(self) -> float:
        """ητ, the factor between a mean gradient and the move of w."""
        return self.eta * self.effective

    def updates(self, nodes: Int64) -> Int64:
        """Local updates of each of these nodes, [n]; 1 in the final round."""
        if self.work is None:
            return np.full(len(nodes), max(1, self.tau))
        return np.array(self.work.of(nodes, self.tau).updates)

    @property
    def combined(self) -> Float32:
        """The combined w_i of the previous round, [parameters]."""
        return self.w if self.mean is None else self.mean

    @property
    def report_fields(self) -> frozenset[str]:
        """Optional fields that the report must have; it has no others."""
        if self.tau == 0:
            return frozenset()
        private = self.private
        if private is not None:
            if private.measures:
                return frozenset({"length"})
            return frozenset({"w"} if private.per_sample else {"length", "w"})

        names = {"w"}
        request = self.request
        if request.estimate and (self.round > 1 or request.one_step):
            names |= {"rho", "beta"}
            if request.gradient:
                names.add("gradients")
        if request.drift:
            names |= {"plain", "corrected"}
            if request.partly:
                names |= {"lasting", "shifted"}
        return frozenset(names)

    @property
    def tallies(self) -> int:
        """Number of test results that a node reports: w, and in the final round w^f."""
        if not self.evaluate:
            return 0
        return 2 if self.tau == 0 else 1

    @property
    def wire_bytes(self) -> int:
        """Bytes on the wire to a node that was in the previous round."""
        missed = 0 if self.catch_up is None else _size_of_fields(self.catch_up)
        return self.wire_bytes_with_catch_up - missed

    @property
    def wire_bytes_with_catch_up(self) -> int:
        """Bytes on the wire to a node that missed the previous round."""
        return _HEADER + _size_of_fields(self)


@dataclass(frozen=True)
class Report:
    """Message from a fleet of n nodes to the aggregator.

    Args:
      round: number of the broadcast's round.
      nodes: numbers of the nodes, rising, [n].
      sizes: D_i, [n].
      losses: F_i(w(t₀)), [n].
      best_losses: F_i(w^f) on the same samples, [n].
      w: w_i(t), [n, parameters]; None in the final round. The clipped update instead, if
        the round is private.
      rho, beta: ρ̂_i and β̂_i, [n], if requested and t₀ > 0; NaN if a node has none.
      gradients: ∇F_i(w(t₀)) plus the shift of drift correction, [n, parameters], if
        requested with the estimates.
      plain, corrected: divergence of the nodes' mean gradients in the previous round, [n],
        without and with drift correction (drift.py).
      lasting, shifted: -<c_i, s_i> of this round, and ‖s_i‖², [n], if requested.
      length: norm of the update before clipping, [n], as encoded by privacy.py; then sizes
        are 1 and losses 0. With per-sample privacy, norms of gradients as encoded by
        sample_privacy.py.
    """

    round: int
    nodes: Int64
    sizes: Int64
    losses: Float64
    best_losses: Float64
    w: Float32 | None = None
    rho: Float64 | None = None
    beta: Float64 | None = None
    gradients: Float32 | None = None
    plain: Float64 | None = None
    corrected: Float64 | None = None
    lasting: Float64 | None = None
    shifted: Float64 | None = None
    length: Float64 | None = None

    @property
    def wire_bytes(self) -> int:
        """Bytes on the wire if each of the n nodes sends its own report."""
        return _HEADER * len(self.nodes) + _size_of_fields(self)

    def require_answers(self, broadcast: Broadcast) -> None:
        """Raise PeerError for a report that does not answer the broadcast."""
        nodes = self.nodes
        if nodes.ndim != 1 or not len(nodes) or (self.sizes < 1).any():
            raise PeerError("a report needs nodes with samples")
        if (nodes[1:] <= nodes[:-1]).any():
            raise PeerError("a node reported twice, or reports are not in node order")
        expected = sorted(broadcast.report_fields)
        missing = [name for name in expected if getattr(self, name) is None]
        if missing:
            raise PeerError(f"a report without {', '.join(missing)}")
        for name in ("sizes", *NUMBERS, *VECTORS):
            shape = (*nodes.shape, broadcast.w.size) if name in VECTORS else nodes.shape
            values = getattr(self, name)
            if values is not None and values.shape != shape:
                raise PeerError(f"{name} has shape {values.shape}, not {shape}")

    @classmethod
    def merge(cls, reports: "Sequence[Report]") -> "Report":
        """Join reports into one, in node order; refuse a node that is in two of them."""
        if len(reports) == 1:
            return reports[0]
        rounds = sorted({report.round for report in reports})
        if len(rounds) != 1:
            raise PeerError(f"reports of different rounds: {rounds}")
        number = rounds[0]
        nodes = np.concatenate([report.nodes for report in reports])
        order: Int64 | None = None  # reports that arrive in order are not copied again
        if not (nodes[1:] > nodes[:-1]).all():
            order = np.argsort(nodes, kind="stable")
            if len(np.unique(nodes)) != len(nodes):
                raise PeerError(f"a node reported twice in round {number}")

        def join(name: str) -> NDArray[Any] | None:
            parts = [getattr(report, name) for report in reports]
            absent = sum(part is None for part in parts)
            if absent == len(parts):
                return None
            if absent:
                raise PeerError(f"only some reports of round {number} have {name}")
            try:
                joined = np.concatenate(parts)
                return joined if order is None else joined[order]
            except (ValueError, IndexError):
                raise PeerError(
                    f"reports of round {number} have {name} of different shapes"
                ) from None

        names = [field.name for field in fields(cls) if field.name != "round"]
        joined = {name: join(name) for name in names}
        return cls(number, **joined)  # type: ignore[arg-type]


def _fields_of(array: object) -> tuple[str, ...]:
    return tuple(
        field.name
        for field in fields(Report)
        if array in (field.type, *get_args(field.type))
    )


VECTORS = _fields_of(Float32)
"""Fields of a report with a vector for each node, [n, parameters]."""

NUMBERS = _fields_of(Float64)
"""Fields of a report with a number for each node, [n]."""


def _size_of_fields(message: object) -> int:
    """Bytes of the fields on the wire; flags and None are in the header."""
    total = 0
    for name, value in vars(message).items():
        if name in _IN_HEADER or value is None or isinstance(value, bool):
            continue
        if isinstance(value, np.ndarray):
            total += value.nbytes
        elif isinstance(value, int | float):
            total += _SCALAR
        else:
            total += _size_of_fields(value)
    return total
