"""The network engine: runs rounds between the aggregator and nodes on other machines.

The transport is a gRPC server, Flower's grid, or anything else that implements
`RemoteNodes`.

- The clock never stops: a time budget is wall time from the first broadcast to the end.
  Records, checkpoints and local evaluation happen while nodes work on the next round. A run
  may be a few rounds ahead of its disk (runs/checkpoint.py). Nodes remember these rounds,
  and an aggregator that crashed repeats them.
- With `participation` below 1, nodes are drawn as in a simulated run, so that both produce
  the same bits. The draw depends only on the round's number, so that a resumed run asks the
  same nodes. Nodes that join after the first round are always asked.
- With `compress` auto, the number of bits is chosen once, in the first rounds. With a
  byte budget it is 8 bits: the budget buys three to four times the rounds. Otherwise it is
  the choice that shortens rounds:
  - All rounds start with 32 bits. The transfer time of a node is the time from request to
    answer without the node's work; the minimum over some rounds excludes busy moments.
  - If every line is fast, 32 bits stay, and w has the same bits as in one process.
  - If one line is slow, by bandwidth or by latency, some rounds use 8 bits. These stay if
    they shorten rounds, without local updates, by a tenth.
  - Fewer than 8 bits are not tried: if nodes have different labels, they lose more than
    they save. With simulated time, nothing is measured and nothing is tried.
"""

import logging
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import numpy as np

from fedbudget.arrays import Flags
from fedbudget.budget.budget import Costs
from fedbudget.engines.engine import (
    Condition,
    Engine,
    Observer,
    Pay,
    Save,
    no_payment,
    settle,
)
from fedbudget.engines.remote.members import Counters
from fedbudget.engines.remote.messages import Farewell
from fedbudget.engines.remote.round import CollectedRound
from fedbudget.evaluation.points import EvaluationPoints, share_of
from fedbudget.node_status import NodeStatus
from fedbudget.protocol.aggregator import Aggregator, Outcome, Round
from fedbudget.protocol.combine import FEWEST
from fedbudget.protocol.compression import BroadcastCompressor, Kind
from fedbudget.protocol.messages import Broadcast
from fedbudget.protocol.state import AggregatorState
from fedbudget.protocol.workload import NodeTimes
from fedbudget.resources import TIME, round_usage
from fedbudget.resources.counters import Snapshot
from fedbudget.resources.meters import Meters
from fedbudget.resources.resource import Usage

TRIED = 3
"""Rounds with each number of bits, before the choice."""
LEAST_GAIN = 0.1
"""Fraction of a round's time that 8 bits must save."""
QUICK = 0.02
"""Maximum transfer time of a fast line in seconds, including delays of a busy machine."""
FAST = 12.5e6
"""Minimum bandwidth of a fast line in bytes per second."""
LARGE = 2**16
"""Parameters; for smaller models, summing all reports at once is quicker. Same bits."""

_LOG = logging.getLogger("fedbudget.network")

# A deadline is _TIMES the expected time of a round, and at least this many seconds.
_PATIENCE = 3.0
_FIRST_PATIENCE = 30.0
_TIMES = 4.0
_SLOWEST = 10.0  # times the members' median: the longest wait that a deadline considers
_OFTEN = 10  # rounds with a shortened update, until a warning
_WARMING_UP = 3  # rounds until the time of a round is known
_SLOW_LINE = 250e3  # bytes per second, assumed until then


class RemoteNodes(Protocol):
    """A transport: asks nodes on other machines and collects their answers."""

    counters: Counters

    @property
    def error(self) -> str:
        """Why no further round is possible; empty if one is."""

    def lost(self, coming: int) -> list[int]:
        """Numbers of nodes whose drift state is lost before round `coming`, each once."""

    def begin(
        self,
        broadcast: Broadcast,
        *,
        least: int,
        timeout: float,
        left: float,
        needs_reports: bool = True,
        resting: Collection[int] = (),
    ) -> None:
        """Send a broadcast to all idle nodes.

        Args:
          least: minimum number of nodes that must report.
          timeout: seconds until missing nodes are left out.
          left: seconds until the round ends in any case.
          needs_reports: whether every report is needed; otherwise reports may be summed on
            arrival.
          resting: numbers of nodes that are not asked unless the others are too few.
        """

    def finish(self) -> CollectedRound:
        """Wait until the round is over."""

    def wake(self) -> None:
        """Stop waiting; from any thread."""

    def node_statuses(self) -> list[NodeStatus]:
        """Status of all nodes, in the order of their numbers; from any thread."""

    def close(self, farewell: Farewell) -> None:
        """Dismiss all nodes."""

    def state(self) -> Mapping[str, Any] | None:
        """State for a checkpoint; None if a run with this transport cannot be resumed."""


class Participation:
    """Random choice of the nodes of each round.

    Args:
      draw: returns an iterator over attendance, from the first round on.
    """

    def __init__(self, draw: Callable[[], Iterator[Flags]]) -> None:
        self._draw = draw
        self._drawn = draw()
        self._rounds = 0  # number of rounds drawn so far
        self._resting: frozenset[int] = frozenset()

    def resting(self, number: int) -> frozenset[int]:
        """Numbers of nodes that are not asked in round `number`."""
        if number < self._rounds:
            self._drawn = self._draw()
            self._rounds = 0
        while self._rounds < number:
            present = next(self._drawn)
            self._rounds += 1
            if self._rounds == number:
                self._resting = frozenset(np.flatnonzero(~present).tolist())
        return self._resting


@dataclass
class CompressionChoice:
    """Chooses the number of bits of a compressor.

    Args:
      compressor: of the coming broadcasts.
      parameters: number of parameters of the model.
      tries: whether the choice is still open.
    """

    compressor: BroadcastCompressor
    parameters: int
    tries: bool
    _lines: dict[int, float] = field(default_factory=dict)
    _rests: dict[Kind, list[float]] = field(
        default_factory=lambda: {"none": [], "8-bit": []}
    )
    _wholes: list[float] = field(default_factory=list)

    @classmethod
    def first(
        cls,
        compressor: BroadcastCompressor,
        parameters: int,
        *,
        budgeted: bool,
        measured: bool,
    ) -> "CompressionChoice":
        """Start before the first round.

        Args:
          budgeted: whether bytes are budgeted.
          measured: whether time is measured, not simulated.
        """
        compressor.kind = "8-bit" if budgeted else "none"
        return cls(compressor, parameters, measured and not budgeted)

    def add(self, lines: Mapping[int, float], rest: float, whole: float) -> None:
        """Add the times of a round, and set the bits of the next.

        Args:
          lines: transfer time of a node's messages in seconds, by node number.
          rest: seconds of the round without local updates.
          whole: seconds of the round.
        """
        if not self.tries:
            return
        kind = self.compressor.kind
        self._rests[kind].append(rest)
        if kind == "none":
            self._wholes.append(whole)
            for node, seconds in lines.items():
                self._lines[node] = min(seconds, self._lines.get(node, math.inf))
        if len(self._rests[kind]) < TRIED:
            return
        least_gain = LEAST_GAIN * statistics.median(self._wholes)
        if kind == "none" and self._slowest_line > least_gain:
            self.compressor.kind = "8-bit"
            return
        self.tries = False
        if kind != "none":
            before = statistics.median(self._rests["none"])
            after = statistics.median(self._rests["8-bit"])
            if before - after < least_gain:
                self.compressor.kind = "none"

    @property
    def _slowest_line(self) -> float:
        """Transfer time of the slowest line in seconds; 0 if all are fast."""
        slowest = max(self._lines.values(), default=0.0)
        # A round sends w both ways, with four bytes per number.
        return slowest if slowest > max(QUICK, 8 * self.parameters / FAST) else 0.0


@dataclass(eq=False)
class RemoteEngine(Engine):
    """Runs rounds with nodes on other machines.

    Args:
      least: minimum number of nodes of a round.
      timeout: seconds until missing nodes are left out; None to derive it from past rounds.
      trial: usage of a round with one update at the slowest node, before the first round.
      points: when nodes evaluate w on their test samples; None for never.
      evaluation_seconds: time of an evaluation at the slowest node, before the first round.
      compression: chooses the compression of vectors, if that is left open.
      participation: chooses the nodes of each round; None for all.
    """

    checkpoint_interval: ClassVar[float] = 0.0
    aggregator: Aggregator
    nodes: RemoteNodes
    meters: Meters
    least: int
    timeout: float | None
    trial: Usage
    points: EvaluationPoints | None = None
    evaluation_seconds: float = 0.0
    compression: CompressionChoice | None = None
    participation: Participation | None = None

    def __post_init__(self) -> None:
        self._shortened: Counter[int] = Counter()  # shortened updates by node number

    def run(
        self,
        *,
        observe: Observer,
        interrupted: Condition = lambda: False,
        save: Save = lambda: None,
        pay: Pay = no_payment,
    ) -> Outcome:
        outcome = self._run_rounds(
            observe, lambda: interrupted() or bool(self.nodes.error), save, pay
        )
        reason = "the aggregator was interrupted" if interrupted() else "the run is over"
        self.nodes.close(Farewell(reason))
        return outcome

    def wake(self) -> None:
        self.nodes.wake()

    def node_statuses(self) -> list[NodeStatus]:
        return self.nodes.node_statuses()

    def traffic(self) -> Mapping[str, int]:
        return vars(self.nodes.counters).copy()

    def state(self) -> tuple[AggregatorState[Any, Any], Mapping[str, Any]] | None:
        nodes = self.nodes.state()
        if nodes is None:
            return None
        own = {
            "engine": "network",
            "meters": self.meters.state(),
            "counters": self.traffic(),
        }
        return self.aggregator.state, {**nodes, **own}

    def _run_rounds(
        self, observe: Observer, interrupted: Condition, save: Save, pay: Pay
    ) -> Outcome:
        aggregator = self.aggregator
        meters = self.meters
        counters = self.nodes.counters
        clock = _Clock(meters, self.timeout, self.trial, self.evaluation_seconds)
        message = aggregator.pending or aggregator.outcome or aggregator.start()
        settle(aggregator, pay)
        last: tuple[Round, Broadcast] | None = None
        read = meters.counters().read
        began = read()
        bytes_before = counters.wire_bytes
        while isinstance(message, Broadcast):
            lost = self.nodes.lost(message.round)
            broadcast = self._with_evaluation(aggregator.forget(lost) if lost else message)
            elapsed = read()[TIME.name] - began[TIME.name]
            self._begin(broadcast, clock, elapsed)
            if last is not None:
                observe(*last)
            collected = self.nodes.finish()

            now = read()
            used = now - began
            wire_bytes = counters.wire_bytes - bytes_before
            if interrupted() or not collected.enough:
                costs = _unfinished(meters, used, wire_bytes)
                if not interrupted():
                    return aggregator.give_up(costs, "time")
                aggregator.charge(costs)
                save()
                return aggregator.interrupt()
            began = now
            bytes_before += wire_bytes
            message = self._receive(broadcast, collected, clock, used, wire_bytes)
            settle(aggregator, pay)
            last = _completed(aggregator, collected, broadcast), broadcast
            self._warn_shortened(last[0].shortened)
        if last is not None:
            observe(*last)
        return message

    def _begin(self, broadcast: Broadcast, clock: "_Clock", elapsed: float) -> None:
        aggregator = self.aggregator
        resting: Collection[int] = ()
        if self.participation is not None:
            resting = self.participation.resting(broadcast.round)
        self.nodes.begin(
            broadcast,
            least=self.least,
            timeout=clock.deadline(broadcast),
            left=clock.left(aggregator, broadcast, elapsed),
            needs_reports=aggregator.method.needs_reports or broadcast.w.size < LARGE,
            resting=resting,
        )

    def _receive(
        self,
        broadcast: Broadcast,
        collected: CollectedRound,
        clock: "_Clock",
        used: Snapshot,
        wire_bytes: int,
    ) -> Broadcast | Outcome:
        """Charge a complete round, and pass its reports to the aggregator."""
        meters = self.meters
        measured = meters.time.source == "measured"
        times = collected.times(broadcast)
        simulated = meters.step_times(times.nodes)
        if simulated is not None:
            times = NodeTimes(times.nodes, simulated)
        tau = max(1, broadcast.tau)
        usage, evaluation = collected.usage(tau, used, wire_bytes)
        if meters.speeds is not None:
            updates = broadcast.updates(times.nodes)
            usage = replace(usage, slowness=meters.slowness(times.nodes, updates, tau))
        clock.add(usage, [answer.waited for answer in collected.answers])
        if evaluation is not None and measured:
            self._charge_evaluation(meters.expect(evaluation))
        charged = meters.read(usage)
        if self.compression is not None and not collected.missed:
            rest = usage.seconds - usage.updates * usage.step_seconds
            self.compression.add(collected.line_seconds, rest, usage.seconds)

        known = broadcast.tau > 0 and (simulated is not None or measured)
        # A wait for missing nodes is no usual cost: they are not asked again soon.
        return self.aggregator.receive(
            collected.reports,
            charged,
            usual=not collected.missed,
            times=times if known else None,
        )

    def _warn_shortened(self, numbers: Sequence[int]) -> None:
        """Warn once about each node whose updates are shortened often.

        Any node's update may be shortened now and then when little is left to learn.
        """
        self._shortened.update(numbers)
        new = {number for number in numbers if self._shortened[number] == _OFTEN}
        for node in self.nodes.node_statuses() if new else ():
            if new & set(node.numbers):
                _LOG.warning(
                    "%s's updates are far longer than those of most, and are cut to length",
                    node.name,
                )

    def _with_evaluation(self, broadcast: Broadcast) -> Broadcast:
        """Request an evaluation of w if one is due and the budget covers it."""
        points = self.points
        if points is None:
            return broadcast
        ledger = self.aggregator.ledger
        spending = self.aggregator.method.spending
        expected = ledger.budget.amounts(**spending.evaluation)
        if broadcast.tau > 0:
            needed = spending.reserve(ledger, broadcast.tau) + expected
            if not points.due(ledger.share) or not ledger.fits(needed):
                return broadcast
            self.points = points.after(ledger.share, share_of(expected, ledger))
        return replace(broadcast, evaluate=True)

    def _charge_evaluation(self, costs: Costs) -> None:
        """Charge an evaluation in addition to the round; its costs delay the next one."""
        self.aggregator.charge(costs)
        if self.points is not None:
            ledger = self.aggregator.ledger
            share = share_of(costs.aggregation, ledger)
            self.points = self.points.after(ledger.share, share)


class _Clock:
    """Time limits of a round."""

    def __init__(
        self,
        meters: Meters,
        timeout: float | None,
        trial: Usage,
        evaluation: float = 0.0,
    ) -> None:
        self._timeout = timeout
        self._evaluation = evaluation
        self._trial = trial
        self._limit: float | None = None
        if meters.time.source == "measured":
            self._limit = meters.budget.limits.get("time")
        self._steps: deque[float] = deque(maxlen=9)
        self._rests: deque[float] = deque(maxlen=9)

    def add(self, usage: Usage, waited: Sequence[float] = ()) -> None:
        """Add the time of a round.

        Args:
          waited: seconds until each member's answer. A round counts for at most a multiple
            of their median: otherwise a member that always answers at the last moment
            would extend every deadline.
        """
        step = usage.step_seconds
        rest = usage.seconds - usage.updates * usage.step_seconds
        most = _SLOWEST * statistics.median(waited) if len(waited) >= FEWEST else 0.0
        if most > 0:
            step = min(step, most / usage.updates)
            rest = min(rest, most)
        self._steps.append(step)
        self._rests.append(rest)

    def deadline(self, broadcast: Broadcast) -> float:
        """Seconds until missing nodes are left out."""
        if self._timeout is not None:
            return self._timeout
        updates = max(1, broadcast.tau)
        evaluation = broadcast.tallies * self._evaluation
        if len(self._steps) < _WARMING_UP:
            computing = self._trial.seconds + (updates - 1) * self._trial.step_seconds
            usual = computing + 12 * broadcast.w.size / _SLOW_LINE
            return max(_FIRST_PATIENCE, _TIMES * (usual + evaluation))
        usual = updates * statistics.median(self._steps) + statistics.median(self._rests)
        return max(_PATIENCE, _TIMES * (usual + evaluation))

    def left(self, aggregator: Aggregator, broadcast: Broadcast, elapsed: float) -> float:
        """Seconds until a round must close so that the final loss fits a time budget."""
        if self._limit is None:
            return float("inf")
        ledger = aggregator.ledger
        spending = aggregator.method.spending
        reserve = spending.final_reserve(ledger)
        kept = spending.closing
        if broadcast.tau > 0 and reserve is not None:
            kept += ledger.budget.label(reserve)["time"]
        spent = ledger.budget.label(ledger.spent)["time"]
        return max(0.0, (1 + spending.overtime) * self._limit - kept - spent - elapsed)


def _unfinished(meters: Meters, used: Snapshot, wire_bytes: int) -> Costs:
    """Costs of a round that did not complete; zero if costs are simulated."""
    zero = np.zeros(len(meters.budget.limits))
    if meters.time.source == "simulated":
        return Costs(zero, zero)
    usage = round_usage([], own=used, wire_bytes=wire_bytes)
    return Costs(zero, meters.read(usage).aggregation)


def _completed(
    aggregator: Aggregator, collected: CollectedRound, broadcast: Broadcast
) -> Round:
    """The round's record with missing nodes, left-out nodes and the evaluation."""
    last = aggregator.last
    assert last is not None
    evaluation = collected.evaluation(broadcast)
    if not collected.missed and not collected.not_finite and evaluation is None:
        return last
    left_out = tuple(sorted({*last.left_out, *collected.not_finite}))
    return replace(last, missed=collected.missed, left_out=left_out, evaluation=evaluation)
