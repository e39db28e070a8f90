"""Progress of a download on standard error, so that standard output can be piped."""

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
    """Yield an object that prints one line per fetched file, with bars on a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    no_bars = not console.is_terminal
    with RichProgress(*columns, console=console, transient=True, disable=no_bars) as bars:
        yield _Bars(bars)


class _Bars(Progress):
    """Prints one line per fetched file, above a bar for the current file."""

    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._source = ""
        self._tasks: dict[str, TaskID] = {}

    def on_source(self, source: str) -> None:
        self._source = source
        self._clear()
        self.on_bytes(source, 0, None)  # a moving bar until bytes are counted

    def on_bytes(self, name: str, done: int, total: int | None) -> None:
        if name not in self._tasks:
            self._clear()
            self._tasks[name] = self._bars.add_task(name, total=None)
        self._bars.update(self._tasks[name], completed=done, total=total)

    def on_file(self, name: str) -> None:
        line = f"{name} from {self._source}"
        self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _clear(self) -> None:
        for task in self._tasks.values():
            self._bars.remove_task(task)
        self._tasks.clear()
