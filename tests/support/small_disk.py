"""A small file system that tests can fill."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[Path]:
    """Mount a file system of `size` bytes at a new folder; skip the test without root."""
    path.mkdir()
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    tried = subprocess.run(mount, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"mounting a file system failed: {tried.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def fill(path: Path, *, but: int = 0) -> None:
    """Fill the file system except for `but` bytes, which must be whole blocks."""
    with (path / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            size = file.tell()
        file.truncate(max(0, size - but))
