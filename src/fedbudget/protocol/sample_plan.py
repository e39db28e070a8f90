"""How a run is planned that protects single samples: how many updates, with which noise, how long, and how far each.

Of T updates each costs ρ/T, so that with n samples at N nodes the noise in the mean gradient has, in d parameters, the
length σ C √(dN)/n, σ² = T/2ρ. For a convex loss, gradient descent with steps η over a way of the length D ends above
the minimum by

    D²/2ηT + ηT s,        s = C² dN/2ρn²,

as far as noise says: only the product ηT matters, and ηT = D/√(2s) = (D/C) q is best, where

    q = n √(ρ/dN)

says how much of C all samples together are against the noise of a whole run. C is half of C₀, which is how long
gradients are at w(0) (their geometric mean, from the first round). Where scores are linear in features of the length
C₀ they change by C₀D, however features are scaled, and a step η = h/CC₀ with h = 1 is about as long as the loss allows.
So hT = C₀D q, and trials (docs/theory.md) say that C₀D is about 30:

    T = 60 q updates with h = ½, or as many as fit: down to 30 q with larger h, and fewer with h = 1.

More updates with smaller steps are as good for noise, and better otherwise.

Nodes should agree often, and an aggregation costs no privacy: τ is the smallest with which T updates fit in time and
the rest, up to fifty. It is made anew before every round, from what is left: ρ of a round is its share of what is left.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedbudget.arrays import Float64, Int64
from fedbudget.budget import Ledger
from fedbudget.control import Decision, Reason
from fedbudget.protocol.method import PrivateRule
from fedbudget.protocol.privacy import MEASURED
from fedbudget.protocol.private_plan import FEWEST_ROUNDS, MOST_UPDATES, RoundPlan, rho_left, rho_total
from fedbudget.spending import SpendingRule

CLIP = 0.5
"""C, as a share of how long gradients are at w(0)."""
LONGEST_STEP = 1.0
"""h, at most."""
WAY = 30.0
"""hT, in multiples of q."""
UPDATES = 60.0
"""T, in multiples of q, where they fit."""
FEWEST_UPDATES = 10


@dataclass(frozen=True)
class SampleProgress:
    """Where a run is.

    Args:
      updates: that were made.
      rounds: that were made, the first one too.
      most_rounds: that may be made at all, where that is given.
      quality: q.
    """

    updates: int
    rounds: int
    most_rounds: int | None
    quality: float

    @property
    def wanted(self) -> float:
        """Updates that are still to be made."""
        return max(1.0, max(UPDATES * self.quality, FEWEST_UPDATES) - self.updates)

    @property
    def rounds_left(self) -> float:
        return math.inf if self.most_rounds is None else self.most_rounds - self.rounds


@dataclass(frozen=True)
class SampleRoundPlan(RoundPlan):
    """The coming round.

    Args:
      step: h.
    """

    step: float = LONGEST_STEP


def quality(rule: PrivateRule, total: float, parameters: int, samples: int) -> float:
    """q.

    Args:
      total: ρ of the run.
      samples: of all nodes.
    """
    return samples * math.sqrt((1 - MEASURED) * total / (parameters * rule.nodes))


def plan_lengths(ledger: Ledger) -> SampleRoundPlan:
    """The first round, which only asks for lengths."""
    return SampleRoundPlan(Decision(1, Reason.LENGTHS), MEASURED * rho_total(ledger.budget))


def plan_updates(
    rule: PrivateRule, spending: SpendingRule, ledger: Ledger, progress: SampleProgress
) -> SampleRoundPlan | None:
    """The next round, as if all after it were like it; None when there is no ρ left."""
    left = rho_left(ledger)
    if left <= 0:
        return None
    taus = np.arange(1, MOST_UPDATES + 1) if rule.tau is None else np.array([rule.tau])
    fits, scarce = _rounds_that_fit(spending, ledger, taus)
    rounds = np.minimum(fits, progress.rounds_left)
    at = _chosen(taus, rounds, progress)
    tau = int(taus[at])
    needed = math.ceil(progress.wanted / tau) if progress.most_rounds is None else progress.rounds_left
    planned = max(1.0, min(float(rounds[at]), float(needed)))
    made = progress.updates + planned * tau
    return SampleRoundPlan(
        Decision(tau, Reason.PRIVACY if rule.tau is None else Reason.FIXED),
        left / planned,
        scarce if planned < min(2, needed) and fits[at] <= progress.rounds_left else None,
        min(LONGEST_STEP, WAY * progress.quality / made),
    )


def _chosen(taus: Int64, rounds: Float64, progress: SampleProgress) -> int:
    """The place of the smallest τ with which all updates fit; or else of the one with which most do, while there are
    enough rounds."""
    updates = taus * rounds
    if (enough := updates >= progress.wanted).any():
        return int(np.argmax(enough))
    often = rounds >= min(FEWEST_ROUNDS - progress.rounds, progress.rounds_left)
    return int(np.argmax(np.where(often, updates, 0)))


def _rounds_that_fit(spending: SpendingRule, ledger: Ledger, taus: Int64) -> tuple[Float64, str]:
    """How many rounds of each τ are left of everything but privacy, [taus], and of what there is least."""
    costs, budget = spending.costs(ledger), ledger.budget
    each = np.outer(taus, budget.but_noise(costs.step)) + budget.but_noise(costs.aggregation)
    with np.errstate(divide="ignore", invalid="ignore"):
        fits = np.where(each > 0, (budget.array - ledger.spent) / each, np.inf)
    return np.maximum(1.0, np.floor(fits.min(axis=1))), list(budget.limits)[int(fits[-1].argmin())]
