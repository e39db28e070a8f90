"""The in-process engine: aggregator and fleets in one program, a function call away from each other."""

from collections.abc import Callable, Sequence
from typing import Protocol

from fedbudget.arrays import Float32
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
) -> Outcome:
    """Carries messages between aggregator and fleets until the budget is spent.

    Args:
      interrupted: asked after every round; when it says so, the run ends with what it has.
    """
    now = Instant.now if "cpu" in meters.budget.limits else Instant.wall_only
    message: Broadcast | Outcome = aggregator.start()
    mark = now()
    while isinstance(message, Broadcast):
        said = message
        report, trip = _round(fleets, said, mark, now)
        mark += Instant(trip.seconds, trip.cpu)
        message = aggregator.receive(report, meters.read(trip))
        assert aggregator.last is not None
        before = now()
        observe(aggregator.last, said)
        mark += now() - before
        if interrupted() and isinstance(message, Broadcast):
            message = aggregator.interrupt()
    return message


def trial(fleets: Sequence[Fleet], w: Float32, *, estimate: bool) -> RoundTrip:
    """A round on fleets that are thrown away afterwards, to see what a round takes.

    The first one made does not count, because it compiles kernels and has nothing to estimate from; of two more the
    quicker one does, so that a slow moment of the machine is not taken for the cost of a round.
    """
    ask = Broadcast(round=1, w=w, tau=1, eta=0.0, estimate=estimate, best=False, stop=False)
    _, *trips = (_round(fleets, ask, Instant.now(), Instant.now)[1] for _ in range(3))
    return min(trips, key=lambda trip: trip.seconds)


def _round(
    fleets: Sequence[Fleet], said: Broadcast, mark: Instant, now: Callable[[], Instant]
) -> tuple[Report, RoundTrip]:
    """One round of all fleets, timed from `mark` on; only the local updates count as such."""
    for fleet in fleets:
        fleet.receive(said)
    before = now()
    for fleet in fleets:
        fleet.update()
    updating = now() - before
    report = Report.merge([fleet.report() for fleet in fleets])
    updates, nodes = max(1, said.tau), len(report.nodes)
    whole = now() - mark
    return report, RoundTrip(
        updates=updates,
        nodes=nodes,
        wire_bytes=nodes * said.wire_bytes + report.wire_bytes,
        step_seconds=updating.seconds / updates,
        seconds=whole.seconds,
        step_cpu=updating.cpu / updates,
        cpu=whole.cpu,
    )
