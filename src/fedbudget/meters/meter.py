"""What a round costs, for any mix of resources.

An engine sees a round trip: how long it took, what it computed, what it sent. Meters turn that into costs: c per local
update and b for the rest of the round, per resource. Time comes first, simulated or measured; energy, money and
modelled CPU seconds are then figured from time and bytes, so that a simulated run is simulated in every resource.

Every meter says how it knows: `measured` is read from a meter, `declared` is figured from what the user says (watts,
prices), `estimated` is partly one and partly the other, `simulated` is the paper's. A meter that cannot be read is an
error, never zero.
"""

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from fedbudget.budget import Budget, Costs
from fedbudget.errors import WorkError
from fedbudget.meters.expectation import Expectation

_ROUNDING = 1e-9
"""By this much a clock that is added up may seem to run backwards."""

Source = Literal["measured", "estimated", "simulated", "declared"]


class MeterError(WorkError):
    """A meter that should be read cannot be, or says what cannot be."""


@dataclass(frozen=True)
class RoundTrip:
    """What an engine saw of one round.

    Args:
      updates: local updates in it, each at every node; the final loss counts as one.
      nodes: how many took part.
      wire_bytes: all messages of the round, of all nodes, both ways.
      step_seconds: wall clock per local update, of the slowest node.
      seconds: wall clock of the whole round.
      step_cpu: CPU seconds per local update, of all nodes together; nan when it is not known of all of them.
      cpu: CPU seconds of the whole round, aggregator included; nan likewise.
      metered: how many of the nodes run on machines that measure their energy.
      step_joules: energy per local update of these machines together, each counted once; None when there are none.
      joules: their energy of the whole round.
      estimated: whether any of these joules are an estimate, and not read from a meter.
    """

    updates: int
    nodes: int
    wire_bytes: int
    step_seconds: float
    seconds: float
    step_cpu: float
    cpu: float
    metered: int = 0
    step_joules: float | None = None
    joules: float | None = None
    estimated: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.metered <= self.nodes:
            raise ValueError(f"{self.metered} of {self.nodes} nodes cannot be metered")


@dataclass(frozen=True)
class Cost:
    """c for one local update and b for the rest of the round, of one resource."""

    step: float
    aggregation: float

    @classmethod
    def split(cls, what: str, step: float | None, whole: float | None, updates: int) -> "Cost":
        """From readings of one local update and of the whole round.

        Args:
          what: is read, for the error when it is not known.
        """
        if step is None or whole is None or not (0 <= step < math.inf and -_ROUNDING <= whole < math.inf):
            raise MeterError(f"{what} of a round is not known: {step} for a local update, {whole} for the whole round")
        return cls(step, max(0.0, whole - step * updates))


class TimeMeter(Protocol):
    @property
    def source(self) -> Source: ...

    def read(self, trip: RoundTrip) -> Cost:
        """The time of a round that was made."""

    def expect(self, trip: RoundTrip) -> Cost:
        """The time of a round to come, judged from a trial round."""


class Meter(Protocol):
    @property
    def source(self) -> Source: ...

    def read(self, trip: RoundTrip, time: Cost) -> Cost:
        """The cost of a round in this meter's resource, from what was seen and from the time that it took."""


@runtime_checkable
class Remembering(Protocol):
    """A meter that goes by earlier rounds too; what it remembers is plain JSON."""

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


@dataclass(frozen=True)
class Meters:
    """The meters of a budget's resources.

    Args:
      budget: what is to be metered.
      time: always there, because other meters are figured from it.
      others: by the name of their resource.
      expectation: what measured rounds say of those to come.
    """

    budget: Budget
    time: TimeMeter
    others: Mapping[str, Meter]
    expectation: Expectation = field(default_factory=Expectation)

    def read(self, trip: RoundTrip) -> Costs:
        return self._costs(trip, self.time.read(trip), self.others)

    def expect(self, trial: RoundTrip) -> Costs:
        """What a round will cost, from a trial round."""
        apart = {name: copy(meter) for name, meter in self.others.items()}  # a trial is no round of the run
        return self._costs(trial, self.time.expect(trial), apart)

    def expected(self, costs: Costs) -> Costs:
        """What the next round will cost, now that one has cost this; each round is told once.

        Simulated costs are taken as they are, which is the paper's rule.
        """
        return costs if self.time.source == "simulated" else self.expectation.after(costs)

    @property
    def sources(self) -> dict[str, Source]:
        """How each resource of the budget is known, of what was read so far."""
        return {name: (self.time if name == "time" else self.others[name]).source for name in self.budget.limits}

    def state(self) -> dict[str, Any]:
        """All that a run must keep of its meters to go on later, as plain JSON."""
        return {name: meter.state() for name, meter in self._remembering.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from where `state` was taken, of meters of the same kinds."""
        for name, meter in self._remembering.items():
            meter.restore(state[name])

    @cached_property
    def _remembering(self) -> dict[str, Remembering]:
        parts = {"expectation": self.expectation, "time": self.time, **self.others}
        return {name: part for name, part in parts.items() if isinstance(part, Remembering)}

    def _costs(self, trip: RoundTrip, time: Cost, others: Mapping[str, Meter]) -> Costs:
        costs = [time if name == "time" else others[name].read(trip, time) for name in self.budget.limits]
        return Costs(np.array([cost.step for cost in costs]), np.array([cost.aggregation for cost in costs]))
