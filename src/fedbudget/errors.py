"""Errors for people.

`UserError` is a mistake in what was asked (a wrong option, a bad file): one clear line, exit code 2.
Everything else that goes wrong is a failure of the work itself: exit code 1, and one clear line where it is foreseen
(`WorkError`). Of the two sides of a conversation, `LocalError` is ours and `PeerError` the other's (protocol/).

An option has a name in each language: `step_size` in Python, `step-size` in a file, `--step-size` on the command line.
A message has it in backticks, as in Python, and whoever shows the message spells it as its reader does.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any


class FedbudgetError(Exception):
    """All errors of fedbudget's own."""


class UserError(FedbudgetError, ValueError):
    """What was asked cannot be done; the message says what is wrong, where, and what would be right.

    >>> error = UserError("`step_size` must be positive")
    >>> str(error), error.spelled(key), error.spelled(flag)
    ('step_size must be positive', 'step-size must be positive', '--step-size must be positive')
    """

    def spelled(self, spell: Callable[[str], str]) -> str:
        """The message, with the names of options as `spell` writes them."""
        return re.sub(r"`(\w+)`", lambda name: spell(name[1]), super().__str__())

    def __str__(self) -> str:
        return self.spelled(str)


class WorkError(FedbudgetError, RuntimeError):
    """The work failed for a reason that is not in what was asked; the message is all that a person needs of it."""


def key(name: str) -> str:
    """An option's name as it is written in a file."""
    return name.replace("_", "-")


def flag(name: str) -> str:
    """An option's name as it is written on the command line."""
    return f"--{key(name)}"


@contextmanager
def needing(what: str, extra: str = "full") -> Iterator[None]:
    """Says which extra to install, where a package that is imported within is missing.

    >>> with needing("a picture"):
    ...     import no_such_package
    Traceback (most recent call last):
    fedbudget.errors.UserError: a picture needs no_such_package; install it with: pip install 'fedbudget[full]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(
            f"{what} needs {error.name}; install it with: pip install 'fedbudget[{extra}]'"
        ) from None


@contextmanager
def explained(what: str) -> Iterator[None]:
    """What a person's own code raises within, as an error in one line.

    Args:
      what: cannot be done then, such as "net.py:Net cannot be made".
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
    """The error of a name that does not exist: with the name that was probably meant or, where none is near, with all.

    Args:
      what: what it would be the name of.
      otherwise: what to say where none is near, in place of all names.

    >>> str(unknown("model", "sofmax", ["svm", "softmax"])), str(unknown("model", "resnet", ["svm", "softmax"]))
    ("unknown model 'sofmax'; did you mean softmax?", "unknown model 'resnet'; use one of svm, softmax")
    """
    names = list(known)
    hint = suggestion(name, names) or otherwise or f"use one of {', '.join(names)}"
    return UserError(f"unknown {what} {name!r}; {hint}")


def suggestion(name: str, known: Iterable[str]) -> str | None:
    """A question for the name that was probably meant, if one is near."""
    near = get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else None


def printable(text: str, longest: int = 1000) -> str:
    """A text from elsewhere as it may be shown on a terminal: without control characters, and not endless.

    >>> printable("one\\ttwo"), printable("three", longest=2)
    ('one\ufffdtwo', 'th…')
    """
    shown = "".join(each if each.isprintable() else "\ufffd" for each in text[:longest])
    return shown if len(text) <= longest else f"{shown}…"


def printable_texts(values: Any) -> Any:
    """All texts in a structure of dicts, lists and tuples, so.

    >>> printable_texts({"reason": ["a\\tb", 3]})
    {'reason': ['a\ufffdb', 3]}
    """
    if isinstance(values, str):
        return printable(values)
    if isinstance(values, Mapping):
        return {
            printable(str(name)): printable_texts(value) for name, value in values.items()
        }
    return (
        type(values)(map(printable_texts, values))
        if isinstance(values, list | tuple)
        else values
    )
