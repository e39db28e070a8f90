"""Limits of a budget, costs of a round, and the ledger of what was spent.

A budget limits any number M of resources (resources/). Every rule here handles all M at
once.

The ledger is a value. Charging a round returns a new ledger, with the newest cost
estimates ĉ_m and b̂_m, the spent amounts s_m of Algorithm 2, and the statistics of all
costs so far. Nothing is changed in place.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float64
from fedbudget.errors import UserError
from fedbudget.resources import RESOURCES
from fedbudget.resources.resource import Resource

PRIOR_ROUNDS = 8
"""Weight, in rounds, of the spread assumed before the first round."""

_ROUNDING = 1e-12  # relative rounding error allowed in a sum of costs
_COST_CAP = 10.0  # a round counts as at most this multiple of its expected cost
_LIMIT = re.compile(r"(?P<name>[A-Za-z]+)\s*=\s*(?P<amount>.*)")
_AMOUNT = re.compile(r"(?P<number>[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(?P<unit>[A-Za-z]*)")


@dataclass(frozen=True)
class Budget:
    """A limit for each of M resources.

    Args:
      limits: limits by resource, in the units of the resources.
      delta: δ of (ε, δ)-differential privacy, if privacy is limited.
    """

    limits: Mapping[str, float]
    delta: float | None = None

    def __post_init__(self) -> None:
        if not self.limits:
            raise UserError("a run needs a budget, for example time=15s")
        for name, limit in self.limits.items():
            _resource(name)
            if not (math.isfinite(limit) and limit > 0):
                raise UserError(
                    f"budget {name}={limit:g}: the limit must be a positive number"
                )

    @classmethod
    def parse(cls, texts: Iterable[str]) -> "Budget":
        """Parse limits such as `time=2min`, `energy=500J`, `bytes=20MB` and `privacy=4`.

        >>> dict(Budget.parse(["time=2min", "bytes=20MB"]).limits)
        {'time': 120.0, 'bytes': 20000000.0}
        """
        given = _parse_limits(texts)
        for name, (_, added) in given.items():
            if added:
                raise UserError(
                    f"budget {name}: + extends the limit of a resumed run; set `resume` too"
                )
        return cls({name: amount for name, (amount, _) in given.items()})

    def extended(self, texts: Iterable[str]) -> "Budget":
        """Return the budget of a resumed run.

        `time=+10min` adds to the limit, `time=20min` replaces it.

        >>> dict(Budget({"time": 15.0, "bytes": 1e6}).extended(["time=+1min"]).limits)
        {'time': 75.0, 'bytes': 1000000.0}
        """
        limits = dict(self.limits)
        for name, (amount, added) in _parse_limits(texts).items():
            if name not in limits:
                raise UserError(
                    f"budget {name}: a resumed run keeps its resources, {', '.join(limits)}"
                )
            limits[name] = amount + (limits[name] if added else 0.0)
        return Budget(limits, self.delta)

    def part(self, share: float) -> "Budget":
        """Return a share of every limit.

        >>> dict(Budget({"time": 20.0}).part(0.5).limits)
        {'time': 10.0}
        """
        limits = {name: share * limit for name, limit in self.limits.items()}
        return Budget(limits, self.delta)

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts from which `parse` restores the limits, to the bit."""
        return tuple(
            f"{r.name}={self.limits[r.name]:.17g}{r.unit if r.unit in r.units else ''}"
            for r in self.resources
        )

    @property
    def resources(self) -> tuple[Resource, ...]:
        return tuple(RESOURCES[name] for name in self.limits)

    @cached_property
    def array(self) -> Float64:
        """R, [M], in the units of the ledger; read-only."""
        limits = np.array(
            [each.to_ledger(self.limits[each.name], self.delta) for each in self.resources]
        )
        limits.setflags(write=False)
        return limits

    def amounts(self, **by_name: float) -> Float64:
        """Return amounts by resource name as an array, [M]; others are 0, unknown ones
        ignored."""
        return np.array([by_name.get(name, 0.0) for name in self.limits])

    def label(self, values: Float64) -> dict[str, float]:
        """Return values [M] by resource name."""
        return dict(zip(self.limits, values.tolist(), strict=True))

    @cached_property
    def by_noise(self) -> str | None:
        """Name of the privacy resource, if it is limited: noise pays for what is
        published."""
        return next((each.name for each in self.resources if each.by_noise), None)

    @cached_property
    def _is_privacy(self) -> NDArray[np.bool_]:
        return np.array([each.by_noise for each in self.resources])

    def privacy_part(self, values: Float64) -> float:
        """Return the privacy entry of values [M]; 0 if privacy is not limited."""
        return float(values[self._is_privacy].sum())

    def without_privacy(self, values: Float64) -> Float64:
        """Return values [M] with a privacy entry of 0."""
        return np.asarray(values * ~self._is_privacy)

    def privacy_amount(self, amount: float) -> Float64:
        """Return an array [M] with this amount of privacy and 0 of everything else."""
        return np.asarray(amount * self._is_privacy, np.float64)

    def totals(self, values: Float64) -> dict[str, float]:
        """Return ledger sums [M] by resource name, in the units shown to users."""
        return {
            each.name: each.from_ledger(value, self.delta)
            for each, value in zip(self.resources, values.tolist(), strict=True)
        }

    def __str__(self) -> str:
        return ", ".join(
            f"{r.name}={r.format(self.limits[r.name])}" for r in self.resources
        )


@dataclass(frozen=True)
class Costs:
    """Cost of one round: c_m per local update and b_m for the rest of the round, each
    [M]."""

    step: Float64
    aggregation: Float64

    def __post_init__(self) -> None:
        every = (*self.step.tolist(), *self.aggregation.tolist())
        if not all(0 <= cost < math.inf for cost in every):
            raise ValueError(f"costs must be finite and not negative: {self}")


@dataclass(frozen=True)
class CostStatistics:
    """Mean cost of a round so far, and the error of that mean as a forecast.

    The weight of a new round falls with the number of rounds, to a twentieth from round 38
    on. A round counts as at most ten times its expected cost. A single outlier, such as
    the first round on a cold machine, therefore does not become the new mean; a lasting
    change does after a few rounds.

    Args:
      mean: c_m and b_m.
      variance: mean squared error of `mean`, for b_m and for c_m averaged over a round.
      updates: mean τ.
      peak: largest excess of a round over its expected cost, [M]. It decays by a twentieth
        per round. The first round does not count, because its expected cost is a guess.
      rounds: number of rounds.
    """

    mean: Costs
    variance: Costs
    updates: float
    peak: Float64
    rounds: int = 0

    @classmethod
    def before(cls, expected: Costs, spread: Float64) -> "CostStatistics":
        """Return the statistics before the first round.

        Args:
          expected: expected costs.
          spread: relative error of the expected costs, [M].
        """
        step = (spread * expected.step) ** 2
        aggregation = (spread * expected.aggregation) ** 2
        return cls(expected, Costs(step, aggregation), 1.0, np.zeros_like(spread))

    def after(self, updates: int, costs: Costs) -> "CostStatistics":
        """Return the statistics with one more round."""
        rounds = self.rounds + 1
        gain = max(2 / (rounds + 2), 0.05)
        slow_gain = max(1 / (rounds + PRIOR_ROUNDS), 0.05)
        step = _capped_error(costs.step, self.mean.step)
        aggregation = _capped_error(costs.aggregation, self.mean.aggregation)

        variance = self.variance
        mean = Costs(
            self.mean.step + gain * step, self.mean.aggregation + gain * aggregation
        )
        variance = Costs(
            variance.step + slow_gain * (step**2 - variance.step),
            variance.aggregation + slow_gain * (aggregation**2 - variance.aggregation),
        )
        if not self.rounds:
            return CostStatistics(mean, variance, float(updates), self.peak, rounds)

        mean_updates = self.updates + gain * (updates - self.updates)
        peak = np.maximum(0.95 * self.peak, updates * step + aggregation)
        return CostStatistics(mean, variance, mean_updates, peak, rounds)

    def deviation(self, taus: tuple[int, ...]) -> Float64:
        """Return the standard deviation of the total cost of rounds with these τ, [M].

        The updates of a round of usual length or longer count as fully correlated, those
        of a shorter round as partly independent.
        """
        of_steps = sum(tau * tau * max(1.0, self.updates / tau) for tau in taus)
        return np.sqrt(
            of_steps * self.variance.step + len(taus) * self.variance.aggregation
        )


def _capped_error(cost: Float64, expected: Float64) -> Float64:
    """Cost minus expected cost; the cost is capped if a cost was expected at all."""
    capped = np.where(expected > 0, np.minimum(cost, _COST_CAP * expected), cost)
    return capped - expected


@dataclass(frozen=True)
class Ledger:
    """Spent amounts and cost estimates; spending.py decides what still fits.

    Args:
      budget: the limits.
      costs: ĉ_m and b̂_m of the last round; the expected costs before the first one.
      previous: the same of the round before.
      statistics: cost statistics over all rounds.
      spent: s_m, [M].
    """

    budget: Budget
    costs: Costs
    previous: Costs
    statistics: CostStatistics
    spent: Float64

    @classmethod
    def open(cls, budget: Budget, expected: Costs) -> "Ledger":
        """Return a ledger with nothing spent."""
        spread = np.array([resource.spread for resource in budget.resources])
        statistics = CostStatistics.before(expected, spread)
        return cls(budget, expected, expected, statistics, np.zeros(len(budget.limits)))

    def charge(self, updates: int, costs: Costs, *, usual: bool = True) -> "Ledger":
        """s_m ← s_m + c_m τ + b_m, and new estimates ĉ_m and b̂_m.

        Args:
          updates: τ.
          costs: c_m and b_m of the round.
          usual: whether the round is representative; if not, the statistics ignore it.
        """
        if not costs.step.shape == costs.aggregation.shape == self.spent.shape:
            raise ValueError(f"expected costs of {len(self.spent)} resources, not {costs}")
        spent = self.spent + costs.step * updates + costs.aggregation
        statistics = self.statistics.after(updates, costs) if usual else self.statistics
        return Ledger(self.budget, costs, self.costs, statistics, spent)

    def charge_extra(self, amount: Float64) -> "Ledger":
        """Charge an amount [M] that is not part of a round; the cost estimates stay."""
        return replace(self, spent=self.spent + amount)

    def fits(self, amount: Float64) -> bool:
        """Whether another amount [M] fits into the budget."""
        return bool((self.spent + amount <= self.budget.array * (1 + _ROUNDING)).all())

    def cost_in_updates(self, updates: int) -> float:
        """Return the mean cost of a round relative to one local update.

        For the resource of which the round takes the largest share of the budget.
        """
        mean = self.statistics.mean
        whole = updates * mean.step + mean.aggregation
        scarcest = int((whole / self.budget.array).argmax())
        step = float(mean.step[scarcest])
        return float(whole[scarcest]) / step if step > 0 else math.inf

    def nearest_limit(self, amount: Float64) -> str:
        """Return the resource nearest to its limit after another amount [M]."""
        nearest = int(np.argmax((self.spent + amount) / self.budget.array))
        return list(self.budget.limits)[nearest]

    @property
    def share(self) -> float:
        """Spent share of the budget: the largest over resources, at most 1."""
        return float(min(1.0, (self.spent / self.budget.array).max()))

    @property
    def overshoot(self) -> Float64:
        """Amount spent beyond each limit, [M]."""
        return np.maximum(self.spent - self.budget.array, 0.0)

    def require_possible(self) -> None:
        """Raise ValueError for values that no run produces; a file may be damaged."""
        spent = self.spent
        statistics = self.statistics
        if spent.ndim != 1 or not spent.size:
            raise ValueError(f"spent is {spent.tolist()}, not one number per resource")
        if not (np.isfinite(spent) & (spent >= 0)).all():
            raise ValueError(f"spent is {spent.tolist()}")
        arrays = [statistics.peak]
        for costs in (self.costs, self.previous, statistics.mean, statistics.variance):
            arrays += [costs.step, costs.aggregation]
        if any(array.shape != spent.shape for array in arrays):
            raise ValueError("costs and spent have different numbers of resources")
        finite = np.isfinite(statistics.peak).all()
        if not (finite and 1 <= statistics.updates < math.inf and statistics.rounds >= 0):
            raise ValueError(f"the cost statistics are {statistics}")


def _parse_limits(texts: Iterable[str]) -> dict[str, tuple[float, bool]]:
    """Return the amount of each limit, and whether it extends an existing one."""
    limits: dict[str, tuple[float, bool]] = {}
    for text in texts:
        name, amount, added = _parse_limit(text)
        if name in limits:
            raise UserError(f"budget {name} is given twice")
        limits[name] = amount, added
    return limits


def _parse_limit(text: str) -> tuple[str, float, bool]:
    limit = _LIMIT.fullmatch(text.strip())
    if limit is None:
        raise UserError(
            f"budget {text!r} is not understood; "
            "write NAME=AMOUNT, for example time=15s or bytes=20MB"
        )
    resource = _resource(limit["name"])
    amount = _AMOUNT.fullmatch(limit["amount"])
    try:
        number = float(amount["number"] if amount else "")
    except ValueError:
        raise UserError(
            f"budget {text!r}: {limit['amount']!r} is not a number with a unit"
        ) from None
    unit = amount["unit"] if amount else ""
    if unit and unit not in resource.units:
        known = ", ".join(resource.units) or "no unit"
        raise UserError(
            f"budget {text!r}: unknown unit {unit!r} for {resource.name}; use {known}"
        )
    if not (math.isfinite(number) and number > 0):
        raise UserError(f"budget {text!r}: the limit must be a positive number")
    scale = resource.units.get(unit, 1.0)
    return resource.name, number * scale, limit["amount"].startswith("+")


def _resource(name: str) -> Resource:
    if name not in RESOURCES:
        raise UserError(
            f"unknown resource {name!r} in the budget; use one of {', '.join(RESOURCES)}"
        )
    return RESOURCES[name]
