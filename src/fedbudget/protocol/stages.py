"""The stages of a round at the aggregator, each a function from one state to the next.

`Aggregator.receive` has their order.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedbudget.arrays import Float32, Int64
from fedbudget.budget.control import Reason
from fedbudget.budget.step_size import StepSizeInputs
from fedbudget.errors import UserError
from fedbudget.frozen import updated
from fedbudget.protocol.combine import (
    CombineRule,
    averages,
    cap_reports,
    shortened_nodes,
)
from fedbudget.protocol.messages import Broadcast, LossReport, Report
from fedbudget.protocol.method import Method
from fedbudget.protocol.objections import LossWatch, Objection, limit_losses
from fedbudget.protocol.outliers import Outlier, PeerGroups, cap_figures
from fedbudget.protocol.state import AggregatorState, Phase
from fedbudget.protocol.sums import Sums, norms
from fedbudget.protocol.update import (
    SQUARED_STEP,
    FedExP,
    MovingRule,
    UpdateRule,
    moves,
    restarted,
    with_statistics_of,
)

_State = AggregatorState[Any, Any]


@dataclass(frozen=True)
class FilteredReports:
    """Reports of a round after outliers were limited.

    Args:
      sums: their sums.
      report: reports of all nodes; None if only sums arrived.
      capped: whether the combination rule changed a report.
      shortened: numbers of the nodes whose update the combination rule shortened.
      outliers: outliers by node number.
      watch: the watch over losses, with nodes excluded for a false report.
      objection: the objection of a minority to w(t₀), if there is one.
      scales: typical numbers of features in the first round that has them (outliers.py).
    """

    sums: Sums
    report: Report | None
    capped: bool = False
    shortened: tuple[int, ...] = ()
    outliers: Mapping[int, tuple[Outlier, ...]] = field(default_factory=dict)
    watch: LossWatch = field(default_factory=LossWatch)
    objection: Objection | None = None
    scales: Mapping[str, float] = field(default_factory=dict)


def filter_reports(
    method: Method,
    reports: Report | Sums,
    broadcast: Broadcast,
    state: _State,
    start: Float32,
    peers: Int64 | None,
) -> FilteredReports:
    """Limit outliers, and sum.

    Args:
      method: the rules of the run.
      reports: the merged reports, or their sums.
      broadcast: their broadcast.
      state: the state before the round.
      start: starting point of the nodes' gradients, [parameters].
      peers: index of each node's peer, [n]; None if nodes are simulated.
    """
    layout = broadcast.report
    outliers: dict[int, tuple[Outlier, ...]] = {}
    watch = state.watch
    scales = state.scales
    objection: Objection | None = None
    reported = reports if isinstance(reports, Report) else reports.report
    known = reported
    if peers is not None and isinstance(known, LossReport):
        group = PeerGroups(peers)
        at_best = np.array_equal(state.w, state.best)
        found = limit_losses(known, group, watch, state.first_loss, at_best=at_best)
        watch = found.watch
        objection = found.objection
        numbers = [feature.reported(broadcast.round == 1) for feature in method.features]
        capped_figures = cap_figures(found.report, group, numbers, scales)
        known = capped_figures.report
        scales = capped_figures.scales
        outliers = capped_figures.outliers
        for node, each in found.outliers.items():
            outliers[node] = each + outliers.get(node, ())
    if isinstance(reports, Sums):
        if known is not reported and known is not None:
            reports = reports.with_report(known, layout)
        return FilteredReports(
            reports,
            None,
            outliers=outliers,
            watch=watch,
            objection=objection,
            scales=scales,
        )
    assert known is not None
    capped = cap_reports(method.combine, known, start, state.w.size - state.statistics)
    return FilteredReports(
        Sums.of(capped, layout),
        capped,
        capped is not known,
        shortened_nodes(known, capped),
        outliers,
        watch,
        objection,
        scales,
    )


def with_losses(state: _State, sums: Sums) -> tuple[_State, bool]:
    """Record F(w(t₀)) and F(w^f); return whether w(t₀) is the new w^f.

    It is if its loss is lower, or if a feature restarted the run from it.
    """
    loss = sums.totals["losses"] / sums.totals["data"]
    best_loss = sums.totals["best_losses"] / sums.totals["data"]
    if state.t == 0 and state.phase is Phase.ROUND:
        return updated(state, loss=loss, best_loss=loss, first_loss=loss), False
    if not (loss < best_loss or state.restarted):
        return updated(state, loss=loss, best_loss=best_loss), False
    return updated(state, loss=loss, best_loss=loss, best=state.w, restarted=False), True


def check_recovery(state: _State, sums: Sums, *, adapts: bool) -> tuple[_State, bool]:
    """Decide whether to return to w^f.

    The run recovers if no w_i is finite, or if η adapts and w(t₀) is much worse than w^f.
    Losses on small mini-batches are noisy, most of all near 0. So the limit is F(w^f) plus
    half of it, or plus a tenth of F(w(0)) if that is more. The run recovers after two
    rounds in a row above the limit, or after one above ten times the limit. A limit below 0
    is not multiplied.
    """
    limit = _recovery_limit(state.best_loss, state.first_loss)
    worse = not state.loss <= limit
    much_worse = (state.worse and worse) or not state.loss <= max(limit, 10 * limit)
    recover = not sums.totals["used"] or (adapts and much_worse)
    worse = worse and not recover
    return state if worse == state.worse else updated(state, worse=worse), recover


def _recovery_limit(best_loss: float, first_loss: float) -> float:
    return best_loss + max(0.5 * best_loss, 0.1 * first_loss)


def watch_losses(
    state: _State, filtered: FilteredReports, *, best: bool, recover: bool
) -> _State:
    """Remember typical numbers, and the objection of a round if it was decisive.

    If a node is excluded, the step size rule forgets the returns because of objections.

    Args:
      state: the state with the losses of the round.
      filtered: the reports.
      best: whether w(t₀) is the new w^f.
      recover: whether the run returns to w^f.
    """
    objection = filtered.objection
    if objection is None and not filtered.watch.objectors:
        if filtered.watch is state.watch and filtered.scales is state.scales:
            return state
        return updated(state, watch=filtered.watch, scales=filtered.scales)
    if objection is not None:
        limit = _recovery_limit(objection.best_loss, state.first_loss)
        improved = objection.loss < objection.best_loss
        decisive = improved and not best
        if recover:
            decisive = filtered.sums.totals["used"] > 0 and objection.loss <= limit
        if not decisive:
            objection = None
    watch = filtered.watch.after(objection, returned=recover)
    step_size = state.step_size
    undisputed = state.undisputed
    if objection is not None and recover and undisputed is None:
        undisputed = step_size
    if len(watch.excluded) > len(state.watch.excluded) and undisputed is not None:
        step_size = undisputed
        undisputed = None
    return updated(
        state,
        watch=watch,
        scales=filtered.scales,
        step_size=step_size,
        undisputed=undisputed,
    )


def combine_reports(rule: CombineRule, filtered: FilteredReports) -> Float32:
    """Combine the finite w_i(t), [parameters]."""
    report = filtered.report
    if averages(rule) or report is None:
        return filtered.sums.mean("w")
    w = report.vectors["w"]
    used = ~np.isin(report.nodes, filtered.sums.left_out)
    combined = rule.combine(w[used], report.sizes[used], report.nodes[used])
    return checked_vector(rule, combined, w[0])


def step_size_inputs(
    before: float, spent: float, sums: Sums, *, best: bool
) -> StepSizeInputs:
    """Collect the inputs of the step size rule.

    Args:
      before, spent: spent share of the budget before and after the round.
      sums: sums of the reports.
      best: whether w(t₀) is the new w^f.
    """
    return StepSizeInputs(
        sums.largest_beta,
        spent,
        sums.mean_beta,
        best and sums.loss_gap < -sums.loss_gap_error,
        max(0.0, spent - before),
    )


@dataclass(frozen=True)
class Moved:
    """w(t), before compression.

    Args:
      w: w(t), [parameters].
      mean: the combined w_i(t), or w^f, [parameters].
      update: state of the update rule.
      recover: whether w is w^f.
    """

    w: Float32
    mean: Float32
    update: Any
    recover: bool


def move(
    state: _State,
    rule: UpdateRule,
    mean: Float32 | None,
    start: Float32,
    span: float = 0.0,
    scale: float = 1.0,
    sums: Sums | None = None,
) -> Moved:
    """Compute w(t).

    Args:
      state: the state before it.
      rule: the update rule.
      mean: the combined w_i(t), [parameters]; None to return to w^f.
      start: starting point of the nodes' gradients, [parameters].
      span: η τ of the round; 0 if nodes use their own step sizes.
      scale: factor by which the nodes' updates were too short.
      sums: sums of the reports; None in a private run.
    """
    update = state.update
    if sums is not None and isinstance(rule, FedExP):
        update = rule.measured(update, scale * scale * sums.weighted_mean(SQUARED_STEP))
    if mean is not None:
        after, w = _next_w(state, rule, update, mean, start, span, scale)
        if np.isfinite(w).all():
            return Moved(w, mean, after, recover=False)
    update = restarted(rule, update, state.best)
    return Moved(state.best, state.best, update, recover=True)


def _next_w(
    state: _State,
    rule: UpdateRule,
    update: Any,
    mean: Float32,
    start: Float32,
    span: float,
    scale: float,
) -> tuple[Any, Float32]:
    """Return the update rule's state and w(t); it is only finite if the mean is."""
    aim = mean
    if scale != 1:
        aim = state.w + np.float32(scale) * (mean - state.w)
    if moves(rule) and was_last(state):
        w = aim
    else:
        reached = aim
        if start is not state.w:
            reached = aim - start + state.w  # without the nodes' momentum
        reached = with_statistics_of(state.w, reached, state.statistics)
        if moves(rule):
            update, reached = _trusted(rule, update, state.w, reached, span * scale)
        update, w = rule.next(update, state.w, reached)
    w = checked_vector(rule, w, state.w)
    return update, with_statistics_of(mean, w, state.statistics)


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


def checked_vector(rule: object, values: Float32, like: Float32) -> Float32:
    """Check the result of a rule, which may be a custom one."""
    vector = np.asarray(values, np.float32)
    if vector.shape != like.shape:
        raise UserError(
            f"{type(rule).__name__} returned an array of shape {vector.shape}, "
            f"not {like.shape}"
        )
    return vector


def pace(eta: float, before: float) -> float:
    """Return the ratio of a step size to the one before; at most 1."""
    return min(1.0, eta / before) if before > 0 else 1.0


def was_last(state: _State) -> bool:
    """Whether the last announced round was to use up the budget."""
    return state.decision.reason in (Reason.REST, Reason.BUDGET)


def reopen(state: _State) -> _State:
    """Withdraw the end of a run. An announced round stays, but is no longer the last."""
    reopened = updated(
        state, phase=Phase.ROUND, stop=False, stopped_by=None, evaluated=False
    )
    if state.phase is Phase.FINAL:  # the final round was not made
        return updated(reopened, round=state.round - 1)
    if state.phase is Phase.DONE and state.evaluated:
        return updated(reopened, final_rounds=state.final_rounds + 1)
    return reopened


def with_finite_w(state: _State, method: Method) -> _State:
    """Return the state restarted from w^f if w is not finite and w^f is; else itself."""
    best = state.best
    vectors = [each for own in state.states.values() for each in own.sent_vectors]
    finite = all(np.isfinite(each).all() for each in (state.w, *vectors))
    if finite or not np.isfinite(best).all():
        return state
    return _continued_from(state, method, best)


def restart_from(state: _State, method: Method, w: Float32) -> _State:
    """Continue from the w of a feature, with the step size of the first search.

    In the next round w becomes w^f, whatever its loss: the parameters since then overfit.
    """
    after = _continued_from(state, method, w)
    step_size = state.searched or state.step_size
    return updated(after, step_size=step_size, restarted=True)


def _continued_from(state: _State, method: Method, w: Float32) -> _State:
    after = {
        each.name: each.recovered(state.states.get(each.name)) for each in method.features
    }
    return updated(
        state,
        w=w,
        update=restarted(method.update, state.update, w),
        states={name: own for name, own in after.items() if own is not None},
        worse=False,
    )
