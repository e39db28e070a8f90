"""Whether this process was suspended of late: a lid that was closed, a gateway that was frozen, a SIGSTOP.

No clock tells: all of them go on meanwhile. So a timer goes off once a second, and one that is late by as much again
means that nothing ran here. Who was suspended may have a lot to hear, and should hear it before it says anything.
"""

import asyncio

_TICK = 1.0  # seconds


class SuspensionWatch:
    """Watches the running event loop, until it is closed."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._late_at = float("-inf")
        self._due = self._loop.time()
        self._timer = self._loop.call_soon(self._tick)

    @property
    def just_resumed(self) -> bool:
        """Whether this process has been suspended, and is at work again for less than a second."""
        self._look()
        return self._loop.time() - self._late_at < _TICK

    def close(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self._look()
        self._due = self._loop.time() + _TICK
        self._timer = self._loop.call_at(self._due, self._tick)

    def _look(self) -> None:
        now = self._loop.time()
        if now - self._due > _TICK:
            self._due = self._late_at = now
