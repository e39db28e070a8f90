"""What is said between aggregator and fleets: frozen messages, and what they would take on the wire.

A report is a structure of arrays over the nodes of one fleet, so that reports of several fleets add up: `Report.merge`
puts them in node order, whatever order they arrived in.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64

_SCALAR = 8  # bytes of a number
_HEADER = 32  # bytes of round, sizes and flags


class LocalError(RuntimeError):
    """This side used the protocol in a wrong order: a mistake in the engine."""


class PeerError(ValueError):
    """The other side said something that the protocol does not allow."""


@dataclass(frozen=True)
class Drift:
    """What a broadcast says of drift correction, see drift.py.

    Args:
      correct: whether to correct in this round.
      share: P of the round before: of all data, that of the nodes whose w_i(t) made w(t).
    """

    correct: bool
    share: float


@dataclass(frozen=True)
class CatchUp:
    """What a node that was not in the round before cannot know.

    Args:
      best: w^f, [parameters].
      mean: c, [parameters], where drift is corrected.
      since: the last round before this that was not corrected; what a node learned before it is void.
    """

    best: Float32
    mean: Float32 | None = None
    since: int = 0


@dataclass(frozen=True)
class Broadcast:
    """From the aggregator to every node.

    Args:
      round: counts from 1.
      w: w(t₀), [parameters].
      tau: local updates to make; 0 asks for the loss at w alone (the final round).
      eta: step size of these updates.
      estimate: whether ρ̂_i and β̂_i are wanted back.
      best: the w of the broadcast before this one has become w^f.
      stop: no more local updates follow after these.
      gradient: whether the gradient is wanted back, with the estimates.
      curvature: whether β̂_i is wanted also of a node whose w_i is w, between w and the w before it.
      drift: how drift is corrected, if it is.
      catch_up: for nodes that were not in the round before; others need not be sent it.
    """

    round: int
    w: Float32
    tau: int
    eta: float
    estimate: bool
    best: bool
    stop: bool
    gradient: bool = True
    curvature: bool = False
    drift: Drift | None = None
    catch_up: CatchUp | None = None

    @property
    def wire_bytes(self) -> int:
        """What one copy takes on the wire, to a node that was in the round before."""
        return _HEADER + 4 * self.w.size + (0 if self.drift is None else _SCALAR)

    @property
    def wire_bytes_with_catch_up(self) -> int:
        """The same to a node that was not."""
        if self.catch_up is None:
            return self.wire_bytes
        mean = 0 if self.catch_up.mean is None else self.catch_up.mean.size
        return self.wire_bytes + _SCALAR + 4 * (self.catch_up.best.size + mean)


@dataclass(frozen=True)
class Report:
    """From a fleet of n nodes to the aggregator.

    Args:
      round: the broadcast's.
      nodes: the nodes' numbers, [n], rising.
      sizes: D_i, [n].
      losses: F_i(w(t₀)), [n].
      best_losses: F_i(w^f) on the same samples, [n].
      w: w_i(t), [n, parameters]; None in the final round.
      rho, beta: ρ̂_i and β̂_i, [n], where they were asked for and t₀ > 0; NaN of a node that has none.
      gradients: ∇F_i(w(t₀)) with the shift of drift correction, [n, parameters], where asked for with them.
      plain, corrected: by how much nodes' mean gradients were apart in the round before, [n], without correction and
        with it, where drift is corrected; see drift.py.
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

    @property
    def wire_bytes(self) -> int:
        """What the reports of all n nodes take on the wire, each sent by itself."""
        n = len(self.nodes)
        numbers = (self.losses, self.best_losses, self.rho, self.beta, self.plain, self.corrected)
        scalars = sum(field is not None for field in numbers)
        vectors = sum(4 * int(field.shape[1]) for field in (self.w, self.gradients) if field is not None)
        return n * (_HEADER + _SCALAR * scalars + vectors)

    def require_answers(self, broadcast: Broadcast) -> None:
        """Refuses a report that is not what a broadcast asks for."""
        if self.nodes.ndim != 1 or not len(self.nodes) or (self.sizes < 1).any():
            raise PeerError("a report needs nodes with samples")
        if (self.nodes[1:] <= self.nodes[:-1]).any():
            raise PeerError("a node reported twice, or reports are not in node order")
        if broadcast.tau > 0 and self.w is None:
            raise PeerError("a report without w")
        if broadcast.tau > 0 and broadcast.drift is not None and (self.plain is None or self.corrected is None):
            raise PeerError("a report without the divergences of a run that corrects drift")
        numbers: dict[str, Int64 | Float64 | None]
        numbers = {"sizes": self.sizes, "losses": self.losses, "best losses": self.best_losses}
        numbers |= {"rho": self.rho, "beta": self.beta, "plain": self.plain, "corrected": self.corrected}
        for name, values in numbers.items():
            if values is not None and values.shape != self.nodes.shape:
                raise PeerError(f"{name} has shape {values.shape}, not {self.nodes.shape}")
        for name, vector in {"w": self.w, "gradients": self.gradients}.items():
            if vector is not None and vector.shape != (len(self.nodes), broadcast.w.size):
                raise PeerError(f"{name} has shape {vector.shape}, not {(len(self.nodes), broadcast.w.size)}")

    @classmethod
    def merge(cls, reports: "Sequence[Report]") -> "Report":
        """One report over the nodes of all, in node order; a node that is in two of them is refused."""
        if len(reports) == 1:
            return reports[0]
        nodes = np.concatenate([report.nodes for report in reports])
        order = np.argsort(nodes, kind="stable")
        in_order = bool((order[1:] > order[:-1]).all())  # then vectors, which may be large, need not be copied again
        if len(np.unique(nodes)) != len(nodes):
            raise PeerError(f"a node reported twice in round {reports[0].round}")

        def join(name: str) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]] | None":
            parts = [getattr(report, name) for report in reports]
            present = [part is not None for part in parts]
            if any(present) and not all(present):
                raise PeerError(f"some reports of round {reports[0].round} have {name} and some have not")
            if not all(present):
                return None
            try:
                joined = np.concatenate(parts)
                return joined if in_order else joined[order]
            except (ValueError, IndexError):
                raise PeerError(f"reports of round {reports[0].round} have {name} of different shapes") from None

        if len({report.round for report in reports}) != 1:
            raise PeerError(f"reports of different rounds: {sorted({report.round for report in reports})}")
        fields = ("nodes", "sizes", "losses", "best_losses", "w", "rho", "beta", "gradients", "plain", "corrected")
        return cls(reports[0].round, **{name: join(name) for name in fields})  # type: ignore[arg-type]
