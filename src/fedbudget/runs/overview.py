"""Lists of runs for terminals and pages: the state and last figures of each; removal.

A list reads only the last record of each run and imports nothing that it does not need.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedbudget.errors import UserError, printable
from fedbudget.evaluation.kept import KEPT
from fedbudget.file_contents import open_regular
from fedbudget.resources import RESOURCES
from fedbudget.runs.folder import (
    CHECKPOINT,
    CONFIG,
    MAX_RECORDS,
    MODEL,
    OWNER,
    PLOT,
    ROUNDS,
    SPARE,
    is_held,
    is_run,
    read_settings,
    read_summary,
    require_resources,
    require_run,
)
from fedbudget.runs.nodes import NODES
from fedbudget.runs.record import RoundRecord, json_value
from fedbudget.runs.summary import SUMMARY
from fedbudget.runs.text import model_title, run_title, tau_text

RUNS = Path("runs")
"""Default folder of runs."""

STALE_SECONDS = 30.0
"""Without locks, a run counts as broken off after this time without a round, or after ten
rounds' time if that is longer."""

UNREADABLE = (OSError, ValueError, KeyError, TypeError, UserError)
"""Errors of reading a damaged run."""

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
"""Files of a run in the order of removal. After an interrupted removal the folder still
counts as a run and can be removed again."""


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """Return all runs among these folders and directly in them, newest first."""
    runs: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(
                f"there is no folder {folder}; fedbudget run creates runs in {RUNS}/, or "
                "give another folder"
            )
        for path in [folder] if is_run(folder) else filter(is_run, folder.iterdir()):
            runs.setdefault(path.resolve(), path)
    return newest_first(runs.values())


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Sort runs by their start."""
    return sorted(paths, key=lambda path: (-_start_time(path), path.name))


def overview(path: Path) -> dict[str, Any]:
    """Return a run's last figures and its state, or the error if it cannot be read."""
    try:
        return with_state(path, figures(path))
    except UNREADABLE as error:
        return {"state": "unreadable", "title": printable(str(error))}


def figures(path: Path) -> dict[str, Any]:
    """Return a run's last figures, from its summary and its last record."""
    settings = read_settings(path)
    summary = read_summary(path)
    last = last_record(path)
    require_resources(settings, [] if last is None else [last])
    limits = settings.limits().limits
    end = summary or {}
    known = dict.fromkeys(limits, 0.0) if last is None else last.spent
    spent = {**known, **end.get("spent", {})}
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
        "seconds_per_round": _seconds_per_round(last),
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
    """Return a run's figures with its current state."""
    state = state_of(path, figures["status"], figures["seconds_per_round"])
    return {**figures, "state": state}


def state_of(path: Path, status: str | None, seconds_per_round: float) -> str:
    """Return the state of a run: running, interrupted, finished or broken off.

    Args:
      path: folder of the run.
      status: status in its summary; None if there is none.
      seconds_per_round: mean time of a round.
    """
    if status is not None:
        return status
    running = is_held(path / ROUNDS)
    if running is None:
        age = time.time() - (path / ROUNDS).stat().st_mtime
        running = age < max(STALE_SECONDS, 10 * seconds_per_round)
    return "running" if running else "broken off"


def last_record(path: Path) -> RoundRecord | None:
    """Return the last complete record of a run without reading the earlier ones."""
    with open_regular(path / ROUNDS, MAX_RECORDS) as file:
        size = file.seek(0, 2)
        tail = 1 << 14
        while True:
            file.seek(max(0, size - tail))
            # A line is complete between two line ends, or at the start of the file.
            lines = (b"\n" if tail >= size else b"") + file.read(min(tail, size))
            end = lines.rfind(b"\n")
            begin = lines.rfind(b"\n", 0, max(end, 0))
            if 0 <= begin < end:
                return RoundRecord.from_json(lines[begin + 1 : end].decode())
            if tail >= size:
                return None
            tail *= 4


def require_removable(path: Path) -> None:
    """Raise `UserError` unless the folder contains a run that is not active."""
    if path.is_symlink():
        raise UserError(f"{path} is a link; remove the run that it points to")
    require_run(path)
    status = None
    seconds_per_round = 0.0
    with suppress(*UNREADABLE):  # a damaged run can be removed
        status = (read_summary(path) or {}).get("status")
        seconds_per_round = _seconds_per_round(last_record(path))
    if state_of(path, status, seconds_per_round) == "running":
        raise UserError(f"{path} is being written to: end the run first")


def remove(path: Path) -> bool:
    """Remove the files of a run, and its folder if nothing else is in it.

    Returns whether the folder was removed.
    """
    require_removable(path)
    for pattern in FILES:
        # The second pattern matches temporary files of a crashed program.
        for file in (*path.glob(pattern), *path.glob(f".{pattern}.*.new")):
            file.unlink()
    if any(path.iterdir()):
        return False
    path.rmdir()
    return True


def _seconds_per_round(last: RoundRecord | None) -> float:
    return 0.0 if last is None else last.wall / last.round


def _start_time(path: Path) -> float:
    try:
        return (path / CONFIG).stat().st_mtime
    except OSError:  # removed in the meantime
        return 0.0
