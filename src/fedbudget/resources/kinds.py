"""Resources without a file of their own: time, CPU time, bytes and money.

- Time is the wall clock of the slowest node, or simulated as in the paper: Gaussian, with
  the means and deviations that its appendix reports for the prototype.
- CPU time is summed over all threads of every process that takes part.
- Bytes are those of all messages in both directions. Local updates send none.
- Money follows from declared prices, in any currency.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedbudget.errors import UserError
from fedbudget.resources.counters import FunctionReader
from fedbudget.resources.resource import (
    Cost,
    CounterMeter,
    Meter,
    Metering,
    Reader,
    Reading,
    Resource,
    Source,
    TimeMeter,
    Usage,
    require_not_negative,
    slowest,
)

_TIME_UNITS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
_TIME_SHOWN = {"min": 120.0, "h": 7200.0}
_MIN_DRAW = 1e-10  # seconds


class Time(Resource):
    name = "time"
    unit = "s"
    units: ClassVar[Mapping[str, float]] = _TIME_UNITS
    shown_from: ClassVar[Mapping[str, float]] = _TIME_SHOWN

    def reader(self) -> Reader:
        return FunctionReader(time.perf_counter)

    def combine(self, nodes: Sequence[Usage], own: float | None) -> Reading:
        return slowest(self.name, nodes, own)

    def meter(self, metering: Metering) -> TimeMeter:
        return metering.simulated or CounterMeter(self.name, "the time")


@dataclass(frozen=True)
class Gaussian:
    mean: float
    deviation: float

    def draw(self, rng: np.random.Generator, count: int) -> float:
        """Return the mean of `count` draws, each clipped at 1e-10."""
        draws = np.maximum(rng.normal(self.mean, self.deviation, count), _MIN_DRAW)
        return float(np.add.reduce(draws)) / count


@dataclass(frozen=True)
class Profile:
    """Seconds of a local update and of a global aggregation."""

    step: Gaussian
    aggregation: Gaussian

    def times(self, factor: float) -> "Profile":
        """Return the profile with aggregations slower by a factor."""
        slower = Gaussian(
            factor * self.aggregation.mean, factor * self.aggregation.deviation
        )
        return Profile(self.step, slower)


DGD = {
    1: Profile(Gaussian(0.020613052, 0.008154439), Gaussian(0.137093837, 0.05548447)),
    2: Profile(Gaussian(0.021810727, 0.008042984), Gaussian(0.12322071, 0.048079171)),
    3: Profile(Gaussian(0.095353094, 0.016688657), Gaussian(0.157255906, 0.066722225)),
    4: Profile(Gaussian(0.022075891, 0.008528005), Gaussian(0.108598094, 0.044627335)),
}
"""Deterministic gradient descent, by case. In Case 3 each node has all data."""

SGD = Profile(Gaussian(0.013015156, 0.006946299), Gaussian(0.131604348, 0.053873234))
"""Stochastic gradient descent, in all cases."""

CENTRALIZED_SGD = Profile(Gaussian(0.009974248, 0.011922926), Gaussian(0.0, 0.0))
"""Centralized stochastic gradient descent, without aggregations."""


class SimulatedTime:
    """Draws the time of each round: c is the mean of τ draws, b is one draw.

    c is multiplied by the slowness of the slowest node.
    """

    source: ClassVar[Source] = "simulated"

    def __init__(self, profile: Profile, rng: np.random.Generator) -> None:
        self.profile = profile
        self._rng = rng

    def read(self, usage: Usage, time: Cost | None = None) -> Cost:
        step = usage.slowness * self.profile.step.draw(self._rng, usage.updates)
        return Cost(step, self.profile.aggregation.draw(self._rng, 1))

    def expect(self, usage: Usage) -> Cost:
        return Cost(usage.slowness * self.profile.step.mean, self.profile.aggregation.mean)

    def state(self) -> dict[str, Any]:
        """Return the state of the generator as plain JSON."""
        return dict(self._rng.bit_generator.state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        try:
            self._rng.bit_generator.state = dict(state)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise UserError(
                f"the state of the simulated time is invalid: {error}"
            ) from None


class Cpu(Resource):
    name = "cpu"
    unit = "s"
    units: ClassVar[Mapping[str, float]] = _TIME_UNITS
    shown_from: ClassVar[Mapping[str, float]] = _TIME_SHOWN
    most_a_second = 1024.0  # cores

    def reader(self) -> Reader:
        return FunctionReader(time.process_time)

    def meter(self, metering: Metering) -> Meter:
        if metering.simulated is not None:
            return SimulatedCpu()
        return CounterMeter(self.name, "the CPU time")


class SimulatedCpu:
    """Every node is busy during its local updates and idle otherwise."""

    source: ClassVar[Source] = "simulated"

    def read(self, usage: Usage, time: Cost) -> Cost:
        return Cost(time.step * usage.nodes, 0.0)


class Bytes(Resource):
    name = "bytes"
    unit = "B"
    units: ClassVar[Mapping[str, float]] = {
        **{"B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
        **{"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40},
    }
    shown_from: ClassVar[Mapping[str, float]] = {
        "kB": 1e3,
        "MB": 1e6,
        "GB": 1e9,
        "TB": 1e12,
    }
    spread = 0.05  # messages have similar sizes

    def meter(self, metering: Metering) -> Meter:
        return WireBytes("measured" if metering.measured else "declared")


@dataclass(frozen=True)
class WireBytes:
    """Bytes of a round's messages: counted by the engine, or computed from their sizes."""

    source: Source

    def read(self, usage: Usage, time: Cost) -> Cost:
        return Cost(0.0, float(usage.wire_bytes))


class Money(Resource):
    name = "money"
    settings = ("price_per_hour", "price_per_gigabyte")

    def meter(self, metering: Metering) -> Meter:
        return Prices(**metering.declared_for(self.settings))


@dataclass(frozen=True)
class Prices:
    """A price per node and hour, and per gigabyte sent."""

    source: ClassVar[Source] = "declared"
    price_per_hour: float = 0.1
    price_per_gigabyte: float = 0.1

    def __post_init__(self) -> None:
        require_not_negative(self)

    def read(self, usage: Usage, time: Cost) -> Cost:
        rate = self.price_per_hour / 3600 * usage.nodes
        traffic = self.price_per_gigabyte / 1e9 * usage.wire_bytes
        return Cost(rate * time.step, rate * time.aggregation + traffic)
