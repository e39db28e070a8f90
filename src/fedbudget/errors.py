"""Exceptions with messages for users.

- `UserError`: the request is wrong (a bad option, a bad file). One line, exit code 2.
- `WorkError`: the work failed for another, foreseen reason. One line, exit code 1.
- Between two machines, `LocalError` is our own failure and `PeerError` the other side's
  (see protocol/).

Option names are spelled differently in Python (`step_size`), in a file (`step-size`) and on
the command line (`--step-size`). Messages contain the Python name in backticks, followed by
`=` and a text if they suggest a value. The code that prints a message replaces both by the
spelling of its reader.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any


class FedbudgetError(Exception):
    """Base class of all exceptions of fedbudget."""


class _Spelled(FedbudgetError):
    """An error whose message contains names of options in backticks."""

    def spelled(self, spell: Callable[..., str]) -> str:
        """Return the message with options and their values converted by `spell`."""

        def converted(found: re.Match[str]) -> str:
            return spell(*filter(None, found.groups()))

        return re.sub(r"`(\w+)(?:=([^`]+))?`", converted, super().__str__())

    def __str__(self) -> str:
        return self.spelled(argument)


class UserError(_Spelled, ValueError):
    """A request that cannot be fulfilled. The message states cause, place and remedy.

    >>> error = UserError("`step_size` must be positive")
    >>> str(error), error.spelled(flag)
    ('step_size must be positive', '--step-size must be positive')
    >>> error = UserError("use `missing=< 5`")
    >>> str(error), error.spelled(flag)
    ("use missing='< 5'", "use --missing '< 5'")
    """


class PublicReason(UserError):
    """A reason that the other side may read: nothing in it follows from samples."""


class WorkError(_Spelled, RuntimeError):
    """The work failed although the request was valid. No traceback is needed."""


def argument(name: str, value: str | None = None) -> str:
    """Return an option, and its value if given, as written in Python."""
    return name if value is None else f"{name}={value!r}"


def key(name: str, value: str | None = None) -> str:
    """Return an option, and its value if given, as written in a file."""
    spelled = name.replace("_", "-")
    return spelled if value is None else f"{spelled} = {value!r}"


def flag(name: str, value: str | None = None) -> str:
    """Return an option, and its value if given, as written on the command line."""
    spelled = f"--{key(name)}"
    return spelled if value is None else f"{spelled} {shlex.quote(value)}"


@contextmanager
def requires_package(what: str, extra: str = "full") -> Iterator[None]:
    """Turn a failing import into an error that names the extra to install.

    Args:
      what: the feature that needs the package.
      extra: the extra of fedbudget that contains it.

    >>> with requires_package("TLS", "net"):
    ...     import no
    Traceback (most recent call last):
    fedbudget.errors.UserError: TLS needs no; install it with: pip install 'fedbudget[net]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(
            f"{what} needs {error.name}; install it with: pip install 'fedbudget[{extra}]'"
        ) from None


@contextmanager
def as_user_error(what: str) -> Iterator[None]:
    """Turn any exception of the user's own code inside the `with` into a one-line error.

    Args:
      what: start of the message, such as "net.py:Net cannot be created".
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what}: {type(error).__name__}: {error}") from error


def unknown(
    what: str, name: str, known: Iterable[str], otherwise: str | None = None
) -> UserError:
    """Return the error for an unknown name, with the most similar known name as a hint.

    Args:
      what: the kind of thing that has the name.
      known: all valid names.
      otherwise: the hint if no known name is similar; lists all names by default.

    >>> str(unknown("model", "sofmax", ["svm", "softmax"]))
    "unknown model 'sofmax'; did you mean softmax?"
    >>> str(unknown("model", "resnet", ["svm", "softmax"]))
    "unknown model 'resnet'; use one of svm, softmax"
    """
    names = list(known)
    hint = suggestion(name, names) or otherwise or f"use one of {', '.join(names)}"
    return UserError(f"unknown {what} {name!r}; {hint}")


def suggestion(name: str, known: Iterable[str]) -> str | None:
    """Return "did you mean ...?" with the most similar name, or None if none is similar."""
    near = get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else None


def printable(text: str, longest: int = 1000) -> str:
    """Return at most `longest` characters of an untrusted text, without control characters.

    >>> printable("one\\ttwo"), printable("three", longest=2)
    ('one\ufffdtwo', 'th…')
    """
    shown = "".join(each if each.isprintable() else "\ufffd" for each in text[:longest])
    return shown if len(text) <= longest else f"{shown}…"


def printable_texts(values: Any) -> Any:
    """Apply `printable` to all texts in nested dicts, lists and tuples.

    >>> printable_texts({"reason": ["a\\tb", 3]})
    {'reason': ['a\ufffdb', 3]}
    """
    if isinstance(values, str):
        return printable(values)
    if isinstance(values, Mapping):
        return {
            printable(str(name)): printable_texts(value) for name, value in values.items()
        }
    if isinstance(values, list | tuple):
        return type(values)(map(printable_texts, values))
    return values
