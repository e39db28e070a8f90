"""Contents of untrusted files: plain, `.gz`, or in a `.tar.gz`.

Contents are read as a stream with a size limit, so that no header and no compressed file
can fill the memory. Archive members are never written to the paths in the archive.
Files of run folders must be regular files: a pipe or a device never blocks a reader.
"""

import gzip
import json
import os
import stat
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, cast

from fedbudget.errors import UserError

PART = ".part"
"""Suffix of an incomplete file; the rest of its name is final."""

# tarfile raises a TypeError for a truncated header.
DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error, tarfile.TarError, TypeError)
"""Exceptions from reading a damaged `.gz` or `.tar.gz`."""

_CHUNK = 1 << 20
_MEMORY_SHARE = 0.5  # of this machine, for one file of numbers


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


def at_most(stream: IO[bytes], size: int, path: Path) -> bytearray:
    """Read the rest of a stream, and refuse more than `size` bytes.

    Memory grows with the actual contents, whatever a header promises.
    """
    contents = bytearray()
    while chunk := stream.read(min(_CHUNK, size + 1 - len(contents))):
        contents += chunk
        if len(contents) > size:
            raise Damaged(f"{path} is larger than the expected {size} bytes")
    return contents


def open_regular(path: Path, most: int | None = None) -> BinaryIO:
    """Open a regular file for reading, without waiting.

    Args:
      path: of the file.
      most: largest permitted size in bytes.

    Raises:
      OSError: the file cannot be opened.
      Damaged: it is a pipe, a device or a folder, or it is too large.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    file = os.fdopen(os.open(path, flags | getattr(os, "O_BINARY", 0)), "rb")
    try:
        require_regular(file, path, most)
    except BaseException:
        file.close()
        raise
    return file


def require_regular(file: IO[bytes], path: Path, most: int | None = None) -> None:
    """Raise `Damaged` unless an open file is a regular one of at most this size."""
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(f"{path} is not a regular file")
    if most is not None and found.st_size > most:
        raise Damaged(f"{path} is larger than {most} bytes")


def read_regular(path: Path, most: int) -> bytes:
    """Return the contents of a regular file of at most `most` bytes.

    Raises:
      OSError, Damaged: see `open_regular`.
    """
    with open_regular(path, most) as file:
        return bytes(at_most(file, most, path))


def read_json(path: Path, most: int) -> Any:
    """Return the unchecked content of a JSON file.

    Raises:
      OSError, ValueError: the file cannot be read.
    """
    return parsed_json(read_regular(path, most).decode())


def parsed_json(text: str) -> Any:
    """Parse JSON; raise ValueError for invalid and for too deeply nested values."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("values are nested too deeply") from None


def require_tensors(path: Path) -> None:
    """Raise `Damaged` unless the file is a regular one that fits into the memory."""
    most = None
    if hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most = int(_MEMORY_SHARE * memory)
    open_regular(path, most).close()
