"""The meters of a run: measured costs of a round and expected costs of the next."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fedbudget.budget.budget import Budget, Costs
from fedbudget.resources import RESOURCES, TIME
from fedbudget.resources.counters import ResourceCounters
from fedbudget.resources.resource import (
    Cost,
    Meter,
    Metering,
    Resource,
    Source,
    TimeMeter,
    Usage,
)
from fedbudget.resources.speeds import Speeds


@runtime_checkable
class Stateful(Protocol):
    """A meter that depends on earlier rounds; its state is plain JSON."""

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


@dataclass(frozen=True)
class Meters:
    """The meters of a budget's resources.

    Args:
      budget: the budget to meter.
      time: meter of the time; other meters depend on it, so it is always present.
      others: other meters by the name of their resource.
      speeds: speeds of simulated nodes; None if they are equal.
    """

    budget: Budget
    time: TimeMeter
    others: Mapping[str, Meter]
    speeds: Speeds | None = None

    @classmethod
    def of(
        cls, budget: Budget, metering: Metering, speeds: Speeds | None = None
    ) -> "Meters":
        """Create the meters of all resources, which checks every declared cost."""
        others = {
            name: resource.meter(metering)
            for name, resource in RESOURCES.items()
            if name != TIME.name
        }
        return cls(budget, TIME.meter(metering), others, speeds)

    @property
    def resources(self) -> tuple[Resource, ...]:
        """Resources with a counter per process.

        Counters of the whole machine do not belong to a simulated node or the aggregator.
        """
        others = [
            each
            for each in self.budget.resources
            if each is not TIME and not each.machine_wide
        ]
        return (TIME, *others)

    def counters(self) -> ResourceCounters:
        """Return this process's counters of the budget's resources alone; some are slow."""
        return ResourceCounters.of(self.resources)

    def read(self, usage: Usage, time: Cost | None = None) -> Costs:
        """Return the costs of a round.

        Args:
          time: its cost in time, if known.
        """
        if time is None:
            time = self.time.read(usage)
        costs = [
            time if name == TIME.name else self.others[name].read(usage, time)
            for name in self.budget.limits
        ]
        return Costs(
            np.array([cost.step for cost in costs]),
            np.array([cost.aggregation for cost in costs]),
        )

    def expect(self, trial: Usage) -> Costs:
        """Return the expected costs of a round, from a trial round."""
        if self.speeds is not None:
            trial = replace(trial, slowness=self.speeds.slowest)
        # Copies, because a trial must not change the state of a meter.
        copies = {name: copy(meter) for name, meter in self.others.items()}
        return replace(self, others=copies).read(trial, self.time.expect(trial))

    @property
    def sources(self) -> dict[str, Source]:
        """Source of each resource of the budget, from the rounds so far."""
        meters = {**self.others, TIME.name: self.time}
        return {name: meters[name].source for name in self.budget.limits}

    def state(self) -> dict[str, Any]:
        """Return the state of all meters as plain JSON, to resume the run later."""
        return {name: meter.state() for name, meter in self._stateful.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state` of meters of the same kinds."""
        for name, meter in self._stateful.items():
            meter.restore(state[name])

    @cached_property
    def _stateful(self) -> dict[str, Stateful]:
        """Meters with a state, by their names in checkpoints."""
        meters = {TIME.name: self.time, **self.others}
        return {name: each for name, each in meters.items() if isinstance(each, Stateful)}
