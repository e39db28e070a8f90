"""Files that are written completely or not at all, and survive a crash or a power cut.

- A file is written under a temporary name in the same folder, synced to the disk and
  renamed in one step. Then the folder is synced. After a failure the old file is unchanged
  and the temporary file is gone. With several writers, the last one wins.
- `with_retries` repeats a write that fails for a temporary reason: a full disk, or too many
  open files.
- Remote peers can use up a server's file descriptors. So the process reserves some and
  releases them while it writes. Disk space can be reserved in the same way.
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

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds after which `with_retries` gives up."""

_FULL = {errno.ENOSPC, errno.EDQUOT}
_OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
_TEMPORARY = _FULL | _OUT_OF_DESCRIPTORS | {errno.EAGAIN, errno.EINTR}
_PAUSE = 0.2  # seconds
_FREE_FACTOR = 4  # free disk space must be this many times the reserved space
_RESERVED = 12  # descriptors: a file, its folder, and files that libraries open meanwhile
_reserved: list[int] = []
_lock = threading.Lock()


def replace(path: Path, content: bytes | Sequence[bytes | memoryview]) -> None:
    """Write `content` to `path` in one step.

    Args:
      path: of the file; its folder must exist.
      content: bytes, or several parts to write one after the other.

    Raises:
      OSError: the file cannot be written, for example because the disk is full.
    """
    with replacing(path) as file:
        file.writelines([content] if isinstance(content, bytes) else content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a stream that becomes the file at `path` if the `with` ends without an error.

    Args:
      path: of the file; its folder must exist.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def move(source: Path, path: Path) -> None:
    """Sync a complete file and rename it to `path` in the same folder."""
    with source.open("rb+") as file:
        os.fsync(file.fileno())
    _rename(source, path)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder of this mode and the folders above it, and sync each new name."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=mode, exist_ok=True)
        sync_names(path.parent)


def append_line(path: Path, line: bytes) -> None:
    """Append a line, and return only when it survives a power cut.

    The start of a line that a crash cut off is removed first.
    """
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if size and file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if not size:
        sync_names(path.parent)


def sync_names(folder: Path) -> None:
    """Sync the names of the files in a folder."""
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rename(source: Path, path: Path) -> None:
    source.replace(path)
    sync_names(path.parent)


class SpareSpace:
    """A file that reserves disk space and is removed when the disk is full.

    Args:
      path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0

    def keep(self, size: int) -> None:
        """Reserve `size` bytes if four times that are free; otherwise do nothing."""
        if size <= self._size or not hasattr(os, "posix_fallocate"):
            return
        try:
            disk = os.statvfs(self._path.parent)
            if disk.f_bavail * disk.f_frsize < _FREE_FACTOR * size:
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
        """Free the space. Return whether any was reserved."""
        reserved = self._size > 0
        self._size = 0
        with contextlib.suppress(OSError):
            self._path.unlink()
        return reserved


def with_retries(
    action: Callable[[], T], patience: float | None = None, spare: SpareSpace | None = None
) -> T:
    """Call `action` until it succeeds, and return its result.

    Args:
      action: may run several times.
      patience: in seconds; PATIENCE by default.
      spare: released when the disk is full.

    Raises:
      OSError: the last error, if it is permanent or `patience` is over.
    """
    limit = PATIENCE if patience is None else patience
    start = time.monotonic()
    released = False
    try:
        while True:
            try:
                return action()
            except OSError as error:
                if error.errno not in _TEMPORARY or time.monotonic() - start > limit:
                    raise
                if error.errno in _OUT_OF_DESCRIPTORS and _reserved:
                    released = True
                    _release_descriptors()
                elif error.errno not in _FULL or spare is None or not spare.release():
                    time.sleep(_PAUSE)
    finally:
        if released:
            reserve_descriptors()


def reserve_descriptors() -> None:
    """Reserve file descriptors for `with_retries`."""
    with _lock, contextlib.suppress(OSError):
        while len(_reserved) < _RESERVED:
            _reserved.append(os.open(os.devnull, os.O_RDONLY))


def _release_descriptors() -> None:
    with _lock:
        while _reserved:
            os.close(_reserved.pop())
