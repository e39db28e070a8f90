"""A group of nodes of a simulated run, in a process of their own, that answer together, with sums where these suffice.

A group that was lost can be made again: it follows from its shards and the broadcasts it has heard, and a copy of its
memory saves hearing all of them again.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedbudget.arrays import Flags, Float32, Float64
from fedbudget.engines import in_process
from fedbudget.engines.in_process import InProcessNodes, NodeGroupState
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.protocol.sums import ReportsHere, Sums, Vectors
from fedbudget.protocol.tree import branches
from fedbudget.resources.counters import ResourceCounters
from fedbudget.resources.usage import NodeCosts


class NodeGroup:
    """Nodes that answer together.

    Args:
      fleets: all nodes in one, or each alone where some may be absent.
      counters: of this process.
      summed: whether sums are enough for the aggregator; every node's report is given otherwise.
    """

    def __init__(self, fleets: Sequence[Fleet], counters: ResourceCounters, *, summed: bool = True) -> None:
        self._fleets = fleets
        self._counters = counters
        self._nodes = InProcessNodes(counters, fleets)
        self._summed = summed
        self._begins = branches(int(fleets[0].numbers[0]), int(fleets[-1].numbers[-1]) + 1)[:-1]
        self._sizes = np.array([fleet.shards.size.sum() for fleet in fleets])
        self._reports: ReportsHere | None = None

    def answer(self, broadcast: Broadcast, here: Flags | None = None) -> tuple[Sums | Report | None, NodeCosts]:
        """One round; nothing when nobody is here.

        Args:
          here: which fleets are; all when not given.
        """
        began = self._counters.read()
        report, costs = self._nodes.answer_with(broadcast, here)
        if report is None:
            return None, costs
        report.require_answers(broadcast)
        self._reports = ReportsHere(report, self._begins)
        sums = replace(self._reports.sums, all_data=self._all_data())
        whole = self._counters.read() - began  # with the sums
        readings = {name: replace(reading, whole=whole[name]) for name, reading in costs.readings.items()}
        return sums if self._summed else report, replace(costs, readings=readings, here=False)

    def distance_sums(self, vectors: Vectors, mean: Float32) -> Float64:
        """Of the last round's vectors, see `Reports`."""
        assert self._reports is not None
        return self._reports.distance_sums(vectors, mean)

    def trial(self, first: Broadcast) -> NodeCosts:
        """What a round takes; it leaves no trace."""
        return in_process.trial([fleet.fork() for fleet in self._fleets], first, self._counters)

    def memory(self) -> NodeGroupState:
        return self._nodes.memory()[0]

    def recall(self, memory: NodeGroupState) -> float:
        """Goes on from here as the group would that `memory` was taken from, before its first round.

        Returns: the data of its nodes that ever took part.
        """
        self._nodes.recall([memory])
        return self._all_data()

    def _all_data(self) -> float:
        return float(self._sizes[self._nodes.met].sum())
