"""Past the paper: the default with nothing tuned beside published methods that are tuned in hindsight, task by task.

A row is one method on one task: where it ends, the mean over seeds, and how long it takes to the default's loss. The
cells of a rival's grid are known beforehand, but not which of their neighbours are tried (experiments/rivals.py):
`runs` has the former, which tell how long it will take at least. Two figures are made this way: one of tasks that many
runs can be made of, and one of the settings of a published benchmark.

The settings of NIID-Bench (Li et al., *Federated Learning on Non-IID Data Silos*, ICDE 2022) that can be had here.

Ten nodes share MNIST or Fashion-MNIST by Dirichlet(0.5), or have 1, 2 or 3 labels each; the benchmark's small network,
mini-batches of 64. There a round is ten epochs at every node, fifty times, with a momentum of 0.9 in local updates;
here all methods have the same budget of simulated time and are tuned for it. So published accuracies are beside ours to
show which settings are hard, and for whom, and are no result that ours must come to.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from fedbudget.experiments import sweep
from fedbudget.experiments.figures.figure import (
    BASELINE,
    COLOURS,
    Claim,
    Figure,
    FigureTable,
    GridSize,
    Row,
    Rows,
    distinct,
    finish,
    panels,
    where,
)
from fedbudget.experiments.rivals import (
    CLIMBS,
    Rival,
    compare_rivals,
    published_rivals,
    times_to_loss,
)
from fedbudget.experiments.sweep import Sweep, write
from fedbudget.settings.settings import Settings

BEHIND = 1.05
"""The default's loss is at most so many times that of the best rival, which was tuned."""

_OWN = "default"
_SCHEMA = pyarrow.schema(
    {
        "task": pyarrow.string(),
        "method": pyarrow.string(),
        "loss": pyarrow.float64(),
        "accuracy": pyarrow.float64(),
        "knobs": pyarrow.string(),
        "tuning_runs": pyarrow.int64(),
        "seconds": pyarrow.float64(),
        "own_seconds": pyarrow.float64(),
        "budget_seconds": pyarrow.float64(),
        "error": pyarrow.string(),
    }
)

_DIGITS: dict[str, Any] = {"dataset": "digits", "partition": "case:2"}
_SMALL: dict[str, Any] = {"budget": ("time=5s",), "batch_size": 10, "partition": "case:2"}
TASKS: Mapping[str, Mapping[str, Any]] = {
    "softmax, Fashion-MNIST 14x14, Case 1": {"model": "softmax", "dataset": "fashion-mnist-small", "batch_size": 32},
    "softmax, MNIST 14x14, Case 2, 20 nodes": {
        "model": "softmax", "dataset": "mnist-small", "partition": "case:2", "nodes": 20, "batch_size": 10,
    },
    "one hidden layer, MNIST 14x14, Case 2": {
        "model": "mlp", "dataset": "mnist-small", "partition": "case:2", "batch_size": 32,
    },
    "softmax, breast cancer, Dirichlet 0.1": {
        "model": "softmax", "dataset": "breast-cancer", "partition": "dirichlet:0.1", "batch_size": "full",
    },
    "linear, diabetes, Case 2": {
        "model": "linear", "dataset": "diabetes", "partition": "case:2", "batch_size": "full",
    },
    "SVM, breast cancer, Case 2, 5 s": {**_SMALL, "model": "svm", "dataset": "breast-cancer", "nodes": 4},
    "K-means, wine, Case 2, 5 s": {**_SMALL, "model": "kmeans", "dataset": "wine", "clusters": 3},
    "softmax, digits, Case 2": {**_DIGITS, "model": "softmax"},
    "one hidden layer, digits, Case 2": {**_DIGITS, "model": "mlp"},
}  # fmt: skip
"""Their settings, where they are not the default; 5 nodes and 15 seconds otherwise."""

_TEN: dict[str, Any] = {"nodes": 10, "batch_size": 32}
MORE_TASKS: Mapping[str, Mapping[str, Any]] = {
    "softmax, Fashion-MNIST 14x14, Case 2, 10 nodes, 30 s": {
        **_TEN, "model": "softmax", "dataset": "fashion-mnist-small", "partition": "case:2", "budget": ("time=30s",),
    },
    "one hidden layer, Fashion-MNIST 14x14, Dirichlet 0.3, 10 nodes": {
        **_TEN, "model": "mlp", "dataset": "fashion-mnist-small", "partition": "dirichlet:0.3",
    },
    "softmax, MNIST 14x14, one label a node, 10 nodes, 60 s": {
        "model": "softmax", "dataset": "mnist-small", "partition": "labels:1", "nodes": 10, "batch_size": 50,
        "budget": ("time=60s",),
    },
    "SVM, MNIST 14x14, Case 4": {"model": "svm", "dataset": "mnist-small", "partition": "case:4", "batch_size": 100},
    "linear, energy, Case 2": {"model": "linear", "dataset": "energy", "partition": "case:2", "batch_size": 100},
    "one hidden layer, diabetes, Case 1": {"model": "mlp", "dataset": "diabetes", "batch_size": 20},
    "softmax, breast cancer, Case 2, 60 s, 200 kB": {
        "model": "softmax", "dataset": "breast-cancer", "partition": "case:2", "batch_size": 20,
        "budget": ("time=60s", "bytes=200kB"),
    },
    "SVM, breast cancer, Case 3, 10 s": {
        "model": "svm", "dataset": "breast-cancer", "partition": "case:3", "batch_size": "full",
        "budget": ("time=10s",),
    },
    "softmax, students' knowledge, Dirichlet 0.5, 8 nodes": {
        "model": "softmax", "dataset": "user-knowledge", "partition": "dirichlet:0.5", "nodes": 8,
        "batch_size": "full",
    },
    "K-means, digits, Case 2": {**_DIGITS, "model": "kmeans", "clusters": 10, "batch_size": 50},
    "softmax, digits, Case 1, 50 nodes, 10 s": {
        "model": "softmax", "dataset": "digits", "nodes": 50, "batch_size": 10, "budget": ("time=10s",),
    },
    "one hidden layer, digits, Dirichlet 0.1, 20 nodes, 5 s": {
        "model": "mlp", "dataset": "digits", "partition": "dirichlet:0.1", "nodes": 20, "batch_size": 16,
        "budget": ("time=5s",),
    },
}  # fmt: skip
"""Further settings: other data, numbers of nodes, mini-batches and budgets."""


@dataclass(frozen=True)
class Rivals(Figure):
    """Tasks that many runs can be made of.

    Args:
      settings_of: of each task.
    """

    settings_of: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: TASKS, kw_only=True
    )

    def settings(self, data_dir: str | None) -> list[Settings]:
        common: dict[str, Any] = {
            "nodes": 5,
            "partition": "case:1",
            "data_dir": data_dir,
            "evaluations": 1,
        }
        return [Settings(**{**common, **self.settings_of[task]}) for task in self.tasks]

    def rivals(self, size: GridSize) -> Sequence[Rival]:
        """With the grids that they are tuned over."""
        return published_rivals(quick=size.quick)

    def climbs(self, size: GridSize) -> int:
        """How often neighbours of the best cells are tried."""
        return 2 if size.quick else CLIMBS

    def runs(self, base: Settings, size: GridSize) -> Sweep:
        grid = [cell for rival in self.rivals(size) for cell in rival.cells(base)]
        untuned = [replace(base, seed=seed) for seed in range(size.runs)]
        return Sweep(base, ("seed",), tuple(dict.fromkeys([*untuned, *grid])))

    def make(
        self,
        settings: Sequence[Settings],
        size: GridSize,
        folder: Path,
        *,
        jobs: int | None,
        progress: sweep.Progress,
    ) -> Rows:
        rows: list[Row] = []
        for each in settings:
            rows += self._task_rows(each, size, folder, jobs, progress)
            write(pyarrow.Table.from_pylist(rows, _SCHEMA), folder / sweep.RESULTS)
        return rows

    def made_of(self, settings: Sequence[Settings], size: GridSize, on: str) -> str:
        runs = "one run" if size.runs == 1 else f"mean of {size.runs} runs"
        grids = "small grids for a first look" if size.quick else "full grids"
        return (
            f"{runs} of each method at its best, which was looked for over {grids}, on {on}"
        )

    def draw(self, rows: Rows) -> Picture:
        tasks = distinct(rows, "task")
        drawn, axes = panels(tasks, columns=3)
        for axis, task in zip(axes, tasks, strict=True):
            self.panel(axis, where(rows, task=task))
        return drawn

    def panel(self, axis: Axes, rows: Rows) -> None:
        """One task: the loss of each method over the default's."""
        (own,) = where(rows, method=_OWN)
        others = [row for row in rows if row["method"] != _OWN and row["loss"] is not None]
        ratios = [row["loss"] / own["loss"] for row in others]
        axis.axvline(1, color=BASELINE, linewidth=1)
        colours = [COLOURS[1] if ratio >= 1 else COLOURS[2] for ratio in ratios]
        axis.scatter(ratios, [row["method"] for row in others], color=colours)
        if max(ratios, default=1) > 10 * min(ratios, default=1):
            axis.set_xscale("log")
        else:  # where a logarithmic axis has no room for its numbers
            axis.locator_params(axis="x", nbins=4)
        axis.invert_yaxis()
        finish(axis, "loss, times the default's", "")

    def claims(self, rows: Rows) -> list[Claim]:
        claims = []
        ratios = []
        for task in distinct(rows, "task"):
            own, best = own_and_best(where(rows, task=task))
            ratios.append(own["loss"] / best["loss"])
            claims.append(
                Claim(
                    f"{task}: the default's loss is at most {BEHIND} times that of the best rival, which was tuned",
                    f"{ratios[-1]:.3g} times: {own['loss']:.4g}, {best['method']} {best['loss']:.4g}",
                    ratios[-1] <= BEHIND,
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

    def table(self, rows: Rows) -> FigureTable:
        head = ("task", "method", "loss", "accuracy", "times the default's loss", "time to the default's loss",
                "the default's time to its loss", "tuned to", "runs to tune")  # fmt: skip
        lines = []
        for row in rows:
            (own,) = where(rows, task=row["task"], method=_OWN)
            ratio = "" if row["loss"] is None else f"{row['loss'] / own['loss']:.3g}"
            seconds = [shown_time(row, name) for name in ("seconds", "own_seconds")]
            lines.append(
                (row["task"], row["method"], number(row["loss"]), number(row["accuracy"]), ratio, *seconds,
                 row["knobs"], str(row["tuning_runs"]))
            )  # fmt: skip
        return FigureTable(head, tuple(lines))

    def _task_rows(
        self,
        settings: Settings,
        size: GridSize,
        folder: Path,
        jobs: int | None,
        progress: sweep.Progress,
    ) -> list[Row]:
        seeds = range(size.runs)
        more: dict[str, Any] = {
            "folder": folder,
            "seeds": seeds,
            "jobs": jobs,
            "progress": progress,
        }
        found = compare_rivals(
            settings, rivals=self.rivals(size), climbs=self.climbs(size), **more
        )
        times = times_to_loss(found, **more)
        rows = []
        for each in (found.own, *found.others):
            known = times.get(each.name)
            rows.append(
                {
                    "task": self._title(settings),
                    "method": each.name,
                    "loss": each.loss if math.isfinite(each.loss) else None,
                    "accuracy": each.accuracy,
                    "knobs": each.tuned_to,
                    "tuning_runs": each.runs,
                    "seconds": None if known is None else known.other,
                    "own_seconds": None if known is None else known.own,
                    "budget_seconds": settings.limits().limits["time"],
                    "error": None,
                }
            )
        return rows

    def _title(self, settings: Settings) -> str:
        known = self.settings(settings.data_dir)
        return self.tasks[known.index(settings)]


def own_and_best(rows: Rows) -> tuple[Row, Row]:
    """Of one task: the default, and the rival with the lowest loss, or else the default itself."""
    (own,) = where(rows, method=_OWN)
    others = [
        row
        for row in rows
        if row["method"] not in (_OWN, "paper") and row["loss"] is not None
    ]
    return own, min(others, key=lambda row: row["loss"], default=own)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def shown_time(row: Row, name: str) -> str:
    """A time as a share of the budget."""
    if row["method"] == _OWN:
        return ""
    return (
        "never"
        if row[name] is None
        else f"{row[name] / row['budget_seconds']:.0%} of the budget"
    )


_NODES: dict[str, Any] = {
    "model": "lenet",
    "nodes": 10,
    "batch_size": 64,
    "budget": ("time=30s",),
}
_SPREAD = {
    "Dirichlet 0.5": "dirichlet:0.5",
    "1 label": "labels:1",
    "2 labels": "labels:2",
    "3 labels": "labels:3",
}
NIID_TASKS: Mapping[str, Mapping[str, Any]] = {
    f"{title}, {spread}": {**_NODES, "dataset": dataset, "partition": partition}
    for title, dataset in (("MNIST", "mnist"), ("Fashion-MNIST", "fashion-mnist"))
    for spread, partition in _SPREAD.items()
}

PUBLISHED: Mapping[str, Mapping[str, str]] = {
    "MNIST, Dirichlet 0.5": {"FedAvg": "98.9", "SCAFFOLD": "99.1", "FedProx": "99.0", "FedNova": "98.0"},
    "MNIST, 1 label": {"FedAvg": "19.3 ± 11.8", "SCAFFOLD": "9.9", "FedProx": "51.8 ± 26.8", "FedNova": "52.6 ± 14.1"},
    "MNIST, 2 labels": {"FedAvg": "96.9", "SCAFFOLD": "96.9", "FedProx": "96.9", "FedNova": "96.7"},
    "MNIST, 3 labels": {"FedAvg": "97.9", "SCAFFOLD": "97.9", "FedProx": "97.9", "FedNova": "97.6"},
    "Fashion-MNIST, Dirichlet 0.5": {"FedAvg": "88.1", "SCAFFOLD": "88.4", "FedProx": "88.2", "FedNova": "88.2"},
    "Fashion-MNIST, 1 label": {
        "FedAvg": "28.4 ± 17.1", "SCAFFOLD": "10.0", "FedProx": "32.7 ± 6.7", "FedNova": "16.9 ± 9.3",
    },
    "Fashion-MNIST, 2 labels": {
        "FedAvg": "78.1 ± 2.5", "SCAFFOLD": "33.8 ± 41.2", "FedProx": "78.1 ± 1.0", "FedNova": "71.7 ± 2.3",
    },
    "Fashion-MNIST, 3 labels": {
        "FedAvg": "82.4 ± 1.5", "SCAFFOLD": "80.3 ± 5.0", "FedProx": "83.0", "FedNova": "82.0 ± 1.3",
    },
}  # fmt: skip
"""Of test images, in percent, the best of all rounds, as Flower's baseline niid_bench has them; a deviation over seeds
below 1 is left out."""


@dataclass(frozen=True)
class NiidBench(Rivals):
    """The benchmark's methods, and accuracies beside those that it is known by."""

    def rivals(self, size: GridSize) -> Sequence[Rival]:
        grid: dict[str, Sequence[Any]] = {
            "tau": (10,) if size.quick else (10, 100),
            "step_size": (0.03, 0.1),
        }
        published = {rival.name: rival for rival in published_rivals()}
        known = [published[name] for name in ("FedAvg", "SCAFFOLD", "FedProx", "FedNova")]
        return [replace(each, grid={**each.grid, **grid, **_pull(each)}) for each in known]

    def climbs(self, size: GridSize) -> int:
        return 1

    def claims(self, rows: Rows) -> list[Claim]:
        claims = super().claims(rows)[:-1]
        for task in distinct(rows, "task"):
            own, best = own_and_best(where(rows, task=task))
            if own["accuracy"] is not None and best["accuracy"] is not None:
                claims.append(
                    Claim(
                        f"{task}: the default's accuracy is not below that of the rival with the lowest loss",
                        f"{own['accuracy']:.3f}, {best['method']} {best['accuracy']:.3f}",
                        own["accuracy"] >= best["accuracy"],
                    )
                )
        return claims

    def table(self, rows: Rows) -> FigureTable:
        made = super().table(rows)
        published = [
            PUBLISHED.get(task, {}).get(method, "") for task, method, *_ in made.rows
        ]
        lines = [
            (*row[:4], told, *row[4:])
            for row, told in zip(made.rows, published, strict=True)
        ]
        return FigureTable(
            (*made.head[:4], "accuracy, published, %", *made.head[4:]), tuple(lines)
        )


def _pull(rival: Rival) -> dict[str, Sequence[float]]:
    return {"proximal": (0.01, 1.0)} if "proximal" in rival.grid else {}
