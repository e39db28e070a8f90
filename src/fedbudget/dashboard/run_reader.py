"""Run folders, read while runs may still be written.

Rules here:
- A record is parsed once. If the file has grown, only new lines are read; if it was
  replaced, all lines are.
- The summary is read before the records. If it exists, the records read after it are
  complete.
- An incomplete last line is still being written; it is read when it is complete.
- A requested name is looked up in a listing of the folder, and never joined to a path.
- Links that lead out of the folder are ignored.
"""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbudget.errors import UserError
from fedbudget.file_contents import open_regular
from fedbudget.forecasts.forecast import LatestForecast
from fedbudget.runs import nodes
from fedbudget.runs.folder import (
    CONFIG,
    MAX_RECORDS,
    ROUNDS,
    Run,
    is_run,
    read_settings,
    read_summary,
    require_resources,
)
from fedbudget.runs.nodes import NODES
from fedbudget.runs.overview import UNREADABLE, figures, newest_first, state_of, with_state
from fedbudget.runs.record import RoundRecord
from fedbudget.runs.summary import SUMMARY
from fedbudget.settings.settings import Settings

_READ = (CONFIG, ROUNDS, SUMMARY, NODES)


@dataclass(frozen=True)
class RunSnapshot:
    """A run at the time it was read.

    Args:
      run: settings, records and summary.
      nodes: the content of `nodes.json`; None without the file.
      written: time of the last record, in seconds since 1970.
      generation: changes when records were taken back, as by a run that is resumed.
      forecasts: cache of the run's forecast, shared by its snapshots.
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
        """State of the run, such as running or finished."""
        rounds = self.run.rounds
        seconds_per_round = rounds[-1].wall / len(rounds) if rounds else 0.0
        status = None
        if self.run.summary is not None:
            status = str(self.run.summary.get("status", "finished"))
        return state_of(self.run.path, status, seconds_per_round)


class RunReader:
    """Reads a run repeatedly, each time from the position that it has reached.

    Args:
      path: the run's folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._settings: Settings | None = None
        self._records: list[RoundRecord] = []
        self._checked = 0  # records whose costs are those of the budget
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._generation = 0
        self._forecasts = LatestForecast()

    def read(self) -> RunSnapshot:
        """Return the current state of the run."""
        with self._lock:
            try:
                summary = read_summary(self.path)
                written = self._read_records()
                if self._settings is None:
                    self._settings = read_settings(self.path)
                new = self._records[self._checked :]
                require_resources(self._settings, self._records[:1] + new)
                self._checked = len(self._records)
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{self.path.name}: the run's records cannot be read: {error}"
                ) from None
            run = Run(self.path, self._settings, list(self._records), summary)
            return RunSnapshot(
                run, nodes.read(self.path), written, self._generation, self._forecasts
            )

    def _read_records(self) -> float:
        """Read new records, and return the time of the last one."""
        path = self.path / ROUNDS
        stat = path.stat()
        file_id = (stat.st_dev, stat.st_ino)
        if self._file != file_id or stat.st_size < self._offset:
            self._file = file_id
            self._offset = 0
            self._records = []
            self._checked = 0
            self._settings = None  # a resumed run may have a larger budget
            self._generation += 1
        if stat.st_size > self._offset:
            with open_regular(path, MAX_RECORDS) as file:
                file.seek(self._offset)
                new = file.read()
            complete = new.rfind(b"\n") + 1
            lines = new[:complete].decode().split("\n")[:-1]
            self._records += list(map(RoundRecord.from_json, lines))
            self._offset += complete
        return stat.st_mtime


class RunIndex:
    """The runs in a folder, by name.

    Args:
      folder: contains runs, or is a run.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(
                f"there is no folder {folder}; fedbudget run creates runs in runs/, or "
                "give another folder"
            )
        self.folder = folder.resolve()
        self.shown = str(folder)
        self._lock = threading.Lock()
        self._readers: dict[Path, RunReader] = {}
        self._overviews: dict[Path, tuple[list[int], dict[str, Any]]] = {}

    def names(self) -> dict[str, Path]:
        """Return the current runs by name, the newest first."""
        runs = filter(self._is_run, self._candidates())
        return {path.name: path for path in newest_first(runs)}

    def reader(self, name: str) -> RunReader | None:
        """Return the reader of the run with this name; None if there is no such run."""
        for path in self._candidates():
            if path.name == name and self._is_run(path):
                with self._lock:
                    return self._readers.setdefault(path, RunReader(path))
        return None

    def overviews(self) -> list[dict[str, Any]]:
        """Return a few figures of every run."""
        return [self._overview(name, path) for name, path in self.names().items()]

    def _candidates(self) -> list[Path]:
        if self._is_run(self.folder):
            return [self.folder]
        return list(self.folder.iterdir())

    def _is_run(self, path: Path) -> bool:
        return is_run(path) and all(
            (path / name).resolve().is_relative_to(self.folder) for name in _READ
        )

    def _overview(self, name: str, path: Path) -> dict[str, Any]:
        """Return the figures of a run, computed again only if its files have changed."""
        try:
            version: list[int] = []
            for file in (path / ROUNDS, path / SUMMARY):
                if file.exists():
                    stat = file.stat()
                    version += [stat.st_ino, stat.st_size, stat.st_mtime_ns]
            if path not in self._overviews or self._overviews[path][0] != version:
                self._overviews[path] = version, figures(path)
            return {"name": name, **with_state(path, self._overviews[path][1])}
        except UNREADABLE as error:
            return {"name": name, "state": "unreadable", "title": str(error)}
