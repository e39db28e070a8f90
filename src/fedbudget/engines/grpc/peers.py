"""Connected nodes, the messages sent to them, and a bound on the memory of incoming
reports.

Each peer's messages are written by tasks, one message after the other, so that a slow peer
delays no other.

A report that arrives in parts is read further only when `Capacity` has space for all of it.
Until then the stream's flow control stops its node from sending. Nodes with low numbers go
first, so that delayed reports arrive in the order of summation (protocol/sums.py).

Threads: everything runs in the event loop's thread. Only `Peers.get` and `in` may be used
from any thread.
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
from fedbudget.engines.remote.members import OWN, Counters
from fedbudget.engines.remote.messages import Hello
from fedbudget.resources.resource import Usage

LOG = logging.getLogger("fedbudget.network")

FRAME = 5
"""Bytes that gRPC puts before a message."""
REVOKED = "its token was revoked"
"""Fault of a peer whose token is no longer valid."""

_CAPACITY = 2**28  # bytes
GONE = (grpc.aio.BaseError, grpc.RpcError, asyncio.InvalidStateError)


@dataclass(eq=False)
class Peer:
    """A connected node.

    Args:
      hello: its first message.
      context: of its stream.
      handler: the task that reads its stream.
      welcomed: it was sent the task.
      trial: costs of its trial round, once it is ready.
      asked: round for which its report is due; 0 for none.
      asked_at: time of that request, or of the welcome, by the event loop's clock.
      fault: reason for dropping it.
      released: the aggregator has closed its stream in order.
      token: with which it was admitted.
    """

    name: str
    hello: Hello
    context: Any
    handler: "asyncio.Task[Any] | None"
    reader: NodeReader
    welcomed: bool = False
    trial: Usage | None = None
    asked: int = 0
    asked_at: float = 0.0
    fault: str | None = None
    released: bool = False
    token: str = field(default="", repr=False)
    write_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def state(self) -> str:
        """Short text for the user."""
        if self.trial is None:
            return "preparing"
        return "at work" if self.asked else "idle"


class Peers:
    """All connected nodes, by name.

    Args:
      left: called when a peer has left.
    """

    def __init__(self, thread: LoopThread, left: Callable[[Peer], None]) -> None:
        self.counters = Counters()
        self.audit = AuditLog(LOG)
        self._thread = thread
        self._left = left
        self._peers: dict[str, Peer] = {}

    def __contains__(self, name: object) -> bool:
        """Whether a node is connected (the aggregator's own always is); from any thread."""
        return name == OWN or name in self._peers

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, name: str) -> Peer | None:
        """Return a peer by name; from any thread."""
        return self._peers.get(name)

    def add(self, peer: Peer) -> None:
        self._peers[peer.name] = peer

    def remove(self, peer: Peer) -> None:
        """Remove a peer whose connection has ended."""
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
            if peer.fault is None:
                self.audit.record("left", peer.name, peer.context.peer())
            self._left(peer)

    def send(self, peer: Peer, messages: list[bytes]) -> None:
        self._thread.spawn(self._write(peer, messages))

    def drop(self, peer: Peer, fault: str) -> None:
        """End the connection of a peer that has broken the rules."""
        peer.fault = fault
        self.remove(peer)
        if peer.handler is not None:
            peer.handler.cancel()

    def dismiss(self, peer: Peer, reason: str) -> None:
        """End a connection without a fault."""

        async def end() -> None:
            with suppress(*GONE):
                # A cancelled handler sends no reason.
                await peer.context.abort(grpc.StatusCode.ABORTED, reason)
            if peer.handler is not None:
                peer.handler.cancel()

        self.remove(peer)
        self._thread.spawn(end())

    def release(self, peer: Peer) -> None:
        """Close the stream of a peer after its last message."""
        peer.released = True
        if peer.handler is not None:
            peer.handler.cancel()

    async def _write(self, peer: Peer, messages: list[bytes]) -> None:
        try:
            # A farewell may be sent during a broadcast.
            async with peer.write_lock:
                for message in messages:
                    await peer.context.write(message)
                    self.counters.sent += len(message) + FRAME
        except GONE:
            self.remove(peer)


class Capacity:
    """Memory for reports that are being received.

    Args:
      size: in bytes.
    """

    def __init__(self, size: int = _CAPACITY) -> None:
        self._size = size
        self._free = size
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._count = itertools.count()

    @asynccontextmanager
    async def take(self, size: int, order: int) -> AsyncIterator[None]:
        """Wait for free memory, and reserve it inside the context.

        A request larger than the capacity is admitted alone.

        Args:
          order: the waiting request with the lowest order is admitted first.
        """
        size = min(size, self._size)
        admitted = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, next(self._count), size, admitted))
        self._admit()
        try:
            await admitted
            yield
        finally:
            if not admitted.cancelled():
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
