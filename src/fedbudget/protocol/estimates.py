"""ρ̂, β̂ and δ̂ of a round, from the nodes' reports.

ρ̂ and β̂ are the nodes' own, weighted by D_i. δ̂ is from their gradients, as in the paper, or from the w_i(t) that are
here anyway: δ̂_i = ‖w_i(t) - w(t)‖ / ητ, the divergence of what the nodes stepped along, averaged over the interval.
Where no τ is chosen by it, it is what nodes say of the interval before (drift.py), and reports need not be kept for it.
What is not a finite, sane number never reaches the controller: that estimate stays what it was.
"""

import math
from dataclasses import replace

from fedbudget.arrays import Float32
from fedbudget.control import Estimates
from fedbudget.protocol.messages import Broadcast
from fedbudget.protocol.sums import ABSURD, Reports, Sums


def next_estimates(
    previous: Estimates | None, reports: Reports, broadcast: Broadcast, mean: Float32, *, from_nodes: bool = False
) -> tuple[Estimates | None, tuple[str, ...]]:
    """The estimates after a round, and the names of those that had to stay.

    Args:
      previous: those before it; None until a round has given all three.
      mean: what the w_i(t) were combined to, without statistics, [parameters].
      from_nodes: whether δ̂ is what nodes say of the interval before.
    """
    totals, fresh = reports.sums.totals, {}
    delta = _delta_from_nodes(reports.sums, broadcast) if from_nodes else _delta(reports, broadcast, mean)
    if reports.sums.slopes:
        fresh["rho"] = _ratio(totals.rho, totals.rho_of)
        fresh["beta"] = _ratio(totals.beta, totals.beta_of)
    elif delta == 0:  # in the first round, of nodes that do not differ: then ρ and β have no part in G
        fresh["rho"] = fresh["beta"] = 0.0
    if delta is not None:
        fresh["delta"] = delta
    good = {name: value for name, value in fresh.items() if 0 <= value < ABSURD}
    kept = tuple(name for name in fresh if name not in good)
    if previous is not None:
        return replace(previous, **good), kept
    return Estimates(**good) if len(good) == 3 else None, kept


def _delta(reports: Reports, broadcast: Broadcast, mean: Float32) -> float | None:
    sums = reports.sums
    if not broadcast.request.gradient:
        distances = float(sums.total(reports.distance_sums("w", mean))[0])
        return _ratio(distances, sums.totals.used) / broadcast.span
    if sums.gradients is None:
        return None
    if not sums.totals.used:
        return math.nan
    distances = float(sums.total(reports.distance_sums("gradients", sums.mean(sums.gradients)))[0])
    return _ratio(distances, sums.totals.used)


def _delta_from_nodes(sums: Sums, broadcast: Broadcast) -> float | None:
    if broadcast.drift is None or broadcast.round == 1:
        return None
    return _ratio(sums.totals.corrected if broadcast.drift.correct else sums.totals.plain, sums.totals.data)


def _ratio(amount: float, of: float) -> float:
    return amount / of if of else math.nan
