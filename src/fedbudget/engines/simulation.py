"""The engine of simulated nodes: rounds between an aggregator and nodes that are here, or on a cluster.

The clock stands still while a round is observed, and runs at all other times; only the local updates count as such.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fedbudget.engines.engine import Engine, Observer
from fedbudget.meters.measured import Instant
from fedbudget.meters.meter import Meters, RoundTrip
from fedbudget.protocol.aggregator import Aggregator, Outcome
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.protocol.sums import Reports


@dataclass(frozen=True)
class Effort:
    """What nodes did in a round.

    Args:
      nodes: how many took part.
      wire_bytes: all messages, of all nodes, both ways, as if each had sent its own.
      updating: what the local updates took: the time of the slowest, CPU seconds of all.
      cpu: CPU seconds of the whole round in other processes than the aggregator's.
    """

    nodes: int
    wire_bytes: int
    updating: Instant
    cpu: float = 0.0

    def trip(self, broadcast: Broadcast, whole: Instant) -> RoundTrip:
        """The round as the meters want it.

        Args:
          whole: what passed at the aggregator.
        """
        updates = max(1, broadcast.tau)
        return RoundTrip(
            updates=updates,
            nodes=self.nodes,
            wire_bytes=self.wire_bytes,
            step_seconds=self.updating.seconds / updates,
            seconds=whole.seconds,
            step_cpu=self.updating.cpu / updates,
            cpu=whole.cpu + self.cpu,
        )


class SimulatedNodes(Protocol):
    """The nodes of a run, wherever they are."""

    def answer(self, broadcast: Broadcast) -> tuple[Report | Reports, Effort]:
        """One round, by those who take part in it."""


class SimulationEngine(Engine):
    """Carries messages between an aggregator and simulated nodes.

    The clock stands still while a round is observed.
    """

    def __init__(self, aggregator: Aggregator, nodes: SimulatedNodes, meters: Meters) -> None:
        self.aggregator = aggregator
        self.nodes = nodes
        self._meters = meters

    def run(
        self,
        *,
        observe: Observer,
        interrupted: Callable[[], bool] = lambda: False,
        save: Callable[[], None] = lambda: None,
    ) -> Outcome:
        aggregator, meters, now = self.aggregator, self._meters, clock(self._meters)
        message: Broadcast | Outcome = aggregator.start()
        mark = now()
        while isinstance(message, Broadcast):
            broadcast = message
            report, effort = self.nodes.answer(broadcast)
            whole = now() - mark
            mark += whole
            costs = meters.read(effort.trip(broadcast, whole))
            message = aggregator.receive(report, costs, meters.expected(costs))
            assert aggregator.last is not None
            paused = now()
            observe(aggregator.last, broadcast)
            mark += now() - paused
            if interrupted() and isinstance(message, Broadcast):
                message = aggregator.interrupt()
        return message


def clock(meters: Meters) -> Callable[[], Instant]:
    """Reads what is needed; the CPU's clock is slow to read on some machines."""
    return Instant.now if "cpu" in meters.budget.limits else Instant.wall_only
