"""Progress of a download: bars on a terminal, otherwise one line per file.

Both go to standard error, so that standard output can be piped.
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
def download_progress() -> Iterator[Progress]:
    """Yield an object that shows the progress of a download on standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=console, transient=True) as bars:
        yield _Bars(bars)


class _Lines(Progress):
    """Prints one line per fetched file."""

    def __init__(self) -> None:
        self._source = ""

    def on_source(self, source: str) -> None:
        self._source = source

    def on_file(self, name: str) -> None:
        self._print(f"{name} from {self._source}")

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class _Bars(_Lines):
    """Prints the same lines, with a bar for the current file below them."""

    def __init__(self, bars: RichProgress) -> None:
        super().__init__()
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def on_source(self, source: str) -> None:
        super().on_source(source)
        self._clear()
        self.on_bytes(source, 0, None)  # a moving bar until bytes are counted

    def on_bytes(self, name: str, done: int, total: int | None) -> None:
        if name not in self._tasks:
            self._clear()
            self._tasks[name] = self._bars.add_task(name, total=None)
        self._bars.update(self._tasks[name], completed=done, total=total)

    def _clear(self) -> None:
        for task in self._tasks.values():
            self._bars.remove_task(task)
        self._tasks.clear()

    def _print(self, line: str) -> None:
        self._bars.console.print(line, markup=False, highlight=False)
