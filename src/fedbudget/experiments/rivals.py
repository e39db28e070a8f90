"""An untuned method against published rivals that are tuned in hindsight, at equal budget.

The tuning of a rival minimises the loss on all training samples at the end of the budget.
This favours the rivals, because the final loss is unknown when knobs must be set. To save
runs, a rival is tuned in three steps:

1. Every cell of its grid, with one seed.
2. Neighbours of the best cells, which differ in one knob: τ or a step size moves to the
   next value of 1, 3, 10, ..., also beyond the grid, or the step size decays at the end.
   This is repeated while there are new neighbours.
3. The best cells with all seeds. The result is the cell with the lowest mean loss.

Rivals without knobs (`untuned_rivals`) have an empty grid, and are not tuned.

A run that fails, or has no finite loss, counts as an infinite loss.

Finished runs are kept (cells.py), so an interrupted comparison can be continued.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from typing import Any

from fedbudget.errors import UserError
from fedbudget.experiments.cells import CellStore, Progress, made_ready
from fedbudget.experiments.compare import PLAIN_UPDATE, require_losses
from fedbudget.experiments.pool import check_jobs
from fedbudget.launch.inputs import with_absolute_paths
from fedbudget.runs.record import json_value
from fedbudget.runs.text import task_title
from fedbudget.settings.compatibility import require_compatible
from fedbudget.settings.settings import Settings

FALL = 0.35
"""Fraction of the budget over which a step size decays, equal to the automatic one."""

LEADERS = 2
"""Number of best cells with neighbours to try."""

CLIMBS = 8
"""Largest number of times that neighbours are tried."""

FINALISTS = 3
"""Number of best cells that are run with all seeds."""

_EXPECTED_NEIGHBOURS = 20  # per rival, to estimate the number of runs
_SERIES = sorted(
    float(f"{digit}e{exponent}") for exponent in range(-9, 10) for digit in (1, 3)
)
_JSON_FIELDS = ("name", "knobs", "loss", "accuracy", "runs")
_KNOB_NAMES = {
    "tau": "τ",
    "step_size": "η",
    "server_momentum": "momentum",
    "server_step_size": "server step",
    "proximal": "μ",
}
_PLAIN: Mapping[str, Any] = {
    **dict.fromkeys((*PLAIN_UPDATE, "delta", "step_fall", "workload")),
    "method": "frugal",
    "drift_correction": False,
}
"""The common settings of rivals. Like the default, they keep the budget; method paper can
exceed it."""


@dataclass(frozen=True)
class Rival:
    """A published method and its tuning grid.

    Args:
      name: the usual name of the method.
      settings: the settings that define the method.
      grid: the values to try for each knob, including τ and η; empty for a method that is
        not tuned.
    """

    name: str
    settings: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]]

    def cells(self, base: Settings) -> list[Settings]:
        """Return the settings of every combination of knobs.

        Args:
          base: the task.
        """
        return [
            replace(
                base,
                **{**_PLAIN, **self.settings, **dict(zip(self.grid, values, strict=True))},
            )
            for values in product(*self.grid.values())
        ]

    def neighbours(self, cell: Settings) -> list[Settings]:
        """Return cells with one knob changed; τ stays within the range of the grid.

        Only knobs with several values in the grid change.

        >>> rival = Rival("FedAvg", {}, {"tau": (1, 10), "step_size": (0.1, 0.3)})
        >>> near = rival.neighbours(Settings(tau=10, step_size=0.3))
        >>> [(each.tau, each.step_size, each.step_fall) for each in near]
        [(10, 0.3, 0.35), (3, 0.3, None), (10, 0.1, None), (10, 1.0, None)]
        """
        if not self.grid:
            return []
        cells = [replace(cell, step_fall=None if cell.step_fall else FALL)]
        for name in ("tau", "step_size", "server_step_size", "proximal"):
            values = self.grid.get(name, ())
            if len(values) < 2:
                continue
            near: list[Any] = _neighbours(getattr(cell, name))
            if name == "tau":
                near = [int(tau) for tau in near if min(values) <= tau <= max(values)]
            cells += [replace(cell, **{name: value}) for value in near]
        return cells


def published_rivals(
    *, taus: Sequence[int] | None = None, quick: bool = False
) -> tuple[Rival, ...]:
    """Return FedAvg, FedAvgM, FedAdam, FedYogi, SCAFFOLD, FedProx and FedNova.

    Args:
      taus: local updates per round to try; 1 to 100 by default.
      quick: use coarse grids.
    """
    etas = (0.01, 0.1, 1.0) if quick else (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    default_taus = (1, 10, 100) if quick else (1, 3, 10, 30, 100)
    local = {"tau": taus or default_taus, "step_size": etas}
    server = {"server_step_size": etas if quick else etas[:-1]}
    momentum = {"server_momentum": (0.9,) if quick else (0.5, 0.9)}
    # The full grid is that of its authors.
    proximal = {"proximal": (0.01, 1.0) if quick else (0.001, 0.01, 0.1, 1.0)}
    average = {"update": "average"}
    return (
        Rival("FedAvg", average, local),
        Rival("FedAvgM", {"update": "fedavgm"}, {**local, **momentum}),
        Rival("FedAdam", {"update": "fedadam"}, {**local, **server}),
        Rival("FedYogi", {"update": "fedyogi"}, {**local, **server}),
        Rival("SCAFFOLD", {**average, "drift_correction": True}, local),
        Rival("FedProx", average, {**local, **proximal}),
        Rival("FedNova", {**average, "workload": "by-data"}, local),
    )


def untuned_rivals() -> tuple[Rival, ...]:
    """Return published methods that need no tuning: FedExP, Prodigy, Δ-SGD and DoG.

    All have τ = 10. FedExP and Prodigy move the global model, and nodes have η = 0.1.
    """
    server = {"tau": 10, "step_size": 0.1}
    nodes = {"tau": 10, "step_size": None, "update": "average"}
    return (
        Rival("FedExP", {**server, "update": "fedexp"}, {}),
        Rival("Prodigy", {**server, "update": "prodigy"}, {}),
        Rival("Δ-SGD", {**nodes, "local_step": "delta-sgd"}, {}),
        Rival("DoG", {**nodes, "local_step": "dog"}, {}),
    )


@dataclass(frozen=True)
class TunedResult:
    """The mean result of a method over seeds.

    Args:
      name: of the method.
      knobs: the tuned settings; empty for an untuned method.
      loss: on all training samples; infinite if a run failed or diverged.
      accuracy: on the test samples; None if the model has none.
      runs: the number of runs for tuning.
      cell: the settings, with any seed.
      losses: of each seed.
    """

    name: str
    knobs: Mapping[str, Any]
    loss: float
    accuracy: float | None
    runs: int = 0
    cell: Settings | None = None
    losses: tuple[float, ...] = ()

    @property
    def tuned_to(self) -> str:
        """The knobs as text.

        >>> TunedResult("FedAvg", {"tau": 3, "step_fall": 0.35}, 0.2, None).tuned_to
        'τ = 3, falling'
        """
        parts = [
            f"{_KNOB_NAMES[name]} = {value:g}"
            for name, value in self.knobs.items()
            if name in _KNOB_NAMES
        ]
        if "step_fall" in self.knobs:
            parts.append("falling")
        return ", ".join(parts) or "nothing"

    def to_json(self) -> dict[str, Any]:
        """Return the result without settings and single losses."""
        values = {name: getattr(self, name) for name in _JSON_FIELDS}
        return {**values, "loss": json_value(self.loss)}


@dataclass(frozen=True)
class RivalComparison:
    """A method and its rivals on one task.

    Args:
      title: of the task.
      own: the untuned method.
      others: the paper's method and the tuned rivals.
    """

    title: str
    own: TunedResult
    others: tuple[TunedResult, ...]

    def ratio(self, other: TunedResult) -> float | None:
        """Return another loss divided by the own loss; None if the own is not positive."""
        return other.loss / self.own.loss if 0 < self.own.loss < math.inf else None

    def to_json(self) -> dict[str, Any]:
        """Return all results, with their ratios."""
        others = [
            {**other.to_json(), "ratio": json_value(self.ratio(other))}
            for other in self.others
        ]
        return {"title": self.title, "own": self.own.to_json(), "others": others}


def compare_rivals(
    settings: Settings,
    *,
    folder: Path,
    rivals: Sequence[Rival] | None = None,
    seeds: Sequence[int] = range(5),
    climbs: int = CLIMBS,
    jobs: int | None = None,
    progress: Progress = lambda done, of, failed: None,
) -> RivalComparison:
    """Run the untuned method and tune its rivals on the same task.

    Args:
      settings: of the untuned method. Rivals use the same data, model, nodes and budget.
      folder: finished runs are kept here.
      rivals: all published rivals by default, tuned with full grids or untuned.
      seeds: of the runs. Rivals are tuned with the first.
      climbs: how often neighbours of the best cells are tried.
      jobs: runs in parallel; one per core by default.
      progress: receives the number of finished, expected and failed runs.

    Returns:
      The mean results over seeds.
    """
    rivals = (*published_rivals(), *untuned_rivals()) if rivals is None else rivals
    require_compatible(settings, engine="in-process", rivals=True)
    if not (seeds and all(values for rival in rivals for values in rival.grid.values())):
        raise UserError("rivals need at least one seed, and one value of each knob")
    require_losses(settings)
    check_jobs(jobs)
    with made_ready(replace(settings, seed=seeds[0])) as run:  # checks the settings
        title = task_title(run.settings, run.dataset.name, run.dataset.note)

    # Other processes may have another working folder.
    settings = with_absolute_paths(settings)
    runs = _Runs(CellStore(folder, "run"), jobs, progress)
    name = "default" if settings.method == Settings().method else settings.method
    untuned = {name: settings}
    if settings.method != "paper":
        plain = {**_PLAIN, "method": "paper", "drift_correction": None, "step_size": None}
        untuned["paper"] = replace(settings, **plain)
    grids = {rival.name: rival.cells(replace(settings, seed=seeds[0])) for rival in rivals}
    later = len(rivals) * (_EXPECTED_NEIGHBOURS + FINALISTS * (len(seeds) - 1))
    runs.make(_with_seeds(untuned.values(), seeds), later + sum(map(len, grids.values())))
    if runs.errors:
        raise UserError(f"a run with nothing tuned failed: {runs.errors[0]}")
    own, *others = (runs.result(name, {}, cell, seeds) for name, cell in untuned.items())
    runs.make(chain(*grids.values()), later)
    others += _tuned(runs, rivals, grids, seeds, climbs)
    return RivalComparison(title, own, tuple(others))


def _tuned(
    runs: "_Runs",
    rivals: Sequence[Rival],
    grids: Mapping[str, list[Settings]],
    seeds: Sequence[int],
    climbs: int,
) -> list[TunedResult]:
    """Tune each rival, once every cell of its grid was run with the first seed."""
    # Dictionaries keep the order, so that ties are always resolved in the same way.
    tried = {name: dict.fromkeys(cells) for name, cells in grids.items()}
    finals = len(rivals) * FINALISTS * (len(seeds) - 1)
    for climbs_left in reversed(range(climbs)):
        before = sum(map(len, tried.values()))
        for rival in rivals:
            for cell in runs.best(tried[rival.name], LEADERS):
                tried[rival.name] |= dict.fromkeys(rival.neighbours(cell))
        if sum(map(len, tried.values())) == before:
            break
        runs.make(chain(*tried.values()), len(rivals) * climbs_left + finals)

    finalists = {name: runs.best(cells, FINALISTS) for name, cells in tried.items()}
    runs.make(_with_seeds(chain(*finalists.values()), seeds), 0)
    results = []
    for rival in rivals:
        last = finalists[rival.name]
        best = min(last, key=lambda cell: runs.result("", {}, cell, seeds).loss)
        knobs = {name: getattr(best, name) for name in (*rival.grid, "step_fall")}
        given = {name: value for name, value in knobs.items() if value is not None}
        made = {*tried[rival.name], *_with_seeds(last, seeds)} if rival.grid else ()
        results.append(runs.result(rival.name, given, best, seeds, len(made)))
    return results


class _Runs:
    """Makes runs that are not kept yet, reports progress, and holds all results."""

    def __init__(self, store: CellStore, jobs: int | None, progress: Progress) -> None:
        self.errors: list[str] = []
        self._store = store
        self._jobs = jobs
        self._progress = progress
        self._figures: dict[Settings, tuple[float, float | None]] = {}

    def make(self, cells: Iterable[Settings], later: int) -> None:
        """Make the runs that were not made before.

        Args:
          later: expected number of runs after these.
        """
        fresh = [cell for cell in dict.fromkeys(cells) if cell not in self._figures]
        before = len(self._figures)
        failed_before = len(self.errors)

        def progress(done: int, of: int, failed: int) -> None:
            self._progress(before + done, before + of + later, failed_before + failed)

        failures = self._store.make(fresh, progress, jobs=self._jobs)
        self.errors += [failure.error for failure in failures.values()]
        for cell in fresh:
            self._figures[cell] = (math.inf, None)
            if cell not in failures:
                columns = self._store.read(cell)
                (loss,) = columns["loss"]
                (accuracy,) = columns["accuracy"]
                self._figures[cell] = (math.inf if loss is None else loss, accuracy)

    def best(self, cells: Iterable[Settings], count: int) -> list[Settings]:
        """Return the cells with the lowest losses, the lowest first."""
        return sorted(cells, key=lambda cell: self._figures[cell][0])[:count]

    def result(
        self,
        name: str,
        knobs: Mapping[str, Any],
        cell: Settings,
        seeds: Sequence[int],
        runs: int = 0,
    ) -> TunedResult:
        """Return the means of a cell over seeds."""
        figures = [self._figures[each] for each in _with_seeds([cell], seeds)]
        losses = tuple(loss for loss, _ in figures)
        known = [accuracy for _, accuracy in figures if accuracy is not None]
        accuracy = fmean(known) if known else None
        return TunedResult(name, knobs, fmean(losses), accuracy, runs, cell, losses)


def _with_seeds(cells: Iterable[Settings], seeds: Sequence[int]) -> list[Settings]:
    return [replace(cell, seed=seed) for cell in cells for seed in seeds]


def _neighbours(value: float) -> list[float]:
    """Return the next values below and above in ..., 0.1, 0.3, 1, 3, 10, ...

    >>> _neighbours(0.3), _neighbours(20)
    ([0.1, 1.0], [10.0, 30.0])
    """
    below = [each for each in _SERIES if each < value]
    above = [each for each in _SERIES if each > value]
    return [*below[-1:], *above[:1]]
