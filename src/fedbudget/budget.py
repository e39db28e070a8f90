"""What may be spent, what was spent, what is left, and when to stop.

A budget is any number M of resources (resources/) with a limit each, and every rule here is written for M at once.

The ledger is a value. Charging a round gives a new ledger with the newest cost estimates ĉ_m, b̂_m and the spent s_m of
Algorithm 2; nothing is changed in place. What a round cost is the best guess at the next one's cost, unless something
is known to have been out of the ordinary: then it is charged as it was, and another figure is expected.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
    """A limit for each of M resources, in their units."""

    limits: Mapping[str, float]

    def __post_init__(self) -> None:
        if not self.limits:
            raise UserError("a run needs a budget, for example time=15s")
        for name, limit in self.limits.items():
            _resource(name)
            if not (math.isfinite(limit) and limit > 0):
                raise UserError(f"budget {name}={limit:g}: the limit must be a positive number")

    @classmethod
    def parse(cls, texts: Iterable[str]) -> "Budget":
        """Reads `time=15s`, `time=2min`, `energy=500J`, `bytes=20MB`, `cpu=30s`, `money=0.40`.

        >>> dict(Budget.parse(["time=2min", "bytes=20MB"]).limits)
        {'time': 120.0, 'bytes': 20000000.0}
        """
        given = _parse_limits(texts)
        for name, limit in given.items():
            if limit.added:
                raise UserError(f"budget {name}: + adds to the limit of a run that goes on; say which with `resume`")
        return cls({name: limit.amount for name, limit in given.items()})

    def extended(self, texts: Iterable[str]) -> "Budget":
        """What a run that goes on may spend: `time=+10min` adds to its limit, `time=20min` takes the limit's place.

        >>> dict(Budget({"time": 15.0, "bytes": 1e6}).extended(["time=+1min"]).limits)
        {'time': 75.0, 'bytes': 1000000.0}
        """
        limits = dict(self.limits)
        for name, limit in _parse_limits(texts).items():
            if name not in limits:
                raise UserError(f"budget {name}: a run that goes on keeps its resources, {', '.join(limits)}")
            limits[name] = limits[name] + limit.amount if limit.added else limit.amount
        return Budget(limits)

    @property
    def texts(self) -> tuple[str, ...]:
        """The limits as `parse` reads them, to the bit."""
        units = {each.name: each.unit if each.unit in each.units else "" for each in self.resources}
        return tuple(f"{name}={self.limits[name]:.17g}{unit}" for name, unit in units.items())

    @property
    def resources(self) -> tuple[Resource, ...]:
        return tuple(RESOURCES[name] for name in self.limits)

    @cached_property
    def array(self) -> Float64:
        """R, [M], read-only."""
        limits = np.array(list(self.limits.values()), dtype=np.float64)
        limits.setflags(write=False)
        return limits

    def label(self, values: Float64) -> dict[str, float]:
        """Values [M] with their resources' names."""
        return dict(zip(self.limits, values.tolist(), strict=True))

    def __str__(self) -> str:
        return ", ".join(f"{r.name}={r.format(self.limits[r.name])}" for r in self.resources)


@dataclass(frozen=True)
class Costs:
    """What one round cost: c_m per local update and b_m for the rest of the round, each [M]."""

    step: Float64
    aggregation: Float64

    def __post_init__(self) -> None:
        if not all(0 <= cost < math.inf for cost in (*self.step.tolist(), *self.aggregation.tolist())):
            raise ValueError(f"costs must be finite and not negative: {self}")


@dataclass(frozen=True)
class Ledger:
    """What was spent so far, and what the next round is thought to cost, by the last one.

    Args:
      costs: ĉ_m and b̂_m; not always what the last round was charged.
      spent: s_m, [M].
    """

    budget: Budget
    costs: Costs
    spent: Float64

    @classmethod
    def open(cls, budget: Budget, expected: Costs) -> "Ledger":
        """A ledger with nothing spent; refuses a budget that does not cover one round and the final loss."""
        one_round = expected.step + expected.aggregation
        for resource, limit, cost in zip(budget.resources, budget.array, one_round, strict=True):
            if limit < 2 * cost:
                raise UserError(
                    f"budget {resource.name}={resource.format(limit)} is too small: one round costs about "
                    f"{resource.format(cost)}, and as much again is needed for the final loss, "
                    f"so at least {resource.name}={resource.format(_rounded_up(2 * cost))}"
                )
        return cls(budget, expected, np.zeros(len(budget.limits)))

    def charge(self, updates: int, costs: Costs, expected: Costs | None = None) -> "Ledger":
        """s_m ← s_m + c_m τ + b_m, and new estimates ĉ_m and b̂_m.

        Args:
          costs: c_m and b_m, what the round cost.
          expected: ĉ_m and b̂_m, what the next is thought to cost; the same as this one when left out.
        """
        for what in (costs, expected or costs):
            if what.step.shape != self.spent.shape or what.aggregation.shape != self.spent.shape:
                raise ValueError(f"costs of {len(self.spent)} resources are wanted, not {what}")
        return Ledger(self.budget, expected or costs, self.spent + costs.step * updates + costs.aggregation)

    def must_stop_with(self, tau: int) -> bool:
        """Algorithm 2's stop rule: is a round of τ updates, and the final loss after it, the last that can fit?"""
        after = self.spent + self.costs.step * (tau + 1) + 2 * self.costs.aggregation
        return bool((after >= self.budget.array).any())

    def affordable_tau(self) -> tuple[float, str]:
        """The most updates of one more round that leave enough for the final loss, and the resource that says so.

        The figure is below 1 when no round fits, and infinite when nothing that is left costs per update.
        """
        left = self.budget.array * (1 + _ROUNDING) - self.spent - self.costs.step - 2 * self.costs.aggregation
        with np.errstate(divide="ignore", invalid="ignore"):
            fits = np.where(self.costs.step > 0, np.floor(left / self.costs.step), np.where(left >= 0, np.inf, 0))
        binding = int(np.argmin(fits))
        return float(fits[binding]), list(self.budget.limits)[binding]

    def can_evaluate(self) -> bool:
        """Does the final loss, one evaluation and one exchange, still fit?"""
        after = self.spent + self.costs.step + self.costs.aggregation
        return bool((after <= self.budget.array * (1 + _ROUNDING)).all())

    def nearest_limit(self, tau: int) -> str:
        """The resource that a round of τ updates, and the final loss after it, brings nearest to its limit."""
        after = self.spent + self.costs.step * (tau + 1) + 2 * self.costs.aggregation
        return list(self.budget.limits)[int(np.argmax(after / self.budget.array))]

    @property
    def share(self) -> float:
        """How much of the budget is gone: the largest share over resources, at most 1."""
        return float(min(1.0, (self.spent / self.budget.array).max()))

    @property
    def overshoot(self) -> Float64:
        """What was spent beyond the limit, [M]; 0 where the limit was kept."""
        return np.maximum(self.spent - self.budget.array, 0.0)


def _rounded_up(amount: float) -> float:
    """To the four digits that are shown, so that what is asked for is enough."""
    last = 10.0 ** (math.floor(math.log10(amount)) - 3)
    return math.ceil(amount / last - 1e-9) * last


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
        raise UserError(f"budget {text!r} is not understood; write NAME=AMOUNT, for example time=15s or bytes=20MB")
    resource = _resource(limit["name"])
    amount = _AMOUNT.fullmatch(limit["amount"])
    try:
        number = float(amount["number"] if amount else "")
    except ValueError:
        raise UserError(f"budget {text!r}: {limit['amount']!r} is not a number with a unit") from None
    unit = amount["unit"] if amount else ""
    if unit and unit not in resource.units:
        known = ", ".join(resource.units) or "no unit"
        raise UserError(f"budget {text!r}: unknown unit {unit!r} for {resource.name}; use {known}")
    if not (math.isfinite(number) and number > 0):
        raise UserError(f"budget {text!r}: the limit must be a positive number")
    return resource.name, _Limit(number * resource.units.get(unit, 1.0), limit["amount"].startswith("+"))


def _resource(name: str) -> Resource:
    if name not in RESOURCES:
        raise UserError(f"unknown resource {name!r} in the budget; use one of {', '.join(RESOURCES)}")
    return RESOURCES[name]
