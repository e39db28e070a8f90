"""Steps of a round at the aggregator, each from one state to the next; aggregator.py says in which order."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.control import Reason
from fedbudget.errors import UserError
from fedbudget.protocol.combine import CombineRule, averages, doubts
from fedbudget.protocol.drift import Divergence, DriftState, mean_gradient
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.protocol.norms import norms
from fedbudget.protocol.state import AggregatorState, Phase
from fedbudget.protocol.statistics import with_statistics_of
from fedbudget.protocol.sums import Reports, Sums
from fedbudget.protocol.update import MovingRule, UpdateRule, moves, restarted
from fedbudget.protocol.workload import NodeTimes
from fedbudget.step_size import StepSize, StepSizeInputs

Quantize = Callable[[Float32, Float32], Float32]
"""What nodes will hold of a vector, from it and one that they know: of a new w, from the w of the broadcast before, and
of what the w_i were combined to, from w."""

_State = AggregatorState[Any, Any]


def with_losses(state: _State, sums: Sums) -> tuple[_State, bool]:
    """F(w(t₀)) and F(w^f), and whether w(t₀) is the new w^f."""
    loss, best_loss = sums.totals.loss / sums.totals.data, sums.totals.best_loss / sums.totals.data
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


def at_pace(state: _State, rule: UpdateRule, broadcast: Broadcast, eta: float, *, recover: bool) -> _State:
    """Motion as fast as the coming steps are long, and what of it nodes make.

    Args:
      eta: that w went by so far.
    """
    if not moves(rule) or recover or _was_last(state):
        return state.updated(before=None, momentum=0.0)
    ratio = min(1.0, state.step_size.eta / eta) if eta > 0 else 1.0
    update = state.update if ratio == 1 else rule.paced(state.update, ratio)
    momentum = ratio * rule.carried
    return state.updated(update=update, before=broadcast.w if momentum else None, momentum=momentum)


def believed(rule: CombineRule, report: Report | Reports, state: _State) -> Report | Reports:
    """The report with what the rule believes of it; itself where it believes all."""
    if isinstance(report, Report) and doubts(rule):
        return rule.believed(report, state.start, state.w.size - state.statistics)
    return report


def changed(given: Report | Reports, believed: Report | Reports) -> tuple[int, ...]:
    """The numbers of nodes whose w_i is not believed as it was given."""
    if given is believed or not isinstance(given, Report) or not isinstance(believed, Report):
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
    return _vector(rule, rule.combine(report.w[used], report.sizes[used], report.nodes[used]), report.w[0])


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
    update, w = state.update, mean
    if mean is not None:
        aim = mean if scale == 1 else state.w + np.float32(scale) * (mean - state.w)
        if moves(rule) and _was_last(state):
            w = aim
        else:
            reached = aim if state.before is None else aim - state.start + state.w  # by gradients alone
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


def _trusted(rule: MovingRule, state: Any, w: Float32, reached: Float32, span: float) -> tuple[Any, Float32]:
    """The rule's state, and as much of the way from w as it trusts."""
    rate = float(norms(reached[None], w)[0]) / span if span > 0 else 0.0
    if not 0 < rate < math.inf:  # of w that is not finite: it will be gone back from
        return state, reached
    state, share = rule.trust(state, rate)
    return state, reached if share == 1 else w + np.float32(share) * (reached - w)


def _was_last(state: _State) -> bool:
    """Whether the round that was announced last was as long as the rest of the budget."""
    return state.decision.reason in (Reason.REST, Reason.BUDGET)


def first_scale(rule: StepSize, state: _State, broadcast: Broadcast, inputs: StepSizeInputs) -> float:
    """How many times larger η should have been in the first round, that nodes made with their own, as if with this."""
    if not broadcast.request.one_step or broadcast.round > 1:
        return 1.0
    return float(rule.next(state.step_size, inputs).eta / broadcast.eta)


def _vector(rule: object, values: Float32, like: Float32) -> Float32:
    """What a rule gave, which may be the user's own, as a vector like w."""
    vector = np.asarray(values, np.float32)
    if vector.shape != like.shape:
        raise UserError(f"{type(rule).__name__} gave an array of shape {vector.shape}, not {like.shape}")
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
    fresh = Divergence(sums.totals.plain / sums.totals.data, sums.totals.corrected / sums.totals.data)
    if not fresh.possible:
        fresh = drift.divergence or Divergence(0.0, 0.0)
    combined = with_statistics_of(start, state.w if state.mean is None else state.mean, state.statistics)
    after = drift.after(broadcast, combined, share, fresh, recover=recover, start=start, lasted=sums.lasting)
    if after.coming.correct != drift.coming.correct:
        state = with_coming_delta(state, after)
    return state.updated(drift=after)


def unbiased(state: _State, broadcast: Broadcast, mean: Float32) -> Float32:
    """What the w_i(t) would have been combined to with shifts that cancel; see drift.py."""
    used = 0.0 if broadcast.drift is None else broadcast.drift.used
    return mean if state.bias is None or not used else mean + np.float32(used * broadcast.span) * state.bias


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
    return state.updated(bias=with_statistics_of(np.zeros_like(bias), bias, state.statistics))


def with_coming_delta(state: _State, drift: DriftState) -> _State:
    """The coming round is corrected where the last was not, or the other way: δ̂ is of how it was, so far."""
    if state.estimates is None or drift.coming_delta is None:
        return state
    return state.updated(estimates=replace(state.estimates, delta=drift.coming_delta))


def final_round(state: _State, *, best: bool) -> _State:
    """Asks for the loss of the last w(t)."""
    return state.updated(phase=Phase.FINAL, round=state.round + 1, tau=0, work=None, became_best=best, stop=True)


def reopened(state: _State) -> _State:
    """Without the end that was announced or reached; a round that was announced stays as it is, but not the last."""
    state, before = state.updated(phase=Phase.ROUND, stop=False, stopped_by=None), state
    if before.phase is Phase.FINAL:  # it was not made
        return state.updated(round=state.round - 1)
    judged = before.phase is Phase.DONE and before.tau == 0
    return state.updated(final_rounds=state.final_rounds + 1) if judged else state
