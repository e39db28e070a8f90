"""Checkpoints are written in a thread of their own, so that rounds need not wait for the disk.

When rounds are quicker than the disk, the latest checkpoint is written and those before it are passed over; a run is
never more than some rounds ahead of its disk. Records of rounds are added to rounds.jsonl when a checkpoint that holds
them is on disk, and not before.
"""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedbudget.protocol.state import AggregatorState
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.runs.record import RoundRecord

Append = Callable[[RoundRecord], None]


class CheckpointWriter:
    """Writes what it is given, in order, and as soon as the disk has time for it.

    Args:
      folder: of the run.
      append: adds a record to rounds.jsonl.
      ahead: the most rounds that may wait for the disk.
      records: that the last checkpoint on disk holds, as lines.
    """

    def __init__(self, folder: Path, append: Append, *, ahead: int, records: tuple[str, ...] = ()) -> None:
        self._folder = folder
        self._append = append
        self._ahead = ahead
        self._last = records[-1:]
        self._changed = threading.Condition()
        self._waiting: list[RoundRecord] = []
        self._latest: tuple[AggregatorState[Any, Any], Mapping[str, Any]] | None = None
        self._error: Exception | None = None
        self._busy = self._over = False
        self._thread = threading.Thread(target=self._work, name="fedbudget-checkpoints", daemon=True)
        self._thread.start()

    def save(self, state: AggregatorState[Any, Any], engine: Mapping[str, Any], record: RoundRecord | None) -> None:
        """Takes where a run has come to, and the record of the round that was the last, to be on disk before long.

        Raises what went wrong with an earlier one.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < self._ahead or self._error is not None)
            self._raise_error()
            self._latest = state, engine
            if record is not None:
                self._waiting.append(record)
            self._changed.notify_all()

    def flush(self) -> None:
        """Waits until all is on disk."""
        with self._changed:
            self._changed.wait_for(lambda: (self._latest is None and not self._busy) or self._error is not None)
            self._raise_error()

    def close(self) -> None:
        """Ends the thread, when it has written what it was given."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._latest is not None or self._over)
                if self._latest is None:
                    return
                (state, engine), records = self._latest, list(self._waiting)
                self._latest, self._busy = None, True
            try:
                self._write(state, engine, records)
            except Exception as error:
                with self._changed:
                    self._error, self._busy = error, False
                    self._changed.notify_all()
                return
            with self._changed:
                del self._waiting[: len(records)]
                self._busy = False
                self._changed.notify_all()

    def _write(self, state: AggregatorState[Any, Any], engine: Mapping[str, Any], records: list[RoundRecord]) -> None:
        lines = tuple(record.to_json() for record in records) or self._last
        Checkpoint(state, lines, engine).save(self._folder)
        self._last = lines[-1:]
        for record in records:
            self._append(record)
