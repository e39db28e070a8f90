"""Simulated nodes: the engine for them, wherever they are, and fleets in this process, a function call away.

The clock stands still while a round is observed, and runs at all other times; only the local updates count as such.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from fedbudget.arrays import Flags
from fedbudget.engines.engine import Condition, Engine, Observer, Save
from fedbudget.meters.meters import Meters
from fedbudget.protocol.aggregator import Aggregator, Outcome
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.protocol.sums import Reports
from fedbudget.resources import round_usage
from fedbudget.resources.counters import ResourceCounters
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
            message = aggregator.receive(report, costs)
            assert aggregator.last is not None
            paused = now()
            observe(aggregator.last, broadcast)
            mark += now() - paused
            if interrupted() and isinstance(message, Broadcast):
                message = aggregator.interrupt()
        return message


class InProcessEngine(SimulationEngine):
    """Aggregator and fleets in this process.

    Args:
      present: the fleets that take part, round after round; all in each when not given.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        fleets: Sequence[Fleet],
        meters: Meters,
        present: Iterator[Sequence[Fleet]] | None = None,
    ) -> None:
        super().__init__(aggregator, InProcessNodes(meters.counters(), present or itertools.repeat(fleets)), meters)


@dataclass(eq=False)
class InProcessNodes:
    """Fleets in this process.

    Args:
      counters: of this process.
      present: the fleets that take part, round after round.
      before: those in the round before, who have nothing to catch up on.
    """

    counters: ResourceCounters
    present: Iterator[Sequence[Fleet]]
    before: Sequence[Fleet] = ()

    def answer(self, broadcast: Broadcast) -> tuple[Report, Sequence[NodeCosts]]:
        now, fleets = self.counters.read, next(self.present)
        began = now()
        for fleet in fleets:
            fleet.receive(broadcast)
        updating = now()
        for fleet in fleets:
            fleet.update()
        took = now() - updating
        report = Report.merge([fleet.report() for fleet in fleets])
        nodes = len(report.nodes)
        informed = sum(len(fleet.numbers) for fleet in fleets if fleet in self.before)
        self.before = fleets
        broadcasts = informed * broadcast.wire_bytes
        if informed < nodes:
            broadcasts += (nodes - informed) * broadcast.wire_bytes_with_catch_up
        readings = self.counters.readings(took, now() - began, max(1, broadcast.tau))
        return report, [NodeCosts(readings, nodes, broadcasts + report.wire_bytes, here=True)]


def some_absent(fleets: Sequence[Fleet], chance: float, rng: np.random.Generator) -> Iterator[Sequence[Fleet]]:
    """Each fleet takes part in a round with this chance, but never none of them."""
    for here in attendance(len(fleets), chance, rng):
        yield [fleet for fleet, is_here in zip(fleets, here, strict=True) if is_here]


def attendance(nodes: int, chance: float, rng: np.random.Generator) -> Iterator[Flags]:
    """Who takes part, round after round; never nobody."""
    while True:
        here = rng.random(nodes) < chance
        if here.any():
            yield here


def trial(fleets: Sequence[Fleet], first: Broadcast, counters: ResourceCounters) -> NodeCosts:
    """A round on fleets that are thrown away afterwards, to see what a round takes.

    The first one made does not count, because it compiles kernels and has nothing to estimate from; of two more the
    quicker one does, so that a slow moment of the machine is not taken for the cost of a round.

    Args:
      first: what a run's first broadcast says, but for τ and stop.
      counters: of this process.
    """
    nodes = InProcessNodes(counters, itertools.repeat(fleets))
    _, *tried = (nodes.answer(replace(first, round=number, tau=1, stop=False))[1][0] for number in (1, 2, 3))
    return min(tried, key=lambda costs: costs.seconds)
