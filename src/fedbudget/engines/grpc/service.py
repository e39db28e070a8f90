"""The conversation with one peer, from its first message to its last.

A node is connected (after its hello), then welcomed (it has the task), then ready, and from
then on idle or asked. An asked node has one report due, and is not asked again before it
arrives. So at most one message waits for any node, and no node can send unrequested data. A
node that breaks the rules is dropped with a reason; the others continue.

Threads: everything runs in the event loop's thread.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from fedbudget.engines.grpc.admission import AdmissionControl, Refusal, address_of
from fedbudget.engines.grpc.messages import FromNode
from fedbudget.engines.grpc.peers import FRAME, GONE, LOG, REVOKED, Capacity, Peer
from fedbudget.engines.grpc.rounds import Rounds
from fedbudget.engines.grpc.stream import ADMITTED, PRIVATE, pack
from fedbudget.engines.remote.messages import Hello, Ready, Welcome
from fedbudget.engines.remote.task import DataTerms, Task, require_model
from fedbudget.models.description import ModelDescription
from fedbudget.protocol.messages import PeerError
from fedbudget.resources import within
from fedbudget.secure.graph import MOST_NODES

# seconds that a peer may be silent
_HELLO_PATIENCE = 20.0  # after it has connected
_READY_PATIENCE = 600.0  # while it compiles and makes a trial round, on a small device
_BY_ANYONE = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""Codes of refusals that a peer can cause without credentials, or very often."""

_PART_PATIENCE = 30.0  # between two parts of one report


@dataclass(frozen=True)
class PeerLimits:
    """Limits for one peer: its number of nodes, and of classes."""

    nodes: int = MOST_NODES
    classes: int = 1000


@dataclass(eq=False)
class Service:
    """Talks with all peers.

    Args:
      run: name of the run.
      admission: decides which peers are admitted.
      rounds: receive the answers.
      most: largest number of nodes.
      changed: called when nodes have connected or are ready.
      model: the model before there is a task; None if it is not decided yet.
      task: sent to each peer, once it is decided.
      terms: what the data of a node must fulfil.
      limits: for each peer.
      capacity: memory for reports that are being received.
    """

    run: str
    admission: AdmissionControl
    rounds: Rounds
    most: int
    changed: Callable[[], None]
    model: str | ModelDescription | None = None
    task: Task | None = None
    terms: DataTerms = field(default_factory=DataTerms)
    limits: PeerLimits = PeerLimits()
    capacity: Capacity = field(default_factory=Capacity)

    async def converse(self, _: Any, context: Any) -> None:
        """Handle one stream; called by gRPC."""
        peer: Peer | None = None
        name = "a peer"
        try:
            name, token = self.admission.admit(context)
            await self._confirm(context)
            peer = await self._greet(name, token, context)
            if self.task is not None and not peer.welcomed:
                self.welcome(peer)
            await self._follow(peer)
        except PeerError as error:
            self.admission.count_fault(name, context)
            await self._drop(name, peer, context, str(error))
        except asyncio.CancelledError:
            if peer is None or (peer.fault is None and not peer.released):
                raise
            if peer.fault is not None:
                self.admission.count_fault(name, context)
                await self._drop(name, peer, context, peer.fault)
        except Refusal as refusal:
            await self._refuse(name, context, refusal)
        finally:
            if peer is not None:
                if peer.welcomed and peer.trial is None and peer.fault is None:
                    LOG.warning("%s left before it was ready to train; see its log", name)
                self.rounds.peers.remove(peer)

    def welcome(self, peer: Peer) -> None:
        """Send a peer the task, and decide whether its memory of the run is still valid."""
        assert self.task is not None
        member = self.rounds.members.join(peer.name, peer.hello.samples.sizes)
        if peer.hello.run != self.run or member.base_round not in peer.hello.rounds:
            member.forget()
        peer.welcomed = True
        peer.asked_at = asyncio.get_running_loop().time()
        peer.reader.expect_ready()
        welcome = pack(Welcome(self.run, self.task, tuple(member.numbers.tolist())))
        self.rounds.peers.send(peer, self.rounds.reports.before_welcome() + welcome)

    async def _confirm(self, context: Any) -> None:
        """Confirm the admission, and announce a private run before the hello."""
        with suppress(*GONE):
            keys = (ADMITTED, PRIVATE) if self.terms.private else (ADMITTED,)
            await context.send_initial_metadata(tuple((key, "yes") for key in keys))

    async def _greet(self, name: str, token: str, context: Any) -> Peer:
        """Read the hello and admit the peer."""
        reader = self.rounds.reports.reader()
        data = await self._read(context, _HELLO_PATIENCE, counted=False)
        if data is None:
            raise PeerError("it left without a hello")
        hello = reader.feed(data)
        assert isinstance(hello, Hello)
        before = self.rounds.peers.get(name)
        self._require_fit(name, hello, before)
        if before is not None:
            self.rounds.peers.dismiss(before, "the node has a new connection")
        peer = Peer(name, hello, context, asyncio.current_task(), reader, token=token)
        self.rounds.counters.received += len(data) + FRAME
        self.rounds.peers.add(peer)
        self.rounds.peers.audit.record(
            "joined", name, context.peer(), f"{sum(hello.samples.sizes)} samples"
        )
        self.changed()
        return peer

    def _require_fit(self, name: str, hello: Hello, before: Peer | None) -> None:
        """Refuse a peer if its name is taken, its data do not fit, or it is too many."""
        unfit = grpc.StatusCode.FAILED_PRECONDITION
        nodes = len(hello.samples.sizes)
        classes = len(hello.samples.classes)
        if nodes > self.limits.nodes:
            raise Refusal(
                unfit, f"{name} has {nodes} nodes; the limit is {self.limits.nodes}"
            )
        if classes > self.limits.classes:
            raise Refusal(
                unfit, f"{name} has {classes} classes; the limit is {self.limits.classes}"
            )
        if before is not None and before.hello.instance != hello.instance:
            raise Refusal(
                grpc.StatusCode.ALREADY_EXISTS,
                f"there is a node with the name {name} already; names must be unique",
            )
        model = self.model if self.task is None else self.task.model
        if model is not None:
            try:
                require_model(hello.model, model)
            except PeerError as error:
                raise Refusal(unfit, f"{name} cannot take part: {error}") from None
        try:
            self.terms.require(hello.samples)
            if self.task is not None:
                self.task.admit(hello.samples)
        except PeerError as error:
            raise Refusal(unfit, f"{name}'s data do not fit: {error}") from None
        member = self.rounds.members.get(name)
        if member is not None and len(member.numbers) != nodes:
            raise Refusal(unfit, f"{name} had {len(member.numbers)} nodes, not {nodes}")
        if before is None and self.rounds.count() + nodes > self.most:
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"there are {self.rounds.count()} nodes already",
            )

    async def _follow(self, peer: Peer) -> None:
        """Handle a peer's messages until it leaves."""
        while (message := await self._next_message(peer)) is not None:
            if isinstance(message, Ready):
                self.rounds.reports.require_ready(peer)
                waited = asyncio.get_running_loop().time() - peer.asked_at
                peer.trial = within(message.costs, waited, 1)
                self.changed()
            else:
                self.rounds.receive(peer, message)
            message = None  # frees its vectors while we wait for the next one

    async def _next_message(self, peer: Peer) -> FromNode | None:
        """Return the next whole message, or None after the last.

        A report in several parts waits for capacity after its first part.
        """
        patience = _READY_PATIENCE if peer.trial is None and self.task is not None else None
        data = await self._read(peer.context, patience)
        message = None if data is None else peer.reader.feed(data)
        data = None
        if not peer.reader.receiving:
            return message
        first = int(self.rounds.members[peer.name].numbers[0])
        async with self.capacity.take(peer.reader.receiving, first):
            while message is None:
                data = await self._read(peer.context, _PART_PATIENCE)
                if data is None:
                    return None
                message = peer.reader.feed(data)
        return message

    async def _read(
        self, context: Any, patience: float | None, *, counted: bool = True
    ) -> bytes | None:
        """Read one message; None after the last. Uncounted ones cost the run nothing."""
        try:
            if patience is None:
                data = await context.read()
            else:
                data = await asyncio.wait_for(context.read(), patience)
        except TimeoutError:
            raise PeerError(
                f"it was silent for {patience:g} seconds while a message was due"
            ) from None
        if data is grpc.aio.EOF:
            return None
        if counted:
            self.rounds.counters.received += len(data) + FRAME
        return bytes(data)

    async def _refuse(self, name: str, context: Any, refusal: Refusal) -> None:
        self.rounds.counters.refused += 1
        unauthenticated = refusal.code is grpc.StatusCode.UNAUTHENTICATED
        by_anyone = refusal.code in _BY_ANYONE
        if refusal.code is grpc.StatusCode.FAILED_PRECONDITION:
            self.admission.count_fault(name, context)
        self.rounds.peers.audit.record(
            "refused", name, context.peer(), str(refusal), by_anyone=by_anyone
        )
        if unauthenticated:
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
            peer.fault = fault  # or `remove` would record that it left
            self.rounds.peers.remove(peer)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault[:1000])
