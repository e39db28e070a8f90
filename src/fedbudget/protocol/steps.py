"""Steps of a round at the aggregator, each from one state to the next; aggregator.py says in which order."""

from dataclasses import replace
from typing import Any

from fedbudget.budget import Ledger
from fedbudget.protocol.drift import Divergence, DriftState
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.protocol.state import AggregatorState, Phase
from fedbudget.protocol.sums import Reports, Sums

_State = AggregatorState[Any, Any]


def charged(state: _State, ledger: Ledger) -> _State:
    return replace(state, costs=ledger.costs, spent=ledger.spent)


def with_losses(state: _State, sums: Sums) -> tuple[_State, bool]:
    """F(w(t₀)) and F(w^f), and whether w(t₀) is the new w^f."""
    loss, best_loss = sums.totals.loss / sums.totals.data, sums.totals.best_loss / sums.totals.data
    if state.t == 0 and state.phase is Phase.ROUND:
        return replace(state, loss=loss, best_loss=loss, first_loss=loss), False
    if not loss < best_loss:
        return replace(state, loss=loss, best_loss=best_loss), False
    return replace(state, loss=loss, best_loss=loss, best=state.w), True


def with_verdict(state: _State, sums: Sums, *, adapts: bool) -> tuple[_State, bool]:
    """Whether to go back to w^f: nothing is finite or, where η adapts, w(t₀) is much worse than w^f.

    A loss on small mini-batches is noisy, the more so where it is nearly 0: much worse is by half, by a tenth of where
    the run started, and twice in a row, or tenfold at once.
    """
    limit = state.best_loss + max(0.5 * state.best_loss, 0.1 * state.first_loss)
    worse = not state.loss <= limit
    much_worse = (state.worse and worse) or not state.loss <= 10 * limit
    recover = not sums.totals.used or (adapts and much_worse)
    return replace(state, worse=worse and not recover), recover


def with_drift(
    state: _State, drift: DriftState, report: Report | Reports, sums: Sums, broadcast: Broadcast, *, recover: bool
) -> _State:
    """Keeps c, and decides whether the next round is corrected."""
    if isinstance(report, Report):
        drift = drift.join(report)
    data = drift.data if isinstance(report, Report) else sums.all_data or sums.totals.data
    share = 0.0 if recover else sums.totals.used / data
    fresh = Divergence(sums.totals.plain / sums.totals.data, sums.totals.corrected / sums.totals.data)
    after = drift.after(broadcast, state.w, share, fresh, recover=recover)
    if after.coming.correct != drift.coming.correct:
        state = with_coming_delta(state, after)
    return replace(state, drift=after)


def with_coming_delta(state: _State, drift: DriftState) -> _State:
    """The coming round is corrected where the last was not, or the other way: δ̂ is of how it was, so far."""
    if state.estimates is None or drift.coming_delta is None:
        return state
    return replace(state, estimates=replace(state.estimates, delta=drift.coming_delta))


def final_round(state: _State, *, best: bool) -> _State:
    """Asks for the loss of the last w(t)."""
    return replace(state, phase=Phase.FINAL, round=state.round + 1, tau=0, became_best=best, stop=True)
