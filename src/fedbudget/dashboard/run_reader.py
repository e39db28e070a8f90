"""A run's folder, read while it may still be written.

Rules here:
- A record is parsed once. Of a file that has grown only the new lines are read; of one that was replaced, all.
- The summary is read before the records: where there is one, the records that are read after it are all there are.
- Half a line at the end is one that is being written; it is read when it is whole.

The runs in a folder, by name.

Rules here:
- A name that somebody asks for is looked up in a listing of the folder, and never joined to a path.
- What a link leads to outside of the folder is not there.
"""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbudget.errors import UserError
from fedbudget.forecasts.forecast import LatestForecast
from fedbudget.runs import nodes
from fedbudget.runs.folder import (
    CONFIG,
    ROUNDS,
    SUMMARY,
    Run,
    is_run,
    read_settings,
    read_summary,
)
from fedbudget.runs.nodes import NODES
from fedbudget.runs.overview import UNREADABLE, figures, newest_first, state_of, with_state
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.settings import Settings


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
        status = (
            None
            if self.run.summary is None
            else str(self.run.summary.get("status", "finished"))
        )
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
                raise UserError(
                    f"{self.path.name}: the run's records cannot be read: {error}"
                ) from None
            run = Run(self.path, self._settings, list(self._records), summary)
            return RunSnapshot(
                run, nodes.read(self.path), written, self._generation, self._forecasts
            )

    def _read_records(self) -> float:
        path = self.path / ROUNDS
        about = path.stat()
        if self._file != (about.st_dev, about.st_ino) or about.st_size < self._offset:
            self._file = (about.st_dev, about.st_ino)
            self._offset = 0
            self._records = []
            self._settings = None  # a run that goes on may have more to spend
            self._generation += 1
        if about.st_size > self._offset:
            with path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
            whole = new.rfind(b"\n") + 1
            self._records += [
                RoundRecord.from_json(line) for line in new[:whole].decode().splitlines()
            ]
            self._offset += whole
        return about.st_mtime


_READ = (CONFIG, ROUNDS, SUMMARY, NODES)


class RunIndex:
    """Looks into a folder of runs, or at a single run.

    Args:
      folder: has runs in it, or is a run itself.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(
                f"there is no folder {folder}; fedbudget run makes runs in runs/, or give another folder"
            )
        self.folder = folder.resolve()
        self.shown = str(folder)
        self._lock = threading.Lock()
        self._readers: dict[Path, RunReader] = {}
        self._overviews: dict[Path, tuple[tuple[int, ...], dict[str, Any]]] = {}

    def names(self) -> dict[str, Path]:
        """All runs that there are now, the newest first."""
        if self._is_run(self.folder):
            return {self.folder.name: self.folder}
        return {
            path.name: path
            for path in newest_first(filter(self._is_run, self.folder.iterdir()))
        }

    def reader(self, name: str) -> RunReader | None:
        """Of the run with this name; None where there is none."""
        candidates = [self.folder] if self._is_run(self.folder) else self.folder.iterdir()
        path = next((each for each in candidates if each.name == name), None)
        if path is None or not self._is_run(path):
            return None
        with self._lock:
            return self._readers.setdefault(path, RunReader(path))

    def overviews(self) -> list[dict[str, Any]]:
        """A few figures of every run."""
        return [self._overview(name, path) for name, path in self.names().items()]

    def _is_run(self, path: Path) -> bool:
        return is_run(path) and all(
            (path / name).resolve().is_relative_to(self.folder) for name in _READ
        )

    def _overview(self, name: str, path: Path) -> dict[str, Any]:
        """From the end of the records alone, and only when something has changed."""
        try:
            stats = [
                (path / each).stat() for each in (ROUNDS, SUMMARY) if (path / each).exists()
            ]
            changed = tuple(
                number
                for each in stats
                for number in (each.st_ino, each.st_size, each.st_mtime_ns)
            )
            if self._overviews.get(path, (None,))[0] != changed:
                self._overviews[path] = changed, figures(path)
            return {"name": name, **with_state(path, self._overviews[path][1])}
        except UNREADABLE as error:
            return {"name": name, "state": "unreadable", "title": str(error)}
