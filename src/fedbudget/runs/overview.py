"""Runs at a glance: whether each goes on, and its last figures; for lists of runs, on terminals and pages.

Of the records only the last is read, and nothing is imported that a list does not need.

Removes runs from disk: the files that a run writes, and its folder if nothing else is in it.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedbudget.errors import UserError
from fedbudget.evaluation.kept import KEPT
from fedbudget.resources import RESOURCES
from fedbudget.runs.folder import (
    CHECKPOINT,
    CONFIG,
    MODEL,
    OWNER,
    PLOT,
    ROUNDS,
    SPARE,
    SUMMARY,
    is_held,
    is_run,
    read_settings,
    read_summary,
    require_run,
)
from fedbudget.runs.nodes import NODES
from fedbudget.runs.record import RoundRecord, json_value
from fedbudget.runs.text import model_title, run_title, tau_text

RUNS = Path("runs")
"""Where runs are made, unless another folder is asked for."""

STALE_SECONDS = 30.0
"""Seconds without a round after which a run may have died, where locks do not tell; more where rounds take long."""

UNREADABLE = (OSError, ValueError, KeyError, TypeError, UserError)
"""What reading a run that is damaged may raise."""


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """All runs among these folders and in them, each once, the newest first."""
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(
                f"there is no folder {folder}; fedbudget run makes runs in {RUNS}/, or give another folder"
            )
        for path in [folder] if is_run(folder) else filter(is_run, folder.iterdir()):
            found.setdefault(path.resolve(), path)
    return newest_first(found.values())


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """In the order of when they began."""
    return sorted(paths, key=lambda path: (-_began(path), path.name))


def overview(path: Path) -> dict[str, Any]:
    """A run's last figures, and its state; what is wrong, where it cannot be read."""
    try:
        return with_state(path, figures(path))
    except UNREADABLE as error:
        return {"state": "unreadable", "title": str(error)}


def figures(path: Path) -> dict[str, Any]:
    """A run's last figures, from its summary and its last record."""
    settings = read_settings(path)
    summary = read_summary(path)
    last = last_record(path)
    limits = settings.limits().limits
    end = summary or {}
    known = dict.fromkeys(limits, 0.0) if last is None else last.spent
    spent = {name: end.get("spent", known).get(name, known[name]) for name in limits}
    return {
        "title": run_title(settings),
        "model": model_title(settings),
        "dataset": Path(settings.dataset).name,
        "method": settings.method,
        "tau": tau_text(settings),
        "status": None if summary is None else summary.get("status", "finished"),
        "stopped_by": end.get("stopped_by"),
        "loss": json_value(end.get("loss", None if last is None else last.best_loss)),
        "accuracy": end.get("accuracy", None if last is None else last.accuracy),
        "rounds": 0 if last is None else last.round,
        "seconds_per_round": 0.0 if last is None else last.wall / last.round,
        "began": (path / CONFIG).stat().st_mtime,
        "spent": [
            {
                "name": name,
                "amount": spent[name],
                "share": spent[name] / limit,
                "text": RESOURCES[name].format(spent[name]),
            }
            for name, limit in limits.items()
        ],
    }


def with_state(path: Path, figures: dict[str, Any]) -> dict[str, Any]:
    """A run's figures with its state now, which may change while these do not."""
    return {
        **figures,
        "state": state_of(path, figures["status"], figures["seconds_per_round"]),
    }


def state_of(path: Path, status: str | None, seconds_per_round: float) -> str:
    """Whether a run goes on, in a word or two: running, interrupted, finished or broken off.

    Args:
      status: what its summary says, where there is one.
    """
    if status is not None:
        return status
    running = is_held(path / ROUNDS)
    if running is None:
        running = time.time() - (path / ROUNDS).stat().st_mtime < max(
            STALE_SECONDS, 10 * seconds_per_round
        )
    return "running" if running else "broken off"


def last_record(path: Path) -> RoundRecord | None:
    """The last whole record of a run, without reading those before it."""
    with (path / ROUNDS).open("rb") as file:
        size = file.seek(0, 2)
        tail = 1 << 14
        while True:
            file.seek(max(0, size - tail))
            # Only a line with a line's end on both sides is surely whole; or one that the file begins with.
            lines = (b"\n" if tail >= size else b"") + file.read(min(tail, size))
            end = lines.rfind(b"\n")
            begin = lines.rfind(b"\n", 0, max(end, 0))
            if 0 <= begin < end:
                return RoundRecord.from_json(lines[begin + 1 : end].decode())
            if tail >= size:
                return None
            tail *= 4


def _began(path: Path) -> float:
    try:
        return (path / CONFIG).stat().st_mtime
    except OSError:  # it was there a moment ago
        return 0.0


FILES = (
    SUMMARY,
    MODEL,
    KEPT,
    CHECKPOINT,
    PLOT,
    NODES,
    "events.out.tfevents.*",
    OWNER,
    SPARE,
    ROUNDS,
    CONFIG,
)
"""In the order in which they go: until the end it is still the folder of a run, and can be removed again."""


def require_removable(path: Path) -> None:
    """Refuses what is not the folder of a run, or of one that a program writes to now."""
    if path.is_symlink():
        raise UserError(f"{path} is a link; remove the run that it leads to")
    require_run(path)
    last = last_record(path)
    status = (read_summary(path) or {}).get("status")
    if state_of(path, status, 0.0 if last is None else last.wall / last.round) == "running":
        raise UserError(f"{path} is being written to: end the run first")


def remove(path: Path) -> bool:
    """Removes a run's files, and says whether its folder is gone too: it stays where there is something else in it."""
    require_removable(path)
    for pattern in FILES:
        for file in (
            *path.glob(pattern),
            *path.glob(f".{pattern}.*.new"),
        ):  # what a crash has left beside its place
            file.unlink()
    if any(path.iterdir()):
        return False
    path.rmdir()
    return True
