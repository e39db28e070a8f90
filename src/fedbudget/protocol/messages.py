"""What is said between aggregator and fleets: two frozen messages, and what they would take on the wire.

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
class Broadcast:
    """From the aggregator to every node.

    Args:
      round: counts from 1.
      w: w(t₀), [parameters].
      tau: local updates to make; 0 asks for the loss at w alone (the final round).
      eta: step size of these updates.
      estimate: whether ρ̂_i, β̂_i and the gradient are wanted back.
      best: the w of the broadcast before this one has become w^f.
      stop: no more local updates follow after these.
    """

    round: int
    w: Float32
    tau: int
    eta: float
    estimate: bool
    best: bool
    stop: bool

    @property
    def wire_bytes(self) -> int:
        """What one copy takes on the wire."""
        return _HEADER + 4 * self.w.size


@dataclass(frozen=True)
class Report:
    """From a fleet of n nodes to the aggregator.

    Args:
      round: the broadcast's.
      nodes: the nodes' numbers, [n], rising.
      sizes: D_i, [n].
      losses: F_i(w(t₀)), [n].
      best_losses: F_i(w^f) on the same mini-batch, [n]; None with whole shards, where the aggregator knows it already.
      w: w_i(t), [n, parameters]; None in the final round.
      rho, beta: ρ̂_i and β̂_i, [n], where they were asked for and t₀ > 0.
      gradients: ∇F_i(w(t₀)), [n, parameters], with them.
    """

    round: int
    nodes: Int64
    sizes: Int64
    losses: Float64
    best_losses: Float64 | None = None
    w: Float32 | None = None
    rho: Float64 | None = None
    beta: Float64 | None = None
    gradients: Float32 | None = None

    @property
    def wire_bytes(self) -> int:
        """What the reports of all n nodes take on the wire, each sent by itself."""
        n = len(self.nodes)
        scalars = sum(field is not None for field in (self.losses, self.best_losses, self.rho, self.beta))
        vectors = sum(4 * int(field.shape[1]) for field in (self.w, self.gradients) if field is not None)
        return n * (_HEADER + _SCALAR * scalars + vectors)

    @classmethod
    def merge(cls, reports: "Sequence[Report]") -> "Report":
        """One report over the nodes of all, in node order."""
        if len(reports) == 1:
            return reports[0]
        order = np.argsort(np.concatenate([report.nodes for report in reports]), kind="stable")

        def join(name: str) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]] | None":
            parts = [getattr(report, name) for report in reports]
            present = [part is not None for part in parts]
            if any(present) and not all(present):
                raise PeerError(f"some reports of round {reports[0].round} have {name} and some have not")
            return np.concatenate(parts)[order] if all(present) else None

        if len({report.round for report in reports}) != 1:
            raise PeerError(f"reports of different rounds: {sorted({report.round for report in reports})}")
        fields = ("nodes", "sizes", "losses", "best_losses", "w", "rho", "beta", "gradients")
        return cls(reports[0].round, **{name: join(name) for name in fields})  # type: ignore[arg-type]
