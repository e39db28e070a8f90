"""What a person sees while a dataset is fetched: bars on a terminal, a line for each file elsewhere.

Both go to standard error, so that what a command has to say at its end can be piped on.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress

from fedbudget.data.download import Progress


@contextmanager
def showing() -> Iterator[Progress]:
    """Gives what is to be told how it goes."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    name = TextColumn("{task.description}", markup=False)
    columns = (
        name,
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=console, transient=True) as bars:
        yield _Bars(bars)


class _Lines(Progress):
    """A line for each file that came."""

    def __init__(self) -> None:
        self._source = ""

    def on_source(self, source: str) -> None:
        self._source = source

    def on_file(self, name: str) -> None:
        self._say(f"{name} from {self._source}")

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class _Bars(_Lines):
    """The same lines, and below them a bar for what is coming."""

    def __init__(self, bars: RichProgress) -> None:
        super().__init__()
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def on_source(self, source: str) -> None:
        super().on_source(source)
        self._clear()
        self.on_bytes(source, 0, None)  # moves without an end until bytes are counted

    def on_bytes(self, name: str, done: int, total: int | None) -> None:
        if name not in self._tasks:
            self._clear()
            self._tasks[name] = self._bars.add_task(name, total=None)
        self._bars.update(self._tasks[name], completed=done, total=total)

    def _clear(self) -> None:
        for task in self._tasks.values():
            self._bars.remove_task(task)
        self._tasks.clear()

    def _say(self, line: str) -> None:
        self._bars.console.print(line, markup=False, highlight=False)
