"""Files that are written whole or not at all, and that are still there after a crash or a power cut.

A file is written beside its place under a name of its own, forced to the disk, and moved there in one step; then the
folder is forced to the disk too. When anything fails, what was in its place before is still there, and nothing is left
beside it. Of several writers at once the last one wins.

What must be written is tried again when it fails for a reason that may pass: a disk that is full, too many files.

A program that others connect to can run out of descriptors by their doing. So it keeps some back, which are let go for
as long as something is to be written. Space on the disk is kept back too, and let go when there is no other.
"""

import contextlib
import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar


def replace(path: Path, content: bytes | Sequence[bytes | memoryview]) -> None:
    """Writes `content`, all of its parts, to `path` in one step; an OSError when it cannot be, a full disk say."""
    with replacing(path) as file:
        file.writelines([content] if isinstance(content, bytes) else content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A stream whose contents are at `path` once the `with` is left without an error.

    Args:
      path: of the file; its folder must be there.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _put(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def move(beside: Path, path: Path) -> None:
    """Puts a complete file, written in the same folder, at `path`."""
    with beside.open("rb+") as file:
        os.fsync(file.fileno())
    _put(beside, path)


def _put(beside: Path, path: Path) -> None:
    beside.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # where folders cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


T = TypeVar("T")

PATIENCE = 10.0
"""Seconds until it is given up."""

_MAY_PASS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EMFILE,
    errno.ENFILE,
    errno.EAGAIN,
    errno.EINTR,
}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
_PAUSE = 0.2  # seconds
_AMPLE = (
    4  # times the space that is kept back must be free, or nothing else could be written
)
_KEPT = 12  # descriptors: a file, its folder, and what a library opens meanwhile
_spare: list[int] = []
_lock = threading.Lock()


def keep_descriptors() -> None:
    """Keeps some back from now on."""
    with _lock, contextlib.suppress(OSError):
        while len(_spare) < _KEPT:
            _spare.append(os.open(os.devnull, os.O_RDONLY))


class SpareSpace:
    """A file that is there to be removed when the disk is full.

    Args:
      path: where it is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0

    def keep(self, size: int) -> None:
        """So many bytes, if there is much more than that; nothing where the system cannot say."""
        if size <= self._size or not hasattr(os, "posix_fallocate"):
            return
        try:
            disk = os.statvfs(self._path.parent)
            if disk.f_bavail * disk.f_frsize < _AMPLE * size:
                return
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                os.posix_fallocate(handle, 0, size)
                self._size = size
            finally:
                os.close(handle)
        except OSError:
            self.release()

    def release(self) -> bool:
        """Whether there was any."""
        had, self._size = self._size > 0, 0
        with contextlib.suppress(OSError):
            self._path.unlink()
        return had


def persistently(
    action: Callable[[], T], patience: float | None = None, spare: SpareSpace | None = None
) -> T:
    """What it gives, once it has worked; the last OSError, when it does not for so long.

    Args:
      action: may be called several times.
      patience: in seconds; PATIENCE when not given.
      spare: what is let go when the disk is full.
    """
    began = time.monotonic()
    released = False
    try:
        while True:
            try:
                return action()
            except OSError as error:
                waited = time.monotonic() - began
                if error.errno not in _MAY_PASS or waited > (
                    PATIENCE if patience is None else patience
                ):
                    raise
                if error.errno in _OUT_OF_DESCRIPTORS and _spare:
                    released = True
                    _let_go()
                elif error.errno not in _FULL or spare is None or not spare.release():
                    time.sleep(_PAUSE)
    finally:
        if released:
            keep_descriptors()


def _let_go() -> None:
    with _lock:
        while _spare:
            os.close(_spare.pop())
