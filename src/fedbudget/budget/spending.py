"""How a budget is spent: with which costs τ is chosen, which round still fits, and whether the last w can be judged.

A spending rule is a value, and what it says follows from the ledger alone. There are three.

`CarefulSpending` keeps the budget. Rounds cost what they like, and a budget that is met on average is overspent every
second time. So room is kept for what may happen:

- A round is begun only if the run will end within its budget with 99 % certainty: if the round and the final loss fit
  with their mean cost and twice their deviation, more while few rounds have shown what that is (Student's t), and
  no less than the most that a single round went over of late: slow moments of machines and networks are not Gaussian.
- τ is shortened to what fits. When nothing would fit after a round, it is the last, and what is left over would be
  lost: then τ is as long as fits, up to τ_max, unless the user has fixed it. Before that, when ten rounds are left or
  fewer, each is longer by its share of what would be left over, up to half as long again: several rounds that are a
  little longer are worth more than one that is much longer, or one of a few updates.
- The final loss has had its room from the start. If the last round took so much of it that the final loss would more
  likely than one time in ten end over the budget, or one time in 50 over it by more than a hundredth, it is left out,
  and the run ends with w^f, whose loss is known. In a run of one round no w but w(0) was ever judged: then it is made
  if it will more likely fit than not, and otherwise the run ends with w(T).

`PrivateSpending` is the same for runs that are private, in which no loss is known and no w judged.

`PaperSpending` is Algorithm 2 to the letter: the last round's costs are what the next will cost, τ is chosen by those
of the round before, and the final loss is evaluated whatever that takes. It goes over the budget as often as not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from fedbudget.arrays import Float64
from fedbudget.budget.budget import PRIOR_ROUNDS, Budget, Costs, Ledger
from fedbudget.budget.control import Decision, Reason
from fedbudget.errors import UserError

_CERTAIN = 2.0
"""Deviations of two exchanges x₁ + x₂ to leave room for, where nothing more. It is over in 1 % of such cases,
∫ φ(x)Q(√2·2 - x)dx over those x₁ = x after which the second is still made; most rounds begin with more room."""

_LAST_ROUNDS = 10
"""How many are planned together, so that nothing is left over after them."""

_LIKELY = 1.25
"""Deviations of one exchange, which is over in one of ten cases where only so much is left."""

_TOLERABLE = 0.01
_SURELY = 2.05
"""By this share of its budget a run may be over, and by more in one of 50 such cases: where exchanges are long beside
the budget, one of them may be far off."""


@dataclass(frozen=True)
class Plan:
    """The coming round.

    Args:
      decision: its τ and why; None when no round fits.
      stop: whether only the final loss follows it.
      stopped_by: the resource that ends the run, where one does.
    """

    decision: Decision | None
    stop: bool = False
    stopped_by: str | None = None


class SpendingRule(Protocol):
    """Decides how a budget is spent."""

    def costs(self, ledger: Ledger) -> Costs:
        """What the controller chooses τ with."""

    def room(self, ledger: Ledger, tau: int) -> Float64:
        """What must be left for a round of τ updates and the final loss after it, [M]; for that alone with τ = 0."""

    def plan(self, ledger: Ledger, decision: Decision) -> Plan:
        """The coming round, with the τ that was chosen or what fits of it."""

    @property
    def overtime(self) -> float:
        """The share of a time budget by which a round that has begun may go over it, until it is closed as it is."""

    @property
    def closing(self) -> float:
        """Seconds that this takes."""

    @property
    def evaluation(self) -> Mapping[str, float]:
        """What nodes' test samples cost when they are asked, besides what a round costs, by resource."""

    def final_room(self, ledger: Ledger, *, judged: bool = True) -> Float64 | None:
        """What must be left for the final loss to be evaluated, [M]; None where it is, whatever was spent.

        Args:
          judged: whether the loss of any w but w(0) is known.
        """


@dataclass(frozen=True)
class CarefulSpending:
    """Keeps the budget, see above.

    Args:
      tau_max: the most updates of a last round that takes the rest.
      closing: seconds to keep for closing a round, where rounds are closed in time.
      evaluation: what nodes' test samples cost, by resource; for those of the final round there is room.
    """

    overtime: ClassVar[float] = 0.0
    tau_max: int = 100
    closing: float = 0.0
    evaluation: Mapping[str, float] = field(default_factory=dict)

    def costs(self, ledger: Ledger) -> Costs:
        return ledger.statistics.mean

    def room(self, ledger: Ledger, tau: int) -> Float64:
        statistics = ledger.statistics
        taus = (tau, 1) if tau else (1,)
        over = _certain(statistics.rounds) * statistics.deviation(taus)
        kept = len(taus) * self._closing(ledger) + self._evaluation(ledger)
        return _mean(statistics.mean, taus) + np.maximum(over, statistics.peak) + kept

    def plan(self, ledger: Ledger, decision: Decision) -> Plan:
        if not self._fits(ledger, 1):
            return Plan(None, stopped_by=ledger.nearest_limit(self.room(ledger, 1)))
        tau = decision.tau
        if not self._fits(ledger, tau):
            tau = self._most(ledger, tau)
            return Plan(
                Decision(tau, Reason.BUDGET),
                stopped_by=ledger.nearest_limit(self.room(ledger, tau)),
            )
        after = ledger.charge_besides(_mean(ledger.statistics.mean, (tau,)))
        if decision.reason != Reason.FIXED and not self._fits(after, 1):
            longer = self._most(ledger, max(tau, self.tau_max) + 1)
            if longer > tau:
                return Plan(Decision(longer, Reason.REST))
        return Plan(
            decision if decision.reason == Reason.FIXED else self._spread(ledger, decision)
        )

    def _spread(self, ledger: Ledger, decision: Decision) -> Decision:
        """With its share of what would be left over after the last rounds."""
        tau = decision.tau
        mean = ledger.statistics.mean
        left = ledger.budget.array - ledger.spent - self.room(ledger, 0)
        rounds = int((left / _mean(mean, (tau,))).min())
        if not 1 <= rounds <= _LAST_ROUNDS:
            return decision
        with np.errstate(divide="ignore"):
            fits = (left / rounds - mean.aggregation) / mean.step
        longer = int(min(fits.min(), 1.5 * tau, max(tau, self.tau_max)))
        return Decision(longer, Reason.SPREAD) if longer > tau else decision

    def final_room(self, ledger: Ledger, *, judged: bool = True) -> Float64:
        statistics = ledger.statistics
        deviation = statistics.deviation((1,))
        careful = np.maximum(
            _LIKELY * deviation, _SURELY * deviation - _TOLERABLE * ledger.budget.array
        )
        over = careful if judged else 0.0
        return (
            _mean(statistics.mean, (1,))
            + over
            + self._closing(ledger)
            + self._evaluation(ledger)
        )

    def _closing(self, ledger: Ledger) -> Float64:
        return ledger.budget.amounts(time=self.closing)

    def _evaluation(self, ledger: Ledger) -> Float64:
        """Of the final round: of w, and of w^f."""
        return 2 * ledger.budget.amounts(**self.evaluation)

    def _fits(self, ledger: Ledger, tau: int) -> bool:
        return ledger.fits(self.room(ledger, tau))

    def _most(self, ledger: Ledger, below: int) -> int:
        """The largest τ below this that fits; τ = 1 does."""
        least = 1
        while below - least > 1:
            middle = (least + below) // 2
            least, below = (
                (middle, below) if self._fits(ledger, middle) else (least, middle)
            )
        return least


@dataclass(frozen=True)
class PrivateSpending(CarefulSpending):
    """Keeps the budget where no loss is ever asked for: there is no final round to keep room for.

    Of privacy there is as much as the plan gives a round, and so always enough.
    """

    def room(self, ledger: Ledger, tau: int) -> Float64:
        statistics = ledger.statistics
        taus = (tau,) if tau else ()
        over = _certain(statistics.rounds) * statistics.deviation(taus)
        room = _mean(statistics.mean, taus) + (
            np.maximum(over, statistics.peak) if taus else 0.0
        )
        return ledger.budget.but_noise(room + len(taus) * self._closing(ledger))

    def plan(self, ledger: Ledger, decision: Decision) -> Plan:
        if self._fits(ledger, decision.tau):
            return Plan(decision)
        if not self._fits(ledger, 1):
            return Plan(None, stopped_by=ledger.nearest_limit(self.room(ledger, 1)))
        return Plan(Decision(self._most(ledger, decision.tau), Reason.BUDGET))

    def final_room(self, ledger: Ledger, *, judged: bool = True) -> Float64:
        return np.zeros_like(ledger.spent)


@dataclass(frozen=True)
class PaperSpending:
    """Algorithm 2 to the letter, see above."""

    overtime: ClassVar[float] = 0.03
    closing: ClassVar[float] = 0.0
    evaluation: ClassVar[Mapping[str, float]] = {}

    def costs(self, ledger: Ledger) -> Costs:
        return ledger.previous

    def room(self, ledger: Ledger, tau: int) -> Float64:
        return _mean(ledger.costs, (tau, 1) if tau else (1,))

    def plan(self, ledger: Ledger, decision: Decision) -> Plan:
        room = self.room(ledger, decision.tau)
        if not (ledger.spent + room >= ledger.budget.array).any():
            return Plan(decision)
        if ledger.fits(room):
            return Plan(decision, stop=True, stopped_by=ledger.nearest_limit(room))
        fits, stopped_by = self._most(ledger)
        return Plan(
            Decision(fits, Reason.BUDGET) if fits >= 1 else None,
            stop=True,
            stopped_by=stopped_by,
        )

    def final_room(self, ledger: Ledger, *, judged: bool = True) -> None:
        return None

    def _most(self, ledger: Ledger) -> tuple[int, str]:
        """The most updates of one more round that leave enough for the final loss, and the resource that says so."""
        left = ledger.budget.array - ledger.spent - self.room(ledger, 1) + ledger.costs.step
        with np.errstate(divide="ignore", invalid="ignore"):
            fits = np.where(
                ledger.costs.step > 0,
                left / ledger.costs.step,
                np.where(left >= 0, np.inf, 0),
            )
        binding = int(np.argmin(fits))
        return int(fits[binding] * (1 + 1e-12)), list(ledger.budget.limits)[binding]


def open_ledger(budget: Budget, expected: Costs, rule: SpendingRule) -> Ledger:
    """A ledger with nothing spent; refuses a budget that does not cover one round and the final loss."""
    ledger = Ledger.open(budget, expected)
    for resource, limit, round_cost, needed in zip(
        budget.resources,
        budget.array,
        expected.step + expected.aggregation,
        rule.room(ledger, 1),
        strict=True,
    ):
        if limit < needed * (1 - 1e-12):
            final = (
                ""
                if budget.by_noise
                else " and as much again is needed for the final loss,"
            )
            raise UserError(
                f"budget {resource.name}={resource.format(limit)} is too small: one round costs about "
                f"{resource.format(round_cost)},{final} so at least "
                f"{resource.name}={resource.format(_rounded_up(needed))}"
                + (
                    " to be on the safe side"
                    if needed > 2 * round_cost * (1 + 1e-9)
                    else ""
                )
            )
    return ledger


def progress(ledger: Ledger, rule: SpendingRule) -> float:
    """How far the rounds have come, 0 to 1: the share that is gone of what can be spent on rounds."""
    for_rounds = ledger.budget.array - rule.room(ledger, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(for_rounds > 0, ledger.spent / for_rounds, 1.0)
    return float(min(1.0, shares.max()))


def _mean(costs: Costs, taus: tuple[int, ...]) -> Float64:
    """What rounds with these τ cost together, [M]."""
    return sum(taus) * costs.step + len(taus) * costs.aggregation


def _certain(rounds: int) -> float:
    """How many deviations that is where the deviation was estimated: a quantile of Student's t, nearly.

    >>> round(_certain(0), 1), round(_certain(20), 1), round(_certain(10_000), 2)
    (2.4, 2.1, 2.06)
    """
    freedom = min(rounds + PRIOR_ROUNDS, 40)
    z = _CERTAIN
    return (
        z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    )


def _rounded_up(amount: float) -> float:
    """To the four digits that are shown, so that what is asked for is enough."""
    last = 10.0 ** (np.floor(np.log10(amount)) - 3)
    return float(np.ceil(amount / last - 1e-9) * last)
