"""One line that shows how far `fedbudget.train` is, in a terminal or a notebook.

The line is replaced in place, which a file cannot do, so nothing is shown elsewhere.
"""

import math
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedbudget.launch.prepared import Callback, PreparedRun
from fedbudget.runs.record import RoundRecord

_INTERVAL = 0.2  # seconds between two updates of the line


@contextmanager
def showing_progress(
    prepared: PreparedRun, wanted: bool | None = None
) -> Iterator[tuple[Callback, ...]]:
    """Yield the callbacks that show the rounds of a run; none if nobody would see them.

    Args:
      prepared: the run.
      wanted: whether to show the line; by default in a terminal and in a notebook.
    """
    display = _notebook_display()
    if wanted is None:
        wanted = display is not None or sys.stderr.isatty()
    if not wanted:
        yield ()
        return
    line = ProgressLine(prepared, display)
    try:
        yield (line,)
    finally:
        line.end()


class ProgressLine:
    """A callback that shows the last round, at most five times a second.

    Args:
      prepared: the run.
      display: the display of a notebook; None for standard error.
    """

    def __init__(self, prepared: PreparedRun, display: Any = None) -> None:
        self._title = prepared.title
        self._budget = prepared.budget.limits
        self._display = display
        self._began = time.monotonic()
        self._shown = -math.inf
        self._width = 0
        self._record: RoundRecord | None = None

    def __call__(self, record: RoundRecord) -> None:
        self._record = record
        if time.monotonic() - self._shown >= _INTERVAL:
            self._show()

    def end(self) -> None:
        """Show the last round, and end the line."""
        self._show()
        if self._display is None and self._width:
            print(file=sys.stderr, flush=True)

    def text(self, record: RoundRecord) -> str:
        """Return the line for a round."""
        share = max(record.spent[name] / limit for name, limit in self._budget.items())
        parts = [f"{share:4.0%} of the budget", f"round {record.round}"]
        if math.isfinite(record.loss):
            parts.append(f"loss {record.loss:.4f}")
        if record.validation is not None:
            parts.append(f"validation {record.validation:.4f}")
        parts.append(f"{time.monotonic() - self._began:.0f} s")
        return f"{', '.join(parts)}: {self._title}"

    def _show(self) -> None:
        if self._record is None:
            return
        text = self.text(self._record)
        if self._display is not None:
            show = self._display.update if self._width else self._display.display
            show({"text/plain": text}, raw=True)
        else:
            encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
            text = text.encode(encoding, "replace").decode(encoding)
            text = text[: shutil.get_terminal_size().columns - 1]
            print(f"\r{text.ljust(self._width)}", end="", file=sys.stderr, flush=True)
        self._width = len(text)
        self._shown = time.monotonic()


def _notebook_display() -> Any:
    """Return a display whose content can be replaced; None outside of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if not hasattr(shell, "kernel"):
        return None
    return ipython.display.DisplayHandle()
