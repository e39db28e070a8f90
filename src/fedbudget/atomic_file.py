"""Files that are written whole or not at all, and that are still there after a crash or a power cut.

A file is written beside its place, forced to the disk, and moved there in one step; then the folder is forced to the
disk too. When anything fails, what was in its place before is still there, and nothing is left beside it.
"""

import contextlib
import os
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Writes `content` to `path` in one step; an OSError when it cannot be, a full disk say."""
    beside = path.with_name(f".{path.name}.new")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # where folders cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
