"""Names of nodes and their tokens, from a file or from the environment.

Rules:
- A token is never shown, in no error and no repr. Errors in a token file name the line.
- An aggregator keeps only digests of tokens. It compares them in constant time, for unknown
  names too.
- A likely mistake (an empty variable, a file others can read) is an error at the start.
- The aggregator reads its token file again during a run: a removed line revokes the token.

Threads: functions without shared state. A `TokenFile` belongs to one thread.
"""

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedbudget import durable_files
from fedbudget.errors import UserError

TOKEN_VARIABLE = "FEDBUDGET_TOKEN"
_SHORTEST_TOKEN = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOKEN = re.compile(r"[!-~]+")
_COMMENT = re.compile(r"(^|\s)#.*")


def valid_name(name: str) -> bool:
    """Whether a node may have this name; it is then safe in logs and as a file name.

    >>> [valid_name(name) for name in ("edge-1", "", "../edge", "edge 1")]
    [True, False, False, False]
    """
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """Return a valid name; raises `UserError` for an invalid one."""
    if not valid_name(name):
        raise UserError(
            f"{name[:80]!r} cannot be the name of a node; use up to 64 letters (a-z, A-Z), "
            "digits, dots, dashes and underscores, beginning with a letter or digit"
        )
    return name


@dataclass(frozen=True)
class Tokens:
    """Valid tokens: one shared by all nodes, one for each name, or none.

    >>> Tokens().allows("edge-1", "anything")
    True
    """

    _shared: bytes | None = field(default=None, repr=False)
    _by_name: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    # Compared with tokens of unknown names: the same work, and equal to no digest.
    _unknown: bytes = field(
        default_factory=lambda: secrets.token_bytes(32), repr=False, compare=False
    )

    @classmethod
    def load(cls, path: Path | None, *, may_be_empty: bool = False) -> "Tokens":
        """Load tokens from a file or from FEDBUDGET_TOKEN; without both, none is required.

        The file has one token, or a line `NAME TOKEN` for each node. Blank lines and
        comments after # are ignored.

        Args:
          may_be_empty: accept a file without tokens, which admits no node.
        """
        if path is None:
            token = _token_from_environment()
            return cls() if token is None else cls(_shared=_digest(token))
        lines = _read_tokens(path, may_be_empty=may_be_empty)
        if not lines:
            return cls(_shared=secrets.token_bytes(32))
        if all(name is None for name, _ in lines.values()):
            return cls(_shared=_digest(_only_token(path, lines)))
        by_name: dict[str, bytes] = {}
        for number, (name, token) in lines.items():
            where = f"{path}, line {number}"
            if name is None:
                raise UserError(
                    f"{where}: other lines are NAME TOKEN, this one has no name"
                )
            if name in by_name:
                raise UserError(f"{where}: this name has a token already")
            # With a common token, each of two nodes could join under the other's name.
            if _digest(token) in by_name.values():
                raise UserError(
                    f"{where}: another node has the same token; tokens must be unique"
                )
            by_name[name] = _digest(token)
        return cls(_by_name=by_name)

    @property
    def required(self) -> bool:
        return self._shared is not None or bool(self._by_name)

    def allows(self, name: str, token: str) -> bool:
        """Whether a node with this name and token may join."""
        expected = self._shared
        if expected is None:
            expected = self._by_name.get(name, self._unknown)
        equal = hmac.compare_digest(_digest(token), expected)
        return equal or not self.required


class TokenFile:
    """The current tokens of a file or the environment.

    Args:
      path: of the file; None for the environment.
    """

    def __init__(self, path: Path | None) -> None:
        self.tokens = Tokens.load(path)
        self._path = path
        self._seen = self._stamp()

    def reload(self) -> bool:
        """Read the file again if it has changed; returns whether the tokens differ.

        Raises:
          UserError: the file cannot be read; the tokens stay as they are.
        """
        stamp = self._stamp()
        if self._path is None or stamp == self._seen:
            return False
        self._seen = stamp
        before = self.tokens
        self.tokens = Tokens.load(self._path, may_be_empty=True)
        return self.tokens != before

    def _stamp(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size


def node_token(path: Path | None) -> str | None:
    """A node's token from a file, or from FEDBUDGET_TOKEN; None without either."""
    if path is None:
        return _token_from_environment()
    return _only_token(path, _read_tokens(path))


def add_token(path: Path, name: str) -> str:
    """Create a node's token and add it to a file, which is created if missing.

    Returns:
      The token.
    """
    check_name(name)
    lines = _named_lines(path) if path.exists() else []
    if any(_name_of(line) == name for line in lines):
        raise UserError(f"{path} has a token of {name} already; revoke that first")
    token = secrets.token_hex(32)
    _write_lines(path, [*lines, f"{name} {token}"])
    return token


def revoke_token(path: Path, name: str) -> None:
    """Remove a node's token from a file."""
    lines = _named_lines(path)
    kept = [line for line in lines if _name_of(line) != name]
    if len(kept) == len(lines):
        raise UserError(f"{path} has no token of {name[:80]!r}")
    _write_lines(path, kept)


def names_with_tokens(path: Path) -> list[str]:
    """Names of all nodes that have a token in a file."""
    return [name for line in _named_lines(path) if (name := _name_of(line)) is not None]


def _named_lines(path: Path) -> list[str]:
    lines = _read_secret(path).splitlines()
    for number, line in enumerate(lines, start=1):
        if len(_COMMENT.sub("", line).split()) == 1:
            raise UserError(
                f"{path}, line {number}: a token without a name; "
                "this command needs a line NAME TOKEN for each node"
            )
    return lines


def _name_of(line: str) -> str | None:
    words = _COMMENT.sub("", line).split()
    return words[0] if words else None


def _write_lines(path: Path, lines: list[str]) -> None:
    mask = os.umask(0o077)  # other users cannot read the file at any time
    try:
        durable_files.replace(path, "".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise UserError(f"cannot write the token file {path}: {error.strerror}") from None
    finally:
        os.umask(mask)


def _digest(token: str) -> bytes:
    # All digests have the same length, so comparisons do not reveal a token's length.
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _token_from_environment() -> str | None:
    token = os.environ.get(TOKEN_VARIABLE)
    if token is None:
        return None
    return _check_token(token.strip(), f"the variable {TOKEN_VARIABLE}")


def _only_token(path: Path, lines: Mapping[int, tuple[str | None, str]]) -> str:
    if len(lines) > 1:
        raise UserError(
            f"{path} has {len(lines)} lines with tokens; "
            "use one token, or a line NAME TOKEN for each node"
        )
    ((number, (name, token)),) = lines.items()
    if name is not None:
        raise UserError(
            f"{path}, line {number}: a node's file has its token only, without a name"
        )
    return token


def _read_tokens(
    path: Path, *, may_be_empty: bool = False
) -> dict[int, tuple[str | None, str]]:
    """Name (if any) and token by line number."""
    lines: dict[int, tuple[str | None, str]] = {}
    for number, line in enumerate(_read_secret(path).splitlines(), start=1):
        words = _COMMENT.sub("", line).split()
        where = f"{path}, line {number}"
        if len(words) > 2:
            raise UserError(
                f"{where}: expected TOKEN or NAME TOKEN, found {len(words)} words"
            )
        # The name is not shown: if the two were swapped, it is the token.
        if len(words) == 2 and not valid_name(words[0]):
            raise UserError(
                f"{where}: expected NAME TOKEN; the first word cannot be the name of a node"
            )
        if words:
            name = words[0] if len(words) == 2 else None
            lines[number] = name, _check_token(words[-1], where)
    if not lines and not may_be_empty:
        raise UserError(f"{path} has no token")
    return lines


def _check_token(token: str, where: str) -> str:
    if len(token) < _SHORTEST_TOKEN:
        raise UserError(
            f"{where}: a token has at least {_SHORTEST_TOKEN} characters, not "
            f"{len(token)}; openssl rand -hex 32 creates one"
        )
    if _TOKEN.fullmatch(token) is None:
        raise UserError(
            f"{where}: a token has ASCII letters, digits and signs only, and no spaces"
        )
    return token


def _read_secret(path: Path) -> str:
    try:
        with path.open("rb") as file:
            # Mode of the opened file: the path may name another one by now. Windows has
            # no such modes.
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if os.name == "posix" and mode & 0o077:
                raise UserError(
                    f"others can read or change {path} (mode {mode:03o}); chmod 600 {path}"
                )
            return file.read().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read the token file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"the token file {path} is not a text file") from None
