"""How a file comes from a web server to its place, and the words for how that goes.

- What comes goes to a `.part` first, which an interruption leaves, and from whose end the next try goes on.
- Nothing is taken beyond a limit, whatever a server says or sends.
- Only what has the right contents gets its final name, at once and as a whole; what has not is removed.
"""

import http
import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Protocol, cast

from fedbudget import __version__
from fedbudget.data.published.stored import PART, File, matches

_TIMEOUT = 30.0  # seconds without an answer, or without a byte of it
_CHUNK = 1 << 18


class Unavailable(Exception):
    """A source does not give what was wanted; the message says shortly why."""


class Unreachable(Unavailable):
    """A server does not answer at all, so that there is no use in asking it for more."""


class Progress(Protocol):
    """Is told how it goes."""

    def trying(self, source: str) -> None:
        """A source is asked."""

    def coming(self, what: str, done: int, total: int | None) -> None:
        """So many bytes are here, of so many, where that is known."""

    def placed(self, name: str) -> None:
        """A file is in its place."""


class Silent:
    """Tells nobody."""

    def trying(self, source: str) -> None: ...

    def coming(self, what: str, done: int, total: int | None) -> None: ...

    def placed(self, name: str) -> None: ...


def download(url: str, part: Path, limit: int, progress: Progress) -> bool:
    """Fetches what is at `url` into `part`, of which the beginning may be there already.

    Returns:
      Whether such a beginning was used. It may have been another server's, which shows only when all of it is checked.

    Raises:
      Unavailable: the server does not have it, sends more than `limit` bytes, or breaks off; then `part` stays.
    """
    start = part.stat().st_size if part.is_file() else 0
    if 0 < start <= limit:
        try:
            with _ask(url, start) as answer:
                return _save(answer, part, limit, progress)
        except _NoSuchRange as refused:
            if refused.size == start:
                return True  # nothing was missing
    with _ask(url) as answer:
        return _save(answer, part, limit, progress)


def place(part: Path, file: File, folder: Path, progress: Progress) -> None:
    """Gives a complete `part` its final name in `folder`, if it has the right contents; otherwise removes it."""
    if not matches(part, file):
        part.unlink()
        raise Unavailable(f"{file.name} has wrong contents")
    final = folder / part.name.removesuffix(PART)
    part.replace(final)
    for other in (folder / file.name, folder / f"{file.name}.gz"):
        if other != final:
            other.unlink(missing_ok=True)  # with the right contents it would not have been fetched again
    progress.placed(file.name)


def stored_limit(file: File, suffix: str) -> int:
    """The most bytes that a file may take as it is sent; gzip adds a little to what cannot be made smaller."""
    return file.size + (file.size // 1000 + 1024 if suffix else 0)


class _NoSuchRange(Exception):
    """The server cannot go on from where a `.part` ends.

    Args:
      size: of all of it, where the server says so.
    """

    def __init__(self, size: int | None = None) -> None:
        self.size = size


def _ask(url: str, start: int = 0) -> http.client.HTTPResponse:
    """The server's answer to a request for all that comes after `start` bytes."""
    request = urllib.request.Request(url, headers={"User-Agent": f"fedbudget/{__version__}"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        answer = cast(http.client.HTTPResponse, urllib.request.urlopen(request, timeout=_TIMEOUT))
    except urllib.error.HTTPError as error:
        with error:
            if start and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise _NoSuchRange(_number(r"bytes \*/(\d+)", error.headers)) from None
            raise Unavailable(f"{error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(_reason(error)) from None
    if answer.status == http.HTTPStatus.PARTIAL_CONTENT and _number(r"bytes (\d+)-", answer.headers) != start:
        answer.close()
        raise _NoSuchRange
    return answer


def _save(answer: http.client.HTTPResponse, part: Path, limit: int, progress: Progress) -> bool:
    """Writes an answer to `part`: to its end if it goes on from there, else from the start. Returns which it was."""
    goes_on = answer.status == http.HTTPStatus.PARTIAL_CONTENT
    done = part.stat().st_size if goes_on else 0
    total = None if answer.length is None else done + answer.length
    if total is not None and total > limit:
        raise Unavailable(f"wants to send {total:,} bytes, {limit:,} were expected at most")
    with part.open("ab" if goes_on else "wb") as file:
        for chunk in _chunks(answer):
            done += len(chunk)
            if done > limit:
                break
            file.write(chunk)
            progress.coming(part.name.removesuffix(PART), done, total)
    if done > limit:
        part.unlink()
        raise Unavailable(f"sends more than {limit:,} bytes for {part.name.removesuffix(PART)}")
    if total is not None and done < total:
        raise Unavailable(f"broke off after {done:,} of {total:,} bytes")
    return goes_on


def _chunks(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """What comes, piece by piece. Errors of the connection are told apart here from those of the disk."""
    while True:
        try:
            chunk = answer.read1(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"broke off: {_reason(error)}") from None
        if not chunk:
            return
        yield chunk


def _number(pattern: str, headers: Message) -> int | None:
    """The number that the pattern finds in Content-Range."""
    found = re.match(pattern, headers.get("Content-Range", ""))
    return int(found[1]) if found else None


def _reason(error: Exception) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
