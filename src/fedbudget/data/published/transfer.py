"""How a file comes from a web server to its place, by pooch's HTTP downloader.

- What comes goes to a `.part` first, which an interruption leaves, and from whose end the next try goes on.
- Nothing is taken beyond a limit, whatever a server says or sends.
- Only what has the right contents gets its final name, in one step; what has not is removed. `pooch.retrieve` would not
  do: our checksums are of contents when unzipped, and it starts over after every interruption.
"""

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fedbudget import __version__, atomic_file
from fedbudget.data.contents import PART, Damaged, at_most, open_contents
from fedbudget.errors import UserError, needing

if TYPE_CHECKING:
    from requests import Response

_TIMEOUT = 30.0  # seconds without an answer, or without a byte of it
_CHUNK = 1 << 14  # bytes; at most that many are lost when a connection breaks
_PARTIAL, _NO_SUCH_RANGE = 206, 416


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
                return hashlib.sha256(at_most(stream, self.size, path).data).hexdigest() == self.sha256
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
        atomic_file.move(part, final)
        for other in {self.folder / file.name, self.folder / f"{file.name}.gz"} - {final}:
            other.unlink(missing_ok=True)  # with the right contents it would not have been fetched again
        self.progress.on_file(file.name)


def download(url: str, part: Path, limit: int, progress: Progress, use: Callable[[Path], None]) -> None:
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
        fetch = HTTPDownloader(chunk_size=_CHUNK, timeout=_TIMEOUT, headers=headers, hooks={"response": output.begin})
        try:
            fetch(url, output, None)
        except requests.HTTPError as error:
            answer = error.response
            assert answer is not None  # pooch asks for the errors of answers alone, and so does `begin`
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

    def __init__(self, part: Path, start: int, limit: int, progress: Progress, stack: ExitStack) -> None:
        self.done, self.resumed = 0, False
        self.total: int | None = None
        self.file: BinaryIO | None = None
        self._part, self._start, self._limit, self._progress, self._stack = part, start, limit, progress, stack

    def begin(self, answer: "Response", **_: object) -> None:
        """Opens the file, to go on at its end if the answer is the rest of it."""
        from requests import HTTPError

        self._stack.callback(answer.close)
        if not answer.ok or answer.is_redirect:
            return
        answer.raw.headers.pop("Content-Encoding", None)  # with which a `.gz` would be unzipped
        self.resumed = answer.status_code == _PARTIAL
        if self.resumed and not answer.headers.get("Content-Range", "").startswith(f"bytes {self._start}-"):
            raise HTTPError(response=answer)
        self.done = self._start if self.resumed else 0
        if (length := answer.headers.get("Content-Length", "")).isdecimal():
            self.total = self.done + int(length)
            if self.total > self._limit:
                raise Unavailable(f"wants to send {self.total:,} bytes, {self._limit:,} were expected at most")
        self.file = self._stack.enter_context(self._part.open("ab" if self.resumed else "wb"))

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
