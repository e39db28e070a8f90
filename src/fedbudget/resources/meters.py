"""The meters of a run: what a round costs in every resource of its budget, and what the next is thought to cost."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fedbudget.arrays import Float64, Int64
from fedbudget.budget.budget import Budget, Costs
from fedbudget.resources import RESOURCES, TIME
from fedbudget.resources.counters import ResourceCounters
from fedbudget.resources.resource import (
    Cost,
    Meter,
    Metering,
    Resource,
    RoundUsage,
    Source,
    TimeMeter,
)
from fedbudget.resources.speeds import Speeds


@runtime_checkable
class Stateful(Protocol):
    """A meter that goes by earlier rounds too; its state is plain JSON."""

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


@dataclass(frozen=True)
class Meters:
    """The meters of a budget's resources.

    Args:
      budget: what is to be metered.
      time: always there, because other meters are figured from it.
      others: by the name of their resource.
      speeds: of simulated nodes, where they differ.
    """

    budget: Budget
    time: TimeMeter
    others: Mapping[str, Meter]
    speeds: Speeds | None = None

    @classmethod
    def of(
        cls, budget: Budget, metering: Metering, speeds: Speeds | None = None
    ) -> "Meters":
        """Of all known resources, so that what is declared of any is checked."""
        others = {
            name: resource.meter(metering)
            for name, resource in RESOURCES.items()
            if name != TIME.name
        }
        return cls(budget, TIME.meter(metering), others, speeds)

    @property
    def resources(self) -> tuple[Resource, ...]:
        """What the counters of a process are read for; a machine's are none of a simulated node's or aggregator's."""
        return (
            TIME,
            *(
                each
                for each in self.budget.resources
                if each is not TIME and not each.machine_wide
            ),
        )

    def counters(self) -> ResourceCounters:
        """Of this process, as far as they are needed: some are slow to read."""
        return ResourceCounters.of(self.resources)

    def step_times(self, nodes: Int64) -> Float64 | None:
        """What a local update takes at each of these nodes, to compare them by, [n]; None where nobody says."""
        return None if self.speeds is None else self.speeds.step_times(nodes)

    def slowness(self, nodes: Int64, updates: Int64, tau: int) -> float:
        """How many times as long as τ updates of a node of speed 1 the longest of these nodes' updates take.

        Args:
          updates: that each of them makes, [n].
        """
        times = self.step_times(nodes)
        return 1.0 if times is None else float((updates * times).max()) / tau

    def read(self, usage: RoundUsage) -> Costs:
        return self._costs(usage, self.time.read(usage), self.others)

    def expect(self, trial: RoundUsage) -> Costs:
        """What a round will cost, from a trial round."""
        copies = {
            name: copy(meter) for name, meter in self.others.items()
        }  # a trial is no round of the run
        trial = (
            trial if self.speeds is None else replace(trial, slowness=self.speeds.slowest)
        )
        return self._costs(trial, self.time.expect(trial), copies)

    @property
    def sources(self) -> dict[str, Source]:
        """How each resource of the budget is known, of what was read so far."""
        return {
            name: (self.time if name == TIME.name else self.others[name]).source
            for name in self.budget.limits
        }

    def state(self) -> dict[str, Any]:
        """All that a run must keep of its meters to go on later, as plain JSON."""
        return {name: meter.state() for name, meter in self._stateful.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from where `state` was taken, of meters of the same kinds."""
        for name, meter in self._stateful.items():
            meter.restore(state[name])

    @cached_property
    def _stateful(self) -> dict[str, Stateful]:
        """By their names in checkpoints."""
        parts = {"time": self.time, **self.others}
        return {name: part for name, part in parts.items() if isinstance(part, Stateful)}

    def _costs(self, usage: RoundUsage, time: Cost, others: Mapping[str, Meter]) -> Costs:
        costs = [
            time if name == TIME.name else others[name].read(usage, time)
            for name in self.budget.limits
        ]
        return Costs(
            np.array([cost.step for cost in costs]),
            np.array([cost.aggregation for cost in costs]),
        )
