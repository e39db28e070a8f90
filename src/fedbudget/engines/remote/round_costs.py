"""What a round took over a network: as a round, and what nodes' evaluations took besides.

An evaluation is charged, and is not taken for what a round costs: the time of the slowest one, and what all of them
have used of other resources, is told apart by what nodes have measured.

What nodes say is bounded: their time by the aggregator's clock, as it comes (`NodeCosts.within`), and all else by what
the others say, so that no single one decides what was spent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedbudget.engines.remote.messages import Answer
from fedbudget.protocol.belief import FEWEST, reference
from fedbudget.resources import TIME, most_within, round_usage
from fedbudget.resources.counters import Snapshot
from fedbudget.resources.usage import NodeCosts, Reading, RoundUsage

_PROPORTION = 100.0  # times the median: machines differ


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
        costs = [
            answer.costs if answer.costs.nodes == nodes else replace(answer.costs, nodes=nodes)
            for answer, nodes in ((answer, len(answer.report.nodes)) for answer in answers)
        ]
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
        most = most_within(self.own[TIME.name])
        return evaluation_usage([costs.within(most, 1) for costs in self.nodes], self.tally_bytes)


def believable_costs(
    nodes: Sequence[NodeCosts], *, time: bool = False
) -> tuple[list[NodeCosts], list[tuple[str, ...]]]:
    """With the median reading in place of those out of all proportion to it; and of each, which these were.

    Args:
      nodes: of each peer.
      time: whether time is bounded so too, as of a trial that nobody waited for.
    """
    if len(nodes) < FEWEST:
        return list(nodes), [() for _ in nodes]
    counts = [costs.nodes for costs in nodes]
    readings, doubts = _in_proportion([costs.readings for costs in nodes], counts, time=time)
    evaluation, more = _in_proportion([costs.evaluation for costs in nodes], counts, time=time)
    believed = [
        replace(costs, readings=own, evaluation=tested) if doubt or other else costs
        for costs, own, tested, doubt, other in zip(nodes, readings, evaluation, doubts, more, strict=True)
    ]
    return believed, [tuple(sorted(doubt | other)) for doubt, other in zip(doubts, more, strict=True)]


def _in_proportion(
    readings: Sequence[Mapping[str, Reading]], counts: Sequence[int], *, time: bool
) -> tuple[list[dict[str, Reading]], list[set[str]]]:
    believed, doubts = [dict(each) for each in readings], [set[str]() for _ in readings]
    for name in {name for each in readings for name in each if time or name != TIME.name}:
        told = [index for index, each in enumerate(readings) if name in each]
        step = reference([readings[index][name].step / counts[index] for index in told])
        whole = reference([readings[index][name].whole / counts[index] for index in told])
        for index in told:
            own, count = readings[index][name], counts[index]
            held = replace(own, step=_held(own.step, step * count), whole=_held(own.whole, whole * count))
            if held != own:
                believed[index][name] = held
                doubts[index].add(name)
    return believed, doubts


def _held(amount: float, usual: float) -> float:
    return usual if amount > _PROPORTION * usual > 0 else amount


def evaluation_usage(nodes: Sequence[NodeCosts], tally_bytes: int) -> RoundUsage:
    """What evaluations took, as if they were a round without updates.

    Args:
      nodes: of a round, or of trials.
      tally_bytes: of what all of them say.
    """
    evaluated = [replace(costs, readings=costs.evaluation) for costs in nodes if costs.evaluation]
    return round_usage(evaluated, wire_bytes=tally_bytes)
