"""How long a method takes to the loss that another one ends with, at the same budget, in the budget's time.

A run of the one is made once more, and ends where it has reached the other's loss with the same seed, on all training
samples (`until`), which is looked at a hundred times in a budget. Where its own end is below that loss, and no look has
found it before, it is the end that counts. Over seeds it is the median; a run that does not come there counts as one
that never does. Runs that are done are kept beside the others (cells.py).
"""

import math
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fedbudget.experiments.cells import CellStore, attempt
from fedbudget.experiments.pool import unordered
from fedbudget.experiments.rivals import Progress, RivalComparison, TunedResult
from fedbudget.settings import Settings

_EVALUATIONS = 25  # of which there are four times as many with a target


@dataclass(frozen=True)
class TimesToLoss:
    """Of a method and another, in seconds; None where the loss is not reached.

    Args:
      other: that the other took to the loss the own method ends with.
      own: that the own method took to the loss the other ends with.
    """

    other: float | None
    own: float | None


def times_to_loss(
    found: RivalComparison,
    *,
    folder: Path,
    seeds: Sequence[int],
    jobs: int | None = None,
    progress: Progress = lambda done, of, failed: None,
) -> dict[str, TimesToLoss]:
    """Of each of the others, by its name.

    Args:
      found: what `compare_rivals` gave, with these seeds.
      folder: where runs that are done are kept.
    """
    pairs = {other.name: (_cells(other, found.own, seeds), _cells(found.own, other, seeds)) for other in found.others}
    cells = list(dict.fromkeys(cell for pair in pairs.values() for each in pair for cell in each if cell is not None))
    store = CellStore(folder, "run")
    missing = store.missing(cells)
    done = len(cells) - len(missing)
    progress(done, len(cells), 0)
    with closing(unordered(partial(attempt, each="run"), missing, jobs=jobs, backend=None)) as outcomes:
        store.collect(outcomes, lambda made, failed: progress(done + made, len(cells), failed))
    times = {}
    for other in found.others:
        theirs, ours = pairs[other.name]
        times[other.name] = TimesToLoss(
            _median(store, theirs, other, found.own), _median(store, ours, found.own, other)
        )
    return times


def _cells(method: TunedResult, goal: TunedResult, seeds: Sequence[int]) -> list[Settings | None]:
    """The runs of a method to the losses that another one ended with; None where that has none."""
    assert method.cell is not None
    return [
        replace(method.cell, seed=seed, until=(f"loss={loss!r}",), evaluations=_EVALUATIONS)
        if math.isfinite(loss)
        else None
        for seed, loss in zip(seeds, goal.losses, strict=True)
    ]


def _median(store: CellStore, cells: Sequence[Settings | None], method: TunedResult, goal: TunedResult) -> float | None:
    seconds = [
        math.inf if cell is None or cell not in store else _seconds(store, cell, below=own <= loss)
        for cell, own, loss in zip(cells, method.losses, goal.losses, strict=True)
    ]
    middle = statistics.median(seconds)
    return middle if math.isfinite(middle) else None


def _seconds(store: CellStore, cell: Settings, *, below: bool) -> float:
    """Of one run.

    Args:
      below: whether it is known to end at that loss, or below it.
    """
    columns = store.read(cell)
    (stopped_by,), (spent,) = columns["stopped_by"], columns["spent_time"]
    return float(spent) if stopped_by == "target" or below else math.inf
