"""What a tracker is, and what it is told: the figures of a round and of a whole run, by the same names everywhere.

Tells trackers about a run, so that none of them can end it or hold it up.

Each tracker has a thread of its own and gets rounds in batches, at most one a second. A round only leaves its record on
a list. What goes wrong is one line in the log, and the run goes on without that tracker. Before the first round a
tracker has some seconds to get ready, because what it loads would be in the way of rounds that are measured; after the
last one it is waited for as long as it gets on.
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

from fedbudget.runs.record import RoundRecord
from fedbudget.settings.settings import Settings


@dataclass(frozen=True)
class RunInfo:
    """A run that is to be followed.

    Args:
      folder: of the run, whose name is the run's name.
      title: what the run is, in a line.
      settings: as in its config.toml.
      began: when its first round began, in seconds since 1970.
    """

    folder: Path
    title: str
    settings: Settings
    began: float

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def parameters(self) -> dict[str, str | int | float | bool]:
        """The settings by their names in config.toml, without those that are not given."""
        values = {
            name.replace("_", "-"): value
            for name, value in vars(self.settings).items()
            if value is not None
        }
        return {
            name: ", ".join(map(str, it)) if isinstance(it, tuple) else it
            for name, it in values.items()
        }


class TimedRecord(NamedTuple):
    """A round, and when it was over, in seconds since 1970."""

    time: float
    record: RoundRecord


class Tracker(Protocol):
    """Follows one run. Whatever it is told may take its time or fail; see background.py."""

    name: str

    def start(self, run: RunInfo) -> None:
        """Before the first round."""

    def rounds(self, records: Sequence[TimedRecord]) -> None:
        """Rounds in their order, each once."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """After the last round.

        Args:
          summary: what is in summary.json, which is in the run's folder now, as are the model and the plot; None when
            the run failed.
        """


def round_metrics(record: RoundRecord) -> dict[str, float]:
    """A round's numbers by name; what is not known of a round, or is no finite number, is left out.

    The last round of a run may be but a loss that is evaluated: it has no τ and no η.
    """
    decided = ("tau", "eta") if record.tau else ()
    names = ("loss", "best_loss", "accuracy", *decided, "rho", "beta", "delta", "nodes")
    metrics: dict[str, float | None] = {name: getattr(record, name) for name in names}
    for kind, values in (("spent", record.spent), ("c", record.c), ("b", record.b)):
        metrics |= {f"{kind}/{resource}": cost for resource, cost in values.items()}
    for kind, figures in (("test", record.metrics), ("nodes", record.spread)):
        metrics |= {
            f"{kind}/{name}": value
            for name, value in (figures or {}).items()
            if name != "nodes"
        }
    return _finite(metrics)


def final_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """A run's numbers at its end."""
    names = ("loss", "accuracy", "average_tau", "aggregations", "local_updates")
    metrics = {f"final/{name}": summary[name] for name in names}
    metrics |= {
        f"final/{name}": value for name, value in summary.get("metrics", {}).items()
    }
    metrics |= {
        f"final/nodes/{name}": value
        for name, value in summary.get("spread", {}).items()
        if name != "nodes"
    }
    for kind in ("spent", "overshoot"):
        metrics |= {
            f"final/{kind}/{resource}": value for resource, value in summary[kind].items()
        }
    return _finite(metrics)


def _finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if value is not None and math.isfinite(value)
    }


START_TIMEOUT = 10.0
"""Seconds that a run waits for trackers before its first round."""

STALL_TIMEOUT = 30.0
"""Seconds without any progress after which a tracker is no longer waited for."""

_INTERVAL = 1.0  # seconds between batches
_BATCH = 50  # rounds in one, so that progress shows

_log = logging.getLogger("fedbudget.trackers")


class TrackerGroup:
    """All trackers of a run."""

    def __init__(self, threads: "Sequence[_TrackerThread]") -> None:
        self._threads = threads

    def observe(self, record: RoundRecord) -> None:
        now = time.time()
        for thread in self._threads:
            thread.observe(TimedRecord(now, record))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """When all is in the run's folder."""
        for thread in self._threads:
            thread.finish(summary)


@contextmanager
def tracking(
    trackers: Sequence[Tracker], run: RunInfo, earlier: Sequence[RoundRecord]
) -> Iterator[TrackerGroup]:
    """Starts trackers, and waits for them at the end; a run that has not finished by then has failed.

    Args:
      earlier: rounds of a run that goes on.
    """
    past = [TimedRecord(run.began + record.wall, record) for record in earlier]
    threads = [_TrackerThread(tracker, run, past) for tracker in trackers]
    ready_by = time.monotonic() + START_TIMEOUT
    for thread in threads:
        thread.ready.wait(max(0.0, ready_by - time.monotonic()))
    try:
        yield TrackerGroup(threads)
    finally:
        for thread in threads:
            thread.finish(None)
        for thread in threads:
            thread.wait()


class _TrackerThread:
    """One tracker, its thread, and the records that it has not had yet."""

    def __init__(self, tracker: Tracker, run: RunInfo, past: Sequence[TimedRecord]) -> None:
        self._tracker = tracker
        self._run_info = run
        self._pending = deque(past)
        self._summary: Mapping[str, Any] | None = None
        self.ready, self._over = threading.Event(), threading.Event()
        self._steps = 0
        self._given_up = False
        self._thread = threading.Thread(
            target=self._follow, name=f"fedbudget-{tracker.name}", daemon=True
        )
        self._thread.start()

    def observe(self, timed: TimedRecord) -> None:
        if self._thread.is_alive():
            self._pending.append(timed)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """The first word on how the run ended counts."""
        if not self._over.is_set():
            self._summary = summary
            self._over.set()

    def wait(self) -> None:
        """Until the tracker has had everything, or nothing gets on."""
        steps = -1
        while self._thread.is_alive():
            if self._steps == steps:
                self._given_up = True
                _log.warning(
                    "%s does not answer; the run ends without it", self._tracker.name
                )
                return
            steps = self._steps
            self._thread.join(STALL_TIMEOUT)

    def _follow(self) -> None:
        try:
            self._tracker.start(self._run_info)
            self._steps += 1
            self.ready.set()
            over = False
            while not over:
                over = self._over.wait(
                    _INTERVAL
                )  # before the list is looked at: what is on it by then is all
                while self._pending:
                    self._steps += 1
                    self._tracker.rounds(
                        [
                            self._pending.popleft()
                            for _ in range(min(_BATCH, len(self._pending)))
                        ]
                    )
            self._steps += 1
            self._tracker.finish(self._summary)
        except Exception as error:
            if not self._given_up:
                _log.warning(
                    "%s: the run goes on without it: %s",
                    self._tracker.name,
                    _in_a_line(error),
                )
        finally:
            self.ready.set()


def _in_a_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]} ..."
