"""The loop over rounds, the nodes that it needs, and the handling of Ctrl-C and SIGTERM.

`RoundEngine` has the only loop over rounds. In-process fleets, Ray, gRPC and Flower
implement `Nodes`. The baselines are engines of their own (baselines.py).

Rules of the loop:

- The privacy payment of a round is on disk before its result is sent or observed. A second
  answer of a restarted node to the same round is paid for too (`SecondAnswers`).
- A round is observed after the next one has begun. Nodes on other machines work
  meanwhile, and the clock never stops: a time budget is wall time from the first broadcast
  to the end. Simulated nodes begin to work only when the loop waits for them, so their
  clock stops while a round is observed.
- An interrupted run ends between two rounds of simulated nodes. Nodes on other machines
  are interrupted in their round, which is charged as far as it got.

launch/ prepares an engine, and it runs once. All methods of an engine except `run` may be
called at any time and from any thread.
"""

import logging
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, ClassVar, Protocol

import numpy as np

from fedbudget.arrays import Float32, Int64
from fedbudget.budget.budget import Costs
from fedbudget.evaluation.points import NodeEvaluation
from fedbudget.node_status import NodeStatus
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.feature import NodeTimes
from fedbudget.protocol.features.workload import updates_of
from fedbudget.protocol.messages import (
    Broadcast,
    LossRound,
    PersonalReport,
    PersonalRound,
    Private,
    Report,
    ReportLayout,
    SampleNormRound,
    SampleRound,
    VoteReport,
    VoteRound,
    default_layout,
)
from fedbudget.protocol.objections import Objector
from fedbudget.protocol.outliers import Outlier
from fedbudget.protocol.personal import Personal, prior_of_report
from fedbudget.protocol.site_figures import SiteFigures, figures_of
from fedbudget.protocol.state import AggregatorState, Outcome, Round
from fedbudget.protocol.sums import NoisySums, Sums
from fedbudget.resources import round_usage
from fedbudget.resources.meters import Meters
from fedbudget.resources.resource import Usage

Observer = Callable[[Round, Float32], None]
"""Called after every round with its record and the w that it started with."""

After = Callable[[Outcome], None]
"""Called once with the outcome."""

PERSONAL_PATIENCE = 600.0

Condition = Callable[[], bool]
Save = Callable[[], None]

Pay = Callable[[int, float], None]
"""Records the privacy cost ρ of a round durably: called with its number and ρ."""

_LOG = logging.getLogger("fedbudget.network")
_OFTEN = 10  # fewest rounds with a shortened update, until a warning
_MOSTLY = 0.8  # the same, as a share of all rounds


def no_payment(round_: int, rho: float) -> None:
    """Record nothing: for runs that are not private, or whose noise follows from a seed."""


def settle(aggregator: Aggregator, pay: Pay) -> None:
    """Record the payment of the aggregator's last answer, before it is sent or observed."""
    if aggregator.payment is not None:
        pay(*aggregator.payment)


class Engine(ABC):
    """Runs the rounds of a prepared run.

    Attributes:
      checkpoint_interval: minimum number of seconds between two checkpoints. With 0, a
        checkpoint follows every round and a round is published only after its checkpoint:
        nodes on other machines cannot undo what they spent. Local rounds are repeated
        after a crash.
    """

    checkpoint_interval = 1.0

    @abstractmethod
    def run(
        self,
        *,
        observe: Observer,
        interrupted: Condition = lambda: False,
        save: Save = lambda: None,
        pay: Pay = no_payment,
        after: After = lambda outcome: None,
    ) -> Outcome:
        """Run rounds until the budget is spent.

        Args:
          observe: called after every round; its time is not charged while nodes wait.
          interrupted: called after every round; the run ends if it returns True.
          save: called when an interrupted run can be resumed from the current state.
          pay: records the privacy cost of a round before its result is sent or observed.
          after: called after the last round, before nodes are dismissed.

        Returns: the model and the reason for stopping.
        """

    def wake(self) -> None:  # noqa: B027 (most engines wait for nothing)
        """Stop waiting for nodes, because the run was interrupted."""

    def node_statuses(self) -> Sequence[NodeStatus]:
        """Status of each node on another machine; empty if nodes are simulated."""
        return ()

    def traffic(self) -> Mapping[str, int]:
        """Network traffic so far: bytes and counts by name."""
        return {}

    def state(self) -> tuple[Any, object] | None:
        """Contents of a checkpoint: the aggregator's state and the engine's own.

        A baseline has a state of its own in place of the aggregator's. The engine's own
        state consists of frozen dataclasses, mappings, arrays and plain JSON. None if the
        engine's runs cannot be resumed.
        """
        return None


@dataclass(eq=False)
class RoundEngine(Engine):
    """Runs rounds between an aggregator and nodes.

    Args:
      meters: of the run's budget.
      policy: choices for rounds with nodes on other machines.
    """

    aggregator: Aggregator
    nodes: "Nodes"
    meters: Meters
    policy: "RoundPolicy | None" = None

    def __post_init__(self) -> None:
        if self.nodes.remote:
            self.checkpoint_interval = 0.0
        self._rounds = 0  # rounds so far
        self._shortened: Counter[int] = Counter()  # shortened updates by node number
        self._warned_shortened: set[str] = set()  # names of nodes with such a warning
        self._warned: set[int] = set()  # numbers of nodes with outliers
        self._excluded: set[int] = set()  # numbers of nodes whose losses do not count

    def run(
        self,
        *,
        observe: Observer,
        interrupted: Condition = lambda: False,
        save: Save = lambda: None,
        pay: Pay = no_payment,
        after: After = lambda outcome: None,
    ) -> Outcome:
        outcome = self._run_rounds(observe, interrupted, save, pay)
        after(outcome)
        reason = "the aggregator was interrupted" if interrupted() else "the run is over"
        self.nodes.dismiss(reason)
        return outcome

    def _run_rounds(
        self, observe: Observer, interrupted: Condition, save: Save, pay: Pay
    ) -> Outcome:
        aggregator = self.aggregator
        nodes = self.nodes
        counters = self.meters.counters()
        read = counters.read
        message = aggregator.pending or aggregator.outcome or aggregator.start()
        settle(aggregator, pay)
        last: tuple[Round, Float32] | None = None
        began = read()
        bytes_before = nodes.wire_bytes
        while isinstance(message, Broadcast):
            broadcast = message
            terms = _ANY_TERMS
            if self.policy is not None:
                broadcast, terms = self.policy.announce(aggregator, message)
            second = SecondAnswers(aggregator, broadcast, pay)
            if nodes.remote:
                terms = replace(terms, pay_again=second.pay)
            nodes.begin(broadcast, terms)
            if last is not None:
                paused = read()
                observe(*last)
                if not nodes.remote:
                    began += read() - paused
                    if interrupted():
                        save()
                        return aggregator.interrupt()
            collected = nodes.finish()

            now = read()
            used = counters.label(now - began)
            wire_bytes = nodes.wire_bytes - bytes_before
            if nodes.remote and (interrupted() or nodes.error):
                aggregator.charge(unfinished_costs(self.meters, used, wire_bytes))
                save()
                return aggregator.interrupt()
            if not collected.enough:
                costs = unfinished_costs(self.meters, used, wire_bytes)
                return aggregator.give_up(costs, "time")
            began = now
            bytes_before += wire_bytes
            message = self._receive(broadcast, collected, used, wire_bytes)
            if second.count:
                aggregator.charge(second.costs)
                message = aggregator.pending or aggregator.outcome or message
            settle(aggregator, pay)
            record = completed_record(aggregator.last, collected)
            self._rounds += 1
            if record.shortened:
                self._warn_shortened(record.shortened)
            if record.outliers:
                self._warn_outliers(record.outliers)
            if len(record.excluded) > len(self._excluded):
                self._warn_excluded(record.excluded)
            last = record, broadcast.w
        if last is not None:
            observe(*last)
        if not nodes.remote:  # each round of the others was saved when it was observed
            save()
        return message

    def _receive(
        self,
        broadcast: Broadcast,
        collected: "Collected",
        used: Mapping[str, float],
        wire_bytes: int,
    ) -> Broadcast | Outcome:
        """Charge a complete round, and pass its reports to the aggregator."""
        meters = self.meters
        updates = broadcast.steps
        usage, evaluation = collected.usage(updates, used, wire_bytes)
        times: NodeTimes | None = None
        if meters.speeds is not None:
            numbers = collected.numbers
            step_times = meters.speeds.step_times(numbers)
            times = NodeTimes(numbers, step_times)
            longest = (updates_of(broadcast, numbers) * step_times).max()
            usage = replace(usage, slowness=float(longest) / updates)
        elif meters.time.source == "measured":
            times = collected.times
        if self.policy is not None:
            self.policy.learn(self.aggregator, collected, usage, evaluation)
        costs = meters.read(usage)
        extra = broadcast.extra_steps
        if extra and meters.time.source == "simulated":  # otherwise it was measured
            costs = replace(costs, aggregation=costs.aggregation + extra * costs.step)
        return self.aggregator.receive(
            collected.reports,
            costs,
            # A wait for missing nodes is no usual cost: they are not asked again soon.
            usual=not collected.missed,
            times=None if isinstance(broadcast, LossRound) else times,
            peers=collected.peers,
        )

    def _warn_shortened(self, numbers: Sequence[int]) -> None:
        """Warn once about each machine whose updates are shortened in most rounds.

        Any node's update may be shortened now and then when little is left to learn.
        """
        self._shortened.update(numbers)
        most = max(_OFTEN, _MOSTLY * self._rounds)
        often = {number for number in numbers if self._shortened[number] >= most}
        for node in self.nodes.node_statuses() if often else ():
            theirs = often & set(node.numbers)
            if theirs and node.name not in self._warned_shortened:
                self._warned_shortened.add(node.name)
                _LOG.warning(
                    "%s's updates were far longer than the median update in %d of %d "
                    "rounds, and were shortened",
                    node.name,
                    max(self._shortened[number] for number in theirs),
                    self._rounds,
                )

    def _warn_outliers(self, outliers: Mapping[int, tuple[Outlier, ...]]) -> None:
        """Warn once about each machine with numbers beyond their limits."""
        new = outliers.keys() - self._warned
        for node in self.nodes.node_statuses() if new else ():
            theirs = sorted(new & set(node.numbers))
            if theirs and self._warned.isdisjoint(node.numbers):
                each = {one.name: one for number in theirs for one in outliers[number]}
                texts = [str(each[name]) for name in sorted(each)]
                _LOG.warning("%s reported %s", node.name, "; and ".join(texts))
        self._warned |= new

    def _warn_excluded(self, excluded: Sequence[Objector]) -> None:
        """Warn once about each machine whose losses do not count any more."""
        new = {each.node: each for each in excluded if each.node not in self._excluded}
        for node in self.nodes.node_statuses():
            theirs = [new[number] for number in node.numbers if number in new]
            if theirs and self._excluded.isdisjoint(node.numbers):
                _LOG.warning(
                    "%s's losses do not count in this run any more: %s",
                    node.name,
                    theirs[0].excluded,
                )
        self._excluded |= new.keys()

    def personalise(self, w: Float32, *, figures: bool) -> "PersonalModels | None":
        """Let each node correct w on its own rows, after the last round.

        This is outside of the budget. Nodes that do not answer within
        `PERSONAL_PATIENCE` seconds are left out.

        Args:
          w: the result of the run.
          figures: whether nodes report how good their models are.

        Returns: what is known of the models; None if no node answered.
        """
        nodes = self.nodes
        statuses = nodes.node_statuses()
        if nodes.remote and all(each.state == "away" for each in statuses):
            return None
        # Two rounds after the last: no node expects a difference to the last w.
        number = self.aggregator.state.round + 2
        began = time.perf_counter()
        prior: tuple[float, ...] = ()
        if figures:
            votes = self._after_the_last(VoteRound(round=number, w=w))
            if isinstance(votes, VoteReport):
                prior = prior_of_report(votes)
        layout = default_layout(PersonalRound) if figures else ReportLayout()
        report = self._after_the_last(
            PersonalRound(
                round=number + 2, w=w, report=layout, figures=figures, prior=prior
            )
        )
        seconds = time.perf_counter() - began
        if not isinstance(report, PersonalReport):
            return None
        return PersonalModels(figures_of(report), nodes.personal_models(), seconds)

    def _after_the_last(self, broadcast: Broadcast) -> Report | None:
        """Return the reports of a round after the last, None without any."""
        patience = PERSONAL_PATIENCE
        self.nodes.begin(broadcast, RoundTerms(timeout=patience, left=patience))
        collected = self.nodes.finish()
        reports = collected.reports
        assert reports is None or isinstance(reports, Report)
        return reports if collected.enough else None

    def wake(self) -> None:
        self.nodes.wake()

    def node_statuses(self) -> Sequence[NodeStatus]:
        return self.nodes.node_statuses()

    def traffic(self) -> Mapping[str, int]:
        return self.nodes.traffic()

    def state(self) -> tuple[AggregatorState[Any, Any], object] | None:
        own = self.nodes.state(self.meters.state())
        return None if own is None else (self.aggregator.state, own)


def unfinished_costs(meters: Meters, used: Mapping[str, float], wire_bytes: int) -> Costs:
    """Costs of a round that did not complete; zero if costs are simulated."""
    zero = np.zeros(len(meters.budget.limits))
    if meters.time.source == "simulated":
        return Costs(zero, zero)
    usage = round_usage([], own=used, wire_bytes=wire_bytes)
    return Costs(zero, meters.read(usage).aggregation)


def completed_record(record: Round | None, collected: "Collected") -> Round:
    """The record with missing nodes, left-out nodes and the evaluation."""
    assert record is not None
    evaluation = collected.evaluation
    if not collected.missed and not collected.not_finite and evaluation is None:
        return record
    left_out = tuple(sorted({*record.left_out, *collected.not_finite}))
    return replace(
        record, missed=collected.missed, left_out=left_out, evaluation=evaluation
    )


class SecondAnswers:
    """Payments for second answers to a round in which nodes add the noise.

    A node that restarts has lost the secret of its noise. Its second answer has other noise
    than the first, so both together reveal more, as if the round had been made twice.
    """

    def __init__(self, aggregator: Aggregator, broadcast: Broadcast, pay: Pay) -> None:
        self.count = 0
        self._aggregator = aggregator
        self._broadcast = broadcast
        self._pay = pay

    def pay(self) -> bool:
        """Record another payment of the round; False if too little is left for it."""
        broadcast = self._broadcast
        if not isinstance(broadcast, SampleRound | SampleNormRound):
            return True  # the noise is added later, or the masked sum is paid for
        ledger = self._aggregator.ledger
        left = ledger.budget.privacy_part(ledger.budget.array - ledger.spent)
        if (self.count + 2) * broadcast.rho > left:
            return False
        self._pay(broadcast.round, broadcast.rho)
        self.count += 1
        return True

    @property
    def costs(self) -> Costs:
        """What they cost together."""
        assert isinstance(self._broadcast, Private)
        rho = self.count * self._broadcast.rho
        amount = self._aggregator.ledger.budget.privacy_amount(rho)
        return Costs(np.zeros_like(amount), amount)


@dataclass(frozen=True)
class PersonalModels:
    """The personal models of nodes.

    Args:
      figures: how good they are, by node number; without nodes that keep theirs.
      models: the models by node number, if nodes are simulated.
      seconds: until the last node had fitted its model.
    """

    figures: Mapping[int, SiteFigures]
    models: Mapping[int, Personal]
    seconds: float


@dataclass(frozen=True)
class RoundTerms:
    """Terms of a round with nodes on other machines.

    Args:
      least: minimum number of nodes that must report.
      timeout: seconds until missing nodes are left out, given enough others.
      left: seconds until the round ends in any case.
      needs_reports: whether every report is needed; otherwise reports may be summed on
        arrival.
      resting: numbers of nodes that are not asked unless the others are too few.
      pay_again: pays for a second answer of a restarted node; False if that is impossible.
    """

    least: int = 1
    timeout: float = float("inf")
    left: float = float("inf")
    needs_reports: bool = True
    resting: Collection[int] = ()
    pay_again: Callable[[], bool] = lambda: True


_ANY_TERMS = RoundTerms()
"""Terms of rounds of simulated nodes, which all answer at once."""


class Nodes(ABC):
    """The nodes of a run, and the way to reach them.

    Attributes:
      remote: nodes are on other machines and work on their own. The clock runs while they
        do, and what they spent cannot be undone. Simulated nodes work in `finish`.
    """

    remote: ClassVar[bool] = False

    @property
    def error(self) -> str:
        """Why no further round is possible; empty if one is."""
        return ""

    @property
    def wire_bytes(self) -> int:
        """Bytes of all messages so far; 0 if `Collected.usage` contains them."""
        return 0

    @abstractmethod
    def begin(self, broadcast: Broadcast, terms: RoundTerms) -> None:
        """Send a broadcast to all idle nodes."""

    @abstractmethod
    def finish(self) -> "Collected":
        """Wait until the round is over."""

    def wake(self) -> None:  # noqa: B027 (simulated nodes are not waited for)
        """Stop waiting; from any thread."""

    def dismiss(self, reason: str) -> None:  # noqa: B027
        """Send all nodes away, because the run has ended."""

    def node_statuses(self) -> Sequence[NodeStatus]:
        """Status of all nodes, in the order of their numbers; from any thread."""
        return ()

    def traffic(self) -> Mapping[str, int]:
        """Network traffic so far: bytes and counts by name."""
        return {}

    def personal_models(self) -> Mapping[int, Personal]:
        """Personal models by node number, if nodes are simulated; others keep theirs."""
        return {}

    @abstractmethod
    def state(self, meters: dict[str, Any]) -> object | None:
        """State for a checkpoint: a dataclass or plain values, with the name of the engine.

        None if a run with these nodes cannot be resumed.

        Args:
          meters: state of the meters, which is part of it.
        """


class Collected(Protocol):
    """The result of a round at the nodes."""

    @property
    def enough(self) -> bool:
        """Whether enough nodes answered."""

    @property
    def missed(self) -> tuple[int, ...]:
        """Numbers of nodes that were asked and did not answer in time."""

    @property
    def not_finite(self) -> tuple[int, ...]:
        """Numbers of nodes whose report was not finite, and does not count."""

    @property
    def numbers(self) -> Int64:
        """Numbers of the nodes whose reports count."""

    @property
    def reports(self) -> Report | Sums | NoisySums:
        """The reports for the aggregator."""

    @property
    def times(self) -> NodeTimes | None:
        """Seconds of a local update at each node, if measured there."""

    @property
    def peers(self) -> Int64 | None:
        """Index of each node's machine, [n]; None if nodes are simulated."""

    @property
    def evaluation(self) -> NodeEvaluation | None:
        """Metrics on the nodes' test samples, if requested and available."""

    @property
    def waited(self) -> Mapping[int, float]:
        """Seconds until each member's answer, by the number of its first node."""

    @property
    def line_seconds(self) -> Mapping[int, float]:
        """Transfer time of each member's messages, by the number of its first node."""

    def usage(
        self, updates: int, own: Mapping[str, float], wire_bytes: int
    ) -> tuple[Usage, Usage | None]:
        """Usage of the round without evaluations, and that of the evaluations, if any.

        Args:
          updates: local updates at every node.
          own: counts of the aggregator's process, from one round to the next.
          wire_bytes: bytes of all messages that the engine counted.
        """


class RoundPolicy(Protocol):
    """Choices for each round with nodes on other machines."""

    def announce(
        self, aggregator: Aggregator, broadcast: Broadcast
    ) -> tuple[Broadcast, RoundTerms]:
        """Return the broadcast to send, and the terms of its round."""

    def learn(
        self,
        aggregator: Aggregator,
        collected: Collected,
        usage: Usage,
        evaluation: Usage | None,
    ) -> None:
        """Use the measurements of a complete round, before the aggregator receives it.

        Args:
          usage: without evaluations.
          evaluation: of evaluations at nodes, if any.
        """


@contextmanager
def interruptible(wake: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after the first Ctrl-C or SIGTERM.

    A second Ctrl-C raises KeyboardInterrupt. Python handles signals in the main thread
    only; in other threads this has no effect.

    Args:
      wake: called at the first signal, for an engine that is waiting.
    """
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return

    def request(number: int, frame: FrameType | None) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()
        wake()

    previous = {
        number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield requested.is_set
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
