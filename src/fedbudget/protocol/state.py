"""State of an aggregator and of a fleet between two rounds.

Both are frozen values. They hold everything that a run needs to resume and that does not
follow from its settings or from the nodes' data:

- The aggregator replaces its `AggregatorState` in every round. An aggregator resumed from
  it repeats the last broadcast, to the bit.
- A `FleetState` is exported from one fleet and imported by another one of the same nodes.

codec.py converts both to plain values and arrays. A new field needs a declaration here and
nothing else.

The functions at the end are the stages of a round at the aggregator, each from one state to
the next; `Aggregator.receive` has their order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy as np

from fedbudget.arrays import Float32, Float64
from fedbudget.budget.budget import Ledger
from fedbudget.budget.control import Decision, Estimates, Reason
from fedbudget.budget.spending import SpendingRule, progress
from fedbudget.budget.step_size import StepSize, StepSizeInputs
from fedbudget.data.sampling import SamplerState
from fedbudget.errors import UserError
from fedbudget.protocol.combine import CombineRule, averages, caps_reports
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

if TYPE_CHECKING:
    from dataclasses import replace as updated
else:

    def updated(state, **changes):
        """Copy an `AggregatorState` with some fields changed.

        Every stage of a round creates a state. `dataclasses.replace` would take a tenth of
        a round's time; type checkers read this function as `dataclasses.replace`.
        """
        new = object.__new__(type(state))
        values = new.__dict__
        values.update(vars(state))
        values.pop("broadcast", None)  # cached, follows from the fields
        values.update(changes)
        return new


__all__ = ["AggregatorState", "FleetState", "Phase", "Quantize", "updated"]

S = TypeVar("S", bound=Any)
U = TypeVar("U")

Quantize = Callable[[Float32, Float32], Float32]
"""Return a vector as nodes receive it, from the vector and a reference that they hold. The
reference of a new w is the w of the previous broadcast; the reference of the combined w_i
is w."""

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

    Args:
      phase: `round` or `final` after such a round was announced; `done` after the last.
      request: what nodes report.
      w: w(t₀) of the last broadcast.
      best: w^f.
      decision: the last choice of τ.
      step_size: state of the step size rule, with the coming η.
      update: state of the update rule.
      ledger: what was spent, and the expected cost of rounds.
      drift: state of drift correction, if the run has it.
      round, tau, became_best, stop: fields of the last broadcast; `round` is 0 before the
        first. `became_best` is its `best`; after the end, the `best` of the next broadcast
        if the run is extended.
      loss, best_loss, first_loss: F of w(t₀) one round ago, of w^f and of w(0).
      worse: F(w(t₀)) was much larger than F(w^f).
      t: local updates per node so far.
      estimates: ρ̂, β̂, δ̂.
      stopped_by: the resource that ends the run, once it is decided.
      final_rounds: number of final rounds after which the run was extended.
      mean: the combined w_i(t) of the last round, if it differs from w and nodes need it.
      before: the w broadcast before w; None without momentum.
      momentum: fraction of the step from `before` to w that nodes repeat.
      statistics: number of running statistics at the end of w.
      times: time of a local update at each node, if faster nodes make more updates.
      work: local updates of each node in the announced round, unless all make τ.
      private: settings of the announced round, if rounds are private.
      bias: mean shift of the nodes, [parameters], if vectors are compressed (drift.py).
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
        """The last broadcast."""
        drift = self.drift
        if self.round <= 1:
            catch_up = None
        elif drift is None:
            catch_up = CatchUp(self.best, before=self.before)
        else:
            catch_up = CatchUp(self.best, drift.mean, drift.uncorrected, self.before)

        return Broadcast(
            self.round,
            self.w,
            self.tau,
            self.step_size.eta,
            self.request,
            best=self.became_best,
            stop=self.stop,
            drift=None if drift is None else drift.coming,
            catch_up=catch_up,
            mean=self.mean,
            momentum=self.momentum,
            work=self.work,
            private=self.private,
        )

    @property
    def start(self) -> Float32:
        """Starting point of the nodes' gradients: w, extrapolated by the momentum."""
        if self.before is None:
            return self.w
        return extrapolated(self.w, self.before, self.momentum, self.statistics)

    def recovered(self, update: U) -> Self:
        """Return the state restarted from w^f if w is not finite and w^f is; else itself.

        Args:
          update: initial state of the update rule at w^f.
        """
        vectors = [v for v in (self.w, self.mean, self.before) if v is not None]
        finite = all(np.isfinite(vector).all() for vector in vectors)
        if finite or not np.isfinite(self.best).all():
            return self
        return updated(
            self,
            w=self.best,
            mean=None,
            before=None,
            momentum=0.0,
            update=update,
            drift=None if self.drift is None else self.drift.reset(),
            estimates=None,
            worse=False,
        )

    def require_possible(self) -> None:
        """Raise ValueError for a state that no run can reach, as of a corrupt file."""
        for name in ("round", "tau", "t", "final_rounds"):
            if not 0 <= getattr(self, name) < _COUNT_LIMIT:
                raise ValueError(f"{name} is {getattr(self, name)}")
        final = self.phase is Phase.FINAL
        running = self.phase is not Phase.DONE
        if self.phase is Phase.READY or (running and (self.tau == 0) != final):
            raise ValueError(f"tau is {self.tau} in phase {self.phase}")

        if self.w.ndim != 1 or not self.w.size:
            raise ValueError(f"w has shape {self.w.shape}")
        for name in ("w", "best", "mean", "before", "bias"):
            vector = getattr(self, name)
            if vector is None:
                continue
            if vector.shape != self.w.shape:
                raise ValueError(
                    f"w and {name} have shapes {self.w.shape} and {vector.shape}"
                )
            if not np.isfinite(vector).all():
                raise ValueError(f"{name} is not finite")
        if not 0 <= self.statistics < self.w.size:
            raise ValueError(f"{self.statistics} statistics in {self.w.size} numbers")
        if not 0 <= self.momentum <= 1 or (self.momentum > 0) != (self.before is not None):
            raise ValueError(f"momentum is {self.momentum}")

        self.ledger.require_possible()
        estimates = self.estimates
        if estimates is not None and not _possible(estimates.rho, estimates.beta):
            raise ValueError(f"estimates are {estimates}")
        private = self.private
        if (private is not None) != self.request.private:
            raise ValueError("a private run needs the settings of its private round")
        if private is not None and not _possible(private.clip, private.rho):
            raise ValueError(f"a private round is {private}")
        if (self.drift is not None) != self.request.drift:
            raise ValueError("drift correction needs its state, and only drift correction")
        if self.drift is not None:
            self.drift.require_possible(self.w)
        if self.times is not None:
            self.times.require_possible()
        if self.work is not None:
            self.work.require_possible()


@dataclass(frozen=True)
class FleetState:
    """A fleet of n nodes between two rounds.

    Args:
      broadcast: the last broadcast, without its `catch_up`.
      w: w_i(t), [n, parameters]; None before the first local update.
      best: w^f.
      losses: F_i at the last broadcast's w, [n].
      best_known: F_i(w^f) on whole shards, [n]; None with mini-batches.
      steepest: change of ∇F_i along its steepest known direction, [n, parameters]; None
        before the first probe.
      correction: state of drift correction, if the run has it.
      position: position of the mini-batch sampler.
      start: starting point of the last updates, [parameters], if not the broadcast's w.
      lost: compression error of w_i(t), [n, parameters].
    """

    broadcast: Broadcast
    w: Float32 | None
    best: Float32
    losses: Float64
    best_known: Float64 | None
    steepest: Float32 | None
    correction: Correction | None
    position: SamplerState
    start: Float32 | None = None
    lost: Float32 | None = None

    @property
    def for_disk(self) -> "FleetState":
        """The state for a checkpoint, without private values if the run is private."""
        if self.broadcast.private is None:
            return self
        return replace(self, w=None, losses=np.zeros_like(self.losses), best_known=None)


def extrapolated(w: Float32, before: Float32, momentum: float, statistics: int) -> Float32:
    """Extrapolate w along its last step by `momentum`, [parameters].

    Args:
      before: the w before the last step, [parameters].
      momentum: fraction of the step to repeat.
      statistics: number of running statistics at the end of w; they stay as they are.
    """
    return with_statistics_of(w, w + np.float32(momentum) * (w - before), statistics)


def _possible(*values: float) -> bool:
    return all(0 <= value < math.inf for value in values)


_State = AggregatorState[Any, Any]


def cap_outliers(
    rule: CombineRule, report: Report | Reports, state: _State
) -> Report | Reports:
    """Return the report with outliers capped by the rule; itself if none was."""
    if isinstance(report, Report) and caps_reports(rule):
        return rule.capped(report, state.start, state.w.size - state.statistics)
    return report


def shortened_nodes(report: Report | Reports, capped: Report | Reports) -> tuple[int, ...]:
    """Return the numbers of the nodes whose finite w_i `cap_outliers` changed."""
    if not isinstance(report, Report) or not isinstance(capped, Report):
        return ()
    if report.w is capped.w or report.w is None or capped.w is None:
        return ()
    same = (report.w == capped.w).all(axis=1) | ~np.isfinite(report.w).all(axis=1)
    return tuple(report.nodes[~same].tolist())


def with_losses(state: _State, sums: Sums) -> tuple[_State, bool]:
    """Record F(w(t₀)) and F(w^f); return whether w(t₀) is the new w^f."""
    loss = sums.totals.loss / sums.totals.data
    best_loss = sums.totals.best_loss / sums.totals.data
    if state.t == 0 and state.phase is Phase.ROUND:
        return updated(state, loss=loss, best_loss=loss, first_loss=loss), False
    if not loss < best_loss:
        return updated(state, loss=loss, best_loss=best_loss), False
    return updated(state, loss=loss, best_loss=loss, best=state.w), True


def with_times(state: _State, broadcast: Broadcast, times: NodeTimes | None) -> _State:
    """Record the time of local updates, if nodes share rounds by their speed."""
    if state.times is None or times is None:
        return state
    return updated(state, times=state.times.after(broadcast.round, times))


def check_recovery(state: _State, sums: Sums, *, adapts: bool) -> tuple[_State, bool]:
    """Decide whether to return to w^f.

    The run recovers if no w_i is finite, or if η adapts and w(t₀) is much worse than w^f.
    Losses on small mini-batches are noisy, most of all near 0. So the limit is F(w^f) plus
    half of it, or plus a tenth of F(w(0)) if that is more. The run recovers after two
    rounds in a row above the limit, or after one above ten times the limit.
    """
    limit = state.best_loss + max(0.5 * state.best_loss, 0.1 * state.first_loss)
    worse = not state.loss <= limit
    much_worse = (state.worse and worse) or not state.loss <= 10 * limit
    recover = not sums.totals.used or (adapts and much_worse)
    return updated(state, worse=worse and not recover), recover


def combine_reports(rule: CombineRule, report: Report | Reports, sums: Sums) -> Float32:
    """Combine the finite w_i(t), [parameters]."""
    assert sums.w is not None  # a report without w was refused
    if averages(rule) or not isinstance(report, Report) or report.w is None:
        return sums.mean(sums.w)
    used = ~np.isin(report.nodes, sums.left_out)
    combined = rule.combine(report.w[used], report.sizes[used], report.nodes[used])
    return _vector(rule, combined, report.w[0])


def without_bias(state: _State, broadcast: Broadcast, mean: Float32) -> Float32:
    """Remove the effect of shifts that do not cancel from the combined w_i (drift.py)."""
    used = 0.0 if broadcast.drift is None else broadcast.drift.used
    if state.bias is None or not used:
        return mean
    return mean + np.float32(used * broadcast.span) * state.bias


def step_size_inputs(
    spending: SpendingRule, before: Ledger, after: Ledger, sums: Sums, *, best: bool
) -> StepSizeInputs:
    """Collect the inputs of the step size rule.

    Args:
      before, after: ledger before and after the round.
      best: whether w(t₀) is the new w^f.
    """
    spent = progress(after, spending)
    return StepSizeInputs(
        sums.largest_beta,
        spent,
        sums.mean_beta,
        best and sums.loss_gap < -sums.loss_gap_error,
        max(0.0, spent - progress(before, spending)),
    )


def first_round_scale(
    rule: StepSize, state: _State, broadcast: Broadcast, inputs: StepSizeInputs
) -> float:
    """Return the factor by which η of the first round was too small.

    In that round nodes use their own step sizes and report as if they had used η.
    """
    if not broadcast.request.one_step or broadcast.round > 1:
        return 1.0
    return float(rule.next(state.step_size, inputs).eta / broadcast.eta)


def damp_velocity(state: _State, rule: UpdateRule, sums: Sums) -> _State:
    """Reduce the momentum if w(t₀) is significantly worse than w^f, by 5 % or more."""
    if moves(rule) and sums.loss_gap > sums.loss_gap_error + state.best_loss / 20:
        return updated(state, update=rule.retreat(state.update))
    return state


def apply_update(
    state: _State,
    rule: UpdateRule,
    mean: Float32 | None,
    quantize: Quantize | None,
    *,
    span: float = 0.0,
    scale: float = 1.0,
) -> tuple[_State, Float32, bool]:
    """Compute w(t).

    Args:
      mean: the combined w_i(t), [parameters]; None to return to w^f.
      span: η τ of the round; 0 if nodes use their own step sizes.
      scale: factor by which the update was too short, see `first_round_scale`.

    Returns:
      The state with w(t); the vector to compare the w_i(t) with; and whether w(t) is w^f,
      because there is no finite mean.
    """
    update = state.update
    w = mean
    if mean is not None:
        update, w = _next_w(state, rule, mean, span, scale)
    recover = w is None or not np.isfinite(w).all()
    if w is None or mean is None or recover:
        w = state.best
        mean = state.best
        update = restarted(rule, state.update, w)

    received = w if quantize is None else quantize(w, state.w)
    if w is mean:
        return updated(state, w=received, mean=None, update=update), received, recover
    sent_mean = mean if state.request.drift else None
    if sent_mean is not None and quantize is not None:
        sent_mean = quantize(sent_mean, received)
    return updated(state, w=received, mean=sent_mean, update=update), mean, recover


def _next_w(
    state: _State, rule: UpdateRule, mean: Float32, span: float, scale: float
) -> tuple[Any, Float32]:
    """Return the update rule's state and w(t); it is only finite if the mean is."""
    update = state.update
    aim = mean
    if scale != 1:
        aim = state.w + np.float32(scale) * (mean - state.w)
    if moves(rule) and _was_last(state):
        w = aim
    else:
        reached = aim
        if state.before is not None:
            reached = aim - state.start + state.w  # without the nodes' momentum
        reached = with_statistics_of(state.w, reached, state.statistics)
        if moves(rule):
            update, reached = _trusted(rule, update, state.w, reached, span * scale)
        update, w = rule.next(update, state.w, reached)
    return update, with_statistics_of(mean, _vector(rule, w, state.w), state.statistics)


def _trusted(
    rule: MovingRule, state: Any, w: Float32, reached: Float32, span: float
) -> tuple[Any, Float32]:
    """Return the rule's state, and the point up to which it trusts the step from w."""
    rate = float(norms(reached[None], w)[0]) / span if span > 0 else 0.0
    if not 0 < rate < math.inf:  # if w is not finite, the run recovers
        return state, reached
    state, share = rule.trust(state, rate)
    if share == 1:
        return state, reached
    return state, w + np.float32(share) * (reached - w)


def _vector(rule: object, values: Float32, like: Float32) -> Float32:
    """Check the result of a rule, which may be a custom one."""
    vector = np.asarray(values, np.float32)
    if vector.shape != like.shape:
        raise UserError(
            f"{type(rule).__name__} returned an array of shape {vector.shape}, "
            f"not {like.shape}"
        )
    return vector


def with_drift(
    state: _State,
    report: Report | None,
    sums: Sums,
    broadcast: Broadcast,
    *,
    restart: bool,
    start: Float32,
) -> _State:
    """Update c, and decide whether and how strongly the next round is corrected.

    Args:
      report: reports of all nodes, with or without vectors; None if only sums arrive.
      restart: whether the next round is not corrected, and all c_i restart.
      start: starting point of the round's updates, [parameters].
    """
    drift = state.drift
    if drift is None:
        return state
    totals = sums.totals
    if report is None:
        data = sums.all_data or totals.data
    else:
        drift = drift.join(report)
        data = drift.data
    share = 0.0 if restart else totals.used / data
    fresh = Divergence(totals.plain / totals.data, totals.corrected / totals.data)
    if not fresh.possible:
        fresh = drift.divergence or Divergence(0.0, 0.0)
    combined = state.w if state.mean is None else state.mean
    after = drift.after(
        broadcast,
        with_statistics_of(start, combined, state.statistics),
        share,
        fresh,
        recover=restart,
        start=start,
        lasted=sums.persistent_share,
    )
    if after.coming.correct != drift.coming.correct:
        state = with_coming_delta(state, after)
    return updated(state, drift=after)


def with_coming_delta(state: _State, drift: DriftState) -> _State:
    """Replace δ̂ when drift correction is switched on or off for the coming round."""
    if state.estimates is None or drift.coming_delta is None:
        return state
    return updated(state, estimates=replace(state.estimates, delta=drift.coming_delta))


def with_bias(state: _State, broadcast: Broadcast, mean: Float32 | None) -> _State:
    """Compute the mean of the coming shifts, if compression changes the combined w_i.

    Args:
      mean: the combined w_i(t), [parameters]; None after a recovery.
    """
    received = state.w if state.mean is None else state.mean
    drift = broadcast.drift
    if mean is None or received is mean or state.drift is None or drift is None:
        return updated(state, bias=None)
    gradient = mean_gradient(received, mean, -broadcast.span)
    bias = np.float32(state.drift.coming.share) * gradient
    if state.bias is not None and drift.used:
        bias += np.float32(drift.used) * state.bias
    bias = with_statistics_of(np.zeros_like(bias), bias, state.statistics)
    return updated(state, bias=bias)


def rescale_velocity(
    state: _State, rule: UpdateRule, broadcast: Broadcast, eta: float, *, recover: bool
) -> _State:
    """Scale the velocity with the step size, and set the nodes' share of it.

    Args:
      eta: step size of the last update of w.
      recover: whether the run returns to w^f; then the velocity is 0.
    """
    if not moves(rule) or recover or _was_last(state):
        return updated(state, before=None, momentum=0.0)
    ratio = min(1.0, state.step_size.eta / eta) if eta > 0 else 1.0
    update = state.update if ratio == 1 else rule.paced(state.update, ratio)
    momentum = ratio * rule.carried
    before = broadcast.w if momentum else None
    return updated(state, update=update, before=before, momentum=momentum)


def _was_last(state: _State) -> bool:
    """Whether the last announced round was to use up the budget."""
    return state.decision.reason in (Reason.REST, Reason.BUDGET)


def reopen(state: _State) -> _State:
    """Withdraw the end of a run. An announced round stays, but is no longer the last."""
    reopened = updated(state, phase=Phase.ROUND, stop=False, stopped_by=None)
    if state.phase is Phase.FINAL:  # the final round was not made
        return updated(reopened, round=state.round - 1)
    if state.phase is Phase.DONE and state.tau == 0:
        return updated(reopened, final_rounds=state.final_rounds + 1)
    return reopened
