"""Privacy: ε of (ε, δ)-differential privacy, of one node in all that a run has made known.

Every aggregation that is made known is a Gaussian mechanism (protocol/privacy.py). Its ε do not add up, but its ρ does,
of zero-concentrated differential privacy (Bun and Steinke 2016): ρ = 1/2σ² for noise of σ times the sensitivity. So the
ledger holds ρ, and people are shown ε. Local updates cost nothing.

From ρ to ε nothing is lost. Gaussian mechanisms one after another are together one, with the sum of their ρ (Dong, Roth
and Su 2022), whose ε at a δ is known exactly (Balle and Wang 2018):

    δ = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ),      μ = √(2ρ).

Where that is solved by halving, it is on the safe side: of ε the larger end, of ρ the smaller.
"""

import math
from functools import lru_cache
from typing import ClassVar

from fedbudget.errors import UserError
from fedbudget.resources.resource import Cost, Meter, Metering, Resource, RoundUsage, Source

DEFAULT_DELTA = 1e-5
"""Or less, where nodes are many."""
MOST = 100.0
"""An ε beyond this hides nothing."""

_HALVINGS = 200
_ROUNDING = 1e-5
"""The share of ρ that is never spent, so that no accountant that rounds up, as by privacy loss distributions, comes to
more than ε."""


class Privacy(Resource):
    name = "privacy"
    by_noise = True
    spread = 0.0  # a round costs what was decided before

    def meter(self, metering: Metering) -> Meter:
        return NoPrivacy()

    def to_ledger(self, amount: float, delta: float | None) -> float:
        return rho_of(amount, _known(delta)) * (1 - _ROUNDING)

    def from_ledger(self, amount: float, delta: float | None) -> float:
        return epsilon_of(amount, _known(delta))


class NoPrivacy:
    """What a round's messages cost by themselves: it is their being made known that does, which the aggregator pays."""

    source: ClassVar[Source] = "accounted"

    def read(self, usage: RoundUsage, time: Cost) -> Cost:
        return Cost(0.0, 0.0)


def delta_of(epsilon: float, rho: float) -> float:
    """The chance that more than ε is lost, exactly, by Gaussian mechanisms of ρ together."""
    if rho <= 0:
        return 0.0
    mu = math.sqrt(2 * rho)
    return max(
        0.0,
        _normal(mu / 2 - epsilon / mu)
        - math.exp(epsilon) * _normal(-mu / 2 - epsilon / mu),
    )


@lru_cache(maxsize=4096)
def epsilon_of(rho: float, delta: float) -> float:
    """ε at this δ of Gaussian mechanisms of ρ together.

    >>> round(epsilon_of(0.5, 1e-5), 3)
    4.377
    """
    if delta_of(0.0, rho) <= delta:
        return 0.0
    # which is always enough
    low = 0.0
    high = rho + 2 * math.sqrt(rho * math.log(1 / delta))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle, rho) > delta else (low, middle)
    return high


def rho_of(epsilon: float, delta: float) -> float:
    """The most ρ that ε at this δ allows.

    >>> round(rho_of(4.0, 1e-5), 3)
    0.428
    """
    if not 0 < epsilon <= MOST:
        raise UserError(
            f"budget privacy={epsilon:g}: ε is more than 0 and at most {MOST:g}, which hides nothing"
        )
    low = 0.0
    high = epsilon + 1.0
    while delta_of(epsilon, high) <= delta:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(epsilon, middle) <= delta else (low, middle)
    return low


def default_delta(nodes: int) -> float:
    """A power of ten that is below one over the number of nodes squared, and no more than 1e-5.

    >>> default_delta(5), default_delta(1000)
    (1e-05, 1e-07)
    """
    return min(DEFAULT_DELTA, float(f"1e-{math.floor(2 * math.log10(max(1, nodes))) + 1}"))


def _known(delta: float | None) -> float:
    if delta is None or not 0 < delta < 1:
        raise UserError(
            f"a privacy budget needs a `privacy_delta` between 0 and 1, not {delta}"
        )
    return delta


def _normal(x: float) -> float:
    """Φ."""
    return math.erfc(-x / math.sqrt(2)) / 2
