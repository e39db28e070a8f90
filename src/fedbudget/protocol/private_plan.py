"""How a private run is planned: τ, how many rounds, and how much noise in each, together.

Of K rounds each gets ρ/K, and so the noise in its mean update has, in d parameters, the length √(dK/2ρ) C/n, where an
update has C at most. How far w ends from where it should go is then, with the best C (docs/theory.md has the proof),

    in proportion to √(1/K + d/2ρn²).

The second part stays, however many rounds are made. With K* = 4ρ n²/d the first is half of it, and more rounds would
gain little, while time that goes into longer rounds makes better updates. So K* rounds are planned, where time and the
rest allow five updates in each; and twelve at least, for C must follow lengths that fall quickly at first. τ takes what
is left: as long as all rounds fit, up to fifty updates, for nodes that go on alone for longer come to what is best for
each of them. docs/privacy.md has what it gives.

It is made anew before every round, from what is left of each resource: the last round gets all of ρ that is left.
"""

from dataclasses import dataclass

import numpy as np

from fedbudget.budget import Budget, Ledger
from fedbudget.control import Decision, Reason
from fedbudget.protocol.messages import Private
from fedbudget.protocol.method import PrivateRule
from fedbudget.protocol.privacy import MEASURED
from fedbudget.spending import SpendingRule

FEWEST_ROUNDS = 12
FEWEST_UPDATES = 5
MOST_UPDATES = 50
_NOTHING = 1e-6
"""The share of ρ that is as good as none."""


@dataclass(frozen=True)
class RoundPlan:
    """The coming round.

    Args:
      decision: its τ.
      rho: its ρ.
      bound_by: the resource for want of which it is the last, where that is another than privacy.
    """

    decision: Decision
    rho: float
    bound_by: str | None = None


def plan_round(
    rule: PrivateRule, spending: SpendingRule, ledger: Ledger, parameters: int, *, first: bool, rounds: int | None
) -> RoundPlan | None:
    """The next round, as if all after it were like it; None when there is no ρ left.

    Args:
      first: it only asks for lengths.
      rounds: that are to be made, with this one, where that is given; otherwise by ρ.
    """
    left = rho_left(ledger)
    if left <= 0:
        return None
    total = rho_total(ledger.budget)
    measured = MEASURED * total if first else 0.0
    wanted = (left - measured) / rho_of_round(rule, total, parameters) if rounds is None else rounds - first
    fits, scarce = rounds_that_fit(rule, spending, ledger)
    planned = max(1.0, min(fits - first, float(round(wanted))))
    decision = _decision(rule, spending, ledger, planned + first, first)
    last = planned < min(2, round(wanted))  # though there is privacy for more
    return RoundPlan(decision, measured or left / planned, scarce if last else None)


def rho_of_round(rule: PrivateRule, total: float, parameters: int) -> float:
    """ρ with which noise is √2 as long as an update, where that leaves enough rounds."""
    return min(rule.excess * parameters / (4 * rule.nodes**2), (1 - MEASURED) * total / FEWEST_ROUNDS)


def rounds_that_fit(rule: PrivateRule, spending: SpendingRule, ledger: Ledger) -> tuple[float, str]:
    """How many rounds of a few updates are left of everything but privacy, and of what there is least."""
    updates = rule.tau or FEWEST_UPDATES
    costs = spending.costs(ledger)
    each = ledger.budget.but_noise(updates * costs.step + costs.aggregation)
    with np.errstate(divide="ignore", invalid="ignore"):
        fits = np.where(each > 0, (ledger.budget.array - ledger.spent) / each, np.inf)
    return max(1.0, float(np.floor(fits.min()))), list(ledger.budget.limits)[int(fits.argmin())]


def rho_left(ledger: Ledger) -> float:
    """What may still be made known; 0 where it is hardly anything."""
    left = ledger.budget.of_noise(ledger.budget.array - ledger.spent)
    return left if left > _NOTHING * rho_total(ledger.budget) else 0.0


def rho_total(budget: Budget) -> float:
    return budget.of_noise(budget.array)


def _decision(rule: PrivateRule, spending: SpendingRule, ledger: Ledger, rounds: float, first: bool) -> Decision:
    """τ with which so many rounds fit."""
    if rule.tau is not None:
        return Decision(rule.tau, Reason.FIXED)
    costs = spending.costs(ledger)
    steps = ledger.budget.but_noise(costs.step)
    with np.errstate(divide="ignore", invalid="ignore"):
        fits = np.where(steps > 0, ((ledger.budget.array - ledger.spent) / rounds - costs.aggregation) / steps, np.inf)
    tau = int(max(1.0, min(float(fits.min()), MOST_UPDATES)))
    return Decision(tau, Reason.LENGTHS if first else Reason.PRIVACY)


def private_of(plan: RoundPlan, clip: float) -> Private:
    """What nodes are told of a round.

    Args:
      clip: C; 0 where only lengths are asked for.
    """
    return Private(clip, plan.rho)
