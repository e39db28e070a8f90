"""Contents of untrusted files: plain, `.gz`, or in a `.tar.gz`.

Contents are read as a stream with a size limit, so that no header and no compressed file
can fill the memory. Archive members are never written to the paths in the archive.
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
"""Suffix of an incomplete file; the rest of its name is final."""

# tarfile raises a TypeError for a truncated header.
DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error, tarfile.TarError, TypeError)
"""Exceptions from reading a damaged `.gz` or `.tar.gz`."""

_CHUNK = 1 << 20


class Damaged(UserError):
    """A file can be read, but its contents are not what its name promises."""


@contextmanager
def open_contents(path: Path, name: str) -> Iterator[BinaryIO]:
    """Open the uncompressed contents of the file `name`.

    Args:
      path: of the file or of the archive that contains it.

    Raises:
      UserError: the file cannot be opened, or proves to be damaged inside the `with`.
    """
    if not os.access(path, os.R_OK):
        reason = "Permission denied" if path.exists() else "it does not exist"
        raise UserError(f"{path} cannot be read: {reason}")
    form = path.name.removesuffix(PART)
    try:
        if form.endswith(".tar.gz"):
            with tarfile.open(path, "r|gz") as archive:
                for member, contents in tar_members(archive):
                    if PurePosixPath(member).name == name:
                        yield cast(BinaryIO, contents)
                        return
                raise Damaged(f"{path} has no file {name}")
        with gzip.open(path) if form.endswith(".gz") else path.open("rb") as file:
            yield cast(BinaryIO, file)
    except DAMAGED as error:
        raise Damaged(f"{path} is damaged: {error}") from None


def tar_members(archive: tarfile.TarFile) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield path and contents of every regular file; read each before the next one."""
    for member in archive:
        if member.isreg() and (contents := archive.extractfile(member)) is not None:
            yield member.name.removeprefix("./"), contents


def at_most(stream: IO[bytes], size: int, path: Path) -> NDArray[np.uint8]:
    """Read the rest of a stream, and refuse more than `size` bytes.

    Memory grows with the actual contents, whatever a header promises.
    """
    contents = bytearray()
    while chunk := stream.read(min(_CHUNK, size + 1 - len(contents))):
        contents += chunk
        if len(contents) > size:
            raise Damaged(f"{path} is larger than the expected {size} bytes")
    return np.frombuffer(contents, np.uint8)  # writable, because a bytearray is
