"""Room for reports that are being received: a bound on the memory that they take, whoever sends and whenever.

A report that comes in parts is read on only when there is room for the whole of it. Until then it stays where it is:
the stream's flow control keeps its node from sending. Nodes of low numbers go first, so that reports that had to wait
come in the order in which they are added up (protocol/tree.py).
"""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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
