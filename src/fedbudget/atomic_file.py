"""Files that are written whole or not at all, and that are still there after a crash or a power cut.

A file is written beside its place under a name of its own, forced to the disk, and moved there in one step; then the
folder is forced to the disk too. When anything fails, what was in its place before is still there, and nothing is left
beside it. Of several writers at once the last one wins.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO


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
