"""A file of a published dataset as it lies on disk: plain, with `.gz`, or in a `.tar.gz`. Its contents are known.

Nothing here trusts a file: contents are read as a stream, never more than was asked for, and members of an archive are
never written to where their own paths say. A `.part` is read as what it will be when it is complete.
"""

import gzip
import hashlib
import os
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, cast

from fedbudget.errors import UserError

PART = ".part"
"""Ends the name of what is not complete yet."""

DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error, tarfile.TarError, TypeError)  # the last of a cut tar.gz header
"""What reading a damaged `.gz` or `.tar.gz` raises."""

_CHUNK = 1 << 20


@dataclass(frozen=True)
class File:
    """One file of a dataset: its name when unzipped, and the size and sha256 of its contents when unzipped."""

    name: str
    size: int
    sha256: str


class Damaged(UserError):
    """A file is there and can be read, but is not what its name says."""


@contextmanager
def opened(path: Path, name: str) -> Iterator[BinaryIO]:
    """The unzipped contents of the file `name` which was found at `path`.

    Raises:
      UserError: the file cannot be opened, or turns out to be damaged, now or while it is read inside the `with`.
    """
    if not os.access(path, os.R_OK):
        raise UserError(f"{path} cannot be read: {'Permission denied' if path.exists() else 'it does not exist'}")
    form = path.name.removesuffix(PART)
    try:
        if form.endswith(".tar.gz"):
            with tarfile.open(path, "r|gz") as archive, _member(archive, name, path) as member:
                yield cast(BinaryIO, member)
        else:
            with gzip.open(path) if form.endswith(".gz") else path.open("rb") as file:
                yield cast(BinaryIO, file)
    except DAMAGED as error:
        raise Damaged(f"{path} is damaged: {error}") from None


def matches(path: Path, file: File) -> bool:
    """Whether what lies at `path` has the contents of `file`."""
    digest, size = hashlib.sha256(), 0
    try:
        with opened(path, file.name) as stream:
            while size <= file.size and (chunk := stream.read(min(_CHUNK, file.size + 1 - size))):
                digest.update(chunk)
                size += len(chunk)
    except Damaged:
        return False
    return size == file.size and digest.hexdigest() == file.sha256


def _member(archive: tarfile.TarFile, name: str, path: Path) -> IO[bytes]:
    for member in archive:
        contents = archive.extractfile(member) if member.isreg() else None
        if contents is not None and PurePosixPath(member.name).name == name:
            return contents
    raise Damaged(f"{path} has no file {name}")
