"""The in-process engine: aggregator and fleets in one program, a function call away from each other."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from fedbudget.arrays import Flags
from fedbudget.engines.simulation import Effort, SimulationEngine, clock
from fedbudget.meters.measured import Instant
from fedbudget.meters.meter import Meters, RoundTrip
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, Report


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
        super().__init__(aggregator, InProcessNodes(clock(meters), present or itertools.repeat(fleets)), meters)


class InProcessNodes:
    """Fleets in this process.

    Args:
      now: reads the clock.
      present: the fleets that take part, round after round.
      before: those in the round before, who have nothing to catch up on.
    """

    def __init__(
        self, now: Callable[[], Instant], present: Iterator[Sequence[Fleet]], before: Sequence[Fleet] = ()
    ) -> None:
        self._now = now
        self._present = present
        self._before = before

    def answer(self, broadcast: Broadcast) -> tuple[Report, Effort]:
        fleets = next(self._present)
        for fleet in fleets:
            fleet.receive(broadcast)
        began = self._now()
        for fleet in fleets:
            fleet.update()
        updating = self._now() - began
        report = Report.merge([fleet.report() for fleet in fleets])
        nodes, before = len(report.nodes), self._before
        informed = sum(len(fleet.numbers) for fleet in fleets if fleet in before)
        self._before = fleets
        broadcasts = informed * broadcast.wire_bytes + (nodes - informed) * broadcast.wire_bytes_with_catch_up
        return report, Effort(nodes, broadcasts + report.wire_bytes, updating)


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


def trial(fleets: Sequence[Fleet], first: Broadcast) -> RoundTrip:
    """A round on fleets that are thrown away afterwards, to see what a round takes.

    The first one made does not count, because it compiles kernels and has nothing to estimate from; of two more the
    quicker one does, so that a slow moment of the machine is not taken for the cost of a round.

    Args:
      first: what a run's first broadcast says, but for τ and stop.
    """
    nodes, trips = InProcessNodes(Instant.now, itertools.repeat(fleets)), []
    for number in (1, 2, 3):
        broadcast, mark = replace(first, round=number, tau=1, stop=False), Instant.now()
        _, effort = nodes.answer(broadcast)
        trips.append(effort.trip(broadcast, Instant.now() - mark))
    return min(trips[1:], key=lambda trip: trip.seconds)
