"""A thread with an event loop of its own, and how other threads talk to it.

Nothing polls: who waits for a condition is woken when something has changed.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class LoopThread:
    """An event loop in a thread. What is changed in the loop is read there too, unless it says otherwise."""

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
        """Runs a coroutine in the loop, and waits for what it gives."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def read(self, function: Callable[[], _Result]) -> _Result:
        """Calls a function in the loop, and waits for what it gives."""

        async def call() -> _Result:
            return function()

        return self.run(call())

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Calls a function in the loop soon; from any thread or signal handler. Nothing is done once it has ended."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    # In the loop.

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Lets a coroutine run by itself."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish_tasks(self, timeout: float) -> None:
        """Waits for what was spawned."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)

    async def cancel_tasks(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.sleep(0)

    async def until(
        self, condition: Callable[[], bool], timeout: float | None = None
    ) -> None:
        """Waits until a condition holds, or so many seconds."""
        if condition():
            return
        waiting = condition, self.loop.create_future()
        self._waiting.append(waiting)
        try:
            await asyncio.wait([waiting[1]], timeout=timeout)
        finally:
            self._waiting.remove(waiting)

    def notify(self) -> None:
        """Something has changed that conditions may depend on."""
        for condition, future in list(self._waiting):
            if not future.done() and condition():
                future.set_result(None)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
