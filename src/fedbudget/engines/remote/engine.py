"""The network engine: carries messages between the aggregator and nodes on other machines, and reads the meters.

What is between them is a hub, or anything else that can ask nodes and gather what they answer, such as Flower's grid.

The clock never stops: a time budget is wall time, from the first broadcast to the end. What there is to do between two
rounds (records, checkpoint, test accuracy) is done while the nodes are at work on the next. A run may be some rounds
ahead of its disk (runs/saver.py): nodes remember as many, and an aggregator that has crashed makes them again.
"""

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from fedbudget.budget import Costs
from fedbudget.engines.remote.members import Counters
from fedbudget.engines.remote.messages import Answer, Farewell
from fedbudget.engines.remote.round import CollectedRound
from fedbudget.engines.simulation import Observer
from fedbudget.meters.meters import Meters
from fedbudget.protocol.aggregator import Aggregator, Outcome, Round
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.resources import TIME, round_usage
from fedbudget.resources.counters import Snapshot
from fedbudget.resources.usage import RoundUsage

OVERTIME = 0.03
"""The share of a time budget by which a round that has begun may go over it."""

_PATIENCE, _FIRST_PATIENCE, _TIMES = (
    3.0,
    30.0,
    4.0,
)  # a deadline: so many seconds, and so many times what it should take
_WARMING_UP = 3  # rounds until it is known what one takes
_SLOW_LINE = 250e3  # bytes a second that a node is thought to have until then


class Nodes(Protocol):
    """Whoever asks nodes on other machines, and gathers what they answer."""

    counters: Counters

    def lost(self, coming: int) -> list[int]:
        """Numbers of nodes whose knowledge of drift is lost, as of the round to come; they are told of once."""

    def begin(self, broadcast: Broadcast, *, least: int, timeout: float, left: float) -> None:
        """Sends a broadcast to all that are idle.

        Args:
          least: how many nodes must report.
          timeout: seconds until those that have not are left out.
          left: seconds until the round ends whatever it has.
        """

    def finish(self) -> CollectedRound:
        """Waits until the round is over."""

    def close(self, farewell: Farewell) -> None:
        """Lets all nodes go."""


def run(
    aggregator: Aggregator,
    server: Nodes,
    meters: Meters,
    *,
    least: int,
    timeout: float | None,
    trial: RoundUsage,
    observe: Observer,
    interrupted: Callable[[], bool],
    keep: Callable[[], None],
) -> Outcome:
    """Carries messages until the budget is spent, and then lets the nodes go.

    Args:
      least: the fewest nodes to make a round with.
      timeout: seconds until nodes that have not reported are left out; from what rounds took when not given.
      trial: what a round of one update took at the slowest node, before the first.
      keep: saves where the run has come to, when it is interrupted.
    """
    outcome = _rounds(aggregator, server, meters, _Clock(meters, timeout, trial), least, observe, interrupted, keep)
    server.close(Farewell("the aggregator was interrupted" if interrupted() else "the run is over"))
    return outcome


def _rounds(
    aggregator: Aggregator,
    server: Nodes,
    meters: Meters,
    clock: "_Clock",
    least: int,
    observe: Observer,
    interrupted: Callable[[], bool],
    keep: Callable[[], None],
) -> Outcome:
    message = aggregator.pending or aggregator.outcome or aggregator.start()
    round_: tuple[Round, Broadcast] | None = None
    read = meters.counters().read
    mark, counted = read(), _traffic(server)
    while isinstance(message, Broadcast):
        lost = server.lost(message.round)
        broadcast = aggregator.forget(lost) if lost else message
        left = clock.left(aggregator, read()[TIME.name] - mark[TIME.name])
        server.begin(broadcast, least=least, timeout=clock.deadline(broadcast), left=left)
        if round_ is not None:
            observe(*round_)
        gathered = server.finish()
        now, traffic = read(), _traffic(server)
        if interrupted() or not gathered.enough:
            costs = _unfinished(meters, now - mark, traffic - counted)
            if not interrupted():
                return aggregator.give_up(costs, "time")
            aggregator.charge(costs)
            keep()
            return aggregator.interrupt()
        usage = _usage(broadcast, gathered.answers, now - mark, traffic - counted)
        mark, counted = now, traffic
        clock.add(usage)
        costs = meters.read(usage)
        report = Report.merge([answer.report for answer in gathered.answers])
        message = aggregator.receive(report, costs, meters.estimate(costs))
        round_ = _with_absent(aggregator, gathered), broadcast
    if round_ is not None:
        observe(*round_)
    return message


class _Clock:
    """How long a round may take."""

    def __init__(self, meters: Meters, timeout: float | None, trial: RoundUsage) -> None:
        self._timeout = timeout
        self._trial = trial
        self._limit = meters.budget.limits.get("time") if meters.time.source == "measured" else None
        self._steps: deque[float] = deque(maxlen=9)
        self._rests: deque[float] = deque(maxlen=9)

    def add(self, usage: RoundUsage) -> None:
        self._steps.append(usage.step_seconds)
        self._rests.append(usage.seconds - usage.updates * usage.step_seconds)

    def deadline(self, broadcast: Broadcast) -> float:
        """Seconds until nodes that have not reported are left out."""
        if self._timeout is not None:
            return self._timeout
        updates = max(1, broadcast.tau)
        if len(self._steps) < _WARMING_UP:
            usual = self._trial.seconds + (updates - 1) * self._trial.step_seconds + 12 * broadcast.w.size / _SLOW_LINE
            return max(_FIRST_PATIENCE, _TIMES * usual)
        return max(_PATIENCE, _TIMES * (updates * statistics.median(self._steps) + statistics.median(self._rests)))

    def left(self, aggregator: Aggregator, already: float) -> float:
        """Seconds until a time budget is gone for good."""
        if self._limit is None:
            return float("inf")
        spent = aggregator.ledger.budget.label(aggregator.ledger.spent)["time"]
        return max(0.0, (1 + OVERTIME) * self._limit - spent - already)


def _traffic(server: Nodes) -> int:
    """Bytes that have passed so far."""
    return server.counters.sent + server.counters.received


def _usage(broadcast: Broadcast, answers: Sequence[Answer], took: Snapshot, wire_bytes: int) -> RoundUsage:
    costs = [replace(answer.costs, nodes=len(answer.report.nodes)) for answer in answers]
    return round_usage(costs, updates=max(1, broadcast.tau), own=took, wire_bytes=wire_bytes)


def _unfinished(meters: Meters, took: Snapshot, wire_bytes: int) -> Costs:
    """What a round has cost that did not come together; nothing where costs are simulated."""
    nothing = np.zeros(len(meters.budget.limits))
    if meters.time.source == "simulated":
        return Costs(nothing, nothing)
    return Costs(nothing, meters.read(round_usage([], own=took, wire_bytes=wire_bytes)).aggregation)


def _with_absent(aggregator: Aggregator, gathered: CollectedRound) -> Round:
    """The round's record, with who was asked and is not in the average."""
    last = aggregator.last
    assert last is not None
    left_out = tuple(sorted({*last.left_out, *gathered.broken}))
    return replace(last, missed=gathered.missed, left_out=left_out)
