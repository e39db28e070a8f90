"""Who may take part by what they know: names of nodes, and tokens from a file or from the environment.

Rules here:
- A token is never shown: not in an error, not in a repr. What is wrong with a file of tokens is told by its line.
- An aggregator keeps only digests of tokens, and compares these in constant time, for names it does not know too.
- What may be a slip (an empty variable, a file that others can read) is an error at the start.
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
    """Whether a node may be called so: such a name is safe in a log, in a certificate and as the name of a file.

    >>> [valid_name(name) for name in ("edge-1", "", "../edge", "edge 1")]
    [True, False, False, False]
    """
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    if not valid_name(name):
        raise UserError(
            f"{name[:80]!r} cannot be the name of a node; use up to 64 of the letters a-z and A-Z, digits, dots, "
            "dashes and underscores, and begin with a letter or digit"
        )
    return name


@dataclass(frozen=True)
class Tokens:
    """What a node must know to take part: one token shared by all, one for each name, or nothing.

    >>> Tokens().allows("edge-1", "anything")
    True
    """

    _shared: bytes | None = field(default=None, repr=False)
    _by_name: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    # What an unknown name is compared with: as much work as for a known one, and equal to nothing.
    _nobody: bytes = field(
        default_factory=lambda: secrets.token_bytes(32), repr=False, compare=False
    )

    @classmethod
    def load(cls, path: Path | None, *, may_be_empty: bool = False) -> "Tokens":
        """From a file, or else from FEDBUDGET_TOKEN; without either, none is required.

        The file has one token, or a line `NAME TOKEN` for each node; blank lines and what follows a # are ignored.

        Args:
          may_be_empty: whether all tokens of the file may have been revoked; then nobody is let in.
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
            if name is None:
                raise UserError(
                    f"{path}, line {number}: other lines are NAME TOKEN, this one has no name"
                )
            if name in by_name:
                raise UserError(f"{path}, line {number}: this name has a token already")
            # With a token in common, each of two nodes could take part under the other's name.
            if _digest(token) in by_name.values():
                raise UserError(
                    f"{path}, line {number}: another node has the same token; give each its own"
                )
            by_name[name] = _digest(token)
        return cls(_by_name=by_name)

    @property
    def required(self) -> bool:
        return self._shared is not None or bool(self._by_name)

    def allows(self, name: str, token: str) -> bool:
        """Whether a node of this name that says this token may take part."""
        expected = (
            self._by_name.get(name, self._nobody) if self._shared is None else self._shared
        )
        equal = hmac.compare_digest(_digest(token), expected)
        return equal or not self.required


class TokenFile:
    """The tokens of a file, or of the environment, as they are now: a node whose line is gone may take part no more.

    Args:
      path: of the file; None for what the environment has.
    """

    def __init__(self, path: Path | None) -> None:
        self.tokens = Tokens.load(path)
        self._path = path
        self._seen = self._stamp()

    def reload(self) -> bool:
        """Whether there are others now; raises a `UserError` where they cannot be read, and then they stay."""
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
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size


def add_token(path: Path, name: str) -> str:
    """Gives a node a token of its own, in a file that is made where there is none; and gives it."""
    check_name(name)
    lines = _named_lines(path) if path.exists() else []
    if any(_name_of(line) == name for line in lines):
        raise UserError(f"{path} has a token of {name} already; revoke that first")
    token = secrets.token_hex(32)
    _write_lines(path, [*lines, f"{name} {token}"])
    return token


def revoke_token(path: Path, name: str) -> None:
    """Takes a node's token from a file."""
    lines = _named_lines(path)
    kept = [line for line in lines if _name_of(line) != name]
    if len(kept) == len(lines):
        raise UserError(f"{path} has no token of {name[:80]!r}")
    _write_lines(path, kept)


def names_with_tokens(path: Path) -> list[str]:
    """Whose tokens a file has."""
    return [name for line in _named_lines(path) if (name := _name_of(line)) is not None]


def _named_lines(path: Path) -> list[str]:
    text = _read_secret(path)
    for number, line in enumerate(text.splitlines(), start=1):
        if len(_COMMENT.sub("", line).split()) == 1:
            raise UserError(
                f"{path}, line {number}: one token for all has no name, and cannot be told from others"
            )
    return text.splitlines()


def _name_of(line: str) -> str | None:
    words = _COMMENT.sub("", line).split()
    return words[0] if words else None


def _write_lines(path: Path, lines: list[str]) -> None:
    mask = os.umask(0o077)  # from the first byte on, for nobody else to read
    try:
        durable_files.replace(path, "".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise UserError(f"cannot write the token file {path}: {error.strerror}") from None
    finally:
        os.umask(mask)


def node_token(path: Path | None) -> str | None:
    """A node's own token, from a file with nothing else, or else from FEDBUDGET_TOKEN; None without either."""
    return (
        _token_from_environment() if path is None else _only_token(path, _read_tokens(path))
    )


def _digest(token: str) -> bytes:
    # Of equal length for all tokens, so that a comparison does not tell the length either.
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _token_from_environment() -> str | None:
    token = os.environ.get(TOKEN_VARIABLE)
    return (
        None
        if token is None
        else _check_token(token.strip(), f"the variable {TOKEN_VARIABLE}")
    )


def _only_token(path: Path, lines: Mapping[int, tuple[str | None, str]]) -> str:
    if len(lines) > 1:
        raise UserError(
            f"{path} has {len(lines)} lines with tokens; give one token, or a line NAME TOKEN for each node"
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
    """Name, where there is one, and token of each line that has them."""
    lines: dict[int, tuple[str | None, str]] = {}
    for number, line in enumerate(_read_secret(path).splitlines(), start=1):
        words = _COMMENT.sub("", line).split()
        where = f"{path}, line {number}"
        if len(words) > 2:
            raise UserError(
                f"{where}: expected TOKEN or NAME TOKEN, found {len(words)} words"
            )
        # The name is not shown: where the two were swapped, it is the token.
        if len(words) == 2 and not valid_name(words[0]):
            raise UserError(
                f"{where}: expected NAME TOKEN, and the first word cannot be the name of a node"
            )
        if words:
            lines[number] = (
                words[0] if len(words) == 2 else None,
                _check_token(words[-1], where),
            )
    if not lines and not may_be_empty:
        raise UserError(f"{path} has no token")
    return lines


def _check_token(token: str, where: str) -> str:
    if len(token) < _SHORTEST_TOKEN:
        raise UserError(
            f"{where}: a token has at least {_SHORTEST_TOKEN} characters, not {len(token)}; "
            "openssl rand -hex 32 makes a good one"
        )
    if _TOKEN.fullmatch(token) is None:
        raise UserError(
            f"{where}: a token has ASCII letters, digits and signs only, and no spaces"
        )
    return token


def _read_secret(path: Path) -> str:
    try:
        with path.open("rb") as file:
            # Of the file that was opened, not of whatever has its name by now. Windows has no such modes.
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
