"""What must be written is tried again when it fails for a reason that may pass: a disk that is full, too many files.

A program that others connect to can run out of descriptors by their doing. So it keeps some back, which are let go for
as long as something is to be written.
"""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds until it is given up."""

_MAY_PASS = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EINTR}
_OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
_PAUSE = 0.2  # seconds
_KEPT = 12  # descriptors: a file, its folder, and what a library opens meanwhile
_spare: list[int] = []
_lock = threading.Lock()


def keep_descriptors() -> None:
    """Keeps some back from now on."""
    with _lock, contextlib.suppress(OSError):
        while len(_spare) < _KEPT:
            _spare.append(os.open(os.devnull, os.O_RDONLY))


def persistently(action: Callable[[], T], patience: float | None = None) -> T:
    """What it gives, once it has worked; the last OSError, when it does not for so long.

    Args:
      action: may be called several times.
      patience: in seconds; PATIENCE when not given.
    """
    began, released = time.monotonic(), False
    try:
        while True:
            try:
                return action()
            except OSError as error:
                waited = time.monotonic() - began
                if error.errno not in _MAY_PASS or waited > (PATIENCE if patience is None else patience):
                    raise
                if error.errno in _OUT_OF_DESCRIPTORS and _spare:
                    released = True
                    _let_go()
                else:
                    time.sleep(_PAUSE)
    finally:
        if released:
            keep_descriptors()


def _let_go() -> None:
    with _lock:
        while _spare:
            os.close(_spare.pop())
