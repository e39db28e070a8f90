"""Time: the wall clock, of the slowest node; or simulated as the paper does.

The paper's simulated time is Gaussian, with the means and deviations measured on its prototype (appendix).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedbudget.errors import UserError
from fedbudget.resources.combine import slowest
from fedbudget.resources.counters import Clock
from fedbudget.resources.resource import Cost, Counted, Metering, Reader, Resource, Source, TimeMeter
from fedbudget.resources.usage import CombinedReading, NodeCosts, RoundUsage

UNITS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}

_LEAST = 1e-10  # a draw is never less than this, nor negative


class Time(Resource):
    name = "time"
    unit = "s"
    units: ClassVar[Mapping[str, float]] = UNITS

    def reader(self) -> Reader:
        return Clock(time.perf_counter)

    def combine(self, nodes: Sequence[NodeCosts], own: float | None) -> CombinedReading:
        return slowest(self.name, nodes, own)

    def meter(self, metering: Metering) -> TimeMeter:
        return metering.simulated or Counted(self.name, "the time")


@dataclass(frozen=True)
class Gaussian:
    mean: float
    deviation: float

    def draw(self, rng: np.random.Generator, count: int) -> float:
        """The mean of so many draws."""
        return float(np.maximum(rng.normal(self.mean, self.deviation, count), _LEAST).sum()) / count


@dataclass(frozen=True)
class Profile:
    """Seconds of a local update and of a global aggregation."""

    step: Gaussian
    aggregation: Gaussian

    def times(self, factor: float) -> "Profile":
        """The same with aggregations that take so many times as long."""
        slower = Gaussian(factor * self.aggregation.mean, factor * self.aggregation.deviation)
        return Profile(self.step, slower)


DGD = {
    1: Profile(Gaussian(0.020613052, 0.008154439), Gaussian(0.137093837, 0.05548447)),
    2: Profile(Gaussian(0.021810727, 0.008042984), Gaussian(0.12322071, 0.048079171)),
    3: Profile(Gaussian(0.095353094, 0.016688657), Gaussian(0.157255906, 0.066722225)),
    4: Profile(Gaussian(0.022075891, 0.008528005), Gaussian(0.108598094, 0.044627335)),
}
"""Deterministic gradient descent, by case: in Case 3 a node has all of the data."""

SGD = Profile(Gaussian(0.013015156, 0.006946299), Gaussian(0.131604348, 0.053873234))
"""Stochastic gradient descent, in all cases."""

CENTRALIZED_SGD = Profile(Gaussian(0.009974248, 0.011922926), Gaussian(0.0, 0.0))
"""Stochastic gradient descent in one place, which never aggregates."""


class SimulatedTime:
    """Draws the time of each round: c is the mean of τ draws, as slow as the slowest node, and b is one."""

    source: ClassVar[Source] = "simulated"

    def __init__(self, profile: Profile, rng: np.random.Generator) -> None:
        self.profile = profile
        self._rng = rng

    def read(self, usage: RoundUsage, time: Cost | None = None) -> Cost:
        step = usage.slowness * self.profile.step.draw(self._rng, usage.updates)
        return Cost(step, self.profile.aggregation.draw(self._rng, 1))

    def expect(self, usage: RoundUsage) -> Cost:
        return Cost(usage.slowness * self.profile.step.mean, self.profile.aggregation.mean)

    def state(self) -> dict[str, Any]:
        """Where the draws have come to, as plain JSON."""
        return dict(self._rng.bit_generator.state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from where `state` was taken."""
        try:
            self._rng.bit_generator.state = dict(state)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise UserError(f"the state of the simulated time is not one: {error}") from None
