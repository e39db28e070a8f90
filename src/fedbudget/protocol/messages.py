"""What is said between aggregator and fleets: frozen messages, and what they would take on the wire.

A report is a structure of arrays over the nodes of one fleet, so that reports of several fleets add up: `Report.merge`
puts them in node order, whatever order they arrived in. Which of its optional fields a report has is decided by the
broadcast that it answers, `Broadcast.report_fields`. Sizes and merging follow from the fields themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.errors import FedbudgetError

_SCALAR = 8  # bytes of a number
_HEADER = 32  # bytes of all flags, and of the fields below
_IN_HEADER = frozenset(
    {"round", "tau", "eta", "momentum", "work", "compress", "nodes", "sizes"}
)


class LocalError(FedbudgetError, RuntimeError):
    """This side used the protocol in a wrong order: a mistake in the engine."""


class PeerError(FedbudgetError, ValueError):
    """The other side said something that the protocol does not allow."""


@dataclass(frozen=True)
class Request:
    """What nodes are asked for in all rounds of a run, besides the loss and w.

    Args:
      estimate: ρ̂_i and β̂_i.
      gradient: the gradient at w(t₀), with the estimates.
      curvature: β̂_i also of a node whose w_i is w, between w and the w before it.
      drift: the divergences that drift correction is judged by, see drift.py.
      partly: how much of a shift lasts, where drift is corrected as far as it does.
      one_step: β̂_i over one local update from w(t₀). A node's first is searched for (first_step.py), and in the first
        round a node makes its updates with an η_i of its own, 1/β̂_i, and says where η would have taken it.
      proximal: μ of FedProx, by which local updates are held near w(t₀), see proximal.py.
      private: nothing but what privacy.py has; with `one_step`, a node makes all its updates with an η_i of its own.
      per_sample: it is single samples that are protected, by noise that nodes add themselves (sample_updates.py).
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
    """What a broadcast says of a round that is private, see privacy.py.

    Args:
      clip: C, the longest update that is sent; 0 where only lengths are asked for. Where single samples are protected,
        the longest gradient of one.
      rho: ρ that the round costs each node, or each sample.
      samples: where single samples are protected, how many all nodes have, as far as that is known.
    """

    clip: float
    rho: float
    samples: int | None = None

    @property
    def per_sample(self) -> bool:
        """Whether single samples are protected, and not nodes."""
        return self.samples is not None

    @property
    def measures(self) -> bool:
        """Whether only lengths are asked for."""
        return self.clip == 0

    def at_cost(self, rho: float) -> "Private":
        """The same round with another ρ."""
        return replace(self, rho=rho)


@dataclass(frozen=True)
class Drift:
    """What a broadcast says of drift correction, see drift.py.

    Args:
      correct: whether to correct in this round.
      share: P of the round before: of all data, that of the nodes whose w_i(t) made w(t).
      strength: α, the share of a shift that is used; all of it where this is not said.
    """

    correct: bool
    share: float
    strength: float | None = None

    @property
    def used(self) -> float:
        """The share of a shift that is used in this round; 0 where it is not corrected."""
        return 0.0 if not self.correct else 1.0 if self.strength is None else self.strength


@dataclass(frozen=True)
class Work:
    """How many local updates nodes make, where these are not the same for all, see workload.py.

    Args:
      effective: τ_eff, as many of which the round's move of w stands for.
      most: that any node makes; every node draws so many mini-batches, so that all draw the same.
      updates: τ_i of the nodes that it is said to, in the order of their numbers.
    """

    effective: float
    most: int
    updates: tuple[int, ...]

    def of(self, nodes: Int64, tau: int) -> "Work":
        """The same said to some nodes, where it was to all there are, whose numbers begin with 0.

        Args:
          tau: what one makes that is not among them.
        """
        known = len(self.updates)
        return replace(
            self,
            updates=tuple(
                self.updates[node] if node < known else tau for node in nodes.tolist()
            ),
        )


@dataclass(frozen=True)
class CatchUp:
    """What a node that was not in the round before cannot know.

    Args:
      best: w^f, [parameters].
      mean: c, [parameters], where drift is corrected.
      since: the last round before this that was not corrected; what a node learned before it is void.
      before: the w before this one, [parameters], where nodes go on from it.
    """

    best: Float32
    mean: Float32 | None = None
    since: int = 0
    before: Float32 | None = None


@dataclass(frozen=True)
class Broadcast:
    """From the aggregator to every node.

    Args:
      round: counts from 1.
      w: w(t₀), [parameters].
      tau: local updates to make, by the slowest node where others make more; 0 asks for the loss at w alone (the final
        round).
      eta: step size of these updates.
      request: what is wanted back.
      best: the w of the broadcast before this one has become w^f.
      stop: no more local updates follow after these.
      drift: how drift is corrected, where the request has it.
      catch_up: for nodes that were not in the round before; others need not be sent it.
      mean: what the w_i of the round before were combined to, [parameters], where w is not that and nodes must know it.
      momentum: as much of the way from the w before to this one nodes go once more, spread over their updates.
      evaluate: whether nodes that have test samples are to say what w is worth on them, and in the final round w^f too.
      compress: how vectors are sent with it, and back, where that is decided round by round.
      work: where nodes make different numbers of updates; of all nodes, until it is said `to` some.
      private: where the request has it.
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
        if self.request.private != (self.private is not None):
            raise ValueError(
                "a broadcast says what a private round is where that is asked for, and only there"
            )
        if self.private is not None and self.request.per_sample != self.private.per_sample:
            raise ValueError("a private round is of nodes or of samples, as a run asks for")
        if self.request.drift != (self.drift is not None):
            raise ValueError(
                "a broadcast says how drift is corrected where that is asked for, and only there"
            )

    @classmethod
    def first(cls, w: Float32, eta: float, request: Request) -> "Broadcast":
        """What a run begins with, with τ=1: for a trial round, say."""
        drift = Drift(correct=True, share=1.0) if request.drift else None
        private = (
            Private(1.0, 1.0, 0 if request.per_sample else None)
            if request.private
            else None
        )
        return cls(
            1, w, 1, eta, request, best=False, stop=False, drift=drift, private=private
        )

    def to(self, nodes: Int64) -> "Broadcast":
        """As it is sent to the nodes of these numbers."""
        return (
            self if self.work is None else replace(self, work=self.work.of(nodes, self.tau))
        )

    @property
    def remembered(self) -> "Broadcast":
        """Without vectors that are of use only once."""
        return (
            self
            if self.mean is None and self.catch_up is None
            else replace(self, mean=None, catch_up=None)
        )

    @property
    def effective(self) -> float:
        """τ, or τ_eff where nodes make different numbers of updates."""
        return self.tau if self.work is None else self.work.effective

    @property
    def span(self) -> float:
        """ητ, the way that a mean gradient is multiplied with."""
        return self.eta * self.effective

    def updates(self, nodes: Int64) -> Int64:
        """Of each of these nodes, [n], from what is said to all; the final round counts as one."""
        if self.work is None:
            return np.full(len(nodes), max(1, self.tau))
        return np.array(self.work.of(nodes, self.tau).updates)

    @property
    def combined(self) -> Float32:
        """What the w_i of the round before were combined to, [parameters]."""
        return self.w if self.mean is None else self.mean

    @property
    def report_fields(self) -> frozenset[str]:
        """The optional fields that a report has which answers this: these, and no other."""
        if self.tau == 0:
            return frozenset()
        if self.private is not None:
            lengths = (
                {"length"}
                if self.private.measures or not self.private.per_sample
                else set()
            )
            return frozenset(lengths if self.private.measures else {*lengths, "w"})
        names = {"w"}
        if self.request.estimate and (self.round > 1 or self.request.one_step):
            names |= (
                {"rho", "beta", "gradients"} if self.request.gradient else {"rho", "beta"}
            )
        if self.request.drift:
            names |= (
                {"plain", "corrected", "lasting", "shifted"}
                if self.request.partly
                else {"plain", "corrected"}
            )
        return frozenset(names)

    @property
    def tallies(self) -> int:
        """How many a node with test samples has to send with its report: of w, and in the final round of w^f."""
        return (2 if self.tau == 0 else 1) if self.evaluate else 0

    @property
    def wire_bytes(self) -> int:
        """What one copy takes on the wire, to a node that was in the round before."""
        return self.wire_bytes_with_catch_up - _wire_size(self.catch_up)

    @property
    def wire_bytes_with_catch_up(self) -> int:
        """The same to a node that was not."""
        return _HEADER + _size_of_fields(self)


@dataclass(frozen=True)
class Report:
    """From a fleet of n nodes to the aggregator.

    Args:
      round: the broadcast's.
      nodes: the nodes' numbers, [n], rising.
      sizes: D_i, [n].
      losses: F_i(w(t₀)), [n].
      best_losses: F_i(w^f) on the same samples, [n].
      w: w_i(t), [n, parameters]; None in the final round. Where rounds are private, the clipped update in its place.
      rho, beta: ρ̂_i and β̂_i, [n], where they were asked for and t₀ > 0; NaN of a node that has none.
      gradients: ∇F_i(w(t₀)) with the shift of drift correction, [n, parameters], where asked for with them.
      plain, corrected: by how much nodes' mean gradients were apart in the round before, [n], without correction and
        with it, where drift is corrected; see drift.py.
      lasting, shifted: -<c_i, s_i> of this round, and ‖s_i‖², [n], where asked for.
      length: of the update before it was clipped, as privacy.py tells it, [n], where rounds are private; then sizes are
        1, and losses 0. Where single samples are protected, of gradients, as sample_updates.py tells it.
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
        """What the reports of all n nodes take on the wire, each sent by itself."""
        return _HEADER * len(self.nodes) + _size_of_fields(self)

    def require_answers(self, broadcast: Broadcast) -> None:
        """Refuses a report that is not what a broadcast asks for."""
        if self.nodes.ndim != 1 or not len(self.nodes) or (self.sizes < 1).any():
            raise PeerError("a report needs nodes with samples")
        if (self.nodes[1:] <= self.nodes[:-1]).any():
            raise PeerError("a node reported twice, or reports are not in node order")
        missing = sorted(
            name for name in broadcast.report_fields if getattr(self, name) is None
        )
        if missing:
            raise PeerError(f"a report without {', '.join(missing)}")
        one = self.nodes.shape
        many = (len(self.nodes), broadcast.w.size)
        for name, shape in {
            **dict.fromkeys(NUMBERS, one),
            **dict.fromkeys(VECTORS, many),
            "sizes": one,
        }.items():
            values = getattr(self, name)
            if values is not None and values.shape != shape:
                raise PeerError(f"{name} has shape {values.shape}, not {shape}")

    @classmethod
    def merge(cls, reports: "Sequence[Report]") -> "Report":
        """One report over the nodes of all, in node order; a node that is in two of them is refused."""
        if len(reports) == 1:
            return reports[0]
        nodes = np.concatenate([report.nodes for report in reports])
        order: Int64 | None = (
            None  # none is needed where they come in it, and then vectors are not copied again
        )
        if not (nodes[1:] > nodes[:-1]).all():
            order = np.argsort(nodes, kind="stable")
            if len(np.unique(nodes)) != len(nodes):
                raise PeerError(f"a node reported twice in round {reports[0].round}")

        def join(name: str) -> NDArray[Any] | None:
            parts = [getattr(report, name) for report in reports]
            absent = sum(part is None for part in parts)
            if absent == len(parts):
                return None
            if absent:
                raise PeerError(
                    f"some reports of round {reports[0].round} have {name} and some have not"
                )
            try:
                joined = np.concatenate(parts)
                return joined if order is None else joined[order]
            except (ValueError, IndexError):
                raise PeerError(
                    f"reports of round {reports[0].round} have {name} of different shapes"
                ) from None

        if len({report.round for report in reports}) != 1:
            raise PeerError(
                f"reports of different rounds: {sorted({report.round for report in reports})}"
            )
        joined = {
            field.name: join(field.name) for field in fields(cls) if field.name != "round"
        }
        return cls(reports[0].round, **joined)  # type: ignore[arg-type]


VECTORS = tuple(
    field.name for field in fields(Report) if Float32 in (field.type, *get_args(field.type))
)
"""The fields of a report that have a vector of each node, [n, parameters]."""

NUMBERS = tuple(
    field.name for field in fields(Report) if Float64 in (field.type, *get_args(field.type))
)
"""The fields of a report that have a number of each node, [n]."""


def _size_of_fields(message: object) -> int:
    return sum(
        _wire_size(value) for name, value in vars(message).items() if name not in _IN_HEADER
    )


def _wire_size(value: object) -> int:
    """What a field takes on the wire; flags are in the header."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if value is None or isinstance(value, bool):
        return 0
    if isinstance(value, int | float):
        return _SCALAR
    return sum(map(_wire_size, vars(value).values()))
