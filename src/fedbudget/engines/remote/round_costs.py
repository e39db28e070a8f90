"""What a round took over a network: as a round, and what nodes' evaluations took besides.

An evaluation is charged, and is not taken for what a round costs: the time of the slowest one, and what all of them
have used of other resources, is told apart by what nodes have measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedbudget.engines.remote.messages import Answer
from fedbudget.resources import TIME, round_usage
from fedbudget.resources.counters import Snapshot
from fedbudget.resources.usage import NodeCosts, RoundUsage


@dataclass(frozen=True)
class RoundCosts:
    """Of one round.

    Args:
      nodes: what it took at each.
      own: what the aggregator's process counted, from one round to the next.
      wire_bytes: of all messages.
      tally_bytes: of these, those that evaluations are told with.
    """

    nodes: Sequence[NodeCosts]
    own: Snapshot
    wire_bytes: int
    tally_bytes: int = 0

    @classmethod
    def of(cls, answers: Sequence[Answer], own: Snapshot, wire_bytes: int) -> "RoundCosts":
        costs = [replace(answer.costs, nodes=len(answer.report.nodes)) for answer in answers]
        return cls(costs, own, wire_bytes, sum(answer.tally_bytes for answer in answers))

    @property
    def evaluated(self) -> bool:
        return any(costs.evaluation for costs in self.nodes)

    def usage(self, updates: int) -> RoundUsage:
        """Of the round itself."""
        own = dict(self.own.values)
        own[TIME.name] -= self.evaluation_usage().seconds if self.evaluated else 0.0
        for costs in self.nodes:
            for name, reading in costs.evaluation.items() if costs.here else ():
                if name in own and name != TIME.name:
                    own[name] = max(0.0, own[name] - reading.whole)
        wire_bytes = self.wire_bytes - self.tally_bytes
        return round_usage(self.nodes, updates=updates, own=Snapshot(own), wire_bytes=wire_bytes)

    def evaluation_usage(self) -> RoundUsage:
        """Of evaluations, as if they were a round without updates; in time, no more than the round itself."""
        seconds = self.own[TIME.name]
        return evaluation_usage([costs.within(seconds, 1) for costs in self.nodes], self.tally_bytes)


def evaluation_usage(nodes: Sequence[NodeCosts], tally_bytes: int) -> RoundUsage:
    """What evaluations took, as if they were a round without updates.

    Args:
      nodes: of a round, or of trials.
      tally_bytes: of what all of them say.
    """
    evaluated = [replace(costs, readings=costs.evaluation) for costs in nodes if costs.evaluation]
    return round_usage(evaluated, wire_bytes=tally_bytes)
