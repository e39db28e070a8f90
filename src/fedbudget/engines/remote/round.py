"""A round over a network: requests, answers, when it is complete, and what it cost.

Rules:
- No clock and no messages here: times are passed in, and the transport does what
  `next_step` returns.
- A requested member is awaited. A report of a member that is not awaited came too late and
  does not count.
- A round closes when all requested members have answered; with enough answers, at its
  deadline; in any case at its end. With too few answers, idle members are asked (again).
- A member's status changes only when the round closes.
- A member that restarts has new noise. In a round whose reports contain noise of nodes, its
  second answer reveals more than the first. So the round is paid for again before such a
  member is asked again; it is not asked if too little is left of the budget.
- Evaluations are charged, but do not count as the cost of a round. The time of the slowest
  evaluation and the other resources of all evaluations come from the nodes' measurements.
- Reported costs are bounded: time by the aggregator's clock (`resources.within`), other
  resources by the other members' reports. So no single member decides what was spent.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, ClassVar, Generic

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.engines.engine import Nodes
from fedbudget.engines.remote.members import Counters, Key, Members
from fedbudget.engines.remote.messages import Answer, MemberAnswer
from fedbudget.engines.remote.tallies import capped_tallies, plausible_tallies
from fedbudget.evaluation.metrics import Tally
from fedbudget.evaluation.points import NodeEvaluation
from fedbudget.protocol.features.feature import NodeTimes
from fedbudget.protocol.features.workload import Work
from fedbudget.protocol.messages import LOSSES, Broadcast, Report, SiteRound
from fedbudget.protocol.outliers import FEWEST, reference
from fedbudget.protocol.sums import NoisySums, ReportAdder, Sums, within
from fedbudget.resources import TIME, round_usage
from fedbudget.resources import within as capped_usage
from fedbudget.resources.resource import Reading, Usage

FAILURES = 3
"""Failures of a member in one round until it is not asked again in it."""

_OUTLIER = 100.0  # times the median: machines differ


class RemoteNodes(Nodes):
    """Nodes on other machines; a subclass is their transport."""

    remote: ClassVar[bool] = True
    counters: Counters

    @property
    def wire_bytes(self) -> int:
        return self.counters.wire_bytes

    def traffic(self) -> dict[str, int]:
        return vars(self.counters).copy()

    @abstractmethod
    def lost(self, coming: int) -> list[int]:
        """Numbers of nodes whose drift state is lost before round `coming`, each once."""

    @abstractmethod
    def finish(self) -> "CollectedRound":
        """Wait until the round is over."""


class NextStep(Enum):
    """What the transport must do next for a round."""

    WAIT = auto()
    ASK = auto()  # ask idle members, because there are too few answers
    CLOSE = auto()
    GIVE_UP = auto()  # too few members can answer


@dataclass
class PendingRound(Generic[Key]):
    """A round in progress.

    Args:
      least: minimum number of nodes that must report.
      deadline: time at which missing members are left out, given enough answers.
      end: time at which the round closes in any case.
      asked: members that were asked.
      awaited: members that were asked and have not answered.
      answers: by member.
      instances: process identifier of each asked member.
      failures: number of failures by member.
      failure: message of the last failure.
      not_finite: members whose answers are not finite.
      stopped: whether to close with the current answers.
      needs_reports: whether every report is kept; otherwise reports are summed on arrival.
      resting: members that are not asked unless the others are too few.
      pay_again: pays for a second answer of the same member; False if it is not possible.
    """

    broadcast: Broadcast
    least: int
    deadline: float = float("inf")
    end: float = float("inf")
    asked: set[Key] = field(default_factory=set)
    awaited: set[Key] = field(default_factory=set)
    answers: dict[Key, MemberAnswer] = field(default_factory=dict)
    instances: dict[Key, str] = field(default_factory=dict)
    failures: dict[Key, int] = field(default_factory=dict)
    failure: str = ""
    not_finite: set[Key] = field(default_factory=set)
    stopped: bool = False
    needs_reports: bool = True
    resting: Collection[Key] = ()
    pay_again: Callable[[], bool] = lambda: True

    def __post_init__(self) -> None:
        self._repeats: dict[Key, int] = {}  # second answers of members
        self._paid = 0  # second answers that are paid for, of any member
        self._finite = ReportAdder(self.broadcast)
        self._others = ReportAdder(self.broadcast)

    def can_ask(self, key: Key, instance: str = "") -> bool:
        """Whether an idle member may be asked in this round; pays for a second answer.

        Args:
          instance: process identifier of the member; empty if it is not known.
        """
        if key in self.resting or key in self.awaited or key in self.answers:
            return False
        if self.failures.get(key, 0) >= FAILURES:
            return False
        if self._has_new_noise(key, instance) and self._repeats.get(key, 0) >= self._paid:
            if not self.pay_again():
                return False
            self._paid += 1
        return True

    def ask(self, key: Key, instance: str = "") -> None:
        """Record that a member was asked; its report is awaited from now on."""
        if self._has_new_noise(key, instance):
            self._repeats[key] = self._repeats.get(key, 0) + 1
        self.awaited.add(key)
        self.asked.add(key)
        self.instances[key] = instance

    def _has_new_noise(self, key: Key, instance: str) -> bool:
        """Whether a member was asked before, and may have restarted since."""
        return key in self.instances and not instance == self.instances[key] != ""

    def expects(self, key: Key, number: int) -> bool:
        """Whether a member's report of round `number` is awaited; otherwise it is late."""
        return number == self.broadcast.round and key in self.awaited

    def receive(self, key: Key, answer: MemberAnswer) -> None:
        """Add an awaited answer."""
        self.awaited.discard(key)
        if isinstance(answer, Answer):
            finite = _is_possible(answer.report)
            if not finite:
                self.not_finite.add(key)
            if not self.needs_reports:
                sums = self._finite if finite else self._others
                answer = replace(answer, report=sums.add(answer.report))
        self.answers[key] = answer

    def begin_again(self) -> None:
        """Forget all answers; every member may be asked again."""
        self.awaited.clear()
        self.answers.clear()

    @property
    def vectors(self) -> int:
        """Number of vectors in memory for the summed reports."""
        return self._finite.vectors + self._others.vectors

    def fail(self, key: Key, reason: str, *, silent: bool = False) -> None:
        """Record that an asked member cannot answer this time.

        Args:
          silent: it has certainly sent no report.
        """
        if silent:
            self.instances.pop(key, None)
        self.awaited.discard(key)
        self.failures[key] = self.failures.get(key, 0) + 1
        self.failure = reason

    def withdraw(self, key: Key) -> None:
        """Record that a member disconnected; it missed the round unless it returns."""
        self.awaited.discard(key)

    def replace(self, key: Key, new: Key) -> None:
        """Remove a member as if it had never been asked: `new` takes its place."""
        self.withdraw(key)
        if key in self.instances:
            self.instances[new] = self.instances.pop(key)
            self._repeats[new] = self._repeats.pop(key, 0)
        self.asked.discard(key)
        self.failures.pop(key, None)

    def waits(self, now: float) -> bool:
        """Whether there is nothing to do until an answer or a deadline; from any thread."""
        return (
            bool(self.awaited) and not self.stopped and now < min(self.deadline, self.end)
        )

    def next_step(self, now: float, members: Members[Key]) -> NextStep:
        if self.stopped or now >= self.end:
            return NextStep.CLOSE
        if self.awaited and now < self.deadline:
            return NextStep.WAIT
        if members.nodes(self.answers) >= self.least:
            return NextStep.CLOSE
        if not self.awaited and self.failures and min(self.failures.values()) >= FAILURES:
            return NextStep.GIVE_UP
        self.resting = ()
        return NextStep.ASK

    def close(
        self, members: Members[Key], instances: Mapping[Key, str]
    ) -> "CollectedRound":
        """Choose the answers that count, and update the members' status.

        Args:
          instances: process identifiers of connected members. A new process has no memory
            of this round.
        """
        finite = {
            key: answer
            for key, answer in self.answers.items()
            if key not in self.not_finite
        }
        if len(self.answers) >= FEWEST and 2 * len(finite) < len(self.answers):
            finite = {}  # if most nodes diverged, w itself diverged
        counted = finite or {
            key: self.answers[key] for key in self.answers if key in self.not_finite
        }
        not_finite = self.answers.keys() - counted.keys()
        missed = self.asked - self.answers.keys()
        seconds = self._update_members(members, instances, counted)
        for key in not_finite:
            members[key].not_finite += 1
        for key in missed:
            members[key].missed += 1

        summed = None
        plain = all(isinstance(answer, Answer) for answer in counted.values())
        if counted and plain and not self.needs_reports:
            summed = (self._finite if finite else self._others).sums()
        best: Float32 | None = None
        if self.broadcast.tallies > 1 and self.broadcast.catch_up is not None:
            best = self.broadcast.result
            if best is None:
                best = self.broadcast.catch_up.best
        oversized = [members[key].oversized for key in counted]
        answers, outliers = _cap_answers(counted, oversized)
        numbers = {key: int(answer.nodes[0]) for key, answer in counted.items()}
        order = sorted(counted, key=numbers.__getitem__)
        return CollectedRound(
            [answers[key] for key in order],
            not_finite=members.numbers(not_finite),
            missed=members.numbers(missed),
            enough=members.nodes(counted) >= self.least,
            summed=summed,
            outliers=outliers,
            step_seconds=[seconds[key] for key in order],
            best=best,
        )

    def _update_members(
        self,
        members: Members[Key],
        instances: Mapping[Key, str],
        counted: Mapping[Key, MemberAnswer],
    ) -> dict[Key, Float64]:
        """Update the members' status; return the seconds of an update at each node."""
        step_seconds = {}
        for key, answer in counted.items():
            member = members[key]
            member.not_finite = 0
            member.rounds += 1
            seconds, member.updates = _pace(answer, self.broadcast)
            member.step_seconds = float(seconds.mean())
            step_seconds[key] = seconds
            same = instances.get(key, self.instances[key]) == self.instances[key]
            if same and not isinstance(self.broadcast, SiteRound):  # these leave no memory
                member.base_round = self.broadcast.round
        members.compare(counted)
        return step_seconds


@dataclass(frozen=True)
class CollectedRound:
    """The answers of a closed round.

    Args:
      answers: in the order of nodes' numbers.
      not_finite: numbers of nodes whose report was not finite, and does not count.
      missed: numbers of nodes that were asked and did not answer in time.
      enough: whether enough nodes answered.
      summed: the reports, if they were summed on arrival; those in `answers` then have no
        vectors.
      tallies: metrics of all nodes together, if those of each node are unknown.
      outliers: names of the capped numbers of each member, by key (protocol/combine.py).
      step_seconds: time of a local update at each node of each member, as measured there.
      best: w^f, [parameters], if nodes evaluated it in addition to w.
    """

    answers: list[MemberAnswer]
    not_finite: tuple[int, ...]
    missed: tuple[int, ...]
    enough: bool
    summed: Sums | NoisySums | None = None
    tallies: tuple[Tally, ...] = ()
    outliers: Mapping[Any, tuple[str, ...]] = field(default_factory=dict)
    step_seconds: Sequence[Float64] = ()
    best: Float32 | None = None

    @property
    def reports(self) -> Report | Sums | NoisySums:
        """The reports for the aggregator; at least one is required."""
        return self.summed or Report.merge(
            [answer.report for answer in self.answers if isinstance(answer, Answer)]
        )

    @property
    def numbers(self) -> Int64:
        return np.concatenate([answer.nodes for answer in self.answers])

    @property
    def peers(self) -> Int64:
        """Index of each node's member, in the order of nodes' numbers, [n]."""
        counts = [len(answer.nodes) for answer in self.answers]
        members = np.repeat(np.arange(len(counts)), counts)
        return members[np.argsort(self.numbers, kind="stable")]

    @property
    def waited(self) -> dict[int, float]:
        return {int(answer.nodes[0]): answer.waited for answer in self.answers}

    @property
    def times(self) -> NodeTimes:
        return NodeTimes(self.numbers, np.concatenate(self.step_seconds))

    @property
    def evaluation(self) -> NodeEvaluation | None:
        tallies = [answer.tallies for answer in self.answers if answer.tallies]
        if self.tallies:
            tallies = [self.tallies]
        if not tallies:
            return None
        nodes = [each[0] for each in tallies]
        best = () if self.best is None else [each[1] for each in tallies]
        return NodeEvaluation(nodes, best, self.best)

    def usage(
        self, updates: int, own: Mapping[str, float], wire_bytes: int
    ) -> tuple[Usage, Usage | None]:
        """Usage of the round without evaluations, and that of the evaluations, if any."""
        nodes = [
            answer.costs
            if answer.costs.nodes == len(answer.nodes)
            else replace(answer.costs, nodes=len(answer.nodes))
            for answer in self.answers
        ]
        evaluation: Usage | None = None
        if any(usage.evaluation for usage in nodes):
            seconds = own[TIME.name]  # the time of the round caps that of evaluations
            tally_bytes = sum(answer.tally_bytes for answer in self.answers)
            evaluation = evaluation_usage(
                [capped_usage(usage, seconds, 1) for usage in nodes], tally_bytes
            )
            own = _without_evaluation(own, evaluation, nodes)
            wire_bytes -= tally_bytes
        return round_usage(
            nodes, updates=updates, own=own, wire_bytes=wire_bytes
        ), evaluation

    @property
    def line_seconds(self) -> dict[int, float]:
        """Transfer time of each member's messages, by the number of its first node.

        This is the wait without the member's own work.
        """
        seconds = {}
        for answer in self.answers:
            evaluation = answer.costs.evaluation.get(TIME.name)
            evaluating = 0.0 if evaluation is None else evaluation.whole
            rest = answer.waited - answer.costs.seconds - evaluating
            seconds[int(answer.nodes[0])] = max(0.0, rest)
        return seconds


def evaluation_usage(nodes: Sequence[Usage], tally_bytes: int) -> Usage:
    """Usage of evaluations, expressed as a round without updates.

    Args:
      nodes: usage of a round or of trials.
      tally_bytes: bytes of all evaluation results.
    """
    evaluated = [
        replace(usage, readings=usage.evaluation, wire_bytes=0)
        for usage in nodes
        if usage.evaluation
    ]
    return round_usage(evaluated, wire_bytes=tally_bytes)


def _without_evaluation(
    own: Mapping[str, float], evaluation: Usage, nodes: Sequence[Usage]
) -> dict[str, float]:
    """Counts of the aggregator's process without its wait for evaluations and its own."""
    values = dict(own)
    values[TIME.name] -= evaluation.seconds
    for usage in nodes:
        for name, reading in usage.evaluation.items() if usage.here else ():
            if name in values and name != TIME.name:
                values[name] = max(0.0, values[name] - reading.whole)
    return values


def capped_costs(
    nodes: Sequence[Usage], *, time: bool = False
) -> tuple[list[Usage], list[tuple[str, ...]]]:
    """Replace outliers by the median over members.

    Args:
      nodes: costs of each member.
      time: whether to cap time too, for a trial without a wait on the aggregator's clock.

    Returns: the costs, and the names of each member's outliers.
    """
    if len(nodes) < FEWEST:
        return list(nodes), [() for _ in nodes]
    counts = [costs.nodes for costs in nodes]
    outliers = [set[str]() for _ in nodes]
    readings = [dict(costs.readings) for costs in nodes]
    evaluation = [dict(costs.evaluation) for costs in nodes]
    for rows in (readings, evaluation):
        names = {name for row in rows for name in row}
        for name in names if time else names - {TIME.name}:
            _cap_reading(name, rows, counts, outliers)
    capped = [
        replace(costs, readings=readings[index], evaluation=evaluation[index])
        if outliers[index]
        else costs
        for index, costs in enumerate(nodes)
    ]
    return capped, [tuple(sorted(names)) for names in outliers]


def _cap_reading(
    name: str,
    rows: Sequence[dict[str, Reading]],
    counts: Sequence[int],
    outliers: Sequence[set[str]],
) -> None:
    """Cap the readings of one resource in `rows`; add its name to `outliers`."""
    reported = [index for index, row in enumerate(rows) if name in row]
    step = reference([rows[index][name].step / counts[index] for index in reported])
    whole = reference([rows[index][name].whole / counts[index] for index in reported])
    for index in reported:
        own = rows[index][name]
        capped = replace(
            own,
            step=_capped(own.step, step * counts[index]),
            whole=_capped(own.whole, whole * counts[index]),
        )
        if capped != own:
            rows[index][name] = capped
            outliers[index].add(name)


def _capped(amount: float, usual: float) -> float:
    return usual if amount > _OUTLIER * usual > 0 else amount


def _cap_answers(
    counted: Mapping[Key, MemberAnswer], oversized: Sequence[bool]
) -> tuple[dict[Key, MemberAnswer], dict[Key, tuple[str, ...]]]:
    """Cap the outliers of all answers.

    Args:
      oversized: whether each member claims an implausible number of samples.

    Returns: the answers, and the outliers, by member.
    """
    costs, cost_outliers = capped_costs([answer.costs for answer in counted.values()])
    plausible = plausible_tallies([answer.tallies for answer in counted.values()])
    outliers: dict[Key, tuple[str, ...]] = {}
    answers: dict[Key, MemberAnswer] = {}
    for index, (key, answer) in enumerate(counted.items()):
        names: tuple[str, ...] = cost_outliers[index]
        if isinstance(answer, Answer) and not plausible[index]:
            names = ("test samples", *names)
            answer = replace(answer, tallies=())
        if oversized[index]:
            names = ("samples", *names)
        if names:
            outliers[key] = names
            answer = replace(answer, costs=costs[index])
        answers[key] = answer
    tallies = capped_tallies([answer.tallies for answer in answers.values()])
    for (key, member), capped in zip(list(answers.items()), tallies, strict=True):
        if isinstance(member, Answer) and capped != member.tallies:
            answers[key] = replace(member, tallies=capped)
    return answers, outliers


def _pace(answer: MemberAnswer, broadcast: Broadcast) -> tuple[Float64, int]:
    """Seconds of a local update at each node of a member, and its largest number of them.

    A member measures the mean over τ updates.
    """
    nodes = answer.nodes
    seconds = answer.costs.step_seconds
    work = broadcast.part(Work)
    if work is None:
        return np.full(len(nodes), seconds), broadcast.steps
    updates = np.array(work.of(nodes))
    return seconds * broadcast.steps / updates, int(updates.max())


def _is_possible(report: Report) -> bool:
    """Whether all numbers that w and c depend on are finite and within bounds."""
    numbers = report.numbers
    spread = [numbers[name] for name in ("plain", "corrected") if name in numbers]
    if not all((part >= 0).all() for part in spread):
        return False
    losses = [numbers[name] for name in LOSSES.numbers if name in numbers]
    if not all(within(part) for part in (*losses, *spread)):
        return False
    return all(within(vectors) for vectors in report.vectors.values())
