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
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import ClassVar

from fedbudget.errors import UserError
from fedbudget.resources.resource import Cost, Meter, Metering, Resource, Source, Usage

MAX_EPSILON = 100.0
"""A larger ε protects nothing."""

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
    bound = epsilon + 1.0
    while delta_of(epsilon, bound) <= delta:
        bound *= 2
    return _bisect(lambda rho: delta_of(epsilon, rho) <= delta, bound)[0]


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
