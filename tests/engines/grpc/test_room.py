"""Memory of incoming reports: a bound, and memory is released when a peer leaves."""

import asyncio
from contextlib import suppress

from fedbudget.engines.grpc.peers import Capacity


class Visitors:
    """Which requests hold memory, and which did, in order."""

    def __init__(self, size: int) -> None:
        self.capacity = Capacity(size)
        self.inside: dict[int, int] = {}
        self.most, self.came = 0, list[int]()

    async def visit(self, size: int, order: int) -> None:
        async with self.capacity.take(size, order):
            self.inside[order] = size
            self.came.append(order)
            self.most = max(self.most, sum(self.inside.values()))
            try:
                await asyncio.sleep(0)
            finally:
                del self.inside[order]


def test_no_more_are_in_than_fit_and_low_numbers_go_first() -> None:
    ours = Visitors(10)

    async def all_at_once() -> None:
        await asyncio.gather(*(ours.visit(4, order) for order in (9, 8, 7, 1, 3, 2)))

    asyncio.run(all_at_once())
    assert ours.most == 8
    assert ours.came == [9, 8, 1, 2, 3, 7]


def test_what_is_larger_than_the_room_is_alone_in_it() -> None:
    ours = Visitors(10)

    async def all_at_once() -> None:
        await asyncio.gather(*(ours.visit(25, order) for order in range(3)))

    asyncio.run(all_at_once())
    assert (ours.most, ours.came) == (25, [0, 1, 2])


def test_who_leaves_while_waiting_or_inside_takes_no_room_away() -> None:
    ours = Visitors(10)

    async def leave() -> None:
        for leaves in (0, 1):
            tasks = [asyncio.create_task(ours.visit(10, order)) for order in (0, 1, 2)]
            await asyncio.sleep(0)
            tasks[leaves].cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task
            assert not ours.inside
            await ours.visit(10, 5)

    asyncio.run(leave())
    assert ours.most == 10
    assert 1 not in ours.came[-3:]
