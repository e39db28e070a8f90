"""Ctrl-C and SIGTERM as a question that an engine can ask between rounds, so that a run always ends in order."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible(wake: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether the run should end; a second Ctrl-C ends it at once.

    Signals can be caught in a program's main thread only; elsewhere they stay what they are.

    Args:
      wake: called when it should, for an engine that waits for something else.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        wake()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
