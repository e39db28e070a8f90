"""The paper's tasks, each a TOML file of settings that can be copied and changed."""

from collections.abc import Sequence
from pathlib import Path

from fedbudget.errors import unknown

_FOLDER = Path(__file__).parent


def names() -> Sequence[str]:
    """All tasks, in alphabetical order.

    >>> "svm-sgd-mnist" in names()
    True
    """
    return sorted(file.stem for file in _FOLDER.glob("*.toml"))


def path(name: str) -> Path:
    """The file of a task."""
    if name not in names():
        raise unknown("task", name, names())
    return _FOLDER / f"{name}.toml"


def title(name: str) -> str:
    """What a task is, from the first line of its file."""
    return path(name).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
