"""Memory for incoming reports: bounded, and released when a peer leaves."""

import asyncio
from contextlib import suppress

from fedbudget.engines.grpc.peers import Capacity


class Requests:
    """Requests for memory: those that hold some, and the order of all."""

    def __init__(self, size: int) -> None:
        self.capacity = Capacity(size)
        self.holding: dict[int, int] = {}
        self.peak, self.order = 0, list[int]()

    async def request(self, size: int, order: int) -> None:
        async with self.capacity.take(size, order):
            self.holding[order] = size
            self.order.append(order)
            self.peak = max(self.peak, sum(self.holding.values()))
            try:
                await asyncio.sleep(0)
            finally:
                del self.holding[order]


def test_capacity_is_never_exceeded() -> None:
    """Waiting requests with low numbers are served first."""
    requests = Requests(10)

    async def run_all() -> None:
        await asyncio.gather(*(requests.request(4, order) for order in (9, 8, 7, 1, 3, 2)))

    asyncio.run(run_all())
    assert requests.peak == 8
    assert requests.order == [9, 8, 1, 2, 3, 7]


def test_oversized_request_runs_alone() -> None:
    requests = Requests(10)

    async def run_all() -> None:
        await asyncio.gather(*(requests.request(25, order) for order in range(3)))

    asyncio.run(run_all())
    assert (requests.peak, requests.order) == (25, [0, 1, 2])


def test_cancelled_requests_release_capacity() -> None:
    """Cancelled while waiting, or while holding memory."""
    requests = Requests(10)

    async def run_and_cancel() -> None:
        for cancelled in (0, 1):
            tasks = [
                asyncio.create_task(requests.request(10, order)) for order in (0, 1, 2)
            ]
            await asyncio.sleep(0)
            tasks[cancelled].cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task
            assert not requests.holding
            await requests.request(10, 5)

    asyncio.run(run_and_cancel())
    assert requests.peak == 10
    assert 1 not in requests.order[-3:]
