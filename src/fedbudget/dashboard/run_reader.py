"""A run's folder, read while it may still be written.

Rules here:
- A record is parsed once. Of a file that has grown only the new lines are read; of one that was replaced, all.
- The summary is read before the records: where there is one, the records that are read after it are all there are.
- Half a line at the end is one that is being written; it is read when it is whole.
"""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbudget.errors import UserError
from fedbudget.forecasts.latest import LatestForecast
from fedbudget.runs import nodes
from fedbudget.runs.folder import ROUNDS, Run, read_settings, read_summary
from fedbudget.runs.overview import state_of
from fedbudget.runs.record import RoundRecord
from fedbudget.settings import Settings


@dataclass(frozen=True)
class RunSnapshot:
    """A run as it was when it was read.

    Args:
      nodes: what `nodes.json` says, if there is one.
      written: when the last record was, in seconds since 1970.
      generation: another number when records were taken back, as a run that goes on from a checkpoint does.
      forecasts: of this run, the last one kept between snapshots.
    """

    run: Run
    nodes: dict[str, Any] | None
    written: float
    generation: int
    forecasts: LatestForecast = field(default_factory=LatestForecast)

    @property
    def name(self) -> str:
        return self.run.path.name

    @property
    def state(self) -> str:
        rounds = self.run.rounds
        seconds_per_round = rounds[-1].wall / len(rounds) if rounds else 0.0
        status = None if self.run.summary is None else str(self.run.summary.get("status", "finished"))
        return state_of(self.run.path, status, seconds_per_round)


class RunReader:
    """Reads a run again and again, each time on from where it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._settings: Settings | None = None
        self._records: list[RoundRecord] = []
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._generation = 0
        self._forecasts = LatestForecast()

    def read(self) -> RunSnapshot:
        """The run as it is now."""
        with self._lock:
            try:
                summary = read_summary(self.path)
                written = self._read_records()
                if self._settings is None:
                    self._settings = read_settings(self.path)
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UserError(f"{self.path.name}: the run's records cannot be read: {error}") from None
            run = Run(self.path, self._settings, list(self._records), summary)
            return RunSnapshot(run, nodes.read(self.path), written, self._generation, self._forecasts)

    def _read_records(self) -> float:
        path = self.path / ROUNDS
        about = path.stat()
        if self._file != (about.st_dev, about.st_ino) or about.st_size < self._offset:
            self._file, self._offset, self._records = (about.st_dev, about.st_ino), 0, []
            self._settings = None  # a run that goes on may have more to spend
            self._generation += 1
        if about.st_size > self._offset:
            with path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
            whole = new.rfind(b"\n") + 1
            self._records += [RoundRecord.from_json(line) for line in new[:whole].decode().splitlines()]
            self._offset += whole
        return about.st_mtime
