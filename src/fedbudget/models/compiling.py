"""numba, where it is installed; and whoever wants to know is told when it compiles a kernel that is not on disk yet."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Any

COMPILING = "compiling kernels for this machine, which is done once and can take a minute"

_listeners: list[Callable[[], None]] = []
_importing = Lock()


def has_numba() -> bool:
    """Whether there are compiled kernels; all that they compute is computed in numpy otherwise."""
    return find_spec("numba") is not None


def numba_if_installed() -> Any | None:
    """numba itself, which is slow to import."""
    if not has_numba():
        return None
    import numba

    return numba


@cache
def import_kernels(module: str) -> Any | None:
    """The module of kernels with this name, where numba is installed; it is slow to import, and so not until it is
    needed.

    By one thread at a time: modules of numba import each other, and two threads that do it at once get halves.
    """
    if not has_numba():
        return None
    with _importing:
        return import_module(module)


@contextmanager
def on_compiling(listener: Callable[[], None]) -> Iterator[None]:
    """Within it, the listener is called once, when the first kernel is compiled; in whatever thread that happens."""
    _listeners.append(listener)
    try:
        yield
    finally:
        if listener in _listeners:
            _listeners.remove(listener)


@cache
def watch() -> None:
    """Begins to look; called by what imports numba."""
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
