"""A method with nothing to tune, against published rivals that are tuned in hindsight, at the same budget.

Each rival has a grid over its knobs. What counts is the loss on all training samples at the end of the budget, which
nobody knows when knobs must be set: so this flatters the rivals. Runs are many, and most are of no use; hence

    1. every cell of the grid, with one seed;
    2. neighbours of the best ones, which have one knob changed: τ or a step size the next in 1, 3, 10, ..., beyond the
       edge of the grid too, or a step size that falls at the end; and so on as long as there are new ones;
    3. the best of all these with all seeds; the one with the lowest mean is what the rival is said to reach.

A run that fails, or whose loss is not finite, counts as an infinite loss. Runs that are done are kept, as those of a
sweep are (cells.py), so that what was interrupted goes on where it was.

How long a method takes to the loss that another one ends with, at the same budget, in the budget's time.

A run of the one is made once more, and ends where it has reached the other's loss with the same seed, on all training
samples (`until`), which is looked at a hundred times in a budget. Where its own end is below that loss, and no look has
found it before, it is the end that counts. Over seeds it is the median; a run that does not come there counts as one
that never does. Runs that are done are kept beside the others (cells.py).
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

from fedbudget.errors import UserError
from fedbudget.experiments.cells import CellStore, attempt, made_ready
from fedbudget.experiments.compare import PLAIN_UPDATE, require_losses
from fedbudget.experiments.pool import check_backend, unordered
from fedbudget.launch.inputs import from_any_folder
from fedbudget.runs.text import task_title
from fedbudget.settings.option import in_words
from fedbudget.settings.settings import FEDERATED, Settings

FALL = 0.35
"""The share of the budget over which a step size falls, as the automatic one does."""

LEADERS = 2
CLIMBS = 8
FINALISTS = 3
"""Of how many cells neighbours are tried, how often, and how many cells are made with all seeds."""

_CLIMBED = 20
"""About how many neighbours are tried for a rival, to say how long it will take."""

_SERIES = sorted(
    float(f"{digit}e{exponent}") for exponent in range(-9, 10) for digit in (1, 3)
)

_LETTERS = {
    "tau": "τ",
    "step_size": "η",
    "server_momentum": "momentum",
    "server_step_size": "server step",
    "proximal": "μ",
}
"""Knobs as people know them."""

Progress = Callable[[int, int, int], None]
"""Told how many runs are done, of how many, and how many of those done have failed."""


@dataclass(frozen=True)
class Rival:
    """A published method, and what is to be tuned of it.

    Args:
      name: as the field knows it.
      settings: what makes it that method.
      grid: the knobs, with the values to try; τ and η among them.
    """

    name: str
    settings: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]]

    def cells(self, base: Settings) -> list[Settings]:
        """The settings of every combination."""
        combinations = [
            dict(zip(self.grid, values, strict=True))
            for values in product(*self.grid.values())
        ]
        return [
            replace(base, **{**_PLAIN, **self.settings, **knobs}) for knobs in combinations
        ]

    def neighbours(self, cell: Settings) -> list[Settings]:
        """Cells with one knob changed, of those that have more than one value; τ stays within the grid's range.

        >>> rival = Rival("FedAvg", {}, {"tau": (1, 10), "step_size": (0.1, 0.3)})
        >>> [(each.tau, each.step_size, each.step_fall) for each in rival.neighbours(Settings(tau=10, step_size=0.3))]
        [(10, 0.3, 0.35), (3, 0.3, None), (10, 0.1, None), (10, 1.0, None)]
        """
        found = [replace(cell, step_fall=None if cell.step_fall else FALL)]
        for name in ("tau", "step_size", "server_step_size", "proximal"):
            if len(values := self.grid.get(name, ())) > 1:
                near: list[Any] = _neighbours(getattr(cell, name))
                if name == "tau":
                    near = [
                        int(value) for value in near if min(values) <= value <= max(values)
                    ]
                found += [replace(cell, **{name: value}) for value in near]
        return found


_PLAIN: Mapping[str, Any] = {
    **dict.fromkeys((*PLAIN_UPDATE, "delta", "step_fall", "workload")),
    "method": "frugal",
    "drift_correction": False,
}
"""What rivals have in common; they keep to the budget as the default does, where the paper's method goes over it."""


def published_rivals(
    *, taus: Sequence[int] | None = None, quick: bool = False
) -> tuple[Rival, ...]:
    """FedAvg, FedAvgM, FedAdam, FedYogi, SCAFFOLD, FedProx and FedNova.

    Args:
      taus: the local updates per round to try; 1 to 100 when not given.
      quick: whether grids are coarse.
    """
    local = {
        "tau": tuple(taus or ((1, 10, 100) if quick else (1, 3, 10, 30, 100))),
        "step_size": (0.01, 0.1, 1.0) if quick else (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    }
    momentum = {"server_momentum": (0.9,) if quick else (0.5, 0.9)}
    pull = {
        "proximal": (0.01, 1.0) if quick else (0.001, 0.01, 0.1, 1.0)
    }  # as its authors have it
    server = {
        "server_step_size": (0.01, 0.1, 1.0)
        if quick
        else (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    }
    return (
        Rival("FedAvg", {"update": "average"}, local),
        Rival("FedAvgM", {"update": "fedavgm"}, {**local, **momentum}),
        Rival("FedAdam", {"update": "fedadam"}, {**local, **server}),
        Rival("FedYogi", {"update": "fedyogi"}, {**local, **server}),
        Rival("SCAFFOLD", {"update": "average", "drift_correction": True}, local),
        Rival("FedProx", {"update": "average"}, {**local, **pull}),
        Rival("FedNova", {"update": "average", "workload": "by-data"}, local),
    )


@dataclass(frozen=True)
class TunedResult:
    """The mean over seeds of a method.

    Args:
      knobs: what it was tuned to, by settings; nothing where nothing was tuned.
      loss: on all training samples; infinite where a run failed or diverged.
      accuracy: on test samples; None where it has no meaning.
      runs: how many it took to tune it.
      cell: the settings that it has then, with any seed.
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
        """The knobs in words."""
        if not self.knobs:
            return "nothing"
        parts = [
            f"{_LETTERS[name]} = {value:g}"
            for name, value in self.knobs.items()
            if name in _LETTERS
        ]
        return ", ".join([*parts, *(["falling"] if "step_fall" in self.knobs else [])])

    def to_json(self) -> dict[str, Any]:
        figures = {
            "name": self.name,
            "knobs": dict(self.knobs),
            "loss": _finite(self.loss),
            "accuracy": self.accuracy,
        }
        return {**figures, "runs": self.runs}


@dataclass(frozen=True)
class RivalComparison:
    """A method and its rivals on one task.

    Args:
      title: what was trained on what.
      own: the method with nothing tuned.
      others: the paper's method, and each rival as it was tuned.
    """

    title: str
    own: TunedResult
    others: tuple[TunedResult, ...]

    def ratio(self, other: TunedResult) -> float | None:
        """How many times the own loss another's is; None where that has no meaning."""
        return other.loss / self.own.loss if 0 < self.own.loss < math.inf else None

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "own": self.own.to_json(),
            "others": [
                {**other.to_json(), "ratio": _finite(self.ratio(other))}
                for other in self.others
            ],
        }


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
    """Makes the method's runs and tunes its rivals, as the head of this file says.

    Args:
      settings: of the method that has nothing tuned; rivals have the same data, model, nodes and budget.
      folder: where runs that are done are kept.
      rivals: all that are published here, with full grids, when not given.
      seeds: of the runs; rivals are tuned with the first.
      climbs: how often neighbours of the best cells are tried.
      jobs: how many runs at a time; as many as there are cores when not given.
    """
    rivals = published_rivals() if rivals is None else rivals
    if settings.method not in FEDERATED:
        raise UserError(
            f"{settings.method} descent has no rivals: use `method` {in_words(FEDERATED)}"
        )
    if not (seeds and all(values for rival in rivals for values in rival.grid.values())):
        raise UserError("rivals need at least one seed, and one value of each knob")
    require_losses(settings)
    check_backend(jobs, None)
    with made_ready(
        replace(settings, seed=seeds[0])
    ) as prepared:  # refuses what cannot work
        title = task_title(prepared.settings, prepared.dataset.name, prepared.dataset.note)
    settings = from_any_folder(
        settings
    )  # processes that make runs may have started in another
    runs = _Runs(CellStore(folder, "run"), jobs, progress)
    bases = {
        "default" if settings.method == Settings().method else settings.method: settings
    }
    if settings.method != "paper":
        bases["paper"] = replace(
            settings,
            **{**_PLAIN, "method": "paper", "drift_correction": None},
            step_size=None,
        )
    cells = {rival.name: rival.cells(replace(settings, seed=seeds[0])) for rival in rivals}
    later = len(rivals) * (_CLIMBED + FINALISTS * (len(seeds) - 1))
    runs.make(_with_seeds(bases.values(), seeds), later + sum(map(len, cells.values())))
    runs.require_success()
    untuned = [runs.result(name, {}, base, seeds) for name, base in bases.items()]
    runs.make(chain(*cells.values()), later)
    tuned = _tuned(runs, rivals, cells, seeds, climbs)
    return RivalComparison(title, untuned[0], (*untuned[1:], *tuned))


def _tuned(
    runs: "_Runs",
    rivals: Sequence[Rival],
    cells: Mapping[str, list[Settings]],
    seeds: Sequence[int],
    climbs: int,
) -> list[TunedResult]:
    """What each rival reaches, once every cell of its grid was made with the first seed."""
    tried = {
        name: dict.fromkeys(grid) for name, grid in cells.items()
    }  # in order, so that ties are always the same
    for climbs_left in reversed(range(climbs)):
        before = sum(map(len, tried.values()))
        for rival in rivals:
            leaders = runs.best(tried[rival.name], LEADERS)
            tried[rival.name] |= dict.fromkeys(
                near for cell in leaders for near in rival.neighbours(cell)
            )
        if sum(map(len, tried.values())) == before:
            break
        runs.make(
            chain(*tried.values()),
            len(rivals) * (climbs_left + FINALISTS * (len(seeds) - 1)),
        )
    finalists = {name: runs.best(grid, FINALISTS) for name, grid in tried.items()}
    runs.make(_with_seeds(chain(*finalists.values()), seeds), 0)
    results = []
    for rival in rivals:
        last = finalists[rival.name]
        best = min(last, key=lambda cell: runs.result("", {}, cell, seeds).loss)
        knobs = {
            name: getattr(best, name)
            for name in (*rival.grid, "step_fall")
            if getattr(best, name) is not None
        }
        made = {*tried[rival.name], *_with_seeds(last, seeds)}
        results.append(runs.result(rival.name, knobs, best, seeds, len(made)))
    return results


class _Runs:
    """Makes runs that are not kept yet, tells how far it is, and knows what all of them gave."""

    def __init__(self, store: CellStore, jobs: int | None, progress: Progress) -> None:
        self._store = store
        self._jobs = jobs
        self._progress = progress
        self._figures: dict[Settings, tuple[float, float | None]] = {}
        self._errors: list[str] = []

    def make(self, cells: Iterable[Settings], later: int) -> None:
        """Makes those among the cells that were not made before.

        Args:
          later: how many runs are thought to come after these.
        """
        fresh = [cell for cell in dict.fromkeys(cells) if cell not in self._figures]
        missing = self._store.missing(fresh)
        failed_before = len(self._errors)
        done = len(self._figures) + len(fresh) - len(missing)
        of = len(self._figures) + len(fresh) + later
        self._progress(done, of, failed_before)
        work = partial(attempt, each="run")
        with closing(unordered(work, missing, jobs=self._jobs, backend=None)) as outcomes:
            failures = self._store.collect(
                outcomes,
                lambda made, failed: self._progress(
                    done + made, of, failed_before + failed
                ),
            )
        self._errors += [failure.error for failure in failures.values()]
        for cell in fresh:
            self._figures[cell] = (math.inf, None) if cell in failures else self._read(cell)

    def require_success(self) -> None:
        """Refuses to go on when a run has failed."""
        if self._errors:
            raise UserError(f"a run with nothing tuned failed: {self._errors[0]}")

    def best(self, cells: Iterable[Settings], count: int) -> list[Settings]:
        """The cells with the lowest losses, the lowest first."""
        return sorted(cells, key=lambda cell: self._figures[cell][0])[:count]

    def result(
        self,
        name: str,
        knobs: Mapping[str, Any],
        cell: Settings,
        seeds: Sequence[int],
        runs: int = 0,
    ) -> TunedResult:
        """The means of a cell over seeds."""
        losses, accuracies = zip(
            *(self._figures[each] for each in _with_seeds([cell], seeds)), strict=True
        )
        known = [accuracy for accuracy in accuracies if accuracy is not None]
        accuracy = sum(known) / len(known) if known else None
        return TunedResult(
            name, knobs, sum(losses) / len(losses), accuracy, runs, cell, losses
        )

    def _read(self, cell: Settings) -> tuple[float, float | None]:
        columns = self._store.read(cell)
        (loss,) = columns["loss"]
        (accuracy,) = columns["accuracy"]
        return math.inf if loss is None else loss, accuracy


def _with_seeds(cells: Iterable[Settings], seeds: Sequence[int]) -> list[Settings]:
    return [replace(cell, seed=seed) for cell in cells for seed in seeds]


def _neighbours(value: float) -> list[float]:
    """The next below and above in ..., 0.1, 0.3, 1, 3, 10, ...

    >>> _neighbours(0.3), _neighbours(20)
    ([0.1, 1.0], [10.0, 30.0])
    """
    below = [each for each in _SERIES if each < value]
    above = [each for each in _SERIES if each > value]
    return [*below[-1:], *above[:1]]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


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
    pairs = {
        other.name: (_cells(other, found.own, seeds), _cells(found.own, other, seeds))
        for other in found.others
    }
    cells = list(
        dict.fromkeys(
            cell
            for pair in pairs.values()
            for each in pair
            for cell in each
            if cell is not None
        )
    )
    store = CellStore(folder, "run")
    missing = store.missing(cells)
    done = len(cells) - len(missing)
    progress(done, len(cells), 0)
    with closing(
        unordered(partial(attempt, each="run"), missing, jobs=jobs, backend=None)
    ) as outcomes:
        store.collect(
            outcomes, lambda made, failed: progress(done + made, len(cells), failed)
        )
    times = {}
    for other in found.others:
        theirs, ours = pairs[other.name]
        times[other.name] = TimesToLoss(
            _median(store, theirs, other, found.own), _median(store, ours, found.own, other)
        )
    return times


def _cells(
    method: TunedResult, goal: TunedResult, seeds: Sequence[int]
) -> list[Settings | None]:
    """The runs of a method to the losses that another one ended with; None where that has none."""
    assert method.cell is not None
    return [
        replace(method.cell, seed=seed, until=(f"loss={loss!r}",), evaluations=_EVALUATIONS)
        if math.isfinite(loss)
        else None
        for seed, loss in zip(seeds, goal.losses, strict=True)
    ]


def _median(
    store: CellStore,
    cells: Sequence[Settings | None],
    method: TunedResult,
    goal: TunedResult,
) -> float | None:
    seconds = [
        math.inf
        if cell is None or cell not in store
        else _seconds(store, cell, below=own <= loss)
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
    (stopped_by,) = columns["stopped_by"]
    (spent,) = columns["spent_time"]
    return float(spent) if stopped_by == "target" or below else math.inf
