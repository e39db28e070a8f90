"""`fedbudget tasks`."""

from typing import Annotated

import typer

from fedbudget import tasks as known
from fedbudget.cli.parameters import completion

Name = Annotated[
    str | None,
    typer.Argument(help="Print this task's settings as a file.", autocompletion=completion(lambda _: known.names())),
]


def tasks(name: Name = None) -> None:
    """List the paper's tasks, or print one as a file to change.

    Examples:

      fedbudget tasks

      fedbudget tasks svm-sgd-mnist > mine.toml && fedbudget run --config mine.toml
    """
    if name is not None:
        print(known.path(name).read_text(encoding="utf-8"), end="")
        return
    width = max(map(len, known.names()))
    for each in known.names():
        print(f"{each.ljust(width)}  {known.title(each)}")
