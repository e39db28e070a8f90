"""Checkpoints are written in a thread of their own, so that rounds need not wait for the disk.

When rounds are quicker than the disk, the latest checkpoint is written and those before it are passed over; a run is
never more than some rounds ahead of its disk. Rounds of a few milliseconds share checkpoints: after one, the next waits
for a moment, or until as many rounds wait for it as may. Records of rounds are added to rounds.jsonl when a checkpoint
that holds them is on disk, and not before.

Where rounds can be made again, checkpoints are some time apart, the longer the longer it takes to make one, so that
they take a small share of a run's time; records do not wait for them.

A checkpoint that cannot be written is tried again for a while (persistence.py), and the run goes on as far as it may be
ahead.
"""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedbudget.persistence import SpareSpace, persistently
from fedbudget.protocol.state import AggregatorState
from fedbudget.runs.checkpoint import CHECKPOINT, Checkpoint, Conditions
from fedbudget.runs.record import RoundRecord

Append = Callable[[RoundRecord], None]

SPARE = ".spare"
"""Space on the disk that is kept back, and let go when there is no other."""
_LEAST_SPARE = 2**18  # bytes

_REST = 0.02  # seconds after a checkpoint in which no other is begun, unless rounds would have to wait for it

SHARE = 0.04
"""Of a run's time, that checkpoints take at most where they are some time apart."""


class CheckpointWriter:
    """Writes what it is given, in order, and as soon as the disk has time for it.

    Args:
      folder: of the run.
      append: adds a record to rounds.jsonl.
      sync: returns when the records that were added are safe from a power cut. So they are before there is a checkpoint
        that does not hold them any more.
      ahead: the most rounds that may wait for the disk while the run goes on.
      records: that the last checkpoint on disk holds, as lines.
      interval: seconds between two checkpoints, at least.
      spare: whether space on the disk is kept back.
      conditions: that the run is made under.
    """

    def __init__(
        self,
        folder: Path,
        append: Append,
        *,
        ahead: int,
        sync: Callable[[], None] = lambda: None,
        records: tuple[str, ...] = (),
        interval: float = 0.0,
        spare: bool = False,
        conditions: Conditions = Conditions(),  # noqa: B008 (frozen)
    ) -> None:
        self._interval, self._conditions = interval, conditions
        self._asked = time.monotonic()
        self._next = self._asked + interval
        self._folder = folder
        self._spare = SpareSpace(folder / SPARE) if spare else None
        self._append = append
        self._sync = sync
        self._ahead = ahead
        self._last = records[-1:]
        self._changed = threading.Condition()
        self._waiting: list[RoundRecord] = []
        self._latest: tuple[AggregatorState[Any, Any], object, RoundRecord | None] | None = None
        self._error: Exception | None = None
        self._busy = self._over = self._flushed = False
        self._rested = 0.0  # when the next checkpoint may be begun
        self._thread = threading.Thread(target=self._work, name="fedbudget-checkpoints", daemon=True)
        self._thread.start()

    def due(self) -> bool:
        """Whether it is time for another checkpoint; to be asked before one is made, which is timed from here."""
        now = time.monotonic()
        if self._busy or now < self._next:
            return False
        self._asked, self._next = now, math.inf
        return True

    def save(self, state: AggregatorState[Any, Any], engine: object, record: RoundRecord | None) -> None:
        """Takes where a run has come to, and the record of the round that was the last, to be on disk before long.

        Raises what went wrong with an earlier one.
        """
        with self._changed:
            self._raise_error()
            self._latest = state, engine, record
            if record is not None and not self._interval:
                self._waiting.append(record)
            if self._urgent or time.monotonic() >= self._rested:  # or the thread wakes up by itself
                self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._waiting) <= self._ahead or self._error is not None)
            self._raise_error()

    def flush(self) -> None:
        """Waits until all is on disk."""
        with self._changed:
            self._flushed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: (self._latest is None and not self._busy) or self._error is not None)
            self._flushed = False
            self._raise_error()

    def close(self) -> None:
        """Ends the thread, when it has written what it was given."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()
        if self._spare is not None:
            self._spare.release()

    @property
    def _urgent(self) -> bool:
        """Whether the next checkpoint is not put off."""
        return self._over or self._flushed or bool(self._interval) or len(self._waiting) >= max(1, self._ahead - 1)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent, timeout=max(0.0, self._rested - time.monotonic()))
                self._changed.wait_for(lambda: self._latest is not None or self._over)
                if self._latest is None:
                    return
                (state, engine, record), records = self._latest, list(self._waiting)
                if self._interval and record is not None:
                    records = [record]  # the others are on disk already
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
                now = time.monotonic()
                self._next, self._rested = now + max(self._interval, (now - self._asked) / SHARE), now + _REST
                self._changed.notify_all()

    def _write(self, state: AggregatorState[Any, Any], engine: object, records: list[RoundRecord]) -> None:
        lines = tuple(record.to_json() for record in records) or self._last
        content = Checkpoint(state, lines, engine, conditions=self._conditions)
        self._sync()
        persistently(lambda: content.save(self._folder), spare=self._spare)
        if self._spare is not None:
            self._spare.keep(max(_LEAST_SPARE, 2 * (self._folder / CHECKPOINT).stat().st_size))
        self._last = lines[-1:]
        for record in records:
            self._append(record)
