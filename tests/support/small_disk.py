"""A disk that is soon full."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[Path]:
    """A new folder on a file system of its own with so many bytes; needs to be root, and
    skips the test elsewhere.
    """
    path.mkdir()
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    tried = subprocess.run(mount, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no file system can be mounted here: {tried.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def fill(path: Path, *, but: int = 0) -> None:
    """Fills the file system up, but for so many bytes; these are whole blocks on the disk."""
    with (path / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            size = file.tell()
        file.truncate(max(0, size - but))
