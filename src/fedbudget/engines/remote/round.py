"""What a round took over a network: as a round, and what nodes' evaluations took besides.

An evaluation is charged, and is not taken for what a round costs: the time of the slowest one, and what all of them
have used of other resources, is told apart by what nodes have measured.

What nodes say is bounded: their time by the aggregator's clock, as it comes (`NodeCosts.within`), and all else by what
the others say, so that no single one decides what was spent.

A round in progress: who was asked, who has answered, and when that is enough.

Rules here:
- There is no clock and no message: times are passed in, and whoever carries messages does what `next_step` says.
- A member that is asked owes a report. What comes from one that owes none came too late, and is not counted.
- A round is over when all that were asked have answered; or, with enough answers, at its deadline; or at its end. With
  too few answers, those that are idle are asked (again).
- Nobody's standing changes before the round is closed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Generic

import numpy as np

from fedbudget.arrays import Float64
from fedbudget.engines.remote.encodings import believable_tallies
from fedbudget.engines.remote.members import Key, Members
from fedbudget.engines.remote.messages import Answer
from fedbudget.evaluation.metrics import Tally
from fedbudget.evaluation.points import NodeEvaluation
from fedbudget.protocol.combine import FEWEST, believable, reference
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.protocol.sums import Reports, SummedReports, within
from fedbudget.protocol.workload import NodeTimes
from fedbudget.resources import TIME, most_within, round_usage
from fedbudget.resources.counters import Snapshot
from fedbudget.resources.resource import NodeCosts, Reading, RoundUsage

_PROPORTION = 100.0  # times the median: machines differ


@dataclass(frozen=True)
class RoundCosts:
    """Of one round.

    Args:
      nodes: what it took at each.
      own: what the aggregator's process counted, from one round to the next.
      wire_bytes: of all messages.
      tally_bytes: of these, those that evaluations are told with.
    """

    nodes: Sequence[NodeCosts]
    own: Snapshot
    wire_bytes: int
    tally_bytes: int = 0

    @classmethod
    def of(cls, answers: Sequence[Answer], own: Snapshot, wire_bytes: int) -> "RoundCosts":
        costs = [
            answer.costs
            if answer.costs.nodes == nodes
            else replace(answer.costs, nodes=nodes)
            for answer, nodes in ((answer, len(answer.report.nodes)) for answer in answers)
        ]
        return cls(costs, own, wire_bytes, sum(answer.tally_bytes for answer in answers))

    @property
    def evaluated(self) -> bool:
        return any(costs.evaluation for costs in self.nodes)

    def usage(self, updates: int) -> RoundUsage:
        """Of the round itself."""
        own = dict(self.own.values)
        own[TIME.name] -= self.evaluation_usage().seconds if self.evaluated else 0.0
        for costs in self.nodes:
            for name, reading in costs.evaluation.items() if costs.here else ():
                if name in own and name != TIME.name:
                    own[name] = max(0.0, own[name] - reading.whole)
        wire_bytes = self.wire_bytes - self.tally_bytes
        return round_usage(
            self.nodes, updates=updates, own=Snapshot(own), wire_bytes=wire_bytes
        )

    def evaluation_usage(self) -> RoundUsage:
        """Of evaluations, as if they were a round without updates; in time, no more than the round itself."""
        most = most_within(self.own[TIME.name])
        return evaluation_usage(
            [costs.within(most, 1) for costs in self.nodes], self.tally_bytes
        )


def believable_costs(
    nodes: Sequence[NodeCosts], *, time: bool = False
) -> tuple[list[NodeCosts], list[tuple[str, ...]]]:
    """With the median reading in place of those out of all proportion to it; and of each, which these were.

    Args:
      nodes: of each peer.
      time: whether time is bounded so too, as of a trial that nobody waited for.
    """
    if len(nodes) < FEWEST:
        return list(nodes), [() for _ in nodes]
    counts = [costs.nodes for costs in nodes]
    readings, doubts = _in_proportion(
        [costs.readings for costs in nodes], counts, time=time
    )
    evaluation, more = _in_proportion(
        [costs.evaluation for costs in nodes], counts, time=time
    )
    believed = [
        replace(costs, readings=own, evaluation=tested) if doubt or other else costs
        for costs, own, tested, doubt, other in zip(
            nodes, readings, evaluation, doubts, more, strict=True
        )
    ]
    return believed, [
        tuple(sorted(doubt | other)) for doubt, other in zip(doubts, more, strict=True)
    ]


def _in_proportion(
    readings: Sequence[Mapping[str, Reading]], counts: Sequence[int], *, time: bool
) -> tuple[list[dict[str, Reading]], list[set[str]]]:
    believed = [dict(each) for each in readings]
    doubts = [set[str]() for _ in readings]
    for name in {name for each in readings for name in each if time or name != TIME.name}:
        told = [index for index, each in enumerate(readings) if name in each]
        step = reference([readings[index][name].step / counts[index] for index in told])
        whole = reference([readings[index][name].whole / counts[index] for index in told])
        for index in told:
            own = readings[index][name]
            count = counts[index]
            held = replace(
                own,
                step=_held(own.step, step * count),
                whole=_held(own.whole, whole * count),
            )
            if held != own:
                believed[index][name] = held
                doubts[index].add(name)
    return believed, doubts


def _held(amount: float, usual: float) -> float:
    return usual if amount > _PROPORTION * usual > 0 else amount


def evaluation_usage(nodes: Sequence[NodeCosts], tally_bytes: int) -> RoundUsage:
    """What evaluations took, as if they were a round without updates.

    Args:
      nodes: of a round, or of trials.
      tally_bytes: of what all of them say.
    """
    evaluated = [
        replace(costs, readings=costs.evaluation) for costs in nodes if costs.evaluation
    ]
    return round_usage(evaluated, wire_bytes=tally_bytes)


FAILURES = 3
"""Of a member in one round, until it is not asked again in it."""


class NextStep(Enum):
    """What a round needs."""

    WAIT = auto()
    ASK = auto()  # whoever is idle, because there are too few answers
    CLOSE = auto()
    GIVE_UP = auto()  # too few can answer


@dataclass(frozen=True)
class CollectedRound:
    """What came of a round.

    Args:
      answers: in the order of nodes' numbers.
      not_finite: numbers of nodes whose report was not finite, and was set aside.
      missed: numbers of nodes that were asked and did not answer in time.
      enough: whether as many as were needed have answered.
      doubts: what was not believed of members' answers, by their keys (protocol/belief.py).
      summed: the reports, where they were added up as they came; those in `answers` have no vectors then.
      tallies: of all nodes together, where those of each are not known.
    """

    answers: list[Answer]
    not_finite: tuple[int, ...]
    missed: tuple[int, ...]
    enough: bool
    summed: Reports | None = None
    tallies: tuple[Tally, ...] = ()
    doubts: Mapping[Any, tuple[str, ...]] = field(default_factory=dict)

    def times(self, broadcast: Broadcast) -> NodeTimes:
        """Seconds of a local update at each node, as they have measured it."""
        nodes = np.concatenate([answer.report.nodes for answer in self.answers])
        if broadcast.work is None:
            counts = [len(answer.report.nodes) for answer in self.answers]
            return NodeTimes(
                nodes,
                np.repeat([answer.costs.step_seconds for answer in self.answers], counts),
            )
        return NodeTimes(
            nodes,
            np.concatenate([_update_seconds(answer, broadcast) for answer in self.answers]),
        )

    def evaluation(self, broadcast: Broadcast) -> NodeEvaluation | None:
        """What nodes' test samples say, if they were asked and have some."""
        tallies = [answer.tallies for answer in self.answers if answer.tallies]
        tallies = [self.tallies] if self.tallies else tallies
        if not tallies:
            return None
        best = [each[1] for each in tallies] if broadcast.tallies > 1 else ()
        return NodeEvaluation([each[0] for each in tallies], best)

    @property
    def line_seconds(self) -> dict[int, float]:
        """What the messages to each member and back took on the way, by the first number of its nodes."""
        return {int(answer.report.nodes[0]): answer.line_seconds for answer in self.answers}

    @property
    def reports(self) -> Report | Reports:
        """For the aggregator; there must be one."""
        return self.summed or Report.merge([answer.report for answer in self.answers])


@dataclass
class PendingRound(Generic[Key]):
    """A round in progress.

    Args:
      least: how many nodes must report.
      deadline: when those that have not are left out.
      end: when it is over whatever it has.
      owing: members that were asked and have not answered.
      instances: which process of each has been asked.
      failures: how often each could not answer.
      failure: what the last of these said.
      not_finite: whose answers are not.
      stopped: it is over with what it has.
      needs_reports: whether reports are kept, and not added up as they come.
      resting: members that are not asked, unless the others are too few.
    """

    broadcast: Broadcast
    least: int
    deadline: float = float("inf")
    end: float = float("inf")
    asked: set[Key] = field(default_factory=set)
    owing: set[Key] = field(default_factory=set)
    answers: dict[Key, Answer] = field(default_factory=dict)
    instances: dict[Key, str] = field(default_factory=dict)
    failures: dict[Key, int] = field(default_factory=dict)
    failure: str = ""
    not_finite: set[Key] = field(default_factory=set)
    stopped: bool = False
    needs_reports: bool = True
    resting: Collection[Key] = ()

    def __post_init__(self) -> None:
        self._finite, self._others = (
            SummedReports(self.broadcast),
            SummedReports(self.broadcast),
        )

    def can_ask(self, key: Key) -> bool:
        """Whether one that is idle has something to do in this round."""
        if key in self.resting or key in self.owing or key in self.answers:
            return False
        return self.failures.get(key, 0) < FAILURES

    def ask(self, key: Key, instance: str = "") -> None:
        """One is asked, and owes a report from now on."""
        self.owing.add(key)
        self.asked.add(key)
        self.instances[key] = instance

    def owes(self, key: Key, number: int) -> bool:
        """Whether a report of this round is expected of someone; one that is not came too late."""
        return number == self.broadcast.round and key in self.owing

    def receive(self, key: Key, answer: Answer) -> None:
        """A report that was owed."""
        self.owing.discard(key)
        finite = _is_possible(answer.report)
        if not finite:
            self.not_finite.add(key)
        if not self.needs_reports:
            answer = replace(
                answer, report=(self._finite if finite else self._others).add(answer.report)
            )
        self.answers[key] = answer

    @property
    def vectors(self) -> int:
        """How many are held of the reports that were added up."""
        return self._finite.vectors + self._others.vectors

    def fail(self, key: Key, reason: str) -> None:
        """One that was asked cannot answer, this time."""
        self.owing.discard(key)
        self.failures[key] = self.failures.get(key, 0) + 1
        self.failure = reason

    def withdraw(self, key: Key) -> None:
        """One that was asked has gone; it has missed the round unless it comes back."""
        self.owing.discard(key)

    def forget(self, key: Key) -> None:
        """As if one had never been asked: another is in its place."""
        self.withdraw(key)
        self.asked.discard(key)
        self.failures.pop(key, None)

    def waits(self, now: float) -> bool:
        """Whether nothing is to be done before someone answers or goes, or time passes; from any thread."""
        return bool(self.owing) and not self.stopped and now < min(self.deadline, self.end)

    def next_step(self, now: float, members: Members[Key]) -> NextStep:
        if self.stopped or now >= self.end:
            return NextStep.CLOSE
        if self.owing and now < self.deadline:
            return NextStep.WAIT
        if members.nodes(self.answers) >= self.least:
            return NextStep.CLOSE
        if not self.owing and self.failures and min(self.failures.values()) >= FAILURES:
            return NextStep.GIVE_UP
        self.resting = ()
        return NextStep.ASK

    def close(self, members: Members[Key], instances: Mapping[Key, str]) -> CollectedRound:
        """Counts what has come.

        Args:
          instances: of those that are connected now; where another has come in the place of the one that has answered,
            it remembers nothing of this round.
        """
        finite = {
            key: answer
            for key, answer in self.answers.items()
            if key not in self.not_finite
        }
        if len(self.answers) >= FEWEST and 2 * len(finite) < len(self.answers):
            finite = {}  # where most have diverged it is w that has, whatever the others say of it
        counted = finite or {
            key: self.answers[key] for key in self.answers if key in self.not_finite
        }
        not_finite = self.answers.keys() - counted.keys()
        missed = self.asked - self.answers.keys()
        for key, answer in counted.items():
            member = members[key]
            member.not_finite = 0
            member.rounds += 1
            member.step_seconds, member.updates = _pace(answer, self.broadcast)
            if instances.get(key, self.instances[key]) == self.instances[key]:
                member.base_round = self.broadcast.round
        members.compare(counted)
        for key in not_finite:
            members[key].not_finite += 1
        for key in missed:
            members[key].missed += 1
        summed = None if self.needs_reports else self._finite if finite else self._others
        answers, doubts = _believed(
            counted, summed, [members[key].oversized for key in counted]
        )
        enough = members.nodes(counted) >= self.least
        left_out = members.numbers(not_finite)
        away = members.numbers(missed)
        return CollectedRound(answers, left_out, away, enough, summed, doubts=doubts)


def _believed(
    counted: Mapping[Key, Answer], summed: SummedReports | None, oversized: Sequence[bool]
) -> tuple[list[Answer], dict[Key, tuple[str, ...]]]:
    """The answers with what can be believed of them, in the order of nodes' numbers; and what could not.

    Args:
      oversized: whether each claims more samples than is believed.
    """
    reports, of_reports = believable([answer.report for answer in counted.values()])
    costs, of_costs = believable_costs([answer.costs for answer in counted.values()])
    sane = believable_tallies([answer.tallies for answer in counted.values()])
    if summed is not None:
        summed.believe(reports)
    doubts: dict[Key, tuple[str, ...]] = {}
    for at, key in enumerate(counted):
        own = ("samples",) * oversized[at] + ("test samples",) * (not sane[at])
        if doubt := own + of_reports[at] + of_costs[at]:
            doubts[key] = doubt
    believed = [
        replace(
            answer,
            report=reports[at],
            costs=costs[at],
            tallies=answer.tallies if sane[at] else (),
        )
        if key in doubts
        else answer
        for at, (key, answer) in enumerate(counted.items())
    ]
    return sorted(believed, key=lambda answer: int(answer.report.nodes[0])), doubts


def _update_seconds(answer: Answer, broadcast: Broadcast) -> Float64:
    """Of one local update at each node of a member; what it has measured is of τ."""
    return (
        answer.costs.step_seconds
        * max(1, broadcast.tau)
        / broadcast.updates(answer.report.nodes)
    )


def _pace(answer: Answer, broadcast: Broadcast) -> tuple[float, int]:
    """Seconds of a local update at a member, and how many it made; means, where its nodes differ."""
    if broadcast.work is None:
        return answer.costs.step_seconds, max(1, broadcast.tau)
    updates = broadcast.updates(answer.report.nodes)
    return float(_update_seconds(answer, broadcast).mean()), int(updates.max())


def _is_possible(report: Report) -> bool:
    """Whether all that w and c are made of is finite, and not beyond what can be."""
    spread = (report.plain, report.corrected)
    parts = (report.losses, report.best_losses, report.w, report.gradients, *spread)
    sizes = all(part is None or bool((part >= 0).all()) for part in spread)
    return sizes and all(part is None or within(part) for part in parts)
