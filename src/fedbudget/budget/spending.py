"""Spending rules: which round still fits into a budget, and what stays in reserve.

A spending rule is a value, and its answers follow from the ledger alone. There are three.

`CarefulSpending` keeps the budget. Costs vary, so a budget that suffices on average is
exceeded every second time. The rule therefore keeps a reserve:

- A round begins only if the run will end within its budget with 99 % certainty. The round
  and the final loss must fit with their mean cost plus two standard deviations. The factor
  is larger while few rounds were measured (Student's t). The margin is at least the
  largest recent excess of a single round, because delays of machines and networks are not
  Gaussian.
- τ is shortened to the number of updates that fits. If no further round would fit, this
  round is the last one. It then takes the rest of the budget, up to τ_max updates, unless
  the user fixed τ. If ten or fewer rounds remain, each grows by its share of the rest, up
  to 1.5 times: several slightly longer rounds are worth more than one much longer round.
- The final loss has a reserve from the start. The last round may consume part of it. The
  final loss is skipped if it would exceed the budget with a probability above 1/10, or
  exceed it by more than 1 % with a probability above 1/50. The run then ends with w^f,
  whose loss is known. In a run of one round only the loss of w(0) is known. There the
  final loss is evaluated if it more likely fits than not; otherwise the run ends with
  w(T).

`PrivateSpending` is the same for private runs, which never report a loss.

`PaperSpending` is Algorithm 2 to the letter: the next round is expected to cost as much as
the last, τ is chosen with the costs of the round before, and the final loss is always
evaluated. It exceeds the budget in about half of all runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np

from fedbudget.arrays import Float64
from fedbudget.budget.budget import PRIOR_ROUNDS, Budget, Costs, Ledger
from fedbudget.budget.control import Decision, Reason
from fedbudget.errors import UserError

_CERTAIN = 2.0
"""Reserve for two exchanges x₁ + x₂, in standard deviations of their sum. If nothing more
is left, 1 % of such cases exceed the budget: ∫ φ(x)Q(√2·2 - x)dx over those x₁ = x after
which the second exchange is still made. Most rounds begin with more reserve."""

_LAST_ROUNDS = 10
"""The last rounds, over which the rest of the budget is spread."""

_LIKELY = 1.25
"""Standard deviations of one exchange; it exceeds them in one of ten cases."""

_TOLERABLE = 0.01
_SURELY = 2.05
"""The final loss may exceed the budget by the share `_TOLERABLE`, and by more in one of 50
cases: a single exchange that is long compared with the budget may deviate far."""


@dataclass(frozen=True)
class Plan:
    """Plan of the coming round.

    Args:
      decision: its τ and the reason; None if no round fits.
      stop: whether only the final loss follows it.
      stopped_by: the resource that ends the run, if one does.
    """

    decision: Decision | None
    stop: bool = False
    stopped_by: str | None = None


@dataclass(frozen=True)
class CarefulSpending:
    """Keeps the budget, see the top of this file.

    `overtime` is the share of a time budget by which a running round may exceed it before
    it is closed.

    Args:
      tau_max: largest τ of a last round that takes the rest of the budget.
      closing: seconds in reserve for closing a round, if rounds have deadlines.
      evaluation: cost of an evaluation on the nodes' test samples, by resource. The
        reserve includes the evaluations of the final round.
    """

    overtime: ClassVar[float] = 0.0
    tau_max: int = 100
    closing: float = 0.0
    evaluation: Mapping[str, float] = field(default_factory=dict)

    def costs(self, ledger: Ledger) -> Costs:
        """Return the costs with which the controller chooses τ."""
        return ledger.statistics.mean

    def reserve(self, ledger: Ledger, tau: int) -> Float64:
        """Return the amount needed for a round of τ updates and the final loss, [M].

        With τ = 0 it is the amount for the final loss alone.
        """
        taus = (tau, 1) if tau else (1,)
        needed = _with_margin(ledger, taus)
        if self.closing or self.evaluation:
            needed += self._fixed(ledger, len(taus))
        return needed

    def plan(self, ledger: Ledger, decision: Decision) -> Plan:
        """Return the coming round, with the chosen τ or the τ that fits."""
        tau = decision.tau
        if not ledger.fits(self.reserve(ledger, tau)):
            shortest = self.reserve(ledger, 1)
            if not ledger.fits(shortest):
                return Plan(None, stopped_by=ledger.nearest_limit(shortest))
            tau = self._most(ledger, tau)
            nearest = ledger.nearest_limit(self.reserve(ledger, tau))
            return Plan(Decision(tau, Reason.BUDGET), stopped_by=nearest)
        if decision.reason == Reason.FIXED:
            return Plan(decision)

        after = ledger.charge_extra(_mean(ledger.statistics.mean, (tau,)))
        if not after.fits(self.reserve(after, 1)):
            longer = self._most(ledger, max(tau, self.tau_max) + 1)
            if longer > tau:
                return Plan(Decision(longer, Reason.REST))
        return Plan(self._spread(ledger, decision))

    def _spread(self, ledger: Ledger, decision: Decision) -> Decision:
        """Lengthen the round by its share of the rest, if few rounds remain."""
        tau = decision.tau
        mean = ledger.statistics.mean
        left = ledger.budget.array - ledger.spent - self.reserve(ledger, 0)
        rounds = int((left / _mean(mean, (tau,))).min())
        if not 1 <= rounds <= _LAST_ROUNDS:
            return decision
        with np.errstate(divide="ignore"):
            fits = (left / rounds - mean.aggregation) / mean.step
        longer = int(min(fits.min(), 1.5 * tau, max(tau, self.tau_max)))
        return Decision(longer, Reason.SPREAD) if longer > tau else decision

    def final_reserve(self, ledger: Ledger, *, judged: bool = True) -> Float64:
        """Return the amount needed to evaluate the final loss, [M]; None: always evaluate
        it.

        Args:
          ledger: the ledger before the final loss.
          judged: whether the loss of any w except w(0) is known.
        """
        statistics = ledger.statistics
        deviation = statistics.deviation((1,))
        mean = _mean(statistics.mean, (1,))
        if judged:
            surely = _SURELY * deviation - _TOLERABLE * ledger.budget.array
            mean = mean + np.maximum(_LIKELY * deviation, surely)
        return mean + self._fixed(ledger, 1)

    def _fixed(self, ledger: Ledger, rounds: int) -> Float64:
        """Cost of closing rounds, and of the final evaluations of w and of w^f."""
        amounts = ledger.budget.amounts
        closing = rounds * amounts(time=self.closing)
        return closing + 2 * amounts(**self.evaluation) if self.evaluation else closing

    def _most(self, ledger: Ledger, below: int) -> int:
        """Return the largest τ below this that fits, given that τ = 1 fits."""
        least = 1
        while below - least > 1:
            middle = (least + below) // 2
            if ledger.fits(self.reserve(ledger, middle)):
                least = middle
            else:
                below = middle
        return least


@dataclass(frozen=True)
class PrivateSpending(CarefulSpending):
    """Keeps the budget of a private run, which has no final round and needs no reserve for
    it.

    The plan of a private run divides the privacy among its rounds, so privacy always
    suffices.
    """

    def reserve(self, ledger: Ledger, tau: int) -> Float64:
        if not tau:
            return np.zeros_like(ledger.spent)
        closing = ledger.budget.amounts(time=self.closing)
        return ledger.budget.without_privacy(_with_margin(ledger, (tau,)) + closing)

    def plan(self, ledger: Ledger, decision: Decision) -> Plan:
        if ledger.fits(self.reserve(ledger, decision.tau)):
            return Plan(decision)
        if not ledger.fits(self.reserve(ledger, 1)):
            return Plan(None, stopped_by=ledger.nearest_limit(self.reserve(ledger, 1)))
        return Plan(Decision(self._most(ledger, decision.tau), Reason.BUDGET))

    def final_reserve(self, ledger: Ledger, *, judged: bool = True) -> Float64:
        return np.zeros_like(ledger.spent)


@dataclass(frozen=True)
class PaperSpending:
    """Algorithm 2 to the letter, see the top of this file."""

    overtime: ClassVar[float] = 0.03
    closing: ClassVar[float] = 0.0
    evaluation: ClassVar[Mapping[str, float]] = {}

    def costs(self, ledger: Ledger) -> Costs:
        return ledger.previous

    def reserve(self, ledger: Ledger, tau: int) -> Float64:
        return _mean(ledger.costs, (tau, 1) if tau else (1,))

    def plan(self, ledger: Ledger, decision: Decision) -> Plan:
        reserve = self.reserve(ledger, decision.tau)
        if not (ledger.spent + reserve >= ledger.budget.array).any():
            return Plan(decision)
        if ledger.fits(reserve):
            return Plan(decision, stop=True, stopped_by=ledger.nearest_limit(reserve))
        fits, stopped_by = self._most(ledger)
        shorter = Decision(fits, Reason.BUDGET) if fits >= 1 else None
        return Plan(shorter, stop=True, stopped_by=stopped_by)

    def final_reserve(self, ledger: Ledger, *, judged: bool = True) -> None:
        return None

    def _most(self, ledger: Ledger) -> tuple[int, str]:
        """Return the largest τ that leaves enough for the final loss, and its limiting
        resource."""
        step = ledger.costs.step
        left = ledger.budget.array - ledger.spent - self.reserve(ledger, 1) + step
        with np.errstate(divide="ignore", invalid="ignore"):
            fits = np.where(step > 0, left / step, np.where(left >= 0, np.inf, 0))
        binding = int(np.argmin(fits))
        return int(fits[binding] * (1 + 1e-12)), list(ledger.budget.limits)[binding]


SpendingRule = CarefulSpending | PaperSpending
"""Decides how a budget is spent."""


def open_ledger(budget: Budget, expected: Costs, rule: SpendingRule) -> Ledger:
    """Return a ledger with nothing spent.

    Raises:
      UserError: the budget does not cover one round and the final loss.
    """
    ledger = Ledger.open(budget, expected)
    costs = expected.step + expected.aggregation
    needs = rule.reserve(ledger, 1)
    for resource, limit, cost, needed in zip(
        budget.resources, budget.array, costs, needs, strict=True
    ):
        if limit < needed * (1 - 1e-12):
            final = "" if budget.by_noise else ", and the final loss costs as much again"
            margin = " (with a safety margin)" if needed > 2 * cost * (1 + 1e-9) else ""
            least = resource.format(_rounded_up(needed))
            raise UserError(
                f"budget {resource.name}={resource.format(limit)} is too small: one round "
                f"costs about {resource.format(cost)}{final}; "
                f"use at least {resource.name}={least}{margin}"
            )
    return ledger


def progress(ledger: Ledger, rule: SpendingRule) -> float:
    """Return the spent share of the budget for rounds, 0 to 1."""
    for_rounds = ledger.budget.array - rule.reserve(ledger, 0)
    shares = np.ones_like(for_rounds)
    np.divide(ledger.spent, for_rounds, out=shares, where=for_rounds > 0)
    return float(min(1.0, shares.max()))


class Plans:
    """Ledgers to plan with: a run may end before its budget is spent.

    The last results are kept, because a round needs them several times.

    Args:
      rule: the spending rule.
    """

    def __init__(self, rule: SpendingRule) -> None:
        self._rule = rule
        self._budget: tuple[Budget, float, Budget] | None = None
        self._ledger: tuple[Ledger, float, Ledger] | None = None
        self._progress: tuple[Ledger, float] | None = None

    def ledger(self, ledger: Ledger, ends: float) -> Ledger:
        """Return the ledger with the share `ends` of its budget."""
        if ends == 1:
            return ledger
        last = self._ledger
        if last is not None and last[0] is ledger and last[1] == ends:
            return last[2]
        whole = ledger.budget
        budget = self._budget
        if budget is None or budget[0] is not whole or budget[1] != ends:
            budget = whole, ends, whole.part(ends)
        planned = replace(ledger, budget=budget[2])
        self._budget = budget
        self._ledger = ledger, ends, planned
        return planned

    def progress(self, ledger: Ledger, ends: float) -> float:
        """Return the spent share of the budget for rounds; see `progress`."""
        planned = self.ledger(ledger, ends)
        if self._progress is None or self._progress[0] is not planned:
            self._progress = planned, progress(planned, self._rule)
        return self._progress[1]


def _mean(costs: Costs, taus: tuple[int, ...]) -> Float64:
    """Mean total cost of rounds with these τ, [M]."""
    return sum(taus) * costs.step + len(taus) * costs.aggregation


def _with_margin(ledger: Ledger, taus: tuple[int, ...]) -> Float64:
    """Cost of rounds with these τ that is exceeded in 1 % of all cases, [M]."""
    statistics = ledger.statistics
    over = _certain(statistics.rounds) * statistics.deviation(taus)
    return _mean(statistics.mean, taus) + np.maximum(over, statistics.peak)


@lru_cache(maxsize=64)
def _certain(rounds: int) -> float:
    """Number of standard deviations for 99 %, as an approximate quantile of Student's t.

    >>> round(_certain(0), 1), round(_certain(20), 1), round(_certain(10_000), 2)
    (2.4, 2.1, 2.06)
    """
    freedom = min(rounds + PRIOR_ROUNDS, 40)
    z = _CERTAIN
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + first + second


def _rounded_up(amount: float) -> float:
    """Round up to the four digits that messages show, so that the amount suffices."""
    last = 10.0 ** (np.floor(np.log10(amount)) - 3)
    return float(np.ceil(amount / last - 1e-9) * last)
