"""Which nodes are asked in which round, where only a part of them is in each (`--participation`).

They are drawn as in a simulated run, so that both are the same to the bit; and by the round's number alone, so that a
run that goes on asks whom it would have asked. Nodes that come later than the first are always asked.

How many bits vectors are sent with, where a person leaves that open (auto): decided once, in the first rounds.

Where bytes are budgeted it is 8 bits, with which a budget buys three to four times the rounds. Otherwise it is what
makes rounds shorter. All begin with 32 bits. How long a node's messages were on the line is the time from asking it to
its answer, less what it has worked; the shortest of some rounds is the line's, and not that of a machine that was busy
for a moment. Where all nodes' lines are quick, there is nothing to gain: 32 bits stay, and w is the same to the bit as
in one process. Where one is slow, be it because it carries few bytes a second or because it is long, which cannot be
told apart by that, some rounds are made with 8 bits, and these stay if rounds are a tenth shorter by them, local
updates aside. Fewer than 8 are not tried: where nodes have labels of their own they lose more than they save. Where
time is simulated no line is measured, and nothing is tried.

The network engine: carries messages between the aggregator and nodes on other machines, and reads the meters.

What is between them is a gRPC server, or anything else that can ask nodes and gather what they answer, such as
Flower's grid.

The clock never stops: a time budget is wall time, from the first broadcast to the end. What there is to do between two
rounds (records, checkpoint, test samples that are here) is done while the nodes are at work on the next. A run may be
some rounds ahead of its disk (runs/checkpoint_writer.py): nodes remember as many, and an aggregator that has crashed
makes them again.
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
from fedbudget.engines.engine import Condition, Engine, Observer, Save
from fedbudget.engines.remote.members import Counters
from fedbudget.engines.remote.messages import Farewell
from fedbudget.engines.remote.round import CollectedRound, RoundCosts
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
from fedbudget.resources.resource import RoundUsage


class Participation:
    """Who is asked.

    Args:
      draw: gives who takes part, from the first round on.
    """

    def __init__(self, draw: Callable[[], Iterator[Flags]]) -> None:
        self._draw = draw
        self._drawn = draw()
        self._rounds = 0  # that were drawn
        self._resting: frozenset[int] = frozenset()

    def resting(self, number: int) -> frozenset[int]:
        """The numbers of nodes that are not asked in this round."""
        if number < self._rounds:
            self._drawn = self._draw()
            self._rounds = 0
        while self._rounds < number:
            here, self._rounds = next(self._drawn), self._rounds + 1
            if self._rounds == number:
                self._resting = frozenset(np.flatnonzero(~here).tolist())
        return self._resting


TRIED = 3
"""Rounds that are made each way."""
LEAST_GAIN = 0.1
"""Of a round's time, that 8 bits must save."""
QUICK = 0.02
"""Seconds that messages take at most on a line that is not worth a trial, with what a busy machine adds to them."""
FAST = 12.5e6
"""And bytes a second that such a line carries at least."""


@dataclass
class CompressionChoice:
    """Decides for a compressor.

    Args:
      compressor: that the coming broadcasts are made with.
      parameters: of the model.
      tries: whether it is still open.
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
        """Before the first round.

        Args:
          budgeted: whether bytes are.
          measured: whether time is, and not simulated.
        """
        compressor.kind = "8-bit" if budgeted else "none"
        return cls(compressor, parameters, measured and not budgeted)

    def add(self, lines: Mapping[int, float], rest: float, whole: float) -> None:
        """A round that was made with what was chosen last.

        Args:
          lines: seconds that messages to a node and back were on the line, by a number of it.
          rest: seconds that the round took besides local updates.
          whole: seconds that it took.
        """
        if not self.tries:
            return
        kind = self.compressor.kind
        self._rests[kind].append(rest)
        if kind == "none":
            self._wholes.append(whole)
            self._lines |= {
                node: min(seconds, self._lines.get(node, math.inf))
                for node, seconds in lines.items()
            }
        if len(self._rests[kind]) < TRIED:
            return
        if kind == "none" and self._slowest_line > LEAST_GAIN * statistics.median(
            self._wholes
        ):
            self.compressor.kind = "8-bit"
            return
        self.tries = False
        if kind != "none":
            saved = statistics.median(self._rests["none"]) - statistics.median(
                self._rests["8-bit"]
            )
            if saved < LEAST_GAIN * statistics.median(self._wholes):
                self.compressor.kind = "none"

    @property
    def _slowest_line(self) -> float:
        """Seconds that messages take on it; 0 where all are quick."""
        slowest = max(self._lines.values(), default=0.0)
        # What a round sends is w, both ways, of four bytes a number.
        return slowest if slowest > max(QUICK, 8 * self.parameters / FAST) else 0.0


_LOG = logging.getLogger("fedbudget.api")

# A deadline: so many seconds, at least, and so many times what a round should take.
_PATIENCE = 3.0
_FIRST_PATIENCE = 30.0
_TIMES = 4.0
_SLOWEST = 10.0  # times the median of members is what one is waited for
_OFTEN = 10  # rounds in which a node's update was cut, until it is told
_WARMING_UP = 3  # rounds until it is known what one takes
_SLOW_LINE = 250e3  # bytes a second that a node is thought to have until then
LARGE = 2**16
"""Parameters; below, reports are added up all at once, which is quicker, and the same bits."""


class RemoteNodes(Protocol):
    """Whoever asks nodes on other machines, and gathers what they answer."""

    counters: Counters

    @property
    def error(self) -> str:
        """Why there can be no more rounds, once that is so."""

    def lost(self, coming: int) -> list[int]:
        """Numbers of nodes whose knowledge of drift is lost, as of the round to come; each is given once."""

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
        """Sends a broadcast to all that are idle.

        Args:
          least: how many nodes must report.
          timeout: seconds until those that have not are left out.
          left: seconds until the round ends whatever it has.
          needs_reports: whether every report is needed; where not, they may be added up as they come.
          resting: numbers of nodes that are not asked, unless the others are too few.
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


@dataclass(eq=False)
class RemoteEngine(Engine):
    """Makes a run with nodes on other machines.

    Args:
      least: the fewest nodes to make a round with.
      timeout: seconds until nodes that have not reported are left out; from what rounds took when not given.
      trial: what a round of one update took at the slowest node, before the first.
      points: when nodes that have test samples are asked to evaluate w; None for never.
      evaluation_seconds: what that took at the slowest node, before the first round.
      compression: decides how vectors are sent, where that is left open.
      participation: who is asked, where not all are.
    """

    checkpoint_interval: ClassVar[float] = 0.0
    aggregator: Aggregator
    nodes: RemoteNodes
    meters: Meters
    least: int
    timeout: float | None
    trial: RoundUsage
    points: EvaluationPoints | None = None
    evaluation_seconds: float = 0.0
    compression: CompressionChoice | None = None
    participation: Participation | None = None

    def __post_init__(self) -> None:
        self._shortened: Counter[int] = Counter()  # how often, by nodes' numbers

    def run(
        self,
        *,
        observe: Observer,
        interrupted: Condition = lambda: False,
        save: Save = lambda: None,
    ) -> Outcome:
        outcome = self._run_rounds(
            observe, lambda: interrupted() or bool(self.nodes.error), save
        )
        self.nodes.close(
            Farewell(
                "the aggregator was interrupted" if interrupted() else "the run is over"
            )
        )
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

    def _run_rounds(self, observe: Observer, interrupted: Condition, save: Save) -> Outcome:
        aggregator = self.aggregator
        nodes = self.nodes
        meters = self.meters
        counters = self.nodes.counters
        clock = _Clock(meters, self.timeout, self.trial, self.evaluation_seconds)
        message = aggregator.pending or aggregator.outcome or aggregator.start()
        last: tuple[Round, Broadcast] | None = None
        read = meters.counters().read
        began = read()
        bytes_before = counters.wire_bytes
        while isinstance(message, Broadcast):
            lost = nodes.lost(message.round)
            broadcast = self._asking(aggregator.forget(lost) if lost else message)
            left = clock.left(aggregator, broadcast, read()[TIME.name] - began[TIME.name])
            needs_reports = aggregator.method.needs_reports or broadcast.w.size < LARGE
            timeout = clock.deadline(broadcast)
            resting = (
                ()
                if self.participation is None
                else self.participation.resting(broadcast.round)
            )
            options: Any = {
                "timeout": timeout,
                "left": left,
                "needs_reports": needs_reports,
            }
            nodes.begin(broadcast, least=self.least, resting=resting, **options)
            if last is not None:
                observe(*last)
            collected = nodes.finish()
            now = read()
            bytes_now = counters.wire_bytes
            if interrupted() or not collected.enough:
                costs = _unfinished(meters, now - began, bytes_now - bytes_before)
                if not interrupted():
                    return aggregator.give_up(costs, "time")
                aggregator.charge(costs)
                save()
                return aggregator.interrupt()
            took = RoundCosts.of(collected.answers, now - began, bytes_now - bytes_before)
            began = now
            bytes_before = bytes_now
            times = collected.times(broadcast)
            if (simulated := meters.step_times(times.nodes)) is not None:
                times = NodeTimes(times.nodes, simulated)
            usage = self._usage(broadcast, took, times)
            clock.add(usage, [answer.waited for answer in collected.answers])
            if took.evaluated and meters.time.source == "measured":
                self._charge_evaluation(meters.expect(took.evaluation_usage()))
            costs = meters.read(usage)
            if self.compression is not None and not collected.missed:
                rest = usage.seconds - usage.updates * usage.step_seconds
                self.compression.add(collected.line_seconds, rest, usage.seconds)
            usual = (
                not collected.missed
            )  # who did not answer was waited for, and is not asked again so soon
            known = broadcast.tau > 0 and (
                simulated is not None or meters.time.source == "measured"
            )
            message = aggregator.receive(
                collected.reports, costs, usual=usual, times=times if known else None
            )
            last = _completed(aggregator, collected, broadcast), broadcast
            self._tell_shortened(last[0].shortened)
        if last is not None:
            observe(*last)
        return message

    def _tell_shortened(self, numbers: Sequence[int]) -> None:
        """Says whose updates are cut again and again, once of each; any node's may be, when little is left to learn."""
        self._shortened.update(numbers)
        new = {number for number in numbers if self._shortened[number] == _OFTEN}
        for node in self.nodes.node_statuses() if new else ():
            if new & set(node.numbers):
                _LOG.warning(
                    "%s's updates are far longer than those of most, and are cut to length",
                    node.name,
                )

    def _usage(
        self, broadcast: Broadcast, took: RoundCosts, times: NodeTimes
    ) -> RoundUsage:
        """What a round took, with the time of the slowest node where that is simulated."""
        tau = max(1, broadcast.tau)
        if self.meters.speeds is None:
            return took.usage(tau)
        slowness = self.meters.slowness(times.nodes, broadcast.updates(times.nodes), tau)
        return replace(took.usage(tau), slowness=slowness)

    def _asking(self, broadcast: Broadcast) -> Broadcast:
        """The broadcast, with which nodes are asked to evaluate w where it is time for it, and the budget bears it."""
        points = self.points
        aggregator = self.aggregator
        if points is None:
            return broadcast
        ledger = aggregator.ledger
        spending = aggregator.method.spending
        expected = ledger.budget.amounts(**spending.evaluation)
        if broadcast.tau > 0:
            if not points.due(ledger.share) or not ledger.fits(
                spending.room(ledger, broadcast.tau) + expected
            ):
                return broadcast
            self.points = points.after(ledger.share, share_of(expected, ledger))
        return replace(broadcast, evaluate=True)

    def _charge_evaluation(self, costs: Costs) -> None:
        """What it took, besides the round; the next is as far away as its costs ask for."""
        aggregator = self.aggregator
        aggregator.charge(costs)
        if self.points is not None:
            ledger = aggregator.ledger
            self.points = self.points.after(
                ledger.share, share_of(costs.aggregation, ledger)
            )


class _Clock:
    """How long a round may take."""

    def __init__(
        self,
        meters: Meters,
        timeout: float | None,
        trial: RoundUsage,
        evaluation: float = 0.0,
    ) -> None:
        self._timeout = timeout
        self._evaluation = evaluation
        self._trial = trial
        self._limit = (
            meters.budget.limits.get("time") if meters.time.source == "measured" else None
        )
        self._steps: deque[float] = deque(maxlen=9)
        self._rests: deque[float] = deque(maxlen=9)

    def add(self, usage: RoundUsage, waited: Sequence[float] = ()) -> None:
        """What a round took.

        Args:
          waited: for each member's answer. One that always comes at the last moment would put off every deadline more,
            so that a round counts for no more than a multiple of what most took.
        """
        step = usage.step_seconds
        rest = usage.seconds - usage.updates * usage.step_seconds
        if len(waited) >= FEWEST and (usual := _SLOWEST * statistics.median(waited)) > 0:
            step, rest = min(step, usual / usage.updates), min(rest, usual)
        self._steps.append(step)
        self._rests.append(rest)

    def deadline(self, broadcast: Broadcast) -> float:
        """Seconds until nodes that have not reported are left out."""
        if self._timeout is not None:
            return self._timeout
        updates = max(1, broadcast.tau)
        evaluation = broadcast.tallies * self._evaluation
        if len(self._steps) < _WARMING_UP:
            usual = (
                self._trial.seconds
                + (updates - 1) * self._trial.step_seconds
                + 12 * broadcast.w.size / _SLOW_LINE
            )
            return max(_FIRST_PATIENCE, _TIMES * (usual + evaluation))
        usual = updates * statistics.median(self._steps) + statistics.median(self._rests)
        return max(_PATIENCE, _TIMES * (usual + evaluation))

    def left(self, aggregator: Aggregator, broadcast: Broadcast, already: float) -> float:
        """Seconds until a round must be closed with what it has, if the final loss is to fit into a time budget."""
        if self._limit is None:
            return float("inf")
        ledger = aggregator.ledger
        spending = aggregator.method.spending
        room = spending.final_room(ledger)
        kept = spending.closing
        if broadcast.tau > 0 and room is not None:
            kept += ledger.budget.label(room)["time"]
        spent = ledger.budget.label(ledger.spent)["time"]
        return max(0.0, (1 + spending.overtime) * self._limit - kept - spent - already)


def _unfinished(meters: Meters, took: Snapshot, wire_bytes: int) -> Costs:
    """What a round has cost that did not come together; nothing where costs are simulated."""
    nothing = np.zeros(len(meters.budget.limits))
    if meters.time.source == "simulated":
        return Costs(nothing, nothing)
    return Costs(
        nothing, meters.read(round_usage([], own=took, wire_bytes=wire_bytes)).aggregation
    )


def _completed(
    aggregator: Aggregator, collected: CollectedRound, broadcast: Broadcast
) -> Round:
    """The round's record, with who was asked and is not in the average, and what test samples say."""
    last = aggregator.last
    assert last is not None
    evaluation = collected.evaluation(broadcast)
    if not collected.missed and not collected.not_finite and evaluation is None:
        return last
    left_out = tuple(sorted({*last.left_out, *collected.not_finite}))
    return replace(last, missed=collected.missed, left_out=left_out, evaluation=evaluation)
