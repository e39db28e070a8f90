"""What an aggregator and a fleet are between two rounds: frozen values, all that is needed to go on from there.

The rest comes from the run's settings (budget, method and so on), and from the nodes' own data. An aggregator replaces
its `AggregatorState` in every round; one that is resumed from it says what was said last, to the bit. A `FleetState` is
taken from a fleet, and given to another of the same nodes. Both become plain values and arrays by structure.py: a new
field is declared here, and saved and read with the others.

Steps of a round at the aggregator, each from one state to the next; aggregator.py says in which order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

import numpy as np

from fedbudget.arrays import Float32, Float64
from fedbudget.budget.budget import Ledger
from fedbudget.budget.control import Decision, Estimates, Reason
from fedbudget.budget.step_size import StepSize, StepSizeInputs
from fedbudget.data.sampling import Position
from fedbudget.errors import UserError
from fedbudget.protocol.combine import CombineRule, averages, doubts
from fedbudget.protocol.drift import Correction, Divergence, DriftState, mean_gradient
from fedbudget.protocol.messages import Broadcast, CatchUp, Private, Report, Request, Work
from fedbudget.protocol.sums import Reports, Sums, norms
from fedbudget.protocol.update import (
    MovingRule,
    UpdateRule,
    moves,
    restarted,
    with_statistics_of,
)
from fedbudget.protocol.workload import NodeTimes, StepTimes

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
            catch_up=CatchUp(self.best, mean, since, self.before)
            if self.round > 1
            else None,
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
        if (
            all(np.isfinite(part).all() for part in parts)
            or not np.isfinite(self.best).all()
        ):
            return self
        drift = None if self.drift is None else self.drift.anew()
        start = {"mean": None, "before": None, "momentum": 0.0}
        return self.updated(
            w=self.best, **start, update=update, drift=drift, estimates=None, worse=False
        )

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
                raise ValueError(
                    f"w and {name} have shapes {self.w.shape} and {vector.shape}"
                )
        if self.before is not None and self.before.shape != self.w.shape:
            raise ValueError(
                f"w and the one before have shapes {self.w.shape} and {self.before.shape}"
            )
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
            self.private is not None
            and not (0 <= self.private.clip < math.inf and 0 <= self.private.rho < math.inf)
        ):
            raise ValueError(f"a private round is {self.private}")
        if (self.drift is not None) != self.request.drift:
            raise ValueError("drift is corrected where that is asked for")
        if self.drift is not None:
            self.drift.require_possible(self.w)
        if self.times is not None:
            self.times.require_possible()
        if self.work is not None and not (
            0 < self.work.effective <= self.work.most < 2**31
            and min(self.work.updates, default=0) >= 1
        ):
            raise ValueError(
                f"nodes make {self.work.updates} updates, in effect {self.work.effective}"
            )


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


Quantize = Callable[[Float32, Float32], Float32]
"""What nodes will hold of a vector, from it and one that they know: of a new w, from the w of the broadcast before, and
of what the w_i were combined to, from w."""

_State = AggregatorState[Any, Any]


def with_losses(state: _State, sums: Sums) -> tuple[_State, bool]:
    """F(w(t₀)) and F(w^f), and whether w(t₀) is the new w^f."""
    loss = sums.totals.loss / sums.totals.data
    best_loss = sums.totals.best_loss / sums.totals.data
    if state.t == 0 and state.phase is Phase.ROUND:
        return state.updated(loss=loss, best_loss=loss, first_loss=loss), False
    if not loss < best_loss:
        return state.updated(loss=loss, best_loss=best_loss), False
    return state.updated(loss=loss, best_loss=loss, best=state.w), True


def with_times(state: _State, broadcast: Broadcast, times: NodeTimes | None) -> _State:
    """Knows what local updates took in the round, where nodes share rounds by that."""
    if state.times is None or times is None:
        return state
    return state.updated(times=state.times.after(broadcast.round, times))


def with_verdict(state: _State, sums: Sums, *, adapts: bool) -> tuple[_State, bool]:
    """Whether to go back to w^f: nothing is finite or, where η adapts, w(t₀) is much worse than w^f.

    A loss on small mini-batches is noisy, the more so where it is nearly 0: much worse is by half, by a tenth of where
    the run started, and twice in a row, or tenfold at once.
    """
    limit = state.best_loss + max(0.5 * state.best_loss, 0.1 * state.first_loss)
    worse = not state.loss <= limit
    much_worse = (state.worse and worse) or not state.loss <= 10 * limit
    recover = not sums.totals.used or (adapts and much_worse)
    return state.updated(worse=worse and not recover), recover


def with_retreat(state: _State, rule: UpdateRule, sums: Sums) -> _State:
    """Less motion where w(t₀) is worse than w^f, by a twentieth and more than chance would have it."""
    if moves(rule) and sums.loss_gap > sums.loss_gap_error + state.best_loss / 20:
        return state.updated(update=rule.retreat(state.update))
    return state


def at_pace(
    state: _State, rule: UpdateRule, broadcast: Broadcast, eta: float, *, recover: bool
) -> _State:
    """Motion as fast as the coming steps are long, and what of it nodes make.

    Args:
      eta: that w went by so far.
    """
    if not moves(rule) or recover or _was_last(state):
        return state.updated(before=None, momentum=0.0)
    ratio = min(1.0, state.step_size.eta / eta) if eta > 0 else 1.0
    update = state.update if ratio == 1 else rule.paced(state.update, ratio)
    momentum = ratio * rule.carried
    return state.updated(
        update=update, before=broadcast.w if momentum else None, momentum=momentum
    )


def believed(
    rule: CombineRule, report: Report | Reports, state: _State
) -> Report | Reports:
    """The report with what the rule believes of it; itself where it believes all."""
    if isinstance(report, Report) and doubts(rule):
        return rule.believed(report, state.start, state.w.size - state.statistics)
    return report


def changed(given: Report | Reports, believed: Report | Reports) -> tuple[int, ...]:
    """The numbers of nodes whose w_i is not believed as it was given."""
    if (
        given is believed
        or not isinstance(given, Report)
        or not isinstance(believed, Report)
    ):
        return ()
    if given.w is believed.w or given.w is None or believed.w is None:
        return ()
    same = (given.w == believed.w).all(axis=1) | ~np.isfinite(given.w).all(axis=1)
    return tuple(given.nodes[~same].tolist())


def combined(rule: CombineRule, report: Report | Reports, sums: Sums) -> Float32:
    """What the w_i(t) that are finite are combined to."""
    assert sums.w is not None  # or the report would have been refused
    if averages(rule) or not isinstance(report, Report) or report.w is None:
        return sums.mean(sums.w)
    used = ~np.isin(report.nodes, sums.left_out)
    return _vector(
        rule,
        rule.combine(report.w[used], report.sizes[used], report.nodes[used]),
        report.w[0],
    )


def moved(
    state: _State,
    rule: UpdateRule,
    mean: Float32 | None,
    quantize: Quantize | None,
    *,
    span: float = 0.0,
    scale: float = 1.0,
) -> tuple[_State, Float32, bool]:
    """With w(t); and what the w_i(t) are compared with, and whether w(t) is w^f, for want of a mean that is finite.

    Args:
      mean: what the w_i(t) were combined to; None to go back to w^f.
      span: η τ that they were made with; 0 where nodes have steps of their own.
      scale: how many times as far w would have come with the η that is right.
    """
    update = state.update
    w = mean
    if mean is not None:
        aim = mean if scale == 1 else state.w + np.float32(scale) * (mean - state.w)
        if moves(rule) and _was_last(state):
            w = aim
        else:
            reached = (
                aim if state.before is None else aim - state.start + state.w
            )  # by gradients alone
            reached = with_statistics_of(state.w, reached, state.statistics)
            if moves(rule):
                update, reached = _trusted(rule, update, state.w, reached, span * scale)
            update, w = rule.next(update, state.w, reached)
        w = with_statistics_of(mean, _vector(rule, w, state.w), state.statistics)
    recover = w is None or not np.isfinite(w).all()
    if w is None or mean is None or recover:
        w = mean = state.best
        update = restarted(rule, state.update, w)
    nodes_hold = w if quantize is None else quantize(w, state.w)
    if w is mean:
        return state.updated(w=nodes_hold, mean=None, update=update), nodes_hold, recover
    told = mean if state.request.drift else None
    if told is not None and quantize is not None:
        told = quantize(told, nodes_hold)
    return state.updated(w=nodes_hold, mean=told, update=update), mean, recover


def _trusted(
    rule: MovingRule, state: Any, w: Float32, reached: Float32, span: float
) -> tuple[Any, Float32]:
    """The rule's state, and as much of the way from w as it trusts."""
    rate = float(norms(reached[None], w)[0]) / span if span > 0 else 0.0
    if not 0 < rate < math.inf:  # of w that is not finite: it will be gone back from
        return state, reached
    state, share = rule.trust(state, rate)
    return state, reached if share == 1 else w + np.float32(share) * (reached - w)


def _was_last(state: _State) -> bool:
    """Whether the round that was announced last was as long as the rest of the budget."""
    return state.decision.reason in (Reason.REST, Reason.BUDGET)


def first_scale(
    rule: StepSize, state: _State, broadcast: Broadcast, inputs: StepSizeInputs
) -> float:
    """How many times larger η should have been in the first round, that nodes made with their own, as if with this."""
    if not broadcast.request.one_step or broadcast.round > 1:
        return 1.0
    return float(rule.next(state.step_size, inputs).eta / broadcast.eta)


def _vector(rule: object, values: Float32, like: Float32) -> Float32:
    """What a rule gave, which may be the user's own, as a vector like w."""
    vector = np.asarray(values, np.float32)
    if vector.shape != like.shape:
        raise UserError(
            f"{type(rule).__name__} gave an array of shape {vector.shape}, not {like.shape}"
        )
    return vector


def with_drift(
    state: _State,
    drift: DriftState,
    report: Report | None,
    sums: Sums,
    broadcast: Broadcast,
    *,
    recover: bool,
    start: Float32,
) -> _State:
    """Keeps c, and decides whether the next round is corrected, or how much.

    Args:
      report: of all nodes, with vectors or without; None where only sums arrive.
      start: where the round started from, [parameters].
    """
    if report is not None:
        drift = drift.join(report)
    data = drift.data if report is not None else sums.all_data or sums.totals.data
    share = 0.0 if recover else sums.totals.used / data
    fresh = Divergence(
        sums.totals.plain / sums.totals.data, sums.totals.corrected / sums.totals.data
    )
    if not fresh.possible:
        fresh = drift.divergence or Divergence(0.0, 0.0)
    combined = with_statistics_of(
        start, state.w if state.mean is None else state.mean, state.statistics
    )
    after = drift.after(
        broadcast, combined, share, fresh, recover=recover, start=start, lasted=sums.lasting
    )
    if after.coming.correct != drift.coming.correct:
        state = with_coming_delta(state, after)
    return state.updated(drift=after)


def unbiased(state: _State, broadcast: Broadcast, mean: Float32) -> Float32:
    """What the w_i(t) would have been combined to with shifts that cancel; see drift.py."""
    used = 0.0 if broadcast.drift is None else broadcast.drift.used
    return (
        mean
        if state.bias is None or not used
        else mean + np.float32(used * broadcast.span) * state.bias
    )


def with_bias(state: _State, broadcast: Broadcast, mean: Float32 | None) -> _State:
    """Knows the mean of the coming shifts, where nodes are not told all bits of what the w_i(t) were combined to.

    Args:
      mean: what they were.
    """
    told = state.w if state.mean is None else state.mean
    if mean is None or told is mean or state.drift is None or broadcast.drift is None:
        return state.updated(bias=None)
    bias = np.float32(state.drift.coming.share) * mean_gradient(told, mean, -broadcast.span)
    if state.bias is not None and broadcast.drift.used:
        bias += np.float32(broadcast.drift.used) * state.bias
    return state.updated(
        bias=with_statistics_of(np.zeros_like(bias), bias, state.statistics)
    )


def with_coming_delta(state: _State, drift: DriftState) -> _State:
    """The coming round is corrected where the last was not, or the other way: δ̂ is of how it was, so far."""
    if state.estimates is None or drift.coming_delta is None:
        return state
    return state.updated(estimates=replace(state.estimates, delta=drift.coming_delta))


def final_round(state: _State, *, best: bool) -> _State:
    """Asks for the loss of the last w(t)."""
    return state.updated(
        phase=Phase.FINAL,
        round=state.round + 1,
        tau=0,
        work=None,
        became_best=best,
        stop=True,
    )


def reopened(state: _State) -> _State:
    """Without the end that was announced or reached; a round that was announced stays as it is, but not the last."""
    state, before = state.updated(phase=Phase.ROUND, stop=False, stopped_by=None), state
    if before.phase is Phase.FINAL:  # it was not made
        return state.updated(round=state.round - 1)
    judged = before.phase is Phase.DONE and before.tau == 0
    return state.updated(final_rounds=state.final_rounds + 1) if judged else state
