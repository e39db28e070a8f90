"""Privacy: ε of (ε, δ)-differential privacy, over all results that a run publishes.

Every published aggregation is a Gaussian mechanism (node_privacy.py). The ε of several
mechanisms do not add up. Their ρ of zero-concentrated differential privacy do (Bun and
Steinke 2016): ρ = 1/(2σ²) for noise of σ times the sensitivity. So the ledger holds ρ, and
the user sees ε. Local updates cost nothing.

The conversion from ρ to ε is exact. Several Gaussian mechanisms equal a single one with
the sum of their ρ (Dong, Roth and Su 2022). Its ε at a given δ is (Balle and Wang 2018):

    δ = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ),      μ = √(2ρ).

Bisection solves the equation. Its result is on the safe side: the upper end for ε, the
lower end for ρ.

**Adjacency.** ρ compares a run with a run in which one unit (a node, or a sample)
contributes zero. This ε limits what shows that the unit took part. If another unit takes
its place instead, values move by up to twice the sensitivity: μ doubles, and ρ is four
times as large (`replacement_epsilon`). That ε limits what shows the content of the unit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from fedbudget.errors import UserError
from fedbudget.resources.resource import Cost, Meter, Metering, Resource, Source, Usage

MAX_EPSILON = 100.0
"""A larger ε protects nothing."""

_REPLACEMENT = 4
"""Factor on ρ if a unit is replaced and not left out: twice the sensitivity."""
_MAX_DEFAULT_DELTA = 1e-5
_BISECTIONS = 200
_RESERVE = 1e-5
"""Fraction of ρ that is never spent, so that accountants that round up (privacy loss
distributions) stay below ε."""


class Privacy(Resource):
    name = "privacy"
    by_noise = True
    spread = 0.0  # the cost of a round is decided in advance

    def meter(self, metering: Metering) -> Meter:
        return NoPrivacy()

    def to_ledger(self, amount: float, delta: float | None) -> float:
        return rho_of(amount, _checked(delta)) * (1 - _RESERVE)

    def from_ledger(self, amount: float, delta: float | None) -> float:
        return epsilon_of(amount, _checked(delta))


@dataclass(frozen=True)
class PrivacyGuarantee:
    """Guarantee of a private run and of its model.

    Args:
      epsilon: ε, compared with a run in which one unit contributes zero.
      delta: δ.
      unit: what it protects: `node` or `sample`.
      noise: source of the noise, `secret` or `seeded`; seeded noise hides nothing from
        those who know the seed.
      added_by: who adds the noise: `aggregator` or `nodes`.
      all_runs: ε of all runs on the same data, if a ledger adds them up.
      exact_tests: number of test samples whose metrics are exact; ε does not cover these.
        None if there are none, or if they are published.
    """

    epsilon: float
    delta: float
    unit: str
    noise: str
    added_by: str
    all_runs: float | None = None
    exact_tests: int | None = None

    @property
    def replacement(self) -> float:
        """ε, compared with a run in which another unit takes the place of one."""
        return replacement_epsilon(self.epsilon, self.delta)

    def to_json(self) -> dict[str, Any]:
        """Return all figures, with the names of both adjacencies."""
        figures = {name: value for name, value in vars(self).items() if value is not None}
        figures["adjacency"] = "zero-out"
        figures["epsilon_replacement"] = self.replacement
        figures["simulated"] = self.noise == "seeded"
        return figures


class NoPrivacy:
    """Messages cost no privacy; the aggregator pays for each published result."""

    source: ClassVar[Source] = "accounted"

    def read(self, usage: Usage, time: Cost) -> Cost:
        return Cost(0.0, 0.0)


def delta_of(epsilon: float, rho: float) -> float:
    """Return the exact δ at ε of Gaussian mechanisms whose ρ sum to `rho`."""
    if rho <= 0:
        return 0.0
    mu = math.sqrt(2 * rho)
    above = _normal_cdf(mu / 2 - epsilon / mu)
    below = _normal_cdf(-mu / 2 - epsilon / mu)
    return max(0.0, above - math.exp(epsilon) * below)


@lru_cache(maxsize=4096)
def epsilon_of(rho: float, delta: float) -> float:
    """Return ε at δ of Gaussian mechanisms whose ρ sum to `rho`.

    >>> round(epsilon_of(0.5, 1e-5), 3)
    4.377
    """
    if delta_of(0.0, rho) <= delta:
        return 0.0
    bound = rho + 2 * math.sqrt(rho * math.log(1 / delta))
    return _bisect(lambda epsilon: delta_of(epsilon, rho) > delta, bound)[1]


def rho_of(epsilon: float, delta: float) -> float:
    """Return the largest ρ within ε at δ.

    >>> round(rho_of(4.0, 1e-5), 3)
    0.428
    """
    if not 0 < epsilon <= MAX_EPSILON:
        raise UserError(
            f"budget privacy={epsilon:g}: ε must be positive and at most {MAX_EPSILON:g}; "
            "a larger ε protects nothing"
        )
    return _largest_rho(epsilon, delta)


@lru_cache(maxsize=4096)
def _largest_rho(epsilon: float, delta: float) -> float:
    bound = epsilon + 1.0
    while delta_of(epsilon, bound) <= delta:
        bound *= 2
    return _bisect(lambda rho: delta_of(epsilon, rho) <= delta, bound)[0]


def replacement_epsilon(epsilon: float, delta: float) -> float:
    """Return ε at δ if a unit is replaced, from the ε with which it is left out.

    >>> [round(replacement_epsilon(epsilon, 1e-5), 2) for epsilon in (1.0, 4.0)]
    [2.15, 9.08]
    """
    if epsilon <= 0:
        return 0.0
    return epsilon_of(_REPLACEMENT * _largest_rho(epsilon, delta), delta)


def replacement_text(epsilon: float, delta: float, unit: str) -> str:
    """Return the ε of replacement as text, next to an ε of leaving out.

    Args:
      unit: what is protected: `node` or `sample`.
    """
    replaced = replacement_epsilon(epsilon, delta)
    return f"ε = {replaced:.4g} if a {unit} is replaced, not left out"


def default_delta(nodes: int) -> float:
    """Return a power of ten below 1/nodes², at most 1e-5.

    >>> default_delta(5), default_delta(1000)
    (1e-05, 1e-07)
    """
    exponent = math.floor(2 * math.log10(max(1, nodes))) + 1
    return min(_MAX_DEFAULT_DELTA, float(f"1e-{exponent}"))


def _bisect(below: Callable[[float], bool], high: float) -> tuple[float, float]:
    """Return both ends of the interval around the point at which `below` becomes false."""
    low = 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if below(middle):
            low = middle
        else:
            high = middle
    return low, high


def _checked(delta: float | None) -> float:
    if delta is None or not 0 < delta < 1:
        raise UserError(
            f"a privacy budget needs a `privacy_delta` between 0 and 1, not {delta}"
        )
    return delta


def _normal_cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2
