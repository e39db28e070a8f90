"""What engines of simulated nodes share: rounds between an aggregator and nodes that are here, or on a cluster.

The clock stands still while a round is observed, and runs at all other times; only the local updates count as such.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from fedbudget.meters.meters import Meters
from fedbudget.protocol.aggregator import Aggregator, Outcome, Round
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.protocol.sums import Reports
from fedbudget.resources import round_usage
from fedbudget.resources.usage import NodeCosts

Observer = Callable[[Round, Broadcast], None]
"""Told of every round when it is over, with the broadcast that it began with. The time it takes is not charged."""


class Engine(Protocol):
    """What makes a run, once it is ready to start; of the baselines too."""

    def __call__(self, *, observe: Observer, interrupted: Callable[[], bool]) -> Outcome: ...


class Nodes(Protocol):
    """The nodes of a run, wherever they are."""

    def answer(self, broadcast: Broadcast) -> tuple[Report | Reports, Sequence[NodeCosts]]:
        """One round, by those who take part in it, and what it took at each, or at each group of them."""


def run(
    aggregator: Aggregator,
    nodes: Nodes,
    meters: Meters,
    *,
    observe: Observer,
    interrupted: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Carries messages between aggregator and nodes until the budget is spent.

    Args:
      interrupted: asked after every round; when it says so, the run ends with what it has.
    """
    now = meters.counters().read
    message: Broadcast | Outcome = aggregator.start()
    mark = now()
    while isinstance(message, Broadcast):
        broadcast = message
        report, took = nodes.answer(broadcast)
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
