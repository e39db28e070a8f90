"""The tracker interface, the metrics of a round and of a run, and a thread per tracker.

Rules here:
- A tracker cannot end a run. After an error, one line is logged, and the run continues
  without the tracker.
- A tracker cannot delay a round. The round only appends its record to a list; a thread
  per tracker sends the records in batches, at most one batch per second.
- A run waits some seconds for trackers before its first round, because their imports
  would slow down measured rounds. After the last round it waits while they make progress.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedbudget.errors import key
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.settings import Settings

START_TIMEOUT = 10.0
"""Seconds that a run waits for trackers before its first round."""

STALL_TIMEOUT = 30.0
"""Seconds without progress after which a run no longer waits for a tracker."""

_INTERVAL = 1.0  # seconds between batches
_BATCH = 50  # records; small batches make progress visible

_log = logging.getLogger("fedbudget.trackers")


@dataclass(frozen=True)
class RunInfo:
    """A run to track.

    Args:
      folder: of the run; its name is the run's name.
      title: one line on the run.
      settings: as in its config.toml.
      began: start of the first round, in seconds since 1970.
    """

    folder: Path
    title: str
    settings: Settings
    began: float

    @property
    def name(self) -> str:
        return self.folder.resolve().name


def parameters(settings: Settings) -> dict[str, str | int | float | bool]:
    """Return the settings that are set, by their names in config.toml."""
    return {
        key(name): ", ".join(map(str, value)) if isinstance(value, tuple) else value
        for name, value in vars(settings).items()
        if value is not None
    }


class TimedRecord(NamedTuple):
    """A round and the time of its end, in seconds since 1970."""

    time: float
    record: RoundRecord


class Tracker(Protocol):
    """Tracks one run. Every method may be slow or fail without harm to the run."""

    name: str

    def start(self, run: RunInfo) -> None:
        """Prepare, before the first round."""

    def rounds(self, records: Sequence[TimedRecord]) -> None:
        """Track rounds; each comes once and in order."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Track the end of the run.

        Args:
          summary: the content of summary.json; None if the run failed. Summary, model and
            plot are in the run's folder at this time.
        """


def round_metrics(record: RoundRecord) -> dict[str, float]:
    """Return the finite numbers of a round by name.

    τ and η are missing for the last round of a run if it only evaluates the loss.
    """
    decided = ("tau", "eta") if record.tau else ()
    losses = ("loss", "best_loss", "validation", "validation_best")
    names = (*losses, "accuracy", *decided, "rho", "beta", "delta", "nodes")
    return _finite(
        {name: getattr(record, name) for name in names}
        | _prefixed("spent", record.spent)
        | _prefixed("c", record.c)
        | _prefixed("b", record.b)
        | _prefixed("test", record.metrics)
        | _prefixed("nodes", record.spread)
    )


def final_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a run's summary by name."""
    names = ("loss", "accuracy", "average_tau", "aggregations", "local_updates")
    figures = {name: summary[name] for name in names}
    return _finite(
        _prefixed("final", figures | {"validation_loss": summary.get("validation_loss")})
        | _prefixed("final", summary.get("metrics"))
        | _prefixed("final/nodes", summary.get("spread"))
        | _prefixed("final/spent", summary["spent"])
        | _prefixed("final/overshoot", summary["overshoot"])
    )


def _prefixed(prefix: str, values: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Return values by prefix and name, without the number of nodes of a spread."""
    return {
        f"{prefix}/{name}": value
        for name, value in (values or {}).items()
        if name != "nodes"
    }


def _finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if value is not None and math.isfinite(value)
    }


@contextmanager
def tracking(
    trackers: Sequence[Tracker], run: RunInfo, earlier: Sequence[RoundRecord]
) -> "Iterator[TrackerGroup]":
    """Start trackers, and wait for them at the end.

    A run fails for its trackers if `finish` was not called in the body.

    Args:
      trackers: of the run.
      run: the run.
      earlier: rounds of a resumed run.
    """
    past = [TimedRecord(run.began + record.wall, record) for record in earlier]
    threads = [_TrackerThread(tracker, run, past) for tracker in trackers]
    ready_by = time.monotonic() + START_TIMEOUT
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.ready.wait(max(0.0, ready_by - time.monotonic()))
    group = TrackerGroup(threads)
    try:
        yield group
    finally:
        group.finish(None)
        for thread in threads:
            thread.wait()


class TrackerGroup:
    """All trackers of a run."""

    def __init__(self, threads: "Sequence[_TrackerThread]") -> None:
        self._threads = threads

    def observe(self, record: RoundRecord) -> None:
        """Pass a round to all trackers without waiting."""
        timed = TimedRecord(time.time(), record)
        for thread in self._threads:
            if thread.is_alive():
                thread.pending.append(timed)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Pass the summary to all trackers, after all files are in the run's folder.

        Only the first call counts.
        """
        for thread in self._threads:
            if not thread.over.is_set():
                thread.summary = summary
                thread.over.set()


class _TrackerThread(threading.Thread):
    """One tracker, its thread, and the records that it has not received yet."""

    def __init__(self, tracker: Tracker, run: RunInfo, past: Sequence[TimedRecord]) -> None:
        super().__init__(name=f"fedbudget-{tracker.name}", daemon=True)
        self.pending = deque(past)
        self.summary: Mapping[str, Any] | None = None
        self.ready = threading.Event()
        self.over = threading.Event()
        self._tracker = tracker
        self._run_info = run
        self._steps = 0
        self._given_up = False

    def wait(self) -> None:
        """Wait until the tracker has finished, or makes no progress."""
        steps = -1
        while self.is_alive():
            if self._steps == steps:
                self._given_up = True
                _log.warning(
                    "%s is not responding; the run ends without it", self._tracker.name
                )
                return
            steps = self._steps
            self.join(STALL_TIMEOUT)

    def run(self) -> None:
        try:
            self._follow()
        except Exception as error:
            if not self._given_up:
                text = " ".join(str(error).split()) or type(error).__name__
                _log.warning(
                    "%s failed; the run continues without it: %s",
                    self._tracker.name,
                    text if len(text) <= 300 else f"{text[:300]} ...",
                )
        finally:
            self.ready.set()

    def _follow(self) -> None:
        self._tracker.start(self._run_info)
        self._steps += 1
        self.ready.set()
        over = False
        while not over:
            # Read before the list: if the run is over now, the list is complete.
            over = self.over.wait(_INTERVAL)
            while self.pending:
                self._steps += 1
                size = min(_BATCH, len(self.pending))
                self._tracker.rounds([self.pending.popleft() for _ in range(size)])
        self._steps += 1
        self._tracker.finish(self.summary)
