"""Predefined tasks, most of them from the paper: TOML files of settings."""

from collections.abc import Sequence
from pathlib import Path

from fedbudget.errors import unknown

_FOLDER = Path(__file__).parent


def names() -> Sequence[str]:
    """Return all tasks in alphabetical order.

    >>> "svm-sgd-mnist" in names()
    True
    """
    return sorted(file.stem for file in _FOLDER.glob("*.toml"))


def path(name: str) -> Path:
    """Return the file of a task."""
    if name not in names():
        raise unknown("task", name, names())
    return _FOLDER / f"{name}.toml"


def title(name: str) -> str:
    """Return the description of a task, the first line of its file."""
    return path(name).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
