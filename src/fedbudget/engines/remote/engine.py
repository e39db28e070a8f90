"""The network engine: carries messages between the aggregator and nodes on other machines, and reads the meters.

What is between them is a gRPC server, or anything else that can ask nodes and gather what they answer, such as
Flower's grid.

The clock never stops: a time budget is wall time, from the first broadcast to the end. What there is to do between two
rounds (records, checkpoint, test accuracy) is done while the nodes are at work on the next. A run may be some rounds
ahead of its disk (runs/checkpoint_writer.py): nodes remember as many, and an aggregator that has crashed makes them
again.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from fedbudget.budget import Costs
from fedbudget.engines.engine import Engine, Observer
from fedbudget.engines.remote.costs import NodeCosts
from fedbudget.engines.remote.members import Counters
from fedbudget.engines.remote.messages import Answer, Farewell
from fedbudget.engines.remote.round import CollectedRound
from fedbudget.engines.simulation import clock
from fedbudget.meters.host import is_estimate, machine
from fedbudget.meters.measured import Instant
from fedbudget.meters.meter import Meters, RoundTrip
from fedbudget.node_status import NodeStatus
from fedbudget.protocol.aggregator import Aggregator, Outcome, Round
from fedbudget.protocol.messages import Broadcast, Report

OVERTIME = 0.03
"""The share of a time budget by which a round that has begun may go over it."""

# A deadline: so many seconds, at least, and so many times what a round should take.
_PATIENCE, _FIRST_PATIENCE, _TIMES = 3.0, 30.0, 4.0
_WARMING_UP = 3  # rounds until it is known what one takes
_SLOW_LINE = 250e3  # bytes a second that a node is thought to have until then


class RemoteNodes(Protocol):
    """Whoever asks nodes on other machines, and gathers what they answer."""

    counters: Counters

    @property
    def error(self) -> str:
        """Why there can be no more rounds, once that is so."""

    def lost(self, coming: int) -> list[int]:
        """Numbers of nodes whose knowledge of drift is lost, as of the round to come; each is given once."""

    def begin(self, broadcast: Broadcast, *, least: int, timeout: float, left: float) -> None:
        """Sends a broadcast to all that are idle.

        Args:
          least: how many nodes must report.
          timeout: seconds until those that have not are left out.
          left: seconds until the round ends whatever it has.
        """

    def finish(self) -> CollectedRound:
        """Waits until the round is over."""

    def wake(self) -> None:
        """Ends what is being waited for; from any thread."""

    def node_statuses(self) -> list[NodeStatus]:
        """How all nodes are doing, in the order of their numbers; from any thread."""

    def close(self, farewell: Farewell) -> None:
        """Lets all nodes go."""

    def state(self) -> Mapping[str, Any] | None:
        """What a checkpoint must hold of them; None where a run with them cannot be resumed."""


class RemoteEngine(Engine):
    """Makes a run with nodes on other machines.

    Args:
      least: the fewest nodes to make a round with.
      timeout: seconds until nodes that have not reported are left out; from what rounds took when not given.
      trial: what a round of one update took at the slowest node, before the first.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        nodes: RemoteNodes,
        meters: Meters,
        *,
        least: int,
        timeout: float | None,
        trial: NodeCosts,
    ) -> None:
        self._aggregator = aggregator
        self._nodes = nodes
        self._meters = meters
        self._least = least
        self._clock = _Clock(meters, timeout, trial)

    def run(
        self,
        *,
        observe: Observer,
        interrupted: Callable[[], bool] = lambda: False,
        save: Callable[[], None] = lambda: None,
    ) -> Outcome:
        outcome = self._run_rounds(observe, lambda: interrupted() or bool(self._nodes.error), save)
        self._nodes.close(Farewell("the aggregator was interrupted" if interrupted() else "the run is over"))
        return outcome

    def wake(self) -> None:
        self._nodes.wake()

    def node_statuses(self) -> list[NodeStatus]:
        return self._nodes.node_statuses()

    def traffic(self) -> Mapping[str, int]:
        return vars(self._nodes.counters).copy()

    def state(self) -> Mapping[str, Any] | None:
        nodes = self._nodes.state()
        return None if nodes is None else {**nodes, "meters": self._meters.state(), "counters": self.traffic()}

    def _run_rounds(self, observe: Observer, interrupted: Callable[[], bool], save: Callable[[], None]) -> Outcome:
        aggregator, nodes, meters = self._aggregator, self._nodes, self._meters
        message = aggregator.pending or aggregator.outcome or aggregator.start()
        last: tuple[Round, Broadcast] | None = None
        read = clock(meters)
        began, bytes_before = read(), self._wire_bytes()
        while isinstance(message, Broadcast):
            lost = nodes.lost(message.round)
            broadcast = aggregator.forget(lost) if lost else message
            left = self._clock.left(aggregator, Instant.wall_only().seconds - began.seconds)
            nodes.begin(broadcast, least=self._least, timeout=self._clock.deadline(broadcast), left=left)
            if last is not None:
                observe(*last)
            collected = nodes.finish()
            now, bytes_now = read(), self._wire_bytes()
            if interrupted() or not collected.enough:
                costs = _unfinished(meters, now - began, bytes_now - bytes_before)
                if not interrupted():
                    return aggregator.give_up(costs, "time")
                aggregator.charge(costs)
                save()
                return aggregator.interrupt()
            trip = _trip(broadcast, collected.answers, now - began, bytes_now - bytes_before)
            began, bytes_before = now, bytes_now
            self._clock.add(trip)
            costs = meters.read(trip)
            report = Report.merge([answer.report for answer in collected.answers])
            message = aggregator.receive(report, costs, meters.expected(costs))
            last = _with_absent(aggregator, collected), broadcast
        if last is not None:
            observe(*last)
        return message

    def _wire_bytes(self) -> int:
        """That have passed so far."""
        return self._nodes.counters.sent + self._nodes.counters.received


def slowest(trials: Sequence[NodeCosts]) -> NodeCosts:
    """What a round is thought to take, from trial rounds that nodes have made by themselves, if any are here."""
    return NodeCosts(
        step_seconds=max((costs.step_seconds for costs in trials), default=0.0),
        seconds=max((costs.seconds for costs in trials), default=0.0),
        step_cpu=_sum(costs.step_cpu for costs in trials),
        cpu=_sum(costs.cpu for costs in trials),
    )


class _Clock:
    """How long a round may take."""

    def __init__(self, meters: Meters, timeout: float | None, trial: NodeCosts) -> None:
        self._timeout = timeout
        self._trial = trial
        self._limit = meters.budget.limits.get("time") if meters.time.source == "measured" else None
        self._steps: deque[float] = deque(maxlen=9)
        self._rests: deque[float] = deque(maxlen=9)

    def add(self, trip: RoundTrip) -> None:
        """What a round took."""
        self._steps.append(trip.step_seconds)
        self._rests.append(trip.seconds - trip.updates * trip.step_seconds)

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


def _trip(broadcast: Broadcast, answers: Sequence[Answer], took: Instant, wire_bytes: int) -> RoundTrip:
    costs = [answer.costs for answer in answers]
    elsewhere = [each for each in costs if not each.here]
    metered = [answer for answer in answers if answer.costs.joules is not None]
    step_joules, joules = _by_host([answer.costs for answer in metered])
    return RoundTrip(
        updates=max(1, broadcast.tau),
        nodes=sum(len(answer.report.nodes) for answer in answers),
        wire_bytes=wire_bytes,
        step_seconds=max(each.step_seconds for each in costs),
        seconds=took.seconds,
        step_cpu=_sum(each.step_cpu for each in costs),
        cpu=took.cpu + _sum(each.cpu for each in elsewhere),
        metered=sum(len(answer.report.nodes) for answer in metered),
        step_joules=step_joules,
        joules=joules,
        estimated=any(is_estimate(answer.costs.host) for answer in metered),
    )


def _sum(readings: Iterable[float | None]) -> float:
    """Of all; nan when one is not known."""
    return sum(math.nan if reading is None else reading for reading in readings)


def _by_host(costs: Sequence[NodeCosts]) -> tuple[float | None, float | None]:
    """Energy of a step and of a round: nodes of one machine read one meter, which counts once."""
    steps: dict[str, float] = {}
    wholes: dict[str, float] = {}
    for each in costs:
        assert each.joules is not None
        host = machine(each.host)
        steps[host] = max(steps.get(host, 0.0), each.step_joules or 0.0)
        wholes[host] = max(wholes.get(host, 0.0), each.joules)
    return (sum(steps.values()), sum(wholes.values())) if costs else (None, None)


def _unfinished(meters: Meters, took: Instant, wire_bytes: int) -> Costs:
    """What a round has cost that did not come together; nothing where costs are simulated."""
    nothing = np.zeros(len(meters.budget.limits))
    if meters.time.source == "simulated":
        return Costs(nothing, nothing)
    trip = RoundTrip(1, 0, wire_bytes, 0.0, took.seconds, 0.0, took.cpu)
    return Costs(nothing, meters.read(trip).aggregation)


def _with_absent(aggregator: Aggregator, collected: CollectedRound) -> Round:
    """The round's record, with who was asked and is not in the average."""
    last = aggregator.last
    assert last is not None
    left_out = tuple(sorted({*last.left_out, *collected.not_finite}))
    return replace(last, missed=collected.missed, left_out=left_out)
