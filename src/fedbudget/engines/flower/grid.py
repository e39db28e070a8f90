"""Flower's grid as the network engine wants it: asks nodes, and gathers what they answer.

A node that is asked owes a reply, and is not asked again before it has come or Flower says that it never will: what
comes after its round is discarded. So no more than one message waits for any node. The bookkeeping of a round is in
engines/remote/round.py.

A node that comes later is asked what it has, and takes part from then on. Flower may know one that is started anew by
another number: where it has the partition of a node that is gone, it is that node, come back without its memory.
"""

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedbudget.engines.flower import records
from fedbudget.engines.flower.mailbox import LONG_LIFE, POLL, Mailbox, Reply, pause
from fedbudget.engines.remote.members import Counters, Members
from fedbudget.engines.remote.messages import Farewell, RoundRequest, Welcome
from fedbudget.engines.remote.round import CollectedRound, NextStep, PendingRound
from fedbudget.engines.remote.task import SamplesDescription, Task, require_model
from fedbudget.errors import UserError, WorkError
from fedbudget.models.description import ModelDescription
from fedbudget.node_status import NodeStatus
from fedbudget.protocol.messages import Broadcast, PeerError, Work
from fedbudget.resources.usage import NodeCosts

LOG = logging.getLogger("flwr")
"""Flower's own log, which `flwr log` shows."""

_DEADLINES_TO_LIVE = 10  # so many times the time that a round may take is a message good for


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
        replies = self.mailbox.exchange({node: RecordDict() for node in sorted(online)}, "query.describe")
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
        self._task, self._model = task, task.model
        self._partitions = dict.fromkeys(self.mailbox.online)  # whoever could not say what it has is not asked again
        for each in described:
            self._let_in(each)
        replies = self.mailbox.exchange({node: self._welcome(node) for node in self.members}, "query.trial")
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
        self, broadcast: Broadcast, *, least: int, timeout: float, left: float, needs_reports: bool = True
    ) -> None:
        now = time.monotonic()
        self.mailbox.keeps_errors = True  # from now on what Flower raises ends the run in order
        ends = now + timeout, now + left - POLL
        self._pending = PendingRound(broadcast, least, *ends, needs_reports=needs_reports)
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
        now, online, owing = time.time(), self.mailbox.online, self.mailbox.owing()
        states = {node: "at work" if node in owing else "idle" for node in online}
        members = sorted(self.members.snapshot().items(), key=lambda item: int(item[1].numbers[0]))
        return [member.status(f"node-{member.numbers[0]}", states.get(node, "away"), now) for node, member in members]

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
            self._failure = f"too few nodes can make round {pending.broadcast.round}: {pending.failure}"
        return step in (NextStep.CLOSE, NextStep.GIVE_UP)

    def _ask(self, pending: PendingRound[int]) -> None:
        """All that are connected, owe nothing, and can be asked in this round."""
        broadcast, online, owing = pending.broadcast, self.mailbox.look_for_nodes(), self.mailbox.owing()
        contents: dict[int, RecordDict] = {}
        # By base round and number of updates: the vectors, which may be large, are shared.
        requests: dict[tuple[int, Work | None], RecordDict] = {}
        for node, member in self.members.items():
            if node not in online or node in owing or not pending.can_ask(node):
                continue
            base_round, own = member.base_round, broadcast.to(member.numbers)
            if (base_round, own.work) not in requests:
                catch_up = base_round != broadcast.round - 1
                request = records.request_out(RoundRequest(own, base_round), catch_up=catch_up)
                requests[base_round, own.work] = request
            contents[node] = self._welcome(node)
            contents[node].update(requests[base_round, own.work])
            pending.ask(node)
        life = max(LONG_LIFE, _DEADLINES_TO_LIVE * (pending.deadline - time.monotonic()))
        self.mailbox.send(contents, "train", life=life, round_=broadcast.round)
        for node in () if self.error else contents.keys() - self.mailbox.owing():
            self._fail(pending, node, "Flower has not taken the message")
        new = self.mailbox.online - self._partitions.keys()  # who is asked what it has, and takes part later
        self._partitions |= dict.fromkeys(new)
        self.mailbox.send({node: RecordDict() for node in new}, "query.describe")

    def _receive(self, pending: PendingRound[int], reply: Reply) -> None:
        node = reply.node
        if not pending.owes(node, reply.round):
            self.counters.late += 1
            LOG.info("%s's report of round %d came too late, and is discarded", self._name(node), reply.round)
            return
        member = self.members[node]
        try:
            answer = records.answer_in(_content(reply.message), pending.broadcast, member.numbers, member.counted)
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
            LOG.info("%s has joined, with %d samples", self._name(described.node), sum(described.samples.sizes))
            if pending is not None and place is not None:
                pending.forget(place)

    def _place(self, described: Described) -> int | None:
        """Who is gone and was the same node."""
        away, size = self.members.keys() - self.mailbox.online, len(described.samples.sizes)
        if described.partition is None:
            return None
        same = (node for node, partition in self._partitions.items() if partition == described.partition)
        return next((node for node in same if node in away and len(self.members[node]) == size), None)

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
        return records.welcome_out(Welcome(self._run, self._task, tuple(self.members[node].numbers.tolist())))

    def _name(self, node: int) -> str:
        """For people: our number, and Flower's."""
        member = self.members.get(node)
        return f"Flower's node {node}" if member is None else f"node {member.numbers[0]} (Flower's {node})"


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
