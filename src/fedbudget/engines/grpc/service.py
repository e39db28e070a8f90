"""The conversation with one peer, from its first message to its last.

A node is connected (it said hello), then welcome (it knows the task), then ready, and from then on idle or asked. One
that is asked owes a report, and is not asked again before it has come. So no more than one message waits for any node,
and none can send what it was not asked for. Who breaks the rules is dropped, with a reason; the others go on.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from fedbudget.engines.grpc.admission import AdmissionControl, Refusal, address_of
from fedbudget.engines.grpc.messages import NodeReader, pack_welcome
from fedbudget.engines.grpc.peers import FRAME, LOG, REVOKED, Peer, Room
from fedbudget.engines.grpc.rounds import Rounds
from fedbudget.engines.remote.messages import Answer, Hello, MaskedReport, Ready, Welcome
from fedbudget.engines.remote.task import MOST_NODES, Task, require_classes, require_model
from fedbudget.models.description import ModelDescription
from fedbudget.protocol.messages import PeerError
from fedbudget.resources import most_within
from fedbudget.secure import messages as masking

_HELLO_PATIENCE = 20.0  # seconds until a peer that has connected must have said hello
_READY_PATIENCE = 600.0  # to compile and try, on a small device
_PART_PATIENCE = 30.0  # between two parts of one report


@dataclass(frozen=True)
class PeerLimits:
    """What one peer may bring: nodes that it speaks for, and classes of samples."""

    nodes: int = MOST_NODES
    classes: int = 1000


@dataclass(eq=False)
class Service:
    """Talks with all peers; in the event loop's thread.

    Args:
      run: the run's name.
      admission: who may come in.
      rounds: what answers are for.
      most: the most nodes to let in.
      changed: called when nodes have come, or are ready.
      model: what is trained, as of a task, before there is one; None for what nobody knows yet.
      task: what whoever comes is welcomed to, once it is known.
      classes: all that there may be, before there is a task; None for any.
      limits: of what one peer may bring.
      room: for reports that are being received.
    """

    run: str
    admission: AdmissionControl
    rounds: Rounds
    most: int
    changed: Callable[[], None]
    model: str | ModelDescription | None = None
    task: Task | None = None
    classes: Sequence[str] | None = None
    limits: PeerLimits = PeerLimits()
    room: Room = field(default_factory=Room)

    async def converse(self, _: Any, context: Any) -> None:
        """One stream, as gRPC calls it."""
        peer: Peer | None = None
        name = "a peer"
        try:
            name, token = self.admission.admit(context)
            peer = await self._greet(name, token, context)
            await self.rounds.peers.confirm(peer)
            if self.task is not None and not peer.welcomed:
                self.welcome(peer)
            await self._follow(peer)
        except PeerError as error:
            await self._drop(name, peer, context, str(error))
        except asyncio.CancelledError:
            if peer is None or (peer.fault is None and not peer.released):
                raise
            if peer.fault is not None:
                await self._drop(name, peer, context, peer.fault)
        except Refusal as refusal:
            await self._refuse(name, context, refusal)
        finally:
            if peer is not None:
                if peer.welcomed and peer.trial is None and peer.fault is None:
                    LOG.warning(
                        "%s has left before it was ready to train; it says why", name
                    )
                self.rounds.peers.remove(peer)

    def welcome(self, peer: Peer) -> None:
        """Tells a peer what is trained; what it remembers of the run, if anything, counts or is lost."""
        assert self.task is not None
        member = self.rounds.members.join(peer.name, peer.hello.samples.sizes)
        if peer.hello.run != self.run or member.base_round not in peer.hello.rounds:
            member.forget()
        peer.welcomed, peer.asked_at = True, asyncio.get_running_loop().time()
        peer.reader.expect_ready()
        welcome = pack_welcome(Welcome(self.run, self.task, tuple(member.numbers.tolist())))
        self.rounds.peers.send(peer, [*self.rounds.welcome(), *welcome])

    async def _greet(self, name: str, token: str, context: Any) -> Peer:
        """The hello, and whether there is a place for who said it."""
        reader = NodeReader(self.rounds.masked)
        data = await self._read(context, _HELLO_PATIENCE)
        if data is None:
            raise PeerError("it left without a word")
        hello = reader.feed(data)
        assert isinstance(hello, Hello)
        before = self.rounds.peers.get(name)
        self._require_place(name, hello, before)
        if before is not None:
            self.rounds.peers.dismiss(before, "the node has connected anew")
        peer = Peer(name, hello, context, asyncio.current_task(), reader, token=token)
        self.rounds.peers.add(peer)
        self.rounds.peers.audit.record(
            "joined", name, context.peer(), f"{sum(hello.samples.sizes)} samples"
        )
        self.changed()
        return peer

    def _require_place(self, name: str, hello: Hello, before: Peer | None) -> None:
        """Refuses one whose name is taken, whose model or data do not fit, or that is too many."""
        nodes = len(hello.samples.sizes)
        member = self.rounds.members.get(name)
        if nodes > self.limits.nodes:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{name} speaks for {nodes} nodes, and {self.limits.nodes} is the most here",
            )
        if len(hello.samples.classes) > self.limits.classes:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{name} has {len(hello.samples.classes)} classes, and {self.limits.classes} is the most here",
            )
        if before is not None and before.hello.instance != hello.instance:
            raise Refusal(
                grpc.StatusCode.ALREADY_EXISTS,
                f"there is a node with the name {name} already; each needs its own",
            )
        trained = self.model if self.task is None else self.task.model
        if trained is not None:
            try:
                require_model(hello.model, trained)
            except PeerError as error:
                raise Refusal(
                    grpc.StatusCode.FAILED_PRECONDITION, f"{name} cannot take part: {error}"
                ) from None
        if self.task is not None or self.classes is not None:
            try:
                if self.classes is not None:
                    require_classes(hello.samples, self.classes)
                if self.task is not None:
                    self.task.admit(hello.samples)
            except PeerError as error:
                raise Refusal(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"{name}'s data do not fit: {error}",
                ) from None
        if member is not None and len(member) != nodes:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{name} had {len(member)} nodes, not {nodes}",
            )
        if before is None and self.rounds.count() + nodes > self.most:
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"there are {self.rounds.count()} nodes already",
            )

    async def _follow(self, peer: Peer) -> None:
        """Reads what a node says until it goes."""
        while (message := await self._next_message(peer)) is not None:
            if isinstance(message, Ready):
                self.rounds.require_ready(peer)
                waited = asyncio.get_running_loop().time() - peer.asked_at
                peer.trial = message.costs.within(most_within(waited), 1)
                self.changed()
            elif isinstance(message, Answer):
                self.rounds.receive_from(peer, message)
            elif not isinstance(message, Hello):
                self.rounds.receive_masking(peer, message)
            message = None  # its vectors are not ours to hold, until the next one

    async def _next_message(
        self, peer: Peer
    ) -> Hello | Ready | Answer | MaskedReport | masking.FromNode | None:
        """A whole one, for which a report that comes in parts waits for room; None when no more come."""
        patience = _READY_PATIENCE if peer.trial is None and self.task is not None else None
        data = await self._read(peer.context, patience)
        message = None if data is None else peer.reader.feed(data)
        data = None
        if not peer.reader.receiving:
            return message
        first = int(self.rounds.members[peer.name].numbers[0])
        async with self.room.take(peer.reader.receiving, first):
            while message is None:
                data = await self._read(peer.context, _PART_PATIENCE)
                if data is None:
                    return None
                message = peer.reader.feed(data)
        return message

    async def _read(self, context: Any, patience: float | None) -> bytes | None:
        """The next message; None when no more come."""
        try:
            data = await (
                context.read()
                if patience is None
                else asyncio.wait_for(context.read(), patience)
            )
        except TimeoutError:
            raise PeerError(
                f"nothing was heard of it for {patience:g} seconds, in the middle of something"
            ) from None
        if data is grpc.aio.EOF:
            return None
        self.rounds.counters.received += len(data) + FRAME
        return bytes(data)

    async def _refuse(self, name: str, context: Any, refusal: Refusal) -> None:
        self.rounds.counters.refused += 1
        by_anyone = refusal.code in (
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.INVALID_ARGUMENT,
        )
        self.rounds.peers.audit.record(
            "refused", name, context.peer(), str(refusal), by_anyone=by_anyone
        )
        if refusal.code is grpc.StatusCode.UNAUTHENTICATED:
            try:
                await asyncio.sleep(refusal.wait)
            finally:
                self.admission.answered(address_of(context.peer()))
        await context.abort(refusal.code, str(refusal)[:1000])

    async def _drop(self, name: str, peer: Peer | None, context: Any, fault: str) -> None:
        self.rounds.counters.dropped += 1
        event = "revoked" if fault == REVOKED else "dropped"
        self.rounds.peers.audit.record(event, name, context.peer(), fault)
        if peer is not None:
            peer.fault = fault  # which is told, and not that it has left
            self.rounds.peers.remove(peer)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault[:1000])
