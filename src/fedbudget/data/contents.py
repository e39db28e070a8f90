"""The contents of files that are not trusted: plain, with `.gz`, or in a `.tar.gz`.

Contents are read as a stream, never more than was asked for, so that no header and no zipped file can fill the memory.
Members of an archive are never written to where their own paths say.
"""

import gzip
import os
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from fedbudget.errors import UserError

PART = ".part"
"""Ends the name of what is not complete yet, and is read as what it will be."""

DAMAGED = (
    gzip.BadGzipFile,
    EOFError,
    zlib.error,
    tarfile.TarError,
    TypeError,
)  # the last of a cut tar.gz header
"""What reading a damaged `.gz` or `.tar.gz` raises."""

_CHUNK = 1 << 20


class Damaged(UserError):
    """A file is there and can be read, but is not what its name says."""


@contextmanager
def open_contents(path: Path, name: str) -> Iterator[BinaryIO]:
    """The unzipped contents of the file `name`, which lies at `path` or in the archive there.

    Raises:
      UserError: the file cannot be opened, or turns out to be damaged, now or while it is read inside the `with`.
    """
    if not os.access(path, os.R_OK):
        raise UserError(
            f"{path} cannot be read: {'Permission denied' if path.exists() else 'it does not exist'}"
        )
    form = path.name.removesuffix(PART)
    try:
        if form.endswith(".tar.gz"):
            with tarfile.open(path, "r|gz") as archive:
                members = (
                    contents
                    for member, contents in tar_members(archive)
                    if PurePosixPath(member).name == name
                )
                if (contents := next(members, None)) is None:
                    raise Damaged(f"{path} has no file {name}")
                yield cast(BinaryIO, contents)
        else:
            with gzip.open(path) if form.endswith(".gz") else path.open("rb") as file:
                yield cast(BinaryIO, file)
    except DAMAGED as error:
        raise Damaged(f"{path} is damaged: {error}") from None


def tar_members(archive: tarfile.TarFile) -> Iterator[tuple[str, IO[bytes]]]:
    """The path and contents of every regular file; contents must be read before the next one is asked for."""
    for member in archive:
        if member.isreg() and (contents := archive.extractfile(member)) is not None:
            yield member.name.removeprefix("./"), contents


def at_most(stream: IO[bytes], size: int, path: Path) -> NDArray[np.uint8]:
    """All that is left of a stream, which must be no more than so many bytes.

    Memory grows with what is really there, whatever a header or the name of a file promised.
    """
    contents = bytearray()
    while chunk := stream.read(min(_CHUNK, size + 1 - len(contents))):
        contents += chunk
        if len(contents) > size:
            raise Damaged(
                f"{path} is larger than it should be: it goes on after {size} bytes"
            )
    return np.frombuffer(contents, np.uint8)  # writable, because a bytearray is
