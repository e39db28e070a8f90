"""`fedbudget tasks`."""

from fedbudget import tasks as known
from fedbudget.cli.command import command
from fedbudget.option import option


@command
def tasks(
    *,
    name: str | None = option(
        None, "Print this task's settings as a file.", argument=True, values=lambda _: known.names()
    ),
) -> None:
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
