"""Flower's grid as the network engine wants it: asks nodes, and gathers what they answer.

A node that is asked owes a reply, and is not asked again before it has come or Flower says that it never will: what
comes after its round is discarded. So no more than one message waits for any node. A round is over when all that were
asked have answered; or, with enough answers, at its deadline. With too few, those that have failed and those that have
come back are asked again.

A node that comes later is asked what it has, and takes part from then on. Flower may know one that is started anew by
another number: where it has the partition of a node that is gone, it is that node, come back without its memory.

Flower tells nobody when a reply has come: it is asked again and again here, more often than its own `send_and_receive`
does, because whoever waits pays for the time. How often nodes ask for their messages is Flower's affair.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedbudget.engines.flower import records
from fedbudget.engines.remote.members import GONE_FOR_GOOD, Counters, Member
from fedbudget.engines.remote.messages import Answer, Farewell, RoundRequest, Welcome
from fedbudget.engines.remote.round import CollectedRound, finite
from fedbudget.engines.remote.task import Samples, Task
from fedbudget.errors import UserError, WorkError
from fedbudget.protocol.messages import Broadcast, PeerError
from fedbudget.resources.usage import NodeCosts

LOG = logging.getLogger("flwr")
"""Flower's own log, which `flwr log` shows."""

_POLL, _QUICKEST, _OFTEN = 0.1, 0.005, 20  # seconds between two looks, and how many in the time waited so far
_LOOK_FOR_NODES = 1.0  # seconds between two looks at who is there
_PATIENCE = 600.0  # seconds for an answer before the first round
_TIMES_TO_LIVE, _LEAST_TO_LIVE = 10, 3600.0  # of a message: machines' clocks differ, so it is long
_Result = TypeVar("_Result")
_FAILURES = 3  # of a node in one round, until it is not asked again in it


@dataclass(frozen=True)
class Described:
    """A node that has said what it has.

    Args:
      node: Flower's number of it.
      partition: which share of the run's dataset it has, if that is what it has.
    """

    node: int
    samples: Samples
    partition: int | None


class Refused(PeerError):
    """A node says that it cannot do what it is asked to.

    Args:
      lost: because it does not remember what it must.
    """

    def __init__(self, reason: str, lost: bool) -> None:
        super().__init__(reason)
        self.lost = lost


@dataclass
class _Round:
    """A round in progress; times are of `time.monotonic`."""

    broadcast: Broadcast
    least: int
    deadline: float
    end: float
    asked: set[int] = field(default_factory=set)
    answers: dict[int, Answer] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)
    trouble: str = ""


class GridNodes:
    """Nodes behind a grid.

    Args:
      run: the run's name.
    """

    def __init__(self, grid: Grid, run: str) -> None:
        self.counters = Counters()
        self.round_trip = np.inf  # seconds of the quickest message to all: the first may have had to start something
        self.trouble = ""  # why there can be no more rounds, once that is so
        self.members: dict[int, Member] = {}  # by Flower's numbers
        self._grid = grid
        self._run = run
        self._task: Task | None = None
        self._owed: dict[str, tuple[int, int]] = {}  # who owes a reply and of which round, by the message
        self._round: _Round | None = None
        self._looked = -np.inf
        self._there: set[int] = set()
        self._partitions: dict[int, int | None] = {}  # of all that were let in or refused, by Flower's numbers
        self._met: list[Described] = []  # and not let in yet
        self._woken = False

    # Before the first round.

    def describe(self, nodes: int) -> list[Described]:
        """Waits until so many nodes are connected, and asks what they have; gives them in the order of numbers."""
        last = -1
        while len(there := self._online()) < nodes:
            if len(there) != last:
                LOG.info("%d of %d nodes are here", len(there), nodes)
            last = len(there)
            time.sleep(_POLL)
        replies = self._exchange({node: RecordDict() for node in sorted(there)}, "query.describe")
        described: list[Described] = []
        refused: list[str] = []
        for node in sorted(there):
            try:
                described.append(_described(node, replies.get(node)))
            except PeerError as error:
                refused.append(f"{self._name(node)}: {error}")
                LOG.warning("%s", refused[-1])
        if len(described) < nodes:
            broadcast = f"{len(described)} of {len(there)} nodes could say what they have, and {nodes} are needed"
            raise UserError("; ".join([broadcast, *refused[:1]]))
        partitions = {each.partition for each in described}
        if None in partitions or len(partitions) < len(described):
            return described
        return sorted(described, key=lambda each: each.partition or 0)

    def start(self, task: Task, described: Sequence[Described]) -> list[NodeCosts]:
        """Tells all what is trained; gives what a trial round has cost at each."""
        self._task = task
        self._partitions = dict.fromkeys(self._there)  # whoever could not say what it has is not asked again
        for each in described:
            self._let_in(each)
        replies = self._exchange({node: self._welcome(node) for node in self.members}, "query.trial")
        trials = []
        for node in self.members:
            try:
                trials.append(records.costs_in(_content(replies.get(node))))
            except PeerError as error:
                raise WorkError(f"{self._name(node)} cannot take part: {error}") from None
        return trials

    # As the network engine wants it.

    def lost(self, coming: int) -> list[int]:
        self._let_in_all(None)
        found: list[int] = []
        for node, member in self.members.items():
            if node not in self._there and member.base_round and coming - member.base_round > GONE_FOR_GOOD:
                member.lost, member.base_round = True, 0
            if member.lost:
                member.lost = False
                found += member.numbers.tolist()
        return found

    def begin(self, broadcast: Broadcast, *, least: int, timeout: float, left: float) -> None:
        now = time.monotonic()
        self._round = _Round(broadcast, least, now + timeout, now + left - _POLL)
        self._ask(self._round)

    def finish(self) -> CollectedRound:
        current = self._round
        assert current is not None
        began = time.monotonic()
        while not self._is_over(current):
            time.sleep(max(0.0, min(_pause(began), current.end - time.monotonic())))
            for node, number, reply in self._replies():
                if number:
                    self._take(current, node, number, reply)
                else:
                    self._meet(node, reply)
        self._round = None
        return self._gathered(current)

    def wake(self) -> None:
        """Ends what is being waited for."""
        self._woken = True

    def close(self, farewell: Farewell) -> None:
        """Nodes need not be told: Flower tells them nothing more of this run."""

    # A round.

    def _is_over(self, current: _Round) -> bool:
        now = time.monotonic()
        if self._woken or self.trouble or now >= current.end:
            return True
        owing = (current.asked & self._owing()) - current.answers.keys()
        if owing and now < current.deadline:
            return False
        if sum(len(self.members[node]) for node in current.answers) >= current.least:
            return True
        if not owing and current.failures and min(current.failures.values()) >= _FAILURES:
            self.trouble = f"too few nodes can make round {current.broadcast.round}: {current.trouble}"
            return True
        self._let_in_all(current)
        self._ask(current)
        return False

    def _ask(self, current: _Round) -> None:
        """All that are there, owe nothing, have not answered, and have not failed too often."""
        broadcast, there, owing = current.broadcast, self._online(), self._owing()
        contents: dict[int, RecordDict] = {}
        request: dict[
            int, RecordDict
        ] = {}  # by where nodes' memories stand: the vectors, which may be large, are shared
        for node, member in self.members.items():
            tired = current.failures.get(node, 0) >= _FAILURES
            if node not in there or node in owing or node in current.answers or tired:
                continue
            if member.base_round not in request:
                catch_up = member.base_round != broadcast.round - 1
                request[member.base_round] = records.request_out(
                    RoundRequest(broadcast, member.base_round), catch_up=catch_up
                )
            contents[node] = self._welcome(node)
            contents[node].update(request[member.base_round])
        current.asked |= contents.keys()
        life = max(_LEAST_TO_LIVE, _TIMES_TO_LIVE * (current.deadline - time.monotonic()))
        self._send(contents, "train", life=life, number=broadcast.round)
        for node in () if self.trouble else contents.keys() - self._owing():
            self._failed(current, node, "Flower has not taken the message")
        self._greet()

    def _take(self, current: _Round, node: int, number: int, reply: Message) -> None:
        broadcast = current.broadcast
        if number != broadcast.round or node not in self.members:
            self.counters.late += 1
            LOG.info("%s's report of round %d came too late, and is discarded", self._name(node), number)
            return
        member = self.members[node]
        try:
            current.answers[node] = records.answer_in(_content(reply), broadcast, member.numbers, member.sizes)
        except PeerError as error:
            if isinstance(error, Refused) and error.lost:
                member.forget()
            self._failed(current, node, str(error))

    def _failed(self, current: _Round, node: int, reason: str) -> None:
        current.failures[node] = current.failures.get(node, 0) + 1
        current.trouble = f"{self._name(node)}: {reason}"
        LOG.warning("round %d, %s", current.broadcast.round, current.trouble)

    def _gathered(self, current: _Round) -> CollectedRound:
        those = finite(current.answers)
        for node, answer in those.items():
            member = self.members[node]
            member.base_round, member.step_seconds = current.broadcast.round, answer.costs.step_seconds
            member.rounds += 1
        broken, missed = current.answers.keys() - those.keys(), current.asked - current.answers.keys()
        for node in missed:
            self.members[node].missed += 1
        return CollectedRound(
            sorted(those.values(), key=lambda answer: int(answer.report.nodes[0])),
            self._numbers(broken),
            self._numbers(missed),
            sum(len(self.members[node]) for node in those) >= current.least,
        )

    def _numbers(self, nodes: set[int]) -> tuple[int, ...]:
        return tuple(sorted(number for node in nodes for number in self.members[node].numbers.tolist()))

    # Nodes that come later.

    def _greet(self) -> None:
        """Asks those that are new what they have."""
        new = self._there - self._partitions.keys()
        self._partitions |= dict.fromkeys(new)
        self._send({node: RecordDict() for node in new}, "query.describe", life=_LEAST_TO_LIVE)

    def _meet(self, node: int, reply: Message) -> None:
        assert self._task is not None
        if node in self.members:
            return
        try:
            found = _described(node, reply)
            self._task.admit(found.samples)
        except PeerError as error:
            LOG.warning("%s cannot take part: %s", self._name(node), error)
            return
        self._met.append(found)

    def _let_in_all(self, current: _Round | None) -> None:
        """Those that were met, between two rounds or into one that has too few; not in the place of an answer in it."""
        met, self._met = self._met, []
        for found in met:
            place = self._place(found)
            if current is not None and place in current.answers:
                self._met.append(found)
                continue
            self._let_in(found, place)
            LOG.info("%s has joined, with %d samples", self._name(found.node), sum(found.samples.sizes))
            if current is not None and place is not None:
                current.asked.discard(place)
                current.failures.pop(place, None)

    def _place(self, found: Described) -> int | None:
        """Who is gone and was the same node."""
        away = self.members.keys() - self._there
        for node, partition in self._partitions.items():
            same = partition is not None and partition == found.partition
            if same and node in away and len(self.members[node]) == len(found.samples.sizes):
                return node
        return None

    def _let_in(self, found: Described, place: int | None = None) -> None:
        sizes = np.array(found.samples.sizes, np.int64)
        if place is None:
            first = 1 + max((int(member.numbers[-1]) for member in self.members.values()), default=-1)
            member = Member(np.arange(first, first + len(sizes), dtype=np.int64), sizes)
        else:
            member = self.members.pop(place)
            member.sizes = sizes
            member.forget()
        self.members[found.node], self._partitions[found.node] = member, found.partition

    # Messages.

    def _exchange(self, contents: Mapping[int, RecordDict], kind: str) -> dict[int, Message]:
        """Sends to all, and waits for all."""
        began = time.monotonic()
        self._send(contents, kind, life=_LEAST_TO_LIVE)
        replies: dict[int, Message] = {}
        while self._owed and time.monotonic() < began + _PATIENCE:
            time.sleep(_pause(began))
            replies |= {node: reply for node, _, reply in self._replies()}
        self.round_trip = min(self.round_trip, time.monotonic() - began)
        return replies

    def _send(self, contents: Mapping[int, RecordDict], kind: str, *, life: float, number: int = 0) -> None:
        """Sends to idle nodes.

        Args:
          life: for how many seconds the messages are good.
          number: of the round.
        """
        group = str(number) if number else ""
        messages = [Message(content, node, kind, ttl=life, group_id=group) for node, content in contents.items()]
        none: set[str] = set()
        sent = self._flower(lambda: set(self._grid.push_messages(messages)), none) if messages else none
        for message in messages:
            if message.metadata.message_id in sent:
                self._owed[message.metadata.message_id] = message.metadata.dst_node_id, number
                self.counters.sent += records.size(message.content)

    def _replies(self) -> list[tuple[int, int, Message]]:
        """Those that have come: from which node, of which round."""
        waiting, none, found = list(self._owed), list[Message](), []
        for reply in self._flower(lambda: list(self._grid.pull_messages(waiting)), none) if waiting else none:
            owed = self._owed.pop(reply.metadata.reply_to_message_id, None)
            if owed is not None:
                self.counters.received += records.size(reply.content) if reply.has_content() else 0
                found.append((*owed, reply))
        return found

    def _owing(self) -> set[int]:
        return {node for node, _ in self._owed.values()}

    def _welcome(self, node: int) -> RecordDict:
        assert self._task is not None
        return records.welcome_out(Welcome(self._run, self._task, tuple(self.members[node].numbers.tolist())))

    def _online(self) -> set[int]:
        """Who is connected."""
        if time.monotonic() - self._looked > _LOOK_FOR_NODES:
            self._there = self._flower(lambda: set(self._grid.get_node_ids()), self._there)
            self._looked = time.monotonic()
        return self._there

    def _flower(self, call: Callable[[], _Result], otherwise: _Result) -> _Result:
        """What Flower gives; in a round, what it raises ends the run in order, with what that has come to.

        It may raise anything, when the run is stopped or the SuperLink is gone.
        """
        try:
            return call()
        except Exception as error:
            if self._round is None:
                raise
            self.trouble = self.trouble or f"Flower carries no more messages of this run: {error}"
            return otherwise

    def _name(self, node: int) -> str:
        """For people: our number, and Flower's."""
        member = self.members.get(node)
        return f"Flower's node {node}" if member is None else f"node {member.numbers[0]} (Flower's {node})"


def _pause(began: float) -> float:
    """Seconds until the next look: few where replies take milliseconds, as in a simulation."""
    return min(_POLL, max(_QUICKEST, (time.monotonic() - began) / _OFTEN))


def _described(node: int, reply: Message | None) -> Described:
    hello, partition = records.hello_in(_content(reply))
    return Described(node, hello.samples, partition)


def _content(reply: Message | None) -> RecordDict:
    """What a node has said, when it is not that it cannot."""
    if reply is None:
        raise PeerError("it does not answer; is its SuperNode well?")
    if reply.has_error():
        raise PeerError(f"Flower says: {reply.error.reason} (error {reply.error.code})")
    reason = records.refusal_in(reply.content)
    if reason is not None:
        raise Refused(*reason)
    return reply.content
