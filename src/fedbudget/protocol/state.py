"""What an aggregator and a fleet are between two rounds: frozen values, all that is needed to go on from there.

The rest comes from the run's settings (budget, method and so on), and from the nodes' own data. An aggregator replaces
its `AggregatorState` in every round; one that is resumed from it says what was said last, to the bit. A `FleetState` is
taken from a fleet, and given to another of the same nodes. Both become plain values and arrays by structure.py: a new
field is declared here, and saved and read with the others.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

import numpy as np

from fedbudget.arrays import Float32, Float64
from fedbudget.budget import Ledger
from fedbudget.control import Decision, Estimates
from fedbudget.data.sampling import Position
from fedbudget.protocol.drift import Correction, DriftState
from fedbudget.protocol.messages import Broadcast, CatchUp, Private, Request, Work
from fedbudget.protocol.statistics import with_statistics_of
from fedbudget.protocol.workload import StepTimes

S = TypeVar("S", bound=Any)
U = TypeVar("U")


class Phase(StrEnum):
    """Where a run is, see aggregator.py."""

    READY = "ready"
    ROUND = "round"
    FINAL = "final"
    DONE = "done"


def motion_of(broadcast: Broadcast, start: Float32) -> Float32:
    """What is added to gradients so that nodes go on from `start` to w(t₀), [nodes, parameters], or [1, parameters]."""
    if broadcast.work is None:
        motion: Float32 = (broadcast.w - start) / np.float32(broadcast.eta * broadcast.tau)
        return motion[None]
    spans = np.float32(broadcast.eta) * np.array(broadcast.work.updates, np.float32)
    return np.asarray((broadcast.w - start) / spans[:, None])


def gone_on(w: Float32, before: Float32, momentum: float, statistics: int) -> Float32:
    """Where w comes to that goes so much of its last way once more, [parameters]; running statistics do not."""
    return with_statistics_of(w, w + np.float32(momentum) * (w - before), statistics)


@dataclass(frozen=True)
class AggregatorState(Generic[S, U]):
    """An aggregator between two rounds.

    Args:
      phase: `round` or `final`, when a round of that kind has been announced; `done` after the last.
      request: what nodes are asked for.
      round, tau, became_best, stop: what the last broadcast says; `became_best` is its `best`, or after the end that of
        the next, should there be one; `round` is 0 before the first.
      w: w(t₀), as last broadcast.
      best: w^f.
      loss, best_loss, first_loss: F of w(t₀) one round ago, of w^f and of w(0).
      worse: F(w(t₀)) was much larger than F(w^f).
      t: local updates per node so far.
      final_rounds: how many ends the run has had, of which each was judged in a round, and was then given more budget.
      decision: the last choice of τ.
      step_size: the step size's own state, with the coming η.
      update: the update rule's own state.
      ledger: what was spent, and what rounds cost.
      estimates: ρ̂, β̂, δ̂.
      drift: where drift is corrected.
      stopped_by: what will end the run, once that is known.
      mean: what the last w_i(t) were combined to, where w is not that and nodes must know it.
      before: the w that was broadcast before w; None where there was none, or nobody goes on from it.
      momentum: how much of the way from there nodes go once more.
      statistics: how many of w's last numbers are running statistics.
      times: what a local update takes at nodes, where faster ones make more of them.
      work: how many each makes in the round that was announced, where that is not τ for all.
      private: of the round that was announced, where rounds are private.
      bias: the mean of nodes' shifts, [parameters], where vectors are sent with fewer bits (drift.py).
    """

    phase: Phase
    request: Request
    w: Float32
    best: Float32
    decision: Decision
    step_size: S
    update: U
    ledger: Ledger
    drift: DriftState | None
    round: int = 0
    tau: int = 0
    became_best: bool = False
    stop: bool = False
    loss: float = math.inf
    best_loss: float = math.inf
    first_loss: float = math.inf
    worse: bool = False
    t: int = 0
    estimates: Estimates | None = None
    stopped_by: str | None = None
    final_rounds: int = 0
    mean: Float32 | None = None
    before: Float32 | None = None
    momentum: float = 0.0
    statistics: int = 0
    times: StepTimes | None = None
    work: Work | None = None
    private: Private | None = None
    bias: Float32 | None = None

    @cached_property
    def broadcast(self) -> Broadcast:
        """What was said last."""
        drift = self.drift
        mean, since = (None, 0) if drift is None else (drift.mean, drift.uncorrected)
        return Broadcast(
            self.round,
            self.w,
            self.tau,
            self.step_size.eta,
            self.request,
            best=self.became_best,
            stop=self.stop,
            drift=None if drift is None else drift.coming,
            catch_up=CatchUp(self.best, mean, since, self.before) if self.round > 1 else None,
            mean=self.mean,
            momentum=self.momentum,
            work=self.work,
            private=self.private,
        )

    @property
    def start(self) -> Float32:
        """Where nodes' gradients start from: w, and what is gone once more of the last way, [parameters]."""
        if self.before is None:
            return self.w
        return gone_on(self.w, self.before, self.momentum, self.statistics)

    def updated(self, **changes: Any) -> Self:
        """As `dataclasses.replace`, which would take a tenth of a round's time: every step of a round makes a state."""
        new = object.__new__(type(self))
        known = new.__dict__
        known.update(vars(self))
        known.pop("broadcast", None)  # which follows from these
        assert changes.keys() <= known.keys()
        known.update(changes)
        return new

    def recovered(self, update: U) -> Self:
        """Where w is not finite, and w^f is: from w^f, as after any round that went astray; otherwise itself.

        Args:
          update: the update rule's state to begin with at w^f.
        """
        parts = [part for part in (self.w, self.mean, self.before) if part is not None]
        if all(np.isfinite(part).all() for part in parts) or not np.isfinite(self.best).all():
            return self
        drift = None if self.drift is None else self.drift.anew()
        start = {"mean": None, "before": None, "momentum": 0.0}
        return self.updated(w=self.best, **start, update=update, drift=drift, estimates=None, worse=False)

    def require_possible(self) -> None:
        """Refuses what no run comes to, as a file may have it: raises ValueError."""
        for name in ("round", "tau", "t", "final_rounds"):
            if not 0 <= getattr(self, name) < 2**63:
                raise ValueError(f"{name} is {getattr(self, name)}")
        if self.phase is Phase.READY or (
            self.phase is not Phase.DONE and (self.tau == 0) != (self.phase is Phase.FINAL)
        ):
            raise ValueError(f"tau is {self.tau} in phase {self.phase}")
        if self.w.ndim != 1 or not self.w.size or self.best.shape != self.w.shape:
            raise ValueError(f"w and best have shapes {self.w.shape} and {self.best.shape}")
        if not 0 <= self.statistics < self.w.size:
            raise ValueError(f"{self.statistics} statistics in {self.w.size} numbers")
        for name in ("mean", "bias"):
            if (vector := getattr(self, name)) is not None and vector.shape != self.w.shape:
                raise ValueError(f"w and {name} have shapes {self.w.shape} and {vector.shape}")
        if self.before is not None and self.before.shape != self.w.shape:
            raise ValueError(f"w and the one before have shapes {self.w.shape} and {self.before.shape}")
        if not 0 <= self.momentum <= 1 or (self.momentum > 0) != (self.before is not None):
            raise ValueError(f"momentum is {self.momentum}")
        vectors = (self.w, self.best, self.mean, self.before, self.bias)
        if not all(np.isfinite(vector).all() for vector in vectors if vector is not None):
            raise ValueError("w is not finite")
        self.ledger.require_possible()
        if self.estimates is not None and not (
            0 <= self.estimates.rho < math.inf and 0 <= self.estimates.beta < math.inf
        ):
            raise ValueError(f"estimates are {self.estimates}")
        if (self.private is not None) != self.request.private or (
            self.private is not None and not (0 <= self.private.clip < math.inf and 0 <= self.private.rho < math.inf)
        ):
            raise ValueError(f"a private round is {self.private}")
        if (self.drift is not None) != self.request.drift:
            raise ValueError("drift is corrected where that is asked for")
        if self.drift is not None:
            self.drift.require_possible(self.w)
        if self.times is not None:
            self.times.require_possible()
        if self.work is not None and not (
            0 < self.work.effective <= self.work.most < 2**31 and min(self.work.updates, default=0) >= 1
        ):
            raise ValueError(f"nodes make {self.work.updates} updates, in effect {self.work.effective}")


@dataclass(frozen=True)
class FleetState:
    """A fleet of n nodes between two rounds.

    Args:
      broadcast: the last broadcast, without its `catch_up`.
      w: w_i(t), [n, parameters]; None when no update was ever made.
      best: w^f.
      losses: F_i at the last broadcast's w, [n].
      best_known: F_i(w^f) on whole shards, where these are what is descended on, [n].
      steepest: where the gradient changes the most, [n, parameters], if that was looked for.
      correction: where drift is corrected.
      position: of the mini-batches.
      start: where the last updates started from, where that was not the broadcast's w, [parameters].
      lost: what fewer bits did not tell of w_i(t), [n, parameters].
    """

    broadcast: Broadcast
    w: Float32 | None
    best: Float32
    losses: Float64
    best_known: Float64 | None
    steepest: Float32 | None
    correction: Correction | None
    position: Position
    start: Float32 | None = None
    lost: Float32 | None = None

    @property
    def for_disk(self) -> "FleetState":
        """What a checkpoint has of it: of a private run nothing that only the nodes may know."""
        if self.broadcast.private is None:
            return self
        return replace(self, w=None, losses=np.zeros_like(self.losses), best_known=None)
