"""Choices for rounds with nodes on other machines: deadlines, evaluations, participation
and compression.

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

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedbudget.arrays import Flags
from fedbudget.engines.engine import Collected, RoundTerms
from fedbudget.engines.remote.round import RemoteNodes
from fedbudget.engines.remote.slow_nodes import SlowNodes
from fedbudget.evaluation.points import EvaluationPoints, share_of
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.compression import BroadcastCompressor
from fedbudget.protocol.messages import Broadcast, FinalRound, Kind, TrainRound
from fedbudget.protocol.outliers import FEWEST
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

# A deadline is _TIMES the expected time of a round, and at least this many seconds.
_PATIENCE = 3.0
_FIRST_PATIENCE = 30.0
_TIMES = 4.0
_SLOWEST = 10.0  # times the members' median: the longest wait that a deadline considers
_WARMING_UP = 3  # rounds until the time of a round is known
_SLOW_LINE = 250e3  # bytes per second, assumed until then


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
        """Add the times of a round, and set the bits of the next, while `tries`.

        Args:
          lines: transfer time of a node's messages in seconds, by node number.
          rest: seconds of the round without local updates.
          whole: seconds of the round.
        """
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
class RemotePolicy:
    """Choices for nodes on other machines.

    Args:
      least: minimum number of nodes of a round.
      points: when nodes evaluate w on their test samples; None for never.
      compression: chooses the compression of vectors, if that is left open.
      participation: chooses the nodes of each round; None for all.
      slow: leaves out members that keep the others waiting; None for none.
    """

    nodes: RemoteNodes
    meters: Meters
    least: int
    deadlines: "Deadlines"
    points: EvaluationPoints | None = None
    compression: CompressionChoice | None = None
    participation: Participation | None = None
    slow: SlowNodes | None = None

    def __post_init__(self) -> None:
        self._began: float | None = None  # the last round was complete

    def announce(
        self, aggregator: Aggregator, broadcast: Broadcast
    ) -> tuple[Broadcast, RoundTerms]:
        lost = self.nodes.lost(broadcast.round)
        if lost:
            broadcast = aggregator.forget(lost)
        if self.points is not None:
            broadcast = self._with_evaluation(aggregator, broadcast, self.points)
        resting: Collection[int] = ()
        if self.participation is not None:
            resting = self.participation.resting(broadcast.round)
        if self.slow is not None and isinstance(broadcast, TrainRound):
            resting = self.slow.resting(broadcast.round).union(resting)
        elapsed = 0.0 if self._began is None else time.perf_counter() - self._began
        terms = RoundTerms(
            self.least,
            self.deadlines.timeout(broadcast),
            self.deadlines.left(aggregator, broadcast, elapsed),
            aggregator.method.needs_reports or broadcast.w.size < LARGE,
            resting,
        )
        return broadcast, terms

    def _with_evaluation(
        self, aggregator: Aggregator, broadcast: Broadcast, points: EvaluationPoints
    ) -> Broadcast:
        """Request an evaluation of w if one is due and the budget covers it."""
        ledger = aggregator.ledger
        spending = aggregator.method.spending
        expected = ledger.budget.amounts(**spending.evaluation)
        if not isinstance(broadcast, FinalRound):
            needed = spending.reserve(ledger, broadcast.steps) + expected
            if not points.due(ledger.share) or not ledger.fits(needed):
                return broadcast
            self.points = points.after(ledger.share, share_of(expected, ledger))
        return replace(broadcast, evaluate=True)

    def learn(
        self,
        aggregator: Aggregator,
        collected: Collected,
        usage: Usage,
        evaluation: Usage | None,
    ) -> None:
        self._began = time.perf_counter()
        self.deadlines.add(usage, list(collected.waited.values()))
        if self.slow is not None and isinstance(aggregator.pending, TrainRound):
            number = aggregator.pending.round
            self.slow.add(number, collected.waited, collected.missed)
        if evaluation is not None and self.meters.time.source == "measured":
            # Charged in addition to the round; its costs delay the next evaluation.
            costs = self.meters.expect(evaluation)
            aggregator.charge(costs)
            if self.points is not None:
                ledger = aggregator.ledger
                share = share_of(costs.aggregation, ledger)
                self.points = self.points.after(ledger.share, share)
        if self.compression is not None and self.compression.tries and not collected.missed:
            rest = usage.seconds - usage.updates * usage.step_seconds
            self.compression.add(collected.line_seconds, rest, usage.seconds)


class Deadlines:
    """Time limits of rounds.

    Args:
      timeout: seconds until missing nodes are left out; None to derive it from past rounds.
      trial: usage of a round with one update at the slowest node, before the first round.
      evaluation: time of an evaluation at the slowest node.
    """

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

    def timeout(self, broadcast: Broadcast) -> float:
        """Seconds until missing nodes are left out."""
        if self._timeout is not None:
            return self._timeout
        updates = broadcast.steps
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
        if reserve is not None and not isinstance(broadcast, FinalRound):
            kept += ledger.budget.label(reserve)["time"]
        spent = ledger.budget.label(ledger.spent)["time"]
        return max(0.0, (1 + spending.overtime) * self._limit - kept - spent - elapsed)
