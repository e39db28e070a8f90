"""Downloads of published datasets from web servers.

A source is a web folder (`mirror`) or an archive on a web server (`archive`). It writes its
files to a folder, and raises `Unavailable` if some are missing. These rules hold:

- A download goes to a `.part` file first. An interruption leaves it there, and the next try
  resumes at its end.
- No more than a limit is accepted, whatever a server announces or sends.
- A file receives its final name in one step, and only with the right checksum. Otherwise
  it is removed. Checksums are of uncompressed contents.
- Archive members are chosen by name and size, and never written to the paths in the
  archive.
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
from typing import IO, TYPE_CHECKING
from urllib.parse import quote, urlsplit

from fedbudget import __version__, durable_files
from fedbudget.errors import UserError, requires_package
from fedbudget.file_contents import (
    DAMAGED,
    PART,
    Damaged,
    at_most,
    open_contents,
    tar_members,
)

if TYPE_CHECKING:
    from requests import Response

_TIMEOUT = 30.0  # seconds without an answer, or without a byte of it
_CHUNK = 1 << 14  # bytes; the most that is lost when a connection breaks
_PARTIAL = 206
_NO_SUCH_RANGE = 416
_CONVERTED_LIMIT = 50_000_000  # bytes of a member to convert
# A zip file that is encrypted or compressed in an unusual way raises a RuntimeError.
_DAMAGED_ARCHIVE = (*DAMAGED, zipfile.BadZipFile, RuntimeError)

_KNOWLEDGE_COLUMNS = ("STG", "SCG", "STR", "LPR", "PEG", "UNS")
_KNOWLEDGE_SHEETS = ("Training_Data", "Test_Data")


class Unavailable(UserError):
    """A source lacks some files; the message is a short reason."""


class Unreachable(Unavailable):
    """A server does not answer at all, so further requests are useless."""


class Progress:
    """Callbacks of a download; this class ignores them."""

    def on_source(self, source: str) -> None:
        """A source is contacted."""

    def on_bytes(self, name: str, done: int, total: int | None) -> None:
        """`done` of `total` bytes have arrived; total is None if unknown."""

    def on_file(self, name: str) -> None:
        """A file is complete."""


@dataclass(frozen=True)
class File:
    """One file of a dataset: its name, and size and sha256 of its uncompressed contents."""

    name: str
    size: int
    sha256: str

    def matches(self, path: Path) -> bool:
        """Return whether the file at `path`, compressed or not, has these contents."""
        try:
            with open_contents(path, self.name) as stream:
                contents = at_most(stream, self.size, path)
        except Damaged:
            return False
        return hashlib.sha256(contents).hexdigest() == self.sha256

    def limit(self, suffix: str) -> int:
        """Return the most bytes to accept; gzip can enlarge incompressible contents."""
        return self.size + (self.size // 1000 + 1024 if suffix else 0)


@dataclass(frozen=True)
class Target:
    """The folder of a download, and its callbacks."""

    folder: Path
    progress: Progress

    def part(self, name: str) -> Path:
        """Return the path of an incomplete file."""
        return self.folder / f"{name}{PART}"

    def place(self, part: Path, file: File) -> None:
        """Give a complete `part` its final name, or remove it if its contents are wrong."""
        if not file.matches(part):
            part.unlink()
            raise Unavailable(f"{file.name} has wrong contents")
        final = self.folder / part.name.removesuffix(PART)
        durable_files.move(part, final)
        # An older copy is wrong, or the file would not have been downloaded.
        for other in {self.folder / file.name, self.folder / f"{file.name}.gz"} - {final}:
            other.unlink(missing_ok=True)
        self.progress.on_file(file.name)


@dataclass(frozen=True)
class Source:
    """A place to download files from.

    Args:
      name: for the user.
      fetch: writes the wanted files to the target; raises Unavailable if some are missing.
    """

    name: str
    fetch: Callable[[Sequence[File], Target], None]


def mirror(base_url: str, suffix: str = "") -> Source:
    """Return a web folder that contains each file.

    Args:
      base_url: of the folder, with its slash at the end.
      suffix: after each file's name, `.gz` if files are compressed.
    """

    def fetch(wanted: Sequence[File], target: Target) -> None:
        problems: list[str] = []
        for file in wanted:
            url = base_url + quote(file.name) + suffix
            part = target.part(file.name + suffix)
            use = partial(target.place, file=file)
            with _collected(problems):
                _download(url, part, file.limit(suffix), target.progress, use)
        _raise_all(problems)

    return Source(urlsplit(base_url).netloc, fetch)


def archive(
    url: str,
    member: str,
    limit: int,
    convert: Callable[[bytes], bytes] | None = None,
    inner: str | None = None,
) -> Source:
    """Return a `.tar.gz` or a `.zip` on a web server.

    Args:
      member: path of a file in the archive, with {name} for the file's name.
      limit: the most bytes to download.
      convert: turns a member's contents into the published form of the file.
      inner: path of a `.zip` inside the `.zip`, if that contains the members.
    """
    parsed = urlsplit(url)

    def fetch(wanted: Sequence[File], target: Target) -> None:
        def unpack(path: Path) -> None:
            files = {member.format(name=file.name): file for file in wanted}
            _unpack(path, files, target, convert, inner)

        part = target.part(PurePosixPath(parsed.path).name)
        _download(url, part, limit, target.progress, unpack)
        part.unlink()

    return Source(parsed.netloc, fetch)


def _unpack(
    path: Path,
    wanted: dict[str, File],
    target: Target,
    convert: Callable[[bytes], bytes] | None,
    inner: str | None,
) -> None:
    """Extract the wanted files by member path, also if others are missing or wrong."""
    problems: list[str] = []
    try:
        with closing(_members(path, inner)) as members:
            for name, stream in members:
                if (file := wanted.pop(name, None)) is not None:
                    with _collected(problems):
                        limit = file.size if convert is None else _CONVERTED_LIMIT
                        contents = bytes(at_most(stream, limit, Path(file.name)))
                        part = target.part(file.name)
                        part.write_bytes(contents if convert is None else convert(contents))
                        target.place(part, file)
                if not wanted:
                    break
    except _DAMAGED_ARCHIVE as error:
        name = path.name.removesuffix(PART)
        raise Unavailable(f"{name} is damaged: {error}") from None
    _raise_all([*problems, *(f"has no {file.name}" for file in wanted.values())])


def _members(path: Path, inner: str | None) -> Generator[tuple[str, IO[bytes]], None, None]:
    """Yield path and contents of every file; read each before the next one."""
    if path.name.removesuffix(PART).endswith(".zip"):
        with ExitStack() as stack:
            zipped = stack.enter_context(zipfile.ZipFile(path))
            if inner is not None:
                if inner not in zipped.namelist():
                    raise Unavailable(f"has no {inner}")
                nested = stack.enter_context(zipped.open(inner))
                zipped = stack.enter_context(zipfile.ZipFile(nested))
            for member in zipped.infolist():
                with zipped.open(member) as contents:
                    yield member.filename, contents
    else:
        with tarfile.open(path, "r|gz") as tar:
            yield from tar_members(tar)


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Record a problem and continue, unless the whole server is unreachable."""
    try:
        yield
    except Unreachable:
        raise
    except UserError as problem:
        problems.append(str(problem))


def _raise_all(problems: Sequence[str]) -> None:
    if problems:
        raise Unavailable(", ".join(dict.fromkeys(problems)))


def _download(
    url: str, part: Path, limit: int, progress: Progress, use: Callable[[Path], None]
) -> None:
    """Download `url` to `part`, resuming at the end of an existing `part`.

    Args:
      limit: the most bytes to accept.
      use: called with the complete `part`. If it fails, `part` is removed. If the download
        was a resumed one, it is repeated from the start, because the old beginning may
        belong to something else.

    Raises:
      Unavailable: the server lacks the file or sends too much. If the connection breaks,
        `part` stays.
    """
    resumed = _receive(url, part, limit, progress)
    try:
        use(part)
    except UserError:
        part.unlink(missing_ok=True)
        if not resumed:
            raise
        _download(url, part, limit, progress, use)


def _receive(url: str, part: Path, limit: int, progress: Progress) -> bool:
    """Download `part` or the rest of it. Return whether its beginning existed before."""
    with requires_package("downloading a dataset"):
        import requests  # slow to import

    size = part.stat().st_size if part.is_file() else 0
    start = size if size <= limit else 0
    headers = {"User-Agent": f"fedbudget/{__version__}", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        answer = requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT)
    except requests.RequestException as error:
        raise Unreachable(_reason(error)) from None
    with answer:
        resumed = answer.status_code == _PARTIAL
        sent = answer.headers.get("Content-Range", "")
        other_range = resumed and not sent.startswith(f"bytes {start}-")
        if start and (other_range or answer.status_code == _NO_SUCH_RANGE):
            if sent == f"bytes */{start}":
                return True  # nothing was missing
            part.unlink()
            return _receive(url, part, limit, progress)
        if other_range or not answer.ok:
            raise Unavailable(f"{answer.status_code} {answer.reason}")
        _write(answer, part, start if resumed else 0, limit, progress)
    return resumed


def _write(
    answer: "Response", part: Path, done: int, limit: int, progress: Progress
) -> None:
    """Write an answer to `part`, after the first `done` bytes."""
    from requests import RequestException

    total = None
    if (length := answer.headers.get("Content-Length", "")).isdecimal():
        total = done + int(length)
        if total > limit:
            raise Unavailable(
                f"wants to send {total:,} bytes, {limit:,} were expected at most"
            )
    # With this header, requests would decompress a `.gz`.
    answer.raw.headers.pop("Content-Encoding", None)
    name = part.name.removesuffix(PART)
    with part.open("ab" if done else "wb") as file:
        try:
            for chunk in answer.iter_content(_CHUNK):
                done += len(chunk)
                if done > limit:
                    part.unlink()
                    raise Unavailable(f"sends more than {limit:,} bytes for {name}")
                file.write(chunk)
                progress.on_bytes(name, done, total)
        except RequestException:
            of = "" if total is None else f" of {total:,}"
            raise Unavailable(f"broke off after {done:,}{of} bytes") from None


def _reason(error: BaseException) -> str:
    """Return the system's message, without those of requests and urllib3 around it."""
    while (deeper := error.__cause__ or error.__context__) is not None:
        error = deeper
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def plain_text(contents: bytes) -> bytes:
    r"""Return a text file without quotes and carriage returns.

    >>> plain_text(b'"wd",1\r\n')
    b'wd,1\n'
    """
    return contents.replace(b'"', b"").replace(b"\r", b"")


def knowledge_table(spreadsheet: bytes) -> bytes:
    """Convert the `.xls` of User Knowledge Modeling to its table."""
    try:
        import xlrd
    except ImportError:
        raise Unavailable("reading its .xls needs pip install 'fedbudget[xls]'") from None
    try:
        with xlrd.open_workbook(file_contents=spreadsheet, logfile=io.StringIO()) as book:
            sheets = [book.sheet_by_name(sheet) for sheet in _KNOWLEDGE_SHEETS]
            rows = [list(map(sheet.row_values, range(sheet.nrows))) for sheet in sheets]
    except Exception as error:  # xlrd raises many kinds of errors for a damaged file
        raise Unavailable(f"the spreadsheet cannot be read: {error}") from None
    return knowledge_csv(rows).encode()


def knowledge_csv(sheets: Iterable[Sequence[Sequence[object]]]) -> str:
    """Join the rows of all sheets to one table.

    `Very Low` in one sheet is `very_low` in the other and in the table. Further columns
    contain the authors' remarks and are left out.

    Args:
      sheets: the rows of each sheet, the header first.

    >>> header = ["STG", "SCG", "STR", "LPR", "PEG", " UNS"]
    >>> knowledge_csv([[header, [0.5, 0.25, 0.0, 1.0, 0.1, "Very Low"]]])
    'STG,SCG,STR,LPR,PEG,UNS\\n0.5,0.25,0,1,0.1,very_low\\n'
    """
    lines = [",".join(_KNOWLEDGE_COLUMNS)]
    for header, *rows in (sheet or [[]] for sheet in sheets):
        names = [str(name).strip() for name in header]
        if missing := set(_KNOWLEDGE_COLUMNS) - set(names):
            raise Unavailable(f"a sheet has no column {min(missing)}")
        for row in rows:
            cells = [row[names.index(column)] for column in _KNOWLEDGE_COLUMNS]
            if all(cell == "" for cell in cells):
                continue
            *numbers, level = cells
            if not all(isinstance(number, float) for number in numbers):
                raise Unavailable(
                    f"a sheet has {cells} instead of five numbers and a level"
                )
            text = str(level).strip().replace("Very Low", "very_low")
            lines.append(",".join([*(f"{number:g}" for number in numbers), text]))
    return "\n".join(lines) + "\n"
