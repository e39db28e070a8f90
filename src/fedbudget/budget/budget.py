"""What may be spent, what was spent, and what rounds cost.

A budget is any number M of resources (resources/) with a limit each, and every rule here is written for M at once.

The ledger is a value. Charging a round gives a new ledger with the newest cost estimates ĉ_m, b̂_m and the spent s_m of
Algorithm 2, and with the mean and spread of all costs so far; nothing is changed in place.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fedbudget.arrays import Float64
from fedbudget.errors import UserError
from fedbudget.resources import RESOURCES
from fedbudget.resources.resource import Resource

_ROUNDING = 1e-12
"""The share of a limit that sums of costs may be off by; what fits but for that, fits."""


@dataclass(frozen=True)
class Budget:
    """A limit for each of M resources, in their units.

    Args:
      delta: δ of (ε, δ)-differential privacy, where there is a limit for that.
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
        """Reads `time=15s`, `time=2min`, `energy=500J`, `bytes=20MB`, `cpu=30s`, `money=0.40`, `privacy=4`.

        >>> dict(Budget.parse(["time=2min", "bytes=20MB"]).limits)
        {'time': 120.0, 'bytes': 20000000.0}
        """
        given = _parse_limits(texts)
        for name, limit in given.items():
            if limit.added:
                raise UserError(
                    f"budget {name}: + adds to the limit of a run that goes on; say which with `resume`"
                )
        return cls({name: limit.amount for name, limit in given.items()})

    def extended(self, texts: Iterable[str]) -> "Budget":
        """What a run that goes on may spend: `time=+10min` adds to its limit, `time=20min` takes the limit's place.

        >>> dict(Budget({"time": 15.0, "bytes": 1e6}).extended(["time=+1min"]).limits)
        {'time': 75.0, 'bytes': 1000000.0}
        """
        limits = dict(self.limits)
        for name, limit in _parse_limits(texts).items():
            if name not in limits:
                raise UserError(
                    f"budget {name}: a run that goes on keeps its resources, {', '.join(limits)}"
                )
            limits[name] = limits[name] + limit.amount if limit.added else limit.amount
        return Budget(limits, self.delta)

    @property
    def texts(self) -> tuple[str, ...]:
        """The limits as `parse` reads them, to the bit."""
        units = {
            each.name: each.unit if each.unit in each.units else ""
            for each in self.resources
        }
        return tuple(
            f"{name}={self.limits[name]:.17g}{unit}" for name, unit in units.items()
        )

    @property
    def resources(self) -> tuple[Resource, ...]:
        return tuple(RESOURCES[name] for name in self.limits)

    @cached_property
    def array(self) -> Float64:
        """R, [M], as the ledger counts; read-only."""
        limits = np.array(
            [each.to_ledger(self.limits[each.name], self.delta) for each in self.resources]
        )
        limits.setflags(write=False)
        return limits

    def amounts(self, **by_name: float) -> Float64:
        """So much of these resources, where there is a limit for them, and nothing of others, [M]."""
        return np.array([by_name.get(name, 0.0) for name in self.limits])

    def label(self, values: Float64) -> dict[str, float]:
        """Values [M] with their resources' names."""
        return dict(zip(self.limits, values.tolist(), strict=True))

    @cached_property
    def by_noise(self) -> str | None:
        """The resource that is spent by what is made known, if there is a limit for it: privacy."""
        return next((each.name for each in self.resources if each.by_noise), None)

    def of_noise(self, values: Float64) -> float:
        """Of values [M] that of this resource; 0 where there is none."""
        return (
            0.0
            if self.by_noise is None
            else float(values[list(self.limits).index(self.by_noise)])
        )

    def but_noise(self, values: Float64) -> Float64:
        """Values [M], with nothing of this resource."""
        kept: Float64 = values * np.array([not each.by_noise for each in self.resources])
        return kept

    def noise(self, amount: float) -> Float64:
        """So much of this resource, and nothing of others, [M]."""
        return np.array([amount * each.by_noise for each in self.resources])

    def totals(self, values: Float64) -> dict[str, float]:
        """Sums of the ledger, [M], as people are shown them, with their resources' names."""
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
    """What one round cost: c_m per local update and b_m for the rest of the round, each [M]."""

    step: Float64
    aggregation: Float64

    def __post_init__(self) -> None:
        if not all(
            0 <= cost < math.inf
            for cost in (*self.step.tolist(), *self.aggregation.tolist())
        ):
            raise ValueError(f"costs must be finite and not negative: {self}")


@dataclass(frozen=True)
class CostStatistics:
    """What rounds cost so far: how much on average, and how far off it would have been to expect that.

    Every round counts more than those before it, in proportion to its number; from the fortieth on by a twentieth. No
    round counts as more than ten times what was expected of it: one that is out of all proportion, the first on cold
    machines say, is not the new normal, and if it is, the next ones will show it.

    Args:
      mean: c_m and b_m.
      variance: of a round's c_m, which is an average over its updates, and b_m: the mean square of the error of `mean`.
      updates: τ on average.
      peak: the most by which a round went over what was expected, [M]; fades by a twentieth with every round, and the
        first does not count, of which little could be known.
      rounds: how many there were.
    """

    mean: Costs
    variance: Costs
    updates: float
    peak: Float64
    rounds: int = 0

    @classmethod
    def before(cls, expected: Costs, spread: Float64) -> "CostStatistics":
        """Before the first round.

        Args:
          spread: how far off what is expected may be, as a share of it, [M].
        """
        variance = Costs(
            (spread * expected.step) ** 2, (spread * expected.aggregation) ** 2
        )
        return cls(expected, variance, 1.0, np.zeros_like(spread))

    def after(self, updates: int, costs: Costs) -> "CostStatistics":
        """With one more round."""
        rounds = self.rounds + 1
        gain = max(2 / (rounds + 2), 0.05)
        slow_gain = max(1 / (rounds + PRIOR_ROUNDS), 0.05)
        step = _error(costs.step, self.mean.step)
        aggregation = _error(costs.aggregation, self.mean.aggregation)
        variance = self.variance
        return CostStatistics(
            Costs(self.mean.step + gain * step, self.mean.aggregation + gain * aggregation),
            Costs(
                variance.step + slow_gain * (step**2 - variance.step),
                variance.aggregation + slow_gain * (aggregation**2 - variance.aggregation),
            ),
            self.updates + gain * (updates - self.updates)
            if self.rounds
            else float(updates),
            np.maximum(0.95 * self.peak, updates * step + aggregation)
            if self.rounds
            else self.peak,
            rounds,
        )

    def deviation(self, taus: tuple[int, ...]) -> Float64:
        """By how much all rounds with these τ together may be off, [M].

        A long round's updates are thought to be slow together, and those of a round that is shorter than usual to be
        each as slow as it comes.
        """
        of_steps = sum(tau * tau * max(1.0, self.updates / tau) for tau in taus)
        return np.sqrt(
            of_steps * self.variance.step + len(taus) * self.variance.aggregation
        )


def _error(cost: Float64, expected: Float64) -> Float64:
    """By how much something else was expected; where nothing was, there is nothing to compare with."""
    return np.where(expected > 0, np.minimum(cost, _PROPORTION * expected), cost) - expected


_PROPORTION = 10.0
PRIOR_ROUNDS = 8
"""So many rounds must have been made until what they show of the spread counts as much as what was thought before."""


@dataclass(frozen=True)
class Ledger:
    """What was spent so far, and what rounds cost; spending.py says what follows from that.

    Args:
      costs: ĉ_m and b̂_m, the last round's; what is expected of one before there was any.
      previous: the same of the round before.
      statistics: of all rounds.
      spent: s_m, [M].
    """

    budget: Budget
    costs: Costs
    previous: Costs
    statistics: CostStatistics
    spent: Float64

    @classmethod
    def open(cls, budget: Budget, expected: Costs) -> "Ledger":
        """A ledger with nothing spent."""
        spread = np.array([resource.spread for resource in budget.resources])
        return cls(
            budget,
            expected,
            expected,
            CostStatistics.before(expected, spread),
            np.zeros(len(budget.limits)),
        )

    def charge(self, updates: int, costs: Costs, *, usual: bool = True) -> "Ledger":
        """s_m ← s_m + c_m τ + b_m, and new estimates ĉ_m and b̂_m.

        Args:
          costs: c_m and b_m, what the round cost.
          usual: whether it says anything of what others will cost.
        """
        if (
            costs.step.shape != self.spent.shape
            or costs.aggregation.shape != self.spent.shape
        ):
            raise ValueError(
                f"costs of {len(self.spent)} resources are wanted, not {costs}"
            )
        spent = self.spent + costs.step * updates + costs.aggregation
        statistics = self.statistics.after(updates, costs) if usual else self.statistics
        return Ledger(self.budget, costs, self.costs, statistics, spent)

    def charge_besides(self, amount: Float64) -> "Ledger":
        """What was spent besides rounds, [M]: it says nothing of what the next one costs."""
        return replace(self, spent=self.spent + amount)

    def fits(self, amount: Float64) -> bool:
        """Whether so much more, [M], is within the budget."""
        return bool((self.spent + amount <= self.budget.array * (1 + _ROUNDING)).all())

    def nearest_limit(self, amount: Float64) -> str:
        """The resource that spending so much more, [M], brings nearest to its limit."""
        return list(self.budget.limits)[
            int(np.argmax((self.spent + amount) / self.budget.array))
        ]

    @property
    def share(self) -> float:
        """How much of the budget is gone: the largest share over resources, at most 1."""
        return float(min(1.0, (self.spent / self.budget.array).max()))

    @property
    def overshoot(self) -> Float64:
        """What was spent beyond the limit, [M]; 0 where the limit was kept."""
        return np.maximum(self.spent - self.budget.array, 0.0)

    def require_possible(self) -> None:
        """Refuses what no run comes to, as a file may have it: raises ValueError."""
        spent = self.spent
        statistics = self.statistics
        if (
            spent.ndim != 1
            or not spent.size
            or not (np.isfinite(spent) & (spent >= 0)).all()
        ):
            raise ValueError(f"what was spent is {spent.tolist()}")
        for costs in (self.costs, self.previous, statistics.mean, statistics.variance):
            if (
                not costs.step.shape
                == costs.aggregation.shape
                == statistics.peak.shape
                == spent.shape
            ):
                raise ValueError("costs and spent are of different resources")
        if not (
            np.isfinite(statistics.peak).all()
            and 1 <= statistics.updates < math.inf
            and statistics.rounds >= 0
        ):
            raise ValueError(f"what rounds cost so far is {statistics}")


_LIMIT = re.compile(r"(?P<name>[A-Za-z]+)\s*=\s*(?P<amount>.*)")
_AMOUNT = re.compile(r"(?P<number>[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(?P<unit>[A-Za-z]*)")


class _Limit(NamedTuple):
    """A limit as it was written; `added` where it is to be added to one that there is."""

    amount: float
    added: bool


def _parse_limits(texts: Iterable[str]) -> dict[str, _Limit]:
    limits: dict[str, _Limit] = {}
    for text in texts:
        name, limit = _parse_limit(text)
        if name in limits:
            raise UserError(f"budget {name} is given twice")
        limits[name] = limit
    return limits


def _parse_limit(text: str) -> tuple[str, _Limit]:
    limit = _LIMIT.fullmatch(text.strip())
    if limit is None:
        raise UserError(
            f"budget {text!r} is not understood; write NAME=AMOUNT, for example time=15s or bytes=20MB"
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
    return resource.name, _Limit(
        number * resource.units.get(unit, 1.0), limit["amount"].startswith("+")
    )


def _resource(name: str) -> Resource:
    if name not in RESOURCES:
        raise UserError(
            f"unknown resource {name!r} in the budget; use one of {', '.join(RESOURCES)}"
        )
    return RESOURCES[name]
