"""Removes runs from disk: the files that a run writes, and its folder if nothing else is in it."""

from pathlib import Path

from fedbudget.errors import UserError
from fedbudget.runs.checkpoint import CHECKPOINT
from fedbudget.runs.checkpoint_writer import SPARE
from fedbudget.runs.folder import CONFIG, MODEL, PLOT, ROUNDS, SUMMARY, read_summary, require_run
from fedbudget.runs.kept import KEPT
from fedbudget.runs.lock import OWNER
from fedbudget.runs.nodes import NODES
from fedbudget.runs.overview import last_record, state_of

FILES = (SUMMARY, MODEL, KEPT, CHECKPOINT, PLOT, NODES, "events.out.tfevents.*", OWNER, SPARE, ROUNDS, CONFIG)
"""In the order in which they go: until the end it is still the folder of a run, and can be removed again."""


def require_removable(path: Path) -> None:
    """Refuses what is not the folder of a run, or of one that a program writes to now."""
    if path.is_symlink():
        raise UserError(f"{path} is a link; remove the run that it leads to")
    require_run(path)
    last, status = last_record(path), (read_summary(path) or {}).get("status")
    if state_of(path, status, 0.0 if last is None else last.wall / last.round) == "running":
        raise UserError(f"{path} is being written to: end the run first")


def remove(path: Path) -> bool:
    """Removes a run's files, and says whether its folder is gone too: it stays where there is something else in it."""
    require_removable(path)
    for pattern in FILES:
        for file in (*path.glob(pattern), *path.glob(f".{pattern}.*.new")):  # what a crash has left beside its place
            file.unlink()
    if any(path.iterdir()):
        return False
    path.rmdir()
    return True
