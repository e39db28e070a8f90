"""Time: the wall clock, of the slowest node; or simulated as the paper does.

The paper's simulated time is Gaussian, with the means and deviations measured on its prototype (appendix).

CPU seconds, of all threads of every process that takes part.

Bytes of all messages, both ways. Local updates send nothing.

Money, figured from declared prices; whatever currency they are in.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedbudget.errors import UserError
from fedbudget.resources.counters import Clock
from fedbudget.resources.resource import (
    CombinedReading,
    Cost,
    Counted,
    Meter,
    Metering,
    NodeCosts,
    Reader,
    Resource,
    RoundUsage,
    Source,
    TimeMeter,
    require_not_negative,
    slowest,
)

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
        return (
            float(np.maximum(rng.normal(self.mean, self.deviation, count), _LEAST).sum())
            / count
        )


@dataclass(frozen=True)
class Profile:
    """Seconds of a local update and of a global aggregation."""

    step: Gaussian
    aggregation: Gaussian

    def times(self, factor: float) -> "Profile":
        """The same with aggregations that take so many times as long."""
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
            raise UserError(
                f"the state of the simulated time is not one: {error}"
            ) from None


class Cpu(Resource):
    name = "cpu"
    unit = "s"
    units: ClassVar[Mapping[str, float]] = UNITS
    most_a_second = 1024.0  # cores

    def reader(self) -> Reader:
        return Clock(time.process_time)

    def meter(self, metering: Metering) -> Meter:
        return (
            Counted(self.name, "the CPU time")
            if metering.simulated is None
            else SimulatedCpu()
        )


class SimulatedCpu:
    """Every node is busy during its local updates, and idle otherwise."""

    source: ClassVar[Source] = "simulated"

    def read(self, usage: RoundUsage, time: Cost) -> Cost:
        return Cost(time.step * usage.nodes, 0.0)


class Bytes(Resource):
    name = "bytes"
    unit = "B"
    units: ClassVar[Mapping[str, float]] = {
        **{"B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
        **{"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40},
    }
    spread = 0.05  # messages are much alike

    def format(self, amount: float) -> str:
        """In the largest unit that fits.

        >>> Bytes().format(20_000_000), Bytes().format(999)
        ('20MB', '999B')
        """
        scale = 1.0
        unit = self.unit
        for candidate in ("kB", "MB", "GB"):
            if abs(amount) >= self.units[candidate]:
                scale = self.units[candidate]
                unit = candidate
        return f"{amount / scale:.4g}{unit}"

    def meter(self, metering: Metering) -> Meter:
        return WireBytes(
            "measured" if metering.network and metering.simulated is None else "declared"
        )


@dataclass(frozen=True)
class WireBytes:
    """The messages of a round, as counted by an engine that sends them, or as they would be on the wire."""

    source: Source

    def read(self, usage: RoundUsage, time: Cost) -> Cost:
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

    def read(self, usage: RoundUsage, time: Cost) -> Cost:
        rate = self.price_per_hour / 3600 * usage.nodes
        return Cost(
            rate * time.step,
            rate * time.aggregation + self.price_per_gigabyte / 1e9 * usage.wire_bytes,
        )
