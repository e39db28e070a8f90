"""Messages to nodes behind Flower's grid, and their replies.

A node that is sent a message owes a reply, until that has come or Flower says that it never will.

Flower tells nobody when a reply has come: it is asked again and again here, more often than its own `send_and_receive`
does, because whoever waits pays for the time. How often nodes ask for their messages is Flower's affair.

Flower's grid as the network engine wants it: asks nodes, and gathers what they answer.

A node that is asked owes a reply, and is not asked again before it has come or Flower says that it never will: what
comes after its round is discarded. So no more than one message waits for any node. The bookkeeping of a round is in
engines/remote/round.py.

A node that comes later is asked what it has, and takes part from then on. Flower may know one that is started anew by
another number: where it has the partition of a node that is gone, it is that node, come back without its memory.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedbudget.engines.flower import records
from fedbudget.engines.remote.members import Counters, Members
from fedbudget.engines.remote.messages import Farewell, RoundRequest, Welcome
from fedbudget.engines.remote.round import CollectedRound, NextStep, PendingRound
from fedbudget.engines.remote.task import SamplesDescription, Task, require_model
from fedbudget.errors import UserError, WorkError
from fedbudget.models.description import ModelDescription
from fedbudget.node_status import NodeStatus
from fedbudget.protocol.compression import BroadcastCompressor
from fedbudget.protocol.messages import Broadcast, PeerError, Work
from fedbudget.resources.resource import NodeCosts

LONG_LIFE = 3600.0
"""Seconds for which any message is good, at least: machines' clocks differ, so it is long."""

POLL = 0.1
"""Seconds between two looks, at most."""

# seconds between two looks, and how many in the time waited so far
_QUICKEST = 0.005
_OFTEN = 20
_LOOK_FOR_NODES = 1.0  # seconds between two looks at who is connected
_PATIENCE = 600.0  # seconds for an answer before the first round
_Result = TypeVar("_Result")


class Reply(NamedTuple):
    """What has come from a node.

    Args:
      node: Flower's number of it.
      round: that it was asked for; 0 before the first.
    """

    node: int
    round: int
    message: Message


class Mailbox:
    """Sends messages over a grid, and collects replies.

    Args:
      counters: of what has passed.
    """

    def __init__(self, grid: Grid, counters: Counters) -> None:
        self.online: set[int] = (
            set()
        )  # Flower's numbers of nodes that were connected at the last look
        self.round_trip = np.inf  # seconds of the quickest message to all: the first may have had to start something
        self.keeps_errors = False  # what Flower raises is kept as `error`, and not raised
        self.error = ""
        self._grid = grid
        self._counters = counters
        self._owed: dict[
            str, tuple[int, int]
        ] = {}  # who owes a reply and of which round, by the message
        self._looked = -np.inf

    def look_for_nodes(self) -> set[int]:
        """Who is connected now, or was a moment ago."""
        if time.monotonic() - self._looked > _LOOK_FOR_NODES:
            self.online = self._call(lambda: set(self._grid.get_node_ids()), self.online)
            self._looked = time.monotonic()
        return self.online

    def owing(self) -> set[int]:
        return {node for node, _ in self._owed.values()}

    def send(
        self,
        contents: Mapping[int, RecordDict],
        kind: str,
        *,
        life: float = LONG_LIFE,
        round_: int = 0,
    ) -> None:
        """Sends to nodes that owe nothing.

        Args:
          life: for how many seconds the messages are good.
        """
        group = str(round_) if round_ else ""
        messages = [
            Message(content, node, kind, ttl=life, group_id=group)
            for node, content in contents.items()
        ]
        none: set[str] = set()
        sent = (
            self._call(lambda: set(self._grid.push_messages(messages)), none)
            if messages
            else none
        )
        for message in messages:
            if message.metadata.message_id in sent:
                self._owed[message.metadata.message_id] = (
                    message.metadata.dst_node_id,
                    round_,
                )
                self._counters.sent += records.size(message.content)

    def replies(self) -> list[Reply]:
        """Those that have come."""
        waiting = list(self._owed)
        none = list[Message]()
        replies = []
        for message in (
            self._call(lambda: list(self._grid.pull_messages(waiting)), none)
            if waiting
            else none
        ):
            owed = self._owed.pop(message.metadata.reply_to_message_id, None)
            if owed is not None:
                self._counters.received += (
                    records.size(message.content) if message.has_content() else 0
                )
                replies.append(Reply(*owed, message))
        return replies

    def exchange(self, contents: Mapping[int, RecordDict], kind: str) -> dict[int, Message]:
        """Sends to all, and waits for all."""
        began = time.monotonic()
        self.send(contents, kind)
        replies: dict[int, Message] = {}
        while self._owed and time.monotonic() < began + _PATIENCE:
            time.sleep(pause(began))
            replies |= {reply.node: reply.message for reply in self.replies()}
        self.round_trip = min(self.round_trip, time.monotonic() - began)
        return replies

    def _call(self, call: Callable[[], _Result], otherwise: _Result) -> _Result:
        """What Flower gives. It may raise anything, when the run is stopped or the SuperLink is gone."""
        try:
            return call()
        except Exception as error:
            if not self.keeps_errors:
                raise
            self.error = (
                self.error or f"Flower carries no more messages of this run: {error}"
            )
            return otherwise


def pause(began: float) -> float:
    """Seconds until the next look: few where replies take milliseconds, as in a simulation."""
    return min(POLL, max(_QUICKEST, (time.monotonic() - began) / _OFTEN))


LOG = logging.getLogger("flwr")
"""Flower's own log, which `flwr log` shows."""

_DEADLINES_TO_LIVE = (
    10  # so many times the time that a round may take is a message good for
)


class Described(NamedTuple):
    """A node that has said what it has.

    Args:
      node: Flower's number of it.
      partition: which share of the run's dataset it has, if that is what it has.
    """

    node: int
    samples: SamplesDescription
    partition: int | None


class RefusedByNode(PeerError):
    """A node says that it cannot do what it is asked to.

    Args:
      lost: because it does not remember what it must.
    """

    def __init__(self, reason: str, lost: bool) -> None:
        super().__init__(reason)
        self.lost = lost


class GridNodes:
    """Nodes behind a grid, by Flower's numbers.

    Args:
      run: the run's name.
      max_share: the largest share of the average that one node may have, where they are three or more; see `Members`.
    """

    def __init__(self, grid: Grid, run: str, max_share: float | None = None) -> None:
        self.compressor = BroadcastCompressor("none")
        self.counters = Counters()
        self.members: Members[int] = Members(share=max_share)
        self.mailbox = Mailbox(grid, self.counters)
        self._run = run
        self._model: str | ModelDescription | None = None
        self._task: Task | None = None
        self._pending: PendingRound[int] | None = None
        self._partitions: dict[int, int | None] = {}  # of all that were let in or refused
        self._newcomers: list[Described] = []  # that are not let in yet
        self._failure = ""
        self._stopped = False

    @property
    def error(self) -> str:
        """Why there can be no more rounds, once that is so."""
        return self._failure or self.mailbox.error

    # Before the first round.

    def describe(self, nodes: int, model: str | ModelDescription | None) -> list[Described]:
        """Waits until so many nodes are connected, and asks what they have; gives them in the order of numbers.

        Args:
          model: what will be trained, as of a task; a node that has another is refused, now or later. None where that
            depends on what nodes have.
        """
        self._model = model
        last = -1
        while len(online := self.mailbox.look_for_nodes()) < nodes:
            if len(online) != last:
                LOG.info("%d of %d nodes are here", len(online), nodes)
            last = len(online)
            time.sleep(POLL)
        replies = self.mailbox.exchange(
            {node: RecordDict() for node in sorted(online)}, "query.describe"
        )
        described: list[Described] = []
        refused: list[str] = []
        for node in sorted(online):
            try:
                described.append(self._described(node, replies.get(node)))
            except PeerError as error:
                refused.append(f"{self._name(node)}: {error}")
                LOG.warning("%s", refused[-1])
        if len(described) < nodes:
            count = f"{len(described)} of {len(online)} nodes could say what they have, and {nodes} are needed"
            raise UserError("; ".join([count, *refused[:1]]))
        partitions = {each.partition for each in described}
        if None in partitions or len(partitions) < len(described):
            return described
        return sorted(described, key=lambda each: each.partition or 0)

    def start(self, task: Task, described: Sequence[Described]) -> list[NodeCosts]:
        """Tells all what is trained; gives what a trial round has cost at each."""
        self._task = task
        self._model = task.model
        self._partitions = dict.fromkeys(
            self.mailbox.online
        )  # whoever could not say what it has is not asked again
        for each in described:
            self._let_in(each)
        replies = self.mailbox.exchange(
            {node: self._welcome(node) for node in self.members}, "query.trial"
        )
        trials = []
        for node in self.members:
            try:
                trials.append(records.costs_in(_content(replies.get(node))))
            except PeerError as error:
                raise WorkError(f"{self._name(node)} cannot take part: {error}") from None
        return trials

    # As the network engine wants it.

    def lost(self, coming: int) -> list[int]:
        self._let_in_newcomers(None)
        return self.members.take_lost(coming, self.mailbox.online)

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
        now = time.monotonic()
        if self.compressor.kind != "none":
            broadcast = replace(broadcast, compress=self.compressor.kind)
        self.mailbox.keeps_errors = (
            True  # from now on what Flower raises ends the run in order
        )
        ends = now + timeout, now + left - POLL
        left_out = self.members.with_any(resting)
        self._pending = PendingRound(
            broadcast, least, *ends, needs_reports=needs_reports, resting=left_out
        )
        self._ask(self._pending)

    def finish(self) -> CollectedRound:
        pending = self._pending
        assert pending is not None
        began = time.monotonic()
        while not self._is_over(pending):
            time.sleep(max(0.0, min(pause(began), pending.end - time.monotonic())))
            for reply in self.mailbox.replies():
                if reply.round:
                    self._receive(pending, reply)
                else:
                    self._meet(reply)
        self._pending = None
        return pending.close(self.members, {})

    def wake(self) -> None:
        """Ends what is being waited for."""
        self._stopped = True

    def node_statuses(self) -> list[NodeStatus]:
        """How all nodes are doing; from any thread."""
        now = time.time()
        online = self.mailbox.online
        owing = self.mailbox.owing()
        states = {node: "at work" if node in owing else "idle" for node in online}
        members = sorted(
            self.members.snapshot().items(), key=lambda item: int(item[1].numbers[0])
        )
        return [
            member.status(f"node-{member.numbers[0]}", states.get(node, "away"), now)
            for node, member in members
        ]

    def close(self, farewell: Farewell) -> None:
        """Nodes need not be told: Flower tells them nothing more of this run."""

    def state(self) -> None:
        """A run over Flower cannot be resumed."""

    # A round.

    def _is_over(self, pending: PendingRound[int]) -> bool:
        pending.stopped = self._stopped or bool(self.error)
        step = pending.next_step(time.monotonic(), self.members)
        if step is NextStep.ASK:
            self._let_in_newcomers(pending)
            self._ask(pending)
        elif step is NextStep.GIVE_UP:
            self._failure = (
                f"too few nodes can make round {pending.broadcast.round}: {pending.failure}"
            )
        return step in (NextStep.CLOSE, NextStep.GIVE_UP)

    def _ask(self, pending: PendingRound[int]) -> None:
        """All that are connected, owe nothing, and can be asked in this round."""
        broadcast = pending.broadcast
        online = self.mailbox.look_for_nodes()
        owing = self.mailbox.owing()
        contents: dict[int, RecordDict] = {}
        # By base round and number of updates: the vectors, which may be large, are shared.
        requests: dict[tuple[int, Work | None], RecordDict] = {}
        for node, member in self.members.items():
            if node not in online or node in owing or not pending.can_ask(node):
                continue
            base_round = member.base_round
            own = broadcast.to(member.numbers)
            if (base_round, own.work) not in requests:
                catch_up = base_round != broadcast.round - 1
                told = (
                    {}
                    if catch_up or not base_round
                    else self.compressor.differences(broadcast)
                )
                request = records.request_out(
                    RoundRequest(own, base_round), catch_up=catch_up, differences=told
                )
                requests[base_round, own.work] = request
            contents[node] = self._welcome(node)
            contents[node].update(requests[base_round, own.work])
            pending.ask(node)
        life = max(LONG_LIFE, _DEADLINES_TO_LIVE * (pending.deadline - time.monotonic()))
        self.mailbox.send(contents, "train", life=life, round_=broadcast.round)
        for node in () if self.error else contents.keys() - self.mailbox.owing():
            self._fail(pending, node, "Flower has not taken the message")
        new = (
            self.mailbox.online - self._partitions.keys()
        )  # who is asked what it has, and takes part later
        self._partitions |= dict.fromkeys(new)
        self.mailbox.send({node: RecordDict() for node in new}, "query.describe")

    def _receive(self, pending: PendingRound[int], reply: Reply) -> None:
        node = reply.node
        if not pending.owes(node, reply.round):
            self.counters.late += 1
            LOG.info(
                "%s's report of round %d came too late, and is discarded",
                self._name(node),
                reply.round,
            )
            return
        member = self.members[node]
        try:
            answer = records.answer_in(
                _content(reply.message), pending.broadcast, member.numbers, member.counted
            )
            pending.receive(node, answer)
        except PeerError as error:
            if isinstance(error, RefusedByNode) and error.lost:
                member.forget()
            self._fail(pending, node, str(error))

    def _fail(self, pending: PendingRound[int], node: int, reason: str) -> None:
        pending.fail(node, f"{self._name(node)}: {reason}")
        LOG.warning("round %d, %s", pending.broadcast.round, pending.failure)

    # Nodes that come later.

    def _meet(self, reply: Reply) -> None:
        """One that is new has said what it has."""
        assert self._task is not None
        if reply.node in self.members:
            return
        try:
            described = self._described(reply.node, reply.message)
            self._task.admit(described.samples)
        except PeerError as error:
            LOG.warning("%s cannot take part: %s", self._name(reply.node), error)
            return
        self._newcomers.append(described)

    def _let_in_newcomers(self, pending: PendingRound[int] | None) -> None:
        """Between two rounds, or into one that has too few; not in the place of an answer in it."""
        newcomers, self._newcomers = self._newcomers, []
        for described in newcomers:
            place = self._place(described)
            if pending is not None and place in pending.answers:
                self._newcomers.append(described)
                continue
            self._let_in(described, place)
            LOG.info(
                "%s has joined, with %d samples",
                self._name(described.node),
                sum(described.samples.sizes),
            )
            if pending is not None and place is not None:
                pending.forget(place)

    def _place(self, described: Described) -> int | None:
        """Who is gone and was the same node."""
        away = self.members.keys() - self.mailbox.online
        size = len(described.samples.sizes)
        if described.partition is None:
            return None
        same = (
            node
            for node, partition in self._partitions.items()
            if partition == described.partition
        )
        return next(
            (node for node in same if node in away and len(self.members[node]) == size),
            None,
        )

    def _let_in(self, described: Described, place: int | None = None) -> None:
        if place is None:
            self.members.join(described.node, described.samples.sizes)
        else:
            self.members.replace(place, described.node, described.samples.sizes)
        self._partitions[described.node] = described.partition

    def _described(self, node: int, reply: Message | None) -> Described:
        hello, partition = records.hello_in(_content(reply))
        if self._model is not None:
            require_model(hello.model, self._model)
        return Described(node, hello.samples, partition)

    def _welcome(self, node: int) -> RecordDict:
        assert self._task is not None
        return records.welcome_out(
            Welcome(self._run, self._task, tuple(self.members[node].numbers.tolist()))
        )

    def _name(self, node: int) -> str:
        """For people: our number, and Flower's."""
        member = self.members.get(node)
        return (
            f"Flower's node {node}"
            if member is None
            else f"node {member.numbers[0]} (Flower's {node})"
        )


def _content(reply: Message | None) -> RecordDict:
    """What a node has said, when it is not that it cannot."""
    if reply is None:
        raise PeerError("it does not answer; is its SuperNode well?")
    if reply.has_error():
        raise PeerError(f"Flower says: {reply.error.reason} (error {reply.error.code})")
    reason = records.refusal_in(reply.content)
    if reason is not None:
        raise RefusedByNode(*reason)
    return reply.content
