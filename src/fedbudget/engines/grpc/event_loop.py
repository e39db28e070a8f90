"""A thread that runs an event loop, and the ways other threads reach it.

Threads: methods under "From other threads" must not be called in the loop's thread, except
`post`. Methods under "In the loop" must be called there only. State that changes in the
loop is also read there, unless its docstring states otherwise.

Nothing polls: a waiter is woken when `notify` finds its condition true.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class LoopThread:
    """An event loop in its own thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    # From other threads.

    def start(self) -> None:
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine in the loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def read(self, function: Callable[[], _Result]) -> _Result:
        """Call a function in the loop and wait for its result."""

        async def call() -> _Result:
            return function()

        return self.run(call())

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the loop soon, from any thread or signal handler.

        Does nothing after the loop has ended.
        """
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    # In the loop.

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine as a task."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish_tasks(self, timeout: float) -> None:
        """Wait for spawned tasks."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)

    async def cancel_tasks(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.sleep(0)

    async def until(
        self, condition: Callable[[], bool], timeout: float | None = None
    ) -> None:
        """Wait until a condition holds, at most `timeout` seconds."""
        if condition():
            return
        waiting = condition, self.loop.create_future()
        self._waiting.append(waiting)
        try:
            await asyncio.wait([waiting[1]], timeout=timeout)
        finally:
            self._waiting.remove(waiting)

    def notify(self) -> None:
        """Check the conditions of all waiters."""
        for condition, future in list(self._waiting):
            if not future.done() and condition():
                future.set_result(None)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
