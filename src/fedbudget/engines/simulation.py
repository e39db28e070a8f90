"""The engine of simulated nodes: rounds between an aggregator and nodes that are here, or on a cluster.

The clock stands still while a round is observed, and runs at all other times; only the local updates count as such.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fedbudget.engines.engine import Condition, Engine, Observer, Save
from fedbudget.meters.meters import Meters
from fedbudget.protocol.aggregator import Aggregator, Outcome
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.protocol.sums import Reports
from fedbudget.resources import round_usage
from fedbudget.resources.usage import NodeCosts


class SimulatedNodes(Protocol):
    """The nodes of a run, wherever they are."""

    def answer(self, broadcast: Broadcast) -> tuple[Report | Reports, Sequence[NodeCosts]]:
        """One round, by those who take part in it, and what it took at each, or at each group of them."""


@dataclass(eq=False)
class SimulationEngine(Engine):
    """Carries messages between an aggregator and simulated nodes."""

    aggregator: Aggregator
    nodes: SimulatedNodes
    meters: Meters

    def run(self, *, observe: Observer, interrupted: Condition = lambda: False, save: Save = lambda: None) -> Outcome:
        aggregator, meters, now = self.aggregator, self.meters, self.meters.counters().read
        message: Broadcast | Outcome = aggregator.start()
        mark = now()
        while isinstance(message, Broadcast):
            broadcast = message
            report, took = self.nodes.answer(broadcast)
            whole = now() - mark
            mark += whole
            costs = meters.read(round_usage(took, updates=max(1, broadcast.tau), own=whole))
            message = aggregator.receive(report, costs, meters.estimate(costs))
            assert aggregator.last is not None
            paused = now()
            observe(aggregator.last, broadcast)
            mark += now() - paused
            if interrupted() and isinstance(message, Broadcast):
                message = aggregator.interrupt()
        return message
