"""The in-process engine: aggregator and fleets in one program, a function call away from each other."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from fedbudget.meters.measured import Instant
from fedbudget.meters.meter import Meters, RoundTrip
from fedbudget.protocol.aggregator import Aggregator, Outcome, Round
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, Report

Observer = Callable[[Round, Broadcast], None]
"""Told of every round when it is over, with the broadcast that it began with. The time it takes is not charged."""


class Engine(Protocol):
    """What makes a run, once it is ready to start; of the baselines too."""

    def __call__(self, *, observe: Observer, interrupted: Callable[[], bool]) -> Outcome: ...


def run(
    aggregator: Aggregator,
    fleets: Sequence[Fleet],
    meters: Meters,
    *,
    observe: Observer,
    interrupted: Callable[[], bool] = lambda: False,
    present: Iterator[Sequence[Fleet]] | None = None,
) -> Outcome:
    """Carries messages between aggregator and fleets until the budget is spent.

    Args:
      present: the fleets that take part, round after round; all in each when not given.
      interrupted: asked after every round; when it says so, the run ends with what it has.
    """
    attendance = present or itertools.repeat(fleets)
    before: Sequence[Fleet] = ()
    now = Instant.now if "cpu" in meters.budget.limits else Instant.wall_only
    message: Broadcast | Outcome = aggregator.start()
    mark = now()
    while isinstance(message, Broadcast):
        said, here = message, next(attendance)
        report, trip = _round(here, said, mark, now, before)
        mark += Instant(trip.seconds, trip.cpu)
        costs = meters.read(trip)
        message = aggregator.receive(report, costs, meters.expected(costs))
        assert aggregator.last is not None
        paused = now()
        observe(aggregator.last, said)
        mark += now() - paused
        before = here
        if interrupted() and isinstance(message, Broadcast):
            message = aggregator.interrupt()
    return message


def some_absent(fleets: Sequence[Fleet], chance: float, rng: np.random.Generator) -> Iterator[Sequence[Fleet]]:
    """Each fleet takes part in a round with this chance, but never none of them."""
    while True:
        here = [fleet for fleet, drawn in zip(fleets, rng.random(len(fleets)), strict=True) if drawn < chance]
        if here:
            yield here


def trial(fleets: Sequence[Fleet], first: Broadcast) -> RoundTrip:
    """A round on fleets that are thrown away afterwards, to see what a round takes.

    The first one made does not count, because it compiles kernels and has nothing to estimate from; of two more the
    quicker one does, so that a slow moment of the machine is not taken for the cost of a round.

    Args:
      first: what a run's first broadcast says, but for τ and stop.
    """
    asked = (replace(first, round=number, tau=1, stop=False) for number in (1, 2, 3))
    _, *trips = (_round(fleets, said, Instant.now(), Instant.now, fleets)[1] for said in asked)
    return min(trips, key=lambda trip: trip.seconds)


def _round(
    fleets: Sequence[Fleet], said: Broadcast, mark: Instant, now: Callable[[], Instant], before: Sequence[Fleet]
) -> tuple[Report, RoundTrip]:
    """One round of some fleets, timed from `mark` on; only the local updates count as such.

    Args:
      before: those that were in the round before, and need no news.
    """
    for fleet in fleets:
        fleet.receive(said)
    began = now()
    for fleet in fleets:
        fleet.update()
    updating = now() - began
    report = Report.merge([fleet.report() for fleet in fleets])
    updates, nodes = max(1, said.tau), len(report.nodes)
    informed = sum(len(fleet.numbers) for fleet in fleets if fleet in before)
    whole = now() - mark
    return report, RoundTrip(
        updates=updates,
        nodes=nodes,
        wire_bytes=informed * said.wire_bytes + (nodes - informed) * said.wire_bytes_with_news + report.wire_bytes,
        step_seconds=updating.seconds / updates,
        seconds=whole.seconds,
        step_cpu=updating.cpu / updates,
        cpu=whole.cpu,
    )
