"""The runs in a folder, by name.

Rules here:
- A name that somebody asks for is looked up in a listing of the folder, and never joined to a path.
- What a link leads to outside of the folder is not there.
"""

import threading
from pathlib import Path
from typing import Any

from fedbudget.dashboard.run_reader import RunReader
from fedbudget.errors import UserError
from fedbudget.runs.folder import CONFIG, ROUNDS, SUMMARY, is_run
from fedbudget.runs.nodes import NODES
from fedbudget.runs.overview import UNREADABLE, figures, newest_first, with_state

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
        return {path.name: path for path in newest_first(filter(self._is_run, self.folder.iterdir()))}

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
                self._overviews[path] = changed, figures(path)
            return {"name": name, **with_state(path, self._overviews[path][1])}
        except UNREADABLE as error:
            return {"name": name, "state": "unreadable", "title": str(error)}
