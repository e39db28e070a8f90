"""State of an aggregator between two rounds, the record of a round, and the end of a run.

All are frozen values. An aggregator replaces its `AggregatorState` in every round; codec.py
writes it to checkpoints, and a new field needs a declaration here and nothing else.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.budget.budget import Costs, Ledger
from fedbudget.budget.control import Decision, Estimates
from fedbudget.evaluation.points import NodeEvaluation
from fedbudget.protocol.features.drift import Divergence
from fedbudget.protocol.features.feature import Chosen, FeatureSettings, FeatureState
from fedbudget.protocol.features.workload import WorkShares
from fedbudget.protocol.method import Method
from fedbudget.protocol.objections import LossWatch, Objector
from fedbudget.protocol.outliers import Outlier

S = TypeVar("S", bound=Any)
U = TypeVar("U")

_COUNT_LIMIT = 2**63  # counters must fit into 64 bits


class Phase(StrEnum):
    """Phase of a run; aggregator.py has the transitions."""

    READY = "ready"
    ROUND = "round"
    FINAL = "final"
    DONE = "done"


@dataclass(frozen=True)
class AggregatorState(Generic[S, U]):
    """An aggregator between two rounds.

    It holds everything that a run needs to resume and that does not follow from its
    settings or from the nodes' data. An aggregator resumed from it repeats the last
    broadcast, to the bit.

    Args:
      phase: `round` or `final` after such a round was announced; `done` after the last.
      features: features of the run.
      w: w(t₀) of the last broadcast.
      best: w^f.
      decision: the last choice of τ.
      step_size: state of the step size rule, with the coming η.
      update: state of the update rule.
      ledger: what was spent, and the expected cost of rounds.
      states: states of features by name; those without state are missing.
      round, became_best, stop: fields of the last broadcast; `round` is 0 before the first.
        `became_best` is its `best`; after the end, the `best` of the next broadcast if the
        run is extended.
      tau, effective: τ and τ_eff of the last broadcast.
      loss, best_loss, first_loss: F of w(t₀) one round ago, of w^f and of w(0).
      worse: F(w(t₀)) was much larger than F(w^f).
      searched: state of the step size rule after the first round, for a restart.
      restarted: whether the coming round starts from the w of a feature (restart_from).
      t: local updates per node so far.
      stopped_by: the resource that ends the run, once it is decided.
      ends: share of the budget after which the run ends.
      evaluated: whether the last broadcast is a final round.
      final_rounds: number of final rounds after which the run was extended.
      statistics: number of running statistics at the end of w.
      watch: objections of nodes on other machines (objections.py).
      undisputed: state of the step size rule before the first return to w^f because of a
        minority's objection; None without one.
      scales: typical numbers that such nodes reported at first, by name (outliers.py).
    """

    phase: Phase
    features: tuple[FeatureSettings, ...]
    w: Float32
    best: Float32
    decision: Decision
    step_size: S
    update: U
    ledger: Ledger
    states: Mapping[str, FeatureState]
    round: int = 0
    tau: int = 0
    effective: float = 0.0
    became_best: bool = False
    stop: bool = False
    loss: float = math.inf
    best_loss: float = math.inf
    first_loss: float = math.inf
    worse: bool = False
    searched: S | None = None
    restarted: bool = False
    t: int = 0
    stopped_by: str | None = None
    ends: float = 1.0
    evaluated: bool = False
    final_rounds: int = 0
    statistics: int = 0
    watch: LossWatch = field(default_factory=LossWatch)
    undisputed: S | None = None
    scales: Mapping[str, float] = field(default_factory=dict)

    def require_possible(self) -> None:
        """Raise ValueError for a state that no run can reach, as of a corrupt file."""
        for name in ("round", "tau", "t", "final_rounds"):
            if not 0 <= getattr(self, name) < _COUNT_LIMIT:
                raise ValueError(f"{name} is {getattr(self, name)}")
        if self.phase is Phase.READY or (self.phase is Phase.ROUND and self.tau < 1):
            raise ValueError(f"tau is {self.tau} in phase {self.phase}")
        if self.phase is not Phase.DONE and self.evaluated != (self.phase is Phase.FINAL):
            raise ValueError(f"a final round in phase {self.phase}")
        if self.w.ndim != 1 or not self.w.size:
            raise ValueError(f"w has shape {self.w.shape}")
        for name, vector in (("w", self.w), ("best", self.best)):
            if vector.shape != self.w.shape:
                raise ValueError(
                    f"w and {name} have shapes {self.w.shape} and {vector.shape}"
                )
            if not np.isfinite(vector).all():
                raise ValueError(f"{name} is not finite")
        if not 0 <= self.statistics < self.w.size:
            raise ValueError(f"{self.statistics} statistics in {self.w.size} numbers")
        if not 0 < self.ends <= 1:
            raise ValueError(f"the run ends after {self.ends} of the budget")
        self.ledger.require_possible()
        for state in self.states.values():
            state.require_possible(self.w)


def state_type(method: Method, w: Float32) -> Any:
    """Return the type of the aggregator's state, for reading it from a file."""
    return AggregatorState[type(method.step_size.first()), type(method.update.first(w))]  # type: ignore[misc]


class Payment(NamedTuple):
    """Privacy cost of a round, to be recorded durably before its result leaves the process.

    Args:
      round: number of the round.
      rho: its ρ.
    """

    round: int
    rho: float


@dataclass(frozen=True)
class Round:
    """Record of one round.

    Args:
      round: number of the round, from 1.
      t: local updates per node at its end.
      tau: local updates in it; 0 in the final round, which only evaluates the loss.
      reason: why the controller chose this τ.
      eta: step size.
      loss: F(w(t₀)) at the start of the round; on mini-batches if descent is stochastic.
      best_loss: F(w^f) on the same samples, with w^f as of the end of the round.
      ledger: cost of the round, and what was spent until its end.
      expected: ĉ and b̂ for the next choice of τ; None if no τ is chosen.
      nodes: number of nodes that took part.
      left_out: numbers of the nodes whose w_i was not finite.
      estimates: ρ̂, β̂, δ̂ after the round.
      kept: names of the estimates that this round could not renew.
      corrected: whether drift was corrected.
      divergence: divergence of the nodes' gradients without and with drift correction,
        until the round before; None without drift correction.
      missed: numbers of the nodes that did not answer in time; set by the engine.
      evaluation: results on the nodes' test samples, if requested; set by the engine.
      work: local updates of each node, unless all made τ; τ is then the slowest node's.
      shortened: numbers of the nodes whose update the combination rule shortened.
      extra: numbers of your own features by name.
      outliers: numbers beyond their limits, of nodes on other machines, by node number.
      excluded: nodes on other machines whose losses do not count.
      validation, validation_best, validation_error: validation loss of w(t₀), of the best w
        so far, and the standard error of their difference; None if w was not validated.
      dropout: share of hidden values that local updates set to 0; None without dropout.
      private: clip, noise and cost of a private round by name. Such a round has no loss; η
        is 0 if nodes use their own.
    """

    round: int
    t: int
    tau: int
    reason: str
    eta: float
    loss: float
    best_loss: float
    ledger: Ledger
    expected: Costs | None
    nodes: int
    left_out: tuple[int, ...] = ()
    estimates: Estimates | None = None
    kept: tuple[str, ...] = ()
    corrected: bool = False
    divergence: Divergence | None = None
    missed: tuple[int, ...] = ()
    evaluation: NodeEvaluation | None = None
    work: WorkShares | None = None
    shortened: tuple[int, ...] = ()
    extra: Mapping[str, float] = field(default_factory=dict)
    outliers: Mapping[int, tuple[Outlier, ...]] = field(default_factory=dict)
    excluded: tuple[Objector, ...] = ()
    validation: float | None = None
    validation_best: float | None = None
    validation_error: float | None = None
    dropout: float | None = None
    private: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Outcome:
    """End of a run.

    Args:
      w: w^f, or the w that validation chose, [parameters].
      stopped_by: name of a resource, `rounds`, `validation` or `interrupted`.
      ledger: what was spent.
      chosen: how validation chose w; None if it did not.
    """

    w: Float32
    stopped_by: str
    ledger: Ledger
    chosen: Chosen | None = None
