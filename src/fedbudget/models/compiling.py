"""Optional use of numba, and a notification when it compiles a kernel.

numba is slow to import, so kernels are imported at their first use. Compiled kernels are
cached on disk: only the first run on a machine compiles.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Any

COMPILING = "compiling kernels for this machine, once; this can take a minute"

_listeners: list[Callable[[], None]] = []
_import_lock = Lock()


def has_numba() -> bool:
    """Return whether compiled kernels are available.

    Without them numpy computes the same.
    """
    return find_spec("numba") is not None


def numba_if_installed() -> Any | None:
    """Import and return numba; None if it is not installed."""
    return import_module("numba") if has_numba() else None


@cache
def import_kernels(module: str) -> Any | None:
    """Import a module of kernels; None if numba is not installed.

    One thread at a time: modules of numba import each other, and two concurrent imports can
    see half-initialised modules.
    """
    with _import_lock:
        return import_module(module) if has_numba() else None


@contextmanager
def on_compiling(listener: Callable[[], None]) -> Iterator[None]:
    """Call the listener once when the first kernel is compiled, in the compiling thread."""
    _listeners.append(listener)
    try:
        yield
    finally:
        if listener in _listeners:
            _listeners.remove(listener)


@cache
def watch() -> None:
    """Start to notify listeners. Every module of kernels calls this."""
    from numba.core import event

    class Listener(event.Listener):  # type: ignore[misc]
        def on_start(self, _: Any) -> None:
            listeners = _listeners.copy()
            _listeners.clear()
            for listener in listeners:
                listener()

        def on_end(self, _: Any) -> None:
            pass

    event.register("numba:compile", Listener())
