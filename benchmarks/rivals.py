"""`python -m benchmarks rivals`: the untuned default against methods tuned in hindsight.

    python -m benchmarks rivals rivals more-rivals --quick

A row is one method on one task: its final loss, the mean over seeds, and its time to the
default's loss. The tasks are in rivals.toml.

`runs` contains the cells of the grids, which are known beforehand, but not the neighbours
that are tried later (experiments/rivals.py).

`times_to_loss` measures the time of a method to the final loss of another one, with the
same seed. The run is made again with that loss on all training samples as its target
(`until`), evaluated about a hundred times. If no evaluation reaches the target but the
final loss does, the time is that of the whole run. The result is the median over seeds; a
run that does not reach the target counts as infinite.

`NiidBench` uses settings of NIID-Bench (Li et al., *Federated Learning on Non-IID Data
Silos*, ICDE 2022). Ten nodes share MNIST or Fashion-MNIST by Dirichlet(0.5), or have 1, 2
or 3 labels each, with mini-batches of 64. The benchmark makes 50 rounds of ten local
epochs, with a local momentum of 0.9. Here, all methods have the same budget of simulated
time and are tuned for it. So the published accuracies show which settings are hard for
which method; they are no target."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from benchmarks.task_figures import make
from fedbudget.experiments.cells import CellStore, Progress
from fedbudget.experiments.figures.figure import (
    BASELINE,
    COLOURS,
    Claim,
    Figure,
    GridSize,
    Row,
    Rows,
    Table,
    draw_tasks,
    finish,
    grouped,
    runs_text,
    where,
)
from fedbudget.experiments.rivals import (
    CLIMBS,
    Rival,
    RivalComparison,
    TunedResult,
    compare_rivals,
    published_rivals,
)
from fedbudget.experiments.sweep import RESULTS, Sweep, write
from fedbudget.runs.record import json_value
from fedbudget.settings.option import read_toml
from fedbudget.settings.settings import Settings, read_settings

BEHIND = 1.05
"""Largest ratio of the default's loss to that of the best rival."""

_OWN = "default"
_EVALUATIONS = 25  # a target multiplies them by four
_TYPES = {
    **dict.fromkeys(("task", "method", "knobs", "error"), pyarrow.string()),
    **dict.fromkeys(
        ("loss", "accuracy", "seconds", "own_seconds", "budget_seconds"), pyarrow.float64()
    ),
    "tuning_runs": pyarrow.int64(),
}
_HEAD: tuple[str, ...] = (
    "task",
    "method",
    "loss",
    "accuracy",
    "times the default's loss",
    "time to the default's loss",
    "the default's time to its loss",
    "tuned to",
    "runs to tune",
)

_FILE = read_toml(Path(__file__).with_name("rivals.toml"))
PUBLISHED: Mapping[str, Mapping[str, str]] = _FILE.pop("published")
"""Published accuracies in percent, by task and method."""

TASKS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    figure: {title: read_settings(values, title) for title, values in tasks.items()}
    for figure, tasks in _FILE.items()
}
"""The settings of each task, by the name of the figure and the title of the task."""


class Rivals(Figure):
    """Tasks with runs that are short enough for many."""

    def settings(self, data_dir: str | None) -> list[Settings]:
        common = {"nodes": 5, "partition": "case:1", "evaluations": 1}
        return [
            Settings(**{**common, "data_dir": data_dir, **TASKS[self.name][task]})
            for task in self.tasks
        ]

    def rivals(self, size: GridSize) -> Sequence[Rival]:
        """Return the rivals with the grids of their tuning."""
        return published_rivals(quick=size.quick)

    def climbs(self, size: GridSize) -> int:
        """Return how often neighbours of the best cells are tried."""
        return 2 if size.quick else CLIMBS

    def runs(self, base: Settings, size: GridSize) -> Sweep:
        cells = [replace(base, seed=seed) for seed in range(size.runs)]
        for rival in self.rivals(size):
            cells += rival.cells(base)
        return Sweep(base, ("seed",), tuple(dict.fromkeys(cells)))

    def make(
        self,
        settings: Sequence[Settings],
        size: GridSize,
        folder: Path,
        *,
        jobs: int | None,
        progress: Progress,
    ) -> Rows:
        rows: list[Row] = []
        for each in settings:
            how: Any = {"folder": folder, "seeds": range(size.runs), "jobs": jobs}
            how["progress"] = progress
            comparison = compare_rivals(
                each, rivals=self.rivals(size), climbs=self.climbs(size), **how
            )
            times = times_to_loss(comparison, **how)
            title = self.tasks[self.settings(each.data_dir).index(each)]
            for result in (comparison.own, *comparison.others):
                time = times.get(result.name, TimesToLoss(None, None))
                row = {
                    "task": title,
                    "method": result.name,
                    "loss": result.loss if math.isfinite(result.loss) else None,
                    "accuracy": result.accuracy,
                    "knobs": result.tuned_to,
                    "tuning_runs": result.runs,
                    "seconds": time.other,
                    "own_seconds": time.own,
                    "budget_seconds": each.limits().limits["time"],
                    "error": None,
                }
                rows.append(row)
            schema = pyarrow.schema({name: _TYPES[name] for name in rows[0]})
            write(pyarrow.Table.from_pylist(rows, schema), folder / RESULTS)
        return rows

    def made_of(self, settings: Sequence[Settings], size: GridSize, on: str) -> str:
        grids = "small" if size.quick else "full"
        runs = runs_text(size.runs)
        return f"{runs} of each method at its best, tuned over {grids} grids, on {on}"

    def draw(self, rows: Rows) -> Picture:
        return draw_tasks(grouped(rows, itemgetter("task")), _draw_ratios, columns=3)

    def claims(self, rows: Rows) -> list[Claim]:
        claims = []
        ratios = []
        for task, own_rows in grouped(rows, itemgetter("task")).items():
            own, best = own_and_best(own_rows)
            ratio = own["loss"] / best["loss"]
            ratios.append(ratio)
            claims.append(
                Claim(
                    f"{task}: the default's loss is at most {BEHIND} times that of the "
                    "best rival, which was tuned",
                    f"{ratio:.3g} times: {own['loss']:.4g}, {best['method']} "
                    f"{best['loss']:.4g}",
                    ratio <= BEHIND,
                )
            )
        overall = math.exp(sum(map(math.log, ratios)) / len(ratios))
        claims.append(
            Claim(
                "all tasks: its loss is below the best rival's on the geometric mean",
                f"{overall:.3g}",
                overall < 1,
            )
        )
        return claims

    def table(self, rows: Rows) -> Table:
        lines = [_HEAD]
        for row in rows:
            (own,) = where(rows, task=row["task"], method=_OWN)
            line = (
                row["task"],
                row["method"],
                _number(row["loss"]),
                _number(row["accuracy"]),
                "" if row["loss"] is None else f"{row['loss'] / own['loss']:.3g}",
                _share_of_budget(row, "seconds"),
                _share_of_budget(row, "own_seconds"),
                row["knobs"],
                str(row["tuning_runs"]),
            )
            lines.append(line)
        return lines


class NiidBench(Rivals):
    """The methods of NIID-Bench, with its published accuracies."""

    def rivals(self, size: GridSize) -> Sequence[Rival]:
        grid = {"tau": size.choose((10, 100), (10,)), "step_size": (0.03, 0.1)}
        rivals = []
        for rival in published_rivals():
            if rival.name in ("FedAvg", "SCAFFOLD", "FedProx", "FedNova"):
                own = {"proximal": (0.01, 1.0)} if "proximal" in rival.grid else {}
                rivals.append(replace(rival, grid={**grid, **own}))
        return rivals

    def climbs(self, size: GridSize) -> int:
        return 1

    def claims(self, rows: Rows) -> list[Claim]:
        claims = super().claims(rows)[:-1]
        for task, own_rows in grouped(rows, itemgetter("task")).items():
            own, best = own_and_best(own_rows)
            if own["accuracy"] is not None and best["accuracy"] is not None:
                claims.append(
                    Claim(
                        f"{task}: the default's accuracy is not below that of the rival "
                        "with the lowest loss",
                        f"{own['accuracy']:.3f}, {best['method']} {best['accuracy']:.3f}",
                        own["accuracy"] >= best["accuracy"],
                    )
                )
        return claims

    def table(self, rows: Rows) -> Table:
        lines = []
        for line in super().table(rows):
            published = PUBLISHED.get(line[0], {}).get(line[1], "")
            if line is _HEAD:
                published = "accuracy, published, %"
            lines.append((*line[:4], published, *line[4:]))
        return lines


def own_and_best(rows: Rows) -> tuple[Row, Row]:
    """Return the default's row of a task, and that of the rival with the lowest loss.

    Without a rival, the second is the default's too. The paper's method is no rival.
    """
    (own,) = where(rows, method=_OWN)
    rivals = [
        row
        for row in rows
        if row["method"] not in (_OWN, "paper") and row["loss"] is not None
    ]
    return own, min(rivals, key=itemgetter("loss"), default=own)


def _draw_ratios(axis: Axes, rows: Rows) -> None:
    """Draw the loss of each method, relative to the default's."""
    (own,) = where(rows, method=_OWN)
    others = [row for row in rows if row["method"] != _OWN and row["loss"] is not None]
    ratios = [row["loss"] / own["loss"] for row in others]
    colours = [COLOURS[1] if ratio >= 1 else COLOURS[2] for ratio in ratios]
    axis.axvline(1, color=BASELINE, linewidth=1)
    axis.scatter(ratios, [row["method"] for row in others], color=colours)
    if max(ratios, default=1) > 10 * min(ratios, default=1):
        axis.set_xscale("log")
    else:  # a logarithmic axis would have no numbers
        axis.locator_params(axis="x", nbins=4)
    axis.invert_yaxis()
    finish(axis, "loss, times the default's", "")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _share_of_budget(row: Row, name: str) -> str:
    if row["method"] == _OWN:
        return ""
    if row[name] is None:
        return "never"
    return f"{row[name] / row['budget_seconds']:.0%} of the budget"


@dataclass(frozen=True)
class TimesToLoss:
    """Times of two methods in seconds; None if the loss is not reached.

    Args:
      other: time of the other method to the final loss of the own method.
      own: time of the own method to the final loss of the other method.
    """

    other: float | None
    own: float | None


def times_to_loss(
    comparison: RivalComparison,
    *,
    folder: Path,
    seeds: Sequence[int],
    jobs: int | None = None,
    progress: Progress = lambda done, of, failed: None,
) -> dict[str, TimesToLoss]:
    """Measure the times to each other's loss, of the own method and each of the others.

    Args:
      comparison: the result of `compare_rivals` with these seeds.
      folder: finished runs are kept here.

    Returns:
      The times, by the name of the other method.
    """
    own = comparison.own
    races = {
        other.name: (_races(other, own, seeds), _races(own, other, seeds))
        for other in comparison.others
    }
    store = CellStore(folder, "run")
    cells = dict.fromkeys(chain(*chain(*races.values())))
    store.make(list(cells), progress, jobs=jobs)
    return {
        name: TimesToLoss(*(_median(store, race, len(seeds)) for race in pair))
        for name, pair in races.items()
    }


def _races(
    method: TunedResult, goal: TunedResult, seeds: Sequence[int]
) -> dict[Settings, bool]:
    """Return the runs of a method until the finite losses of a goal.

    The value is whether the method's own final loss reaches the goal.
    """
    assert method.cell is not None
    runs = {}
    for seed, own, loss in zip(seeds, method.losses, goal.losses, strict=True):
        if math.isfinite(loss):
            until = (f"loss={loss!r}",)
            cell = replace(method.cell, seed=seed, until=until, evaluations=_EVALUATIONS)
            runs[cell] = own <= loss
    return runs


def _median(store: CellStore, race: Mapping[Settings, bool], seeds: int) -> float | None:
    """Return the median time over seeds."""
    seconds = []
    for cell, reached in race.items():
        columns = store.read(cell) if cell in store else {}
        if columns and (reached or columns["stopped_by"] == ["target"]):
            seconds += columns["spent_time"]
    never = [math.inf] * (seeds - len(seconds))
    return json_value(statistics.median(seconds + never))


FIGURES: Mapping[str, Figure] = {
    "rivals": Rivals(
        "rivals",
        "The default with nothing tuned, and tuned rivals",
        tuple(TASKS["rivals"]),
        long=True,
    ),
    "more-rivals": Rivals(
        "more-rivals",
        "Further settings: the default with nothing tuned, and tuned rivals",
        tuple(TASKS["more-rivals"]),
        long=True,
    ),
    "niid-bench": NiidBench(
        "niid-bench",
        "NIID-Bench, the default with nothing tuned, and tuned rivals",
        tuple(TASKS["niid-bench"]),
        long=True,
    ),
}


def main(arguments: Sequence[str]) -> None:
    """Make figures and their report."""
    make(FIGURES, "rivals", arguments)
