"""Nodes behind Flower's grid: messages, replies and the transport of the network engine.

- A node that received a message is awaited until its reply arrives or Flower reports that
  none will come. It receives no other message before that, so at most one waits for any
  node. A reply after its round is discarded. The rules of a round are in
  engines/remote/round.py.
- Flower does not notify when a reply arrives. `Mailbox` polls more often than Flower's own
  `send_and_receive`, because waiting costs budget. Flower decides how often nodes poll.
- A node that connects later is asked for its description, and takes part from then on.
  Flower may give a restarted node another number. If it has the partition of a node that is
  gone, it continues as that node, without memory.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedbudget.arrays import Float32
from fedbudget.engines.engine import RoundTerms
from fedbudget.engines.flower import records
from fedbudget.engines.flower.node import PARTITION
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.members import Counters, Members
from fedbudget.engines.remote.messages import Hello, NodeRefusal, Welcome
from fedbudget.engines.remote.round import (
    CollectedRound,
    NextStep,
    PendingRound,
    RemoteNodes,
)
from fedbudget.engines.remote.task import SamplesDescription, Task, require_model
from fedbudget.engines.remote.wire import ExpectedReport
from fedbudget.errors import UserError, WorkError
from fedbudget.models.description import ModelDescription
from fedbudget.node_status import NodeStatus
from fedbudget.protocol.features.compression import BroadcastCompressor
from fedbudget.protocol.features.workload import Work
from fedbudget.protocol.messages import Broadcast, PeerError, SiteRound
from fedbudget.resources.resource import Usage

LOG = logging.getLogger("flwr")
"""Flower's own log, which `flwr log` shows."""

LONG_LIFE = 3600.0
"""Minimum lifetime of a message in seconds: long, because machines' clocks differ."""

POLL = 0.1
"""Maximum number of seconds between two polls."""

_MIN_POLL = 0.005  # seconds
_POLLS = 20  # number of polls in the time waited so far
_NODES_POLL = 1.0  # seconds between two queries for connected nodes
_PATIENCE = 600.0  # seconds for an answer before the first round
_DEADLINES_TO_LIVE = 10  # lifetime of a message, in deadlines of its round
_Result = TypeVar("_Result")


class Reply(NamedTuple):
    """A reply of a node.

    Args:
      node: Flower's number of it.
      round: of the request; 0 before the first.
    """

    node: int
    round: int
    message: Message


class DescribedNode(NamedTuple):
    """A node with the description of its samples.

    Args:
      node: Flower's number of it.
      partition: index of its part of the run's dataset, if it has one.
    """

    node: int
    samples: SamplesDescription
    partition: int | None


class RefusedByNode(PeerError):
    """A node refuses a request.

    Args:
      lost: whether the reason is missing memory.
    """

    def __init__(self, reason: str, lost: bool) -> None:
        super().__init__(reason)
        self.lost = lost


class GridNodes(RemoteNodes):
    """Nodes behind a grid, by Flower's numbers.

    Args:
      run: the run's name.
      max_share: largest share of the average for one of three or more nodes; see `Members`.
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
        self._partitions: dict[int, int | None] = {}  # of admitted and refused nodes
        self._newcomers: list[DescribedNode] = []  # not admitted yet
        self._failure = ""
        self._stopped = False

    @property
    def error(self) -> str:
        return self._failure or self.mailbox.error

    # Before the first round.

    def describe(
        self, nodes: int, model: str | ModelDescription | None
    ) -> list[DescribedNode]:
        """Wait for this many nodes, and request their descriptions.

        Args:
          model: of the run; a node with another model is refused, now or later. None if the
            model depends on the nodes' data.

        Returns: the nodes, in the order of partitions or of Flower's numbers.
        """
        self._model = model
        last = -1
        while len(online := self.mailbox.find_nodes()) < nodes:
            if len(online) != last:
                LOG.info("%d of %d nodes are connected", len(online), nodes)
            last = len(online)
            time.sleep(POLL)
        replies = self.mailbox.exchange(
            {node: RecordDict() for node in sorted(online)}, "query.describe"
        )
        described: list[DescribedNode] = []
        refused: list[str] = []
        for node in sorted(online):
            try:
                described.append(self._described(node, replies.get(node)))
            except PeerError as error:
                refused.append(f"{self._name(node)}: {error}")
                LOG.warning("%s", refused[-1])
        if len(described) < nodes:
            count = (
                f"{len(described)} of {len(online)} nodes could describe their data, and "
                f"{nodes} are needed"
            )
            raise UserError("; ".join([count, *refused[:1]]))
        partitions = {each.partition for each in described}
        if None in partitions or len(partitions) < len(described):
            return described
        return sorted(described, key=lambda each: each.partition or 0)

    def start(self, task: Task, described: Sequence[DescribedNode]) -> list[Usage]:
        """Send the task to all; return the costs of each node's trial round."""
        self._task = task
        self._model = task.model
        # A node that failed to describe its data is not asked again.
        self._partitions = dict.fromkeys(self.mailbox.online)
        for each in described:
            self._admit(each)
        replies = self.mailbox.exchange(
            {node: self._welcome(node) for node in self.members}, "query.trial"
        )
        trials = []
        for node in self.members:
            try:
                content = _content(replies.get(node))
                trials.append(wire.read_ready(records.frame(content, "ready")).costs)
            except PeerError as error:
                raise WorkError(f"{self._name(node)} cannot take part: {error}") from None
        return trials

    # The transport of the network engine (`RemoteNodes`).

    def lost(self, coming: int) -> list[int]:
        self._admit_newcomers(None)
        return self.members.take_lost(coming, self.mailbox.online)

    def begin(self, broadcast: Broadcast, terms: RoundTerms) -> None:
        now = time.monotonic()
        if isinstance(broadcast, SiteRound):
            self._stopped = False  # a target may have stopped the rounds before it
        if self.compressor.kind != "none":
            broadcast = replace(broadcast, compress=self.compressor.kind)
        self.mailbox.keeps_errors = True  # from now on an error of Flower ends the run
        self._pending = PendingRound(
            broadcast,
            terms.least,
            deadline=now + terms.timeout,
            end=now + terms.left - POLL,
            needs_reports=terms.needs_reports,
            resting=self.members.having(terms.resting),
            pay_again=terms.pay_again,
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
                    self._add_newcomer(reply)
        self._pending = None
        return pending.close(self.members, {})

    def wake(self) -> None:
        self._stopped = True

    def node_statuses(self) -> list[NodeStatus]:
        now = time.time()
        online = self.mailbox.online
        awaited = self.mailbox.awaited()
        states = {node: "at work" if node in awaited else "idle" for node in online}
        members = sorted(
            self.members.snapshot().items(), key=lambda item: int(item[1].numbers[0])
        )
        return [
            member.status(f"node-{member.numbers[0]}", states.get(node, "away"), now)
            for node, member in members
        ]

    def state(self, meters: dict[str, Any]) -> None:
        """Return None: a run over Flower cannot be resumed."""

    # A round.

    def _is_over(self, pending: PendingRound[int]) -> bool:
        pending.stopped = self._stopped or bool(self.error)
        step = pending.next_step(time.monotonic(), self.members)
        if step is NextStep.ASK:
            self._admit_newcomers(pending)
            self._ask(pending)
        elif step is NextStep.GIVE_UP:
            number = pending.broadcast.round
            self._failure = f"too few nodes can make round {number}: {pending.failure}"
        return step in (NextStep.CLOSE, NextStep.GIVE_UP)

    def _ask(self, pending: PendingRound[int]) -> None:
        """Ask all connected idle nodes that may be asked in this round."""
        broadcast = pending.broadcast
        online = self.mailbox.find_nodes()
        awaited = self.mailbox.awaited()
        contents: dict[int, RecordDict] = {}
        # By base round and number of updates, because vectors may be large.
        requests: dict[tuple[int, Work | None], RecordDict] = {}
        for node, member in self.members.items():
            if node not in online or node in awaited or not pending.can_ask(node):
                continue
            own = broadcast.to(member.numbers)
            key = (member.base_round, own.part(Work))
            if key not in requests:
                requests[key] = self._request(own, member.base_round)
            contents[node] = self._welcome(node)
            contents[node].update(requests[key])
            pending.ask(node)
        life = max(LONG_LIFE, _DEADLINES_TO_LIVE * (pending.deadline - time.monotonic()))
        self.mailbox.send(contents, "train", life=life, round_=broadcast.round)
        for node in () if self.error else contents.keys() - self.mailbox.awaited():
            self._fail(pending, node, "Flower did not accept the message", silent=True)
        # New nodes describe their data now and take part later.
        new = self.mailbox.online - self._partitions.keys()
        self._partitions |= dict.fromkeys(new)
        self.mailbox.send({node: RecordDict() for node in new}, "query.describe")

    def _request(self, broadcast: Broadcast, base_round: int) -> RecordDict:
        catch_up = base_round != broadcast.round - 1
        differences: Sequence[tuple[Float32, bytes]] = ()
        if base_round and not catch_up:
            differences = self.compressor.differences(broadcast)
        packed = wire.pack_broadcast(
            broadcast, base_round, catch_up=catch_up, differences=differences
        )
        return records.to_content(packed)

    def _receive(self, pending: PendingRound[int], reply: Reply) -> None:
        node = reply.node
        if not pending.expects(node, reply.round):
            self.counters.late += 1
            LOG.info(
                "%s's report of round %d came too late, and is discarded",
                self._name(node),
                reply.round,
            )
            return
        member = self.members[node]
        try:
            expected = ExpectedReport.of(pending.broadcast)
            answer = records.answer(
                _content(reply.message), expected, member.numbers, member.counted
            )
            pending.receive(node, answer)
        except PeerError as error:
            if isinstance(error, RefusedByNode) and error.lost:
                member.forget()
            silent = isinstance(error, RefusedByNode)
            self._fail(pending, node, str(error), silent=silent)

    def _fail(
        self, pending: PendingRound[int], node: int, reason: str, *, silent: bool
    ) -> None:
        pending.fail(node, f"{self._name(node)}: {reason}", silent=silent)
        LOG.warning("round %d, %s", pending.broadcast.round, pending.failure)

    # Nodes that connect later.

    def _add_newcomer(self, reply: Reply) -> None:
        """Check the description of a new node."""
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

    def _admit_newcomers(self, pending: PendingRound[int] | None) -> None:
        """Admit new nodes between rounds, or into a round with too few nodes.

        A new node does not replace a node that has answered in the pending round.
        """
        newcomers = self._newcomers
        self._newcomers = []
        for described in newcomers:
            former = self._former(described)
            if pending is not None and former in pending.answers:
                self._newcomers.append(described)
                continue
            self._admit(described, former)
            LOG.info(
                "%s has joined, with %d samples",
                self._name(described.node),
                sum(described.samples.sizes),
            )
            if pending is not None and former is not None:
                pending.replace(former, described.node)

    def _former(self, described: DescribedNode) -> int | None:
        """Number of a disconnected node that was the same node, if any."""
        if described.partition is None:
            return None
        for node, partition in self._partitions.items():
            away = node in self.members and node not in self.mailbox.online
            if (
                away
                and partition == described.partition
                and len(self.members[node].numbers) == len(described.samples.sizes)
            ):
                return node
        return None

    def _admit(self, described: DescribedNode, former: int | None = None) -> None:
        if former is None:
            self.members.join(described.node, described.samples.sizes)
        else:
            self.members.replace(former, described.node, described.samples.sizes)
        self._partitions[described.node] = described.partition

    def _described(self, node: int, reply: Message | None) -> DescribedNode:
        content = _content(reply)
        hello: Hello = wire.read(records.frame(content, "hello"))
        partition = content.config_records["hello"].get(PARTITION)
        if self._model is not None:
            require_model(hello.model, self._model)
        return DescribedNode(
            node, hello.samples, partition if isinstance(partition, int) else None
        )

    def _welcome(self, node: int) -> RecordDict:
        assert self._task is not None
        numbers = tuple(self.members[node].numbers.tolist())
        return records.to_content(wire.pack(Welcome(self._run, self._task, numbers)))

    def _name(self, node: int) -> str:
        """Name in messages: the node's number, and Flower's."""
        member = self.members.get(node)
        if member is None:
            return f"Flower's node {node}"
        return f"node {member.numbers[0]} (Flower's {node})"


class Mailbox:
    """Sends messages over a grid, and collects replies.

    Args:
      counters: of traffic.
    """

    def __init__(self, grid: Grid, counters: Counters) -> None:
        self.online: set[int] = set()  # Flower's numbers, at the last query
        self.round_trip = np.inf  # seconds; the minimum, as the first may start processes
        self.keeps_errors = False  # whether to store Flower's errors in `error`
        self.error = ""
        self._grid = grid
        self._counters = counters
        self._awaited: dict[str, tuple[int, int]] = {}  # node and round, by message
        self._queried = -np.inf

    def find_nodes(self) -> set[int]:
        """Nodes that are connected now, or were a moment ago."""
        if time.monotonic() - self._queried > _NODES_POLL:
            self.online = self._call(lambda: set(self._grid.get_node_ids()), self.online)
            self._queried = time.monotonic()
        return self.online

    def awaited(self) -> set[int]:
        """Nodes whose reply is awaited."""
        return {node for node, _ in self._awaited.values()}

    def send(
        self,
        contents: Mapping[int, RecordDict],
        kind: str,
        *,
        life: float = LONG_LIFE,
        round_: int = 0,
    ) -> None:
        """Send messages to idle nodes.

        Args:
          contents: by node.
          life: lifetime of the messages in seconds.
          round_: of the request; 0 before the first.
        """
        if not contents:
            return
        group = str(round_) if round_ else ""
        messages = [
            Message(content, node, kind, ttl=life, group_id=group)
            for node, content in contents.items()
        ]
        sent = self._call(lambda: set(self._grid.push_messages(messages)), set[str]())
        for message in messages:
            number = message.metadata.message_id
            if number in sent:
                self._awaited[number] = (message.metadata.dst_node_id, round_)
                self._counters.sent += records.size(message.content)

    def replies(self) -> list[Reply]:
        """Replies that have arrived."""
        waiting = list(self._awaited)
        if not waiting:
            return []
        replies = []
        for message in self._call(
            lambda: list(self._grid.pull_messages(waiting)), list[Message]()
        ):
            request = self._awaited.pop(message.metadata.reply_to_message_id, None)
            if request is None:
                continue
            if message.has_content():
                self._counters.received += records.size(message.content)
            replies.append(Reply(*request, message))
        return replies

    def exchange(self, contents: Mapping[int, RecordDict], kind: str) -> dict[int, Message]:
        """Send to all nodes, and wait for all replies."""
        began = time.monotonic()
        self.send(contents, kind)
        replies: dict[int, Message] = {}
        while self._awaited and time.monotonic() < began + _PATIENCE:
            time.sleep(pause(began))
            replies |= {reply.node: reply.message for reply in self.replies()}
        self.round_trip = min(self.round_trip, time.monotonic() - began)
        return replies

    def _call(self, call: Callable[[], _Result], otherwise: _Result) -> _Result:
        """Call Flower, which may raise anything if the run or the SuperLink has stopped."""
        try:
            return call()
        except Exception as error:
            if not self.keeps_errors:
                raise
            if not self.error:
                self.error = f"Flower sends no more messages of this run: {error}"
            return otherwise


def pause(began: float) -> float:
    """Seconds until the next poll: short if replies take milliseconds, as simulated."""
    return min(POLL, max(_MIN_POLL, (time.monotonic() - began) / _POLLS))


def _content(reply: Message | None) -> RecordDict:
    """Content of a reply; raise `PeerError` for an error, a refusal or no reply."""
    if reply is None:
        raise PeerError("it does not answer; check its SuperNode")
    if reply.has_error():
        raise PeerError(f"Flower error {reply.error.code}: {reply.error.reason}")
    if "refusal" in reply.content.config_records:
        refusal: NodeRefusal = wire.read(records.frame(reply.content, "refusal"))
        raise RefusedByNode(refusal.reason, refusal.lost)
    return reply.content
