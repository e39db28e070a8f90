"""What a round costs, for any mix of resources.

An engine sees a round trip: how long it took, what it computed, what it sent. Meters turn that into costs: c per local
update and b for the rest of the round, per resource. Time comes first, simulated or measured; energy, money and
modelled CPU seconds are then figured from time and bytes, so that a simulated run is simulated in every resource.

Every meter says how it knows: `measured`, `simulated` or `declared`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import numpy as np

from fedbudget.budget import Budget, Costs

Source = Literal["measured", "simulated", "declared"]


@dataclass(frozen=True)
class RoundTrip:
    """What an engine saw of one round.

    Args:
      updates: local updates in it, each at every node; the final loss counts as one.
      nodes: how many took part.
      wire_bytes: all messages of the round, of all nodes, both ways.
      step_seconds: wall clock per local update, of the slowest node.
      seconds: wall clock of the whole round.
      step_cpu: CPU seconds per local update, of all nodes together.
      cpu: CPU seconds of the whole round, aggregator included.
    """

    updates: int
    nodes: int
    wire_bytes: int
    step_seconds: float
    seconds: float
    step_cpu: float
    cpu: float


@dataclass(frozen=True)
class Cost:
    """c for one local update and b for the rest of the round, of one resource."""

    step: float
    aggregation: float


class TimeMeter(Protocol):
    source: ClassVar[Source]

    def read(self, trip: RoundTrip) -> Cost:
        """The time of a round that was made."""

    def expect(self, trip: RoundTrip) -> Cost:
        """The time of a round to come, judged from a trial round."""


class Meter(Protocol):
    source: ClassVar[Source]

    def read(self, trip: RoundTrip, time: Cost) -> Cost:
        """The cost of a round in this meter's resource, from what was seen and from the time that it took."""


@dataclass(frozen=True)
class Meters:
    """The meters of a budget's resources.

    Args:
      budget: what is to be metered.
      time: always there, because other meters are figured from it.
      others: by the name of their resource.
    """

    budget: Budget
    time: TimeMeter
    others: Mapping[str, Meter]

    def read(self, trip: RoundTrip) -> Costs:
        return self._costs(trip, self.time.read(trip))

    def expect(self, trial: RoundTrip) -> Costs:
        """What a round will cost, from a trial round."""
        return self._costs(trial, self.time.expect(trial))

    @property
    def sources(self) -> dict[str, Source]:
        """How each resource of the budget is known."""
        return {name: (self.time if name == "time" else self.others[name]).source for name in self.budget.limits}

    def _costs(self, trip: RoundTrip, time: Cost) -> Costs:
        costs = [time if name == "time" else self.others[name].read(trip, time) for name in self.budget.limits]
        return Costs(np.array([cost.step for cost in costs]), np.array([cost.aggregation for cost in costs]))
