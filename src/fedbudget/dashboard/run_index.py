"""The runs in a folder, by name.

Rules here:
- A name that somebody asks for is looked up in a listing of the folder, and never joined to a path.
- What a link leads to outside of the folder is not there.
"""

import threading
from pathlib import Path
from typing import Any

from fedbudget.dashboard.run_reader import RunReader, last_record, state_of
from fedbudget.errors import UserError
from fedbudget.resources import RESOURCES
from fedbudget.runs.folder import CONFIG, ROUNDS, SUMMARY, is_run, read_summary
from fedbudget.runs.nodes import NODES
from fedbudget.runs.record import json_value
from fedbudget.runs.title import run_title, tau_text
from fedbudget.settings import Settings

_READ = (CONFIG, ROUNDS, SUMMARY, NODES)


class RunIndex:
    """Looks into a folder of runs, or at a single run.

    Args:
      folder: has runs in it, or is a run itself.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; fedbudget run makes runs in runs/, or give another folder")
        self.folder = folder.resolve()
        self.shown = str(folder)
        self._lock = threading.Lock()
        self._readers: dict[Path, RunReader] = {}
        self._overviews: dict[Path, tuple[tuple[int, ...], dict[str, Any]]] = {}

    def names(self) -> dict[str, Path]:
        """All runs that there are now, the newest first."""
        if self._is_run(self.folder):
            return {self.folder.name: self.folder}
        paths = [path for path in self.folder.iterdir() if self._is_run(path)]
        paths.sort(key=lambda path: (-_began(path), path.name))
        return {path.name: path for path in paths}

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
        return is_run(path) and all((path / name).resolve().is_relative_to(self.folder) for name in _READ)

    def _overview(self, name: str, path: Path) -> dict[str, Any]:
        """From the end of the records alone, and only when something has changed."""
        try:
            stats = [(path / each).stat() for each in (ROUNDS, SUMMARY) if (path / each).exists()]
            changed = tuple(number for each in stats for number in (each.st_ino, each.st_size, each.st_mtime_ns))
            if self._overviews.get(path, (None,))[0] != changed:
                self._overviews[path] = changed, _figures(path)
            figures = self._overviews[path][1]
            summary = {"status": figures["status"]} if figures["status"] else None
            state = state_of(summary, stats[0].st_mtime, figures["seconds_per_round"])
            return {"name": name, **figures, "state": state}
        except (OSError, ValueError, KeyError, TypeError, UserError) as error:
            return {"name": name, "state": "unreadable", "title": str(error)}


def _began(path: Path) -> float:
    try:
        return (path / CONFIG).stat().st_mtime
    except OSError:  # it was there a moment ago
        return 0.0


def _figures(path: Path) -> dict[str, Any]:
    settings = Settings(**Settings.from_toml(path / CONFIG))
    summary = read_summary(path) or {}
    last = last_record(path / ROUNDS)
    limits = settings.limits().limits
    spent = dict.fromkeys(limits, 0.0) if last is None else last.spent
    return {
        "title": run_title(settings),
        "model": settings.model,
        "dataset": Path(settings.dataset).name,
        "method": settings.method,
        "tau": tau_text(settings),
        "status": summary.get("status", "finished") if summary else None,
        "loss": json_value(summary.get("loss", None if last is None else last.best_loss)),
        "accuracy": summary.get("accuracy", None if last is None else last.accuracy),
        "rounds": 0 if last is None else last.round,
        "seconds_per_round": 0.0 if last is None else last.wall / last.round,
        "began": (path / CONFIG).stat().st_mtime,
        "spent": [
            {"name": name, "share": spent[name] / limit, "text": RESOURCES[name].format(spent[name])}
            for name, limit in limits.items()
        ],
    }
