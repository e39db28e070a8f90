"""Nodes that are connected, and what is sent to them. All in the event loop's thread, unless it says otherwise.

Messages are sent in tasks of their own, one message after the other to each peer, so that a slow one holds nobody up.

Room for reports that are being received: a bound on the memory that they take, whoever sends and whenever.

A report that comes in parts is read on only when there is room for the whole of it. Until then it stays where it is:
the stream's flow control keeps its node from sending. Nodes of low numbers go first, so that reports that had to wait
come in the order in which they are added up (protocol/tree.py).
"""

import asyncio
import heapq
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from fedbudget.engines.grpc.admission import AuditLog
from fedbudget.engines.grpc.event_loop import LoopThread
from fedbudget.engines.grpc.messages import NodeReader
from fedbudget.engines.grpc.stream import LET_IN
from fedbudget.engines.remote.members import OWN, Counters
from fedbudget.engines.remote.messages import Hello
from fedbudget.resources.resource import NodeCosts

FRAME = 5
"""Bytes that gRPC puts before a message."""

LOG = logging.getLogger("fedbudget.api")

REVOKED = "its token was revoked"
"""Why one is dropped whose token is not right any more."""

_GONE = (grpc.aio.BaseError, grpc.RpcError, asyncio.InvalidStateError)


@dataclass(eq=False)
class Peer:
    """A node that is connected.

    Args:
      hello: what it said first.
      context: of its stream.
      handler: the task that reads its stream.
      welcomed: it was told what is trained.
      trial: what a trial round has cost there, once it is ready.
      asked: the round that it owes a report of; 0 for none.
      asked_at: when, or when it was welcomed, by the event loop's clock.
      fault: why it is dropped, once it is.
      released: its stream is closed from our side, in order.
      token: by which it was let in.
    """

    name: str
    hello: Hello
    context: Any
    handler: "asyncio.Task[Any] | None"
    reader: NodeReader
    welcomed: bool = False
    trial: NodeCosts | None = None
    asked: int = 0
    asked_at: float = 0.0
    fault: str | None = None
    released: bool = False
    token: str = field(default="", repr=False)
    write_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def idle(self) -> bool:
        """It is ready, and owes nothing."""
        return self.trial is not None and not self.asked

    @property
    def state(self) -> str:
        """In words."""
        if self.trial is None:
            return "preparing"
        return "idle" if self.idle else "at work"


class Peers:
    """All that are connected, by their names.

    Args:
      left: called when one has gone.
    """

    def __init__(self, thread: LoopThread, left: Callable[[Peer], None]) -> None:
        self.counters = Counters()
        self.audit = AuditLog(LOG)
        self._thread = thread
        self._left = left
        self._peers: dict[str, Peer] = {}

    def __contains__(self, name: object) -> bool:
        """Whether someone is connected, as the aggregator's own node always is; from any thread."""
        return name == OWN or name in self._peers

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, name: str) -> Peer | None:
        """From any thread."""
        return self._peers.get(name)

    def add(self, peer: Peer) -> None:
        self._peers[peer.name] = peer

    def remove(self, peer: Peer) -> None:
        """Its connection has ended."""
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
            if peer.fault is None:
                self.audit.record("left", peer.name, peer.context.peer())
            self._left(peer)

    def send(self, peer: Peer, messages: list[bytes]) -> None:
        self._thread.spawn(self._write(peer, messages))

    async def confirm(self, peer: Peer) -> None:
        """Lets one know that it is connected, however long it then waits for others."""
        with suppress(*_GONE):
            async with peer.write_lock:
                await peer.context.send_initial_metadata(((LET_IN, "yes"),))

    def drop(self, peer: Peer, fault: str) -> None:
        """Ends the connection of one that has broken the rules."""
        peer.fault = fault
        self.remove(peer)
        if peer.handler is not None:
            peer.handler.cancel()

    def dismiss(self, peer: Peer, reason: str) -> None:
        """Ends a connection that has done no wrong."""

        async def end() -> None:
            with suppress(*_GONE):
                await peer.context.abort(
                    grpc.StatusCode.ABORTED, reason
                )  # a handler that is cancelled says nothing
            if peer.handler is not None:
                peer.handler.cancel()

        self.remove(peer)
        self._thread.spawn(end())

    def release(self, peer: Peer) -> None:
        """Closes the stream of one that was told all there is to tell."""
        peer.released = True
        if peer.handler is not None:
            peer.handler.cancel()

    async def _write(self, peer: Peer, messages: list[bytes]) -> None:
        try:
            async with (
                peer.write_lock
            ):  # a farewell may come while a broadcast is being sent
                for message in messages:
                    await peer.context.write(message)
                    self.counters.sent += len(message) + FRAME
        except _GONE:
            self.remove(peer)


ROOM = 2**28
"""Bytes."""


class Room:
    """In the event loop's thread.

    Args:
      size: in bytes.
    """

    def __init__(self, size: int = ROOM) -> None:
        self._size = self._free = size
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._count = itertools.count()

    @asynccontextmanager
    async def take(self, size: int, order: int) -> AsyncIterator[None]:
        """Waits until there is room, and has it until the end; what is larger than all of it has it alone.

        Args:
          order: who goes first of those that wait, the lowest.
        """
        size = min(size, self._size)
        admitted = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, next(self._count), size, admitted))
        self._admit()
        try:
            await admitted
            yield
        finally:
            if admitted.cancelled():
                size = 0  # it left before there was room
            self._free += size
            self._admit()

    def _admit(self) -> None:
        while self._waiting:
            *_, size, admitted = self._waiting[0]
            if not admitted.cancelled() and size > self._free:
                return
            heapq.heappop(self._waiting)
            if not admitted.cancelled():
                self._free -= size
                admitted.set_result(None)
