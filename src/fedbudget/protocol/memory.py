"""What must be known to go on after a crash, or in another process: plain numbers and arrays, between two rounds.

The rest comes from the run's settings (budget, controller, step size and so on), and from the nodes' own data.
`Aggregator.memory` gives a `Memory`, and `Aggregator.recall` makes of it an aggregator that says what was said last, to
the bit; `Fleet.memory` and `Fleet.recall` do the same for a fleet.
"""

from dataclasses import dataclass
from typing import Literal

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.budget import Costs
from fedbudget.control import Decision, Estimates
from fedbudget.data.sampling import Position
from fedbudget.protocol.drift import Divergence
from fedbudget.protocol.messages import Broadcast, Drift
from fedbudget.step_size import StepSizeState


@dataclass(frozen=True)
class Memory:
    """An aggregator between two rounds.

    Args:
      state: `round` or `final`, when a round of that kind has been announced; `done` after the last.
      round, tau, became_best, stop: what the last broadcast said; `became_best` is its `best`.
      w: w(t₀), as last broadcast.
      best: w^f.
      mean: c, where drift is corrected.
      loss, best_loss, first_loss: F of w(t₀) one round ago, of w^f and of w(0).
      worse: F(w(t₀)) was much larger than F(w^f).
      t: local updates per node so far.
      decision: the last choice of τ.
      pace: the coming η, and what the next follows from.
      estimates: ρ̂, β̂, δ̂.
      drift: what the last broadcast said of drift correction.
      divergence: of the nodes' gradients, without correction and with it.
      uncorrected: the last round without correction.
      nodes, sizes: the numbers and D_i of all nodes that count for P, [n].
      costs, spent: the ledger's, [M].
      stopped_by: what will end the run, once that is known.
    """

    state: Literal["round", "final", "done"]
    round: int
    tau: int
    became_best: bool
    stop: bool
    w: Float32
    best: Float32
    mean: Float32 | None
    loss: float
    best_loss: float
    first_loss: float
    worse: bool
    t: int
    decision: Decision
    pace: StepSizeState
    estimates: Estimates | None
    drift: Drift | None
    divergence: Divergence | None
    uncorrected: int
    nodes: Int64
    sizes: Int64
    costs: Costs
    spent: Float64
    stopped_by: str | None


@dataclass(frozen=True)
class FleetState:
    """A fleet of n nodes between two rounds.

    Args:
      broadcast: the last broadcast; of its news nothing is needed.
      w: w_i(t), [n, parameters]; None when no update was ever made.
      best: w^f.
      losses: F_i at the last broadcast's w, [n].
      best_known: F_i(w^f) on whole shards, where these are what is descended on, [n].
      steep: where the gradient changes the most, [n, parameters], if that was looked for.
      mean, own, shift: c, c_i and c - c_i, [parameters] and [n, parameters], where drift is corrected.
      position: of the mini-batches.
    """

    broadcast: Broadcast
    w: Float32 | None
    best: Float32
    losses: Float64
    best_known: Float64 | None
    steep: Float32 | None
    mean: Float32 | None
    own: Float32 | None
    shift: Float32 | None
    position: Position
