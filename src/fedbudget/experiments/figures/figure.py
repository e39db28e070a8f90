"""The rows of a sweep's results, as plain dictionaries, and what is asked of them.

What a figure is: the runs behind it, how it is drawn, and which claims it bears out, the paper's or our own.

A figure is drawn and its claims are judged from the rows of its sweep alone, so that both can be made again from the
Parquet file at any time. A claim that does not hold is shown as not holding.

How all figures look: the same colour and marker for a case everywhere, which do not rely on colour alone.

What the paper's evaluation says, in its own words; every claim that is judged names the sentence it is from.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from fedbudget import tasks
from fedbudget.experiments import sweep
from fedbudget.experiments.sweep import Sweep
from fedbudget.runs.plot import BLUE, GREEN, GREY, PURPLE, VERMILION
from fedbudget.settings.settings import Settings
from fedbudget.settings.types import EngineName

Row = dict[str, Any]
Rows = Sequence[Row]


def where(rows: Rows, **values: Any) -> list[Row]:
    """The rows that have these values."""
    return [
        row for row in rows if all(row[name] == value for name, value in values.items())
    ]


def distinct(rows: Rows, name: str) -> list[Any]:
    """The values of a column, each once, in the order of their first row."""
    return list(dict.fromkeys(row[name] for row in rows if row[name] is not None))


def mean(rows: Rows, name: str) -> float:
    """The mean of a column over the rows that have a value in it; NaN where none has."""
    values = [row[name] for row in rows if row[name] is not None]
    return float(np.mean(values)) if values else float("nan")


def means(rows: Rows, over: str, values: Iterable[Any], name: str) -> list[float]:
    """The mean of a column for each value of another."""
    return [mean(where(rows, **{over: value}), name) for value in values]


def by_fixed_tau(rows: Rows, case: int, name: str) -> dict[str, float]:
    """The mean of a column for each fixed τ, where it is finite."""
    fixed = [
        row for row in where(rows, method="paper", case=case) if row["tau"] != "adaptive"
    ]
    taus = distinct(fixed, "tau")
    return {
        tau: value
        for tau, value in zip(taus, means(fixed, "tau", taus, name), strict=True)
        if np.isfinite(value)
    }


class CaseLosses:
    """One task in one case: the losses of fixed τ, of the paper's method, and of ours."""

    def __init__(self, rows: Rows, case: int) -> None:
        losses = by_fixed_tau(rows, case, "loss")
        self.case = case
        self.best_tau = min(losses, key=losses.__getitem__)
        self.best, self.worst = losses[self.best_tau], max(losses.values())
        self.paper = mean(where(rows, case=case, method="paper", tau="adaptive"), "loss")
        self.frugal = mean(where(rows, case=case, method="frugal"), "loss")

    def regret(self, loss: float) -> float:
        """What not knowing the best fixed τ costs: 0 for as good as the best, 1 for as bad as the worst."""
        return (
            (loss - self.best) / (self.worst - self.best) if self.worst > self.best else 0.0
        )


CASES = (1, 2, 3, 4)
TAUS = (1, 2, 3, 5, 7, 10, 20, 30, 50, 70, 100)
FEW_TAUS = (1, 3, 10, 30, 100)


@dataclass(frozen=True)
class GridSize:
    """How much of a figure to make.

    Args:
      runs: of each setting, with other seeds.
      quick: a smaller grid, for a first look.
    """

    runs: int
    quick: bool = False

    def choose(self, values: Sequence[Any], few: Sequence[Any]) -> Sequence[Any]:
        """All values, or the few for a first look."""
        return few if self.quick else values


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, or of ours where the figure is.

    Args:
      text: what is claimed.
      measured: the numbers that decide.
      holds: whether they bear it out.
      quote: the paper's words for it; empty for a claim of ours.
    """

    text: str
    measured: str
    holds: bool
    quote: str = ""


@dataclass(frozen=True)
class FigureTable:
    """Numbers beside a figure, as text."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Figure(ABC):
    """A figure of the paper, or one more.

    Args:
      name: what it is called on the command line.
      title: what it shows.
      tasks: the tasks that its runs start from; of several, those whose data are here.
      long: whether it takes hours, and is made only when it is asked for.
      engine: what makes its runs.
    """

    name: str
    title: str
    tasks: tuple[str, ...]
    long: bool = field(default=False, kw_only=True)
    engine: EngineName = field(default="in-process", kw_only=True)

    @abstractmethod
    def runs(self, base: Settings, size: GridSize) -> Sweep:
        """Of one task, from its settings."""

    @abstractmethod
    def draw(self, rows: Rows) -> Picture:
        """The picture of the rows."""

    @abstractmethod
    def claims(self, rows: Rows) -> list[Claim]:
        """What the rows say of claims."""

    def make(
        self,
        settings: Sequence[Settings],
        size: GridSize,
        folder: Path,
        *,
        jobs: int | None,
        progress: sweep.Progress,
    ) -> Rows:
        """Makes the runs that the folder does not have yet, and writes all rows there.

        Args:
          settings: of its tasks.
          jobs: how many runs at a time; one where they measure time, and would be in each other's way.
        """
        alone = self.engine == "network"
        grid = self.sweep(settings, size)
        table = sweep.run(
            grid, folder, jobs=1 if alone else jobs, progress=progress, engine=self.engine
        )
        rows: list[Row] = table.to_pylist()
        return rows

    def made_of(self, settings: Sequence[Settings], size: GridSize, on: str) -> str:
        """How many runs, on which data, by which methods."""
        grid = self.sweep(settings, size)
        seeds = len({cell.seed for cell in grid.cells})
        methods = dict.fromkeys(cell.method for cell in grid.cells)
        quick = ", a small grid for a first look" if size.quick else ""
        runs = (
            f"{'one run' if seeds == 1 else f'mean of {seeds} runs'} of each setting{quick}"
        )
        return f"{runs}, on {on}, {'method' if len(methods) == 1 else 'methods'} {', '.join(methods)}"

    def table(self, rows: Rows) -> FigureTable | None:
        """The numbers, where a picture is not enough."""
        return None

    def claim(self, text: str, measured: str, holds: bool, quote: str = "") -> Claim:
        """About the one task that the figure has."""
        return Claim(f"{self.title}: {text}", measured, holds, quote)

    def settings(self, data_dir: str | None) -> list[Settings]:
        """Of each task, by the paper's method where none is given; accuracy is looked at once, at the end."""
        of_tasks = [Settings(**Settings.from_toml(tasks.path(task))) for task in self.tasks]
        return [
            replace(each, method="paper", data_dir=data_dir, evaluations=1)
            for each in of_tasks
        ]

    def sweep(self, settings: Sequence[Settings], size: GridSize) -> Sweep:
        """All its runs, from the settings of its tasks."""
        return joined(*(self.runs(each, size) for each in settings))


def joined(*sweeps: Sweep) -> Sweep:
    """Several sweeps as one, whose results have a column for whatever varies in any of them or between them."""
    if len(sweeps) == 1:
        return sweeps[0]
    varied = dict.fromkeys(name for sweep in sweeps for name in sweep.varied)
    between = [
        name
        for name in vars(sweeps[0].base)
        if len({getattr(sweep.base, name) for sweep in sweeps}) > 1
    ]
    cells = tuple(cell for sweep in sweeps for cell in sweep.cells)
    names = [*between, *(name for name in varied if name not in between)]
    return Sweep(sweeps[0].base, tuple(names), cells, sweeps[0].each)


COLOURS = {1: BLUE, 2: VERMILION, 3: GREEN, 4: PURPLE}
MARKERS = {1: "o", 2: "s", 3: "^", 4: "D"}
LINES = {1: "-", 2: "--", 3: "-.", 4: ":"}
BASELINE = GREY
ACCURACY = "accuracy on test samples"
LOSS = "loss on all training samples"
TAU = "average τ*, weighted by updates"


def picture(width: float, height: float) -> Picture:
    return Picture(figsize=(width, height), layout="constrained", dpi=120)


def panels(titles: Sequence[str], columns: int = 4) -> tuple[Picture, list[Axes]]:
    """A picture with a small panel for each title, in lines."""
    columns = min(columns, len(titles))
    lines = -(-len(titles) // columns)
    drawn = picture(3.3 * columns + 0.6, 3.1 * lines + 0.4)
    axes = list(drawn.subplots(lines, columns, squeeze=False).ravel())
    for axis, title in zip(axes, titles, strict=False):
        axis.set_title(title, fontsize="medium")
    for axis in axes[len(titles) :]:
        axis.remove()
    return drawn, axes[: len(titles)]


def case_line(
    axis: Axes, case: int, x: Sequence[float], y: Sequence[float], *, markers: bool = True
) -> None:
    axis.plot(
        x,
        y,
        color=COLOURS[case],
        linestyle=LINES[case],
        marker=MARKERS[case] if markers else None,
        markersize=4,
        label=f"Case {case}",
    )


def log_scale(axis: Axes, ticks: Sequence[float]) -> None:
    """A logarithmic axis with these numbers on it, written as numbers."""
    axis.set_xscale("log")
    axis.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)


def finish(axis: Axes, x: str, y: str, *, legend: bool = False) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.25)
    if legend:
        axis.legend(fontsize="small")


# Loss and accuracy values
CLOSE = "We see that the proposed approach performs close to the optimal point for all cases and all models"
CLOSE_ACCURACY = (
    "Our proposed solution (represented by a single marker for each case) gives an average τ and loss/accuracy that is "
    "close to the optimum in all cases."
)
DIFFERENT = (
    "We also see that the (empirically) optimal value of τ is different for different cases and models, so a fixed "
    "value of τ does not work well for all cases."
)
DISTRIBUTED = (
    "In some cases, the distributed approach can perform better than the centralized approach, because for a given "
    "amount of time budget, federated learning is able to make use of the computation resource at multiple nodes."
)
CASE_3 = (
    "For DGD approaches, Case 3 does not perform as well as Case 1, because the amount of data at each node in Case 3 "
    "is larger than that in Case 1"
)

# Number of nodes
NODES = "Our proposed approach performs better than or similar to the fixed τ=10 baseline in all cases"

# Time of an aggregation
LARGER_TAU = (
    "We can see that as one would intuitively expect, a larger global aggregation time generally results in a larger "
    "τ* for the proposed algorithm"
)
SLIGHTLY_DECREASES = (
    "The fact that τ* slightly decreases when the adjustment factor is large is because in this case, the global "
    "aggregation time is so large that only a few rounds of global aggregation can be performed before reaching the "
    "resource budget"
)
BETTER = "Comparing to the fixed τ=10 baseline, the proposed algorithm performs better in (almost) all cases."

# Budget
DECREASES = (
    "We see that except for Case 3 where all nodes have the same dataset, the value of τ* of the proposed algorithm "
    "decreases with the total time budget."
)
BUDGET = "We also see that the proposed algorithm performs better than or similar to the fixed τ=10 baseline in all cases."

# A single run
STABLE = (
    "We see that the value of τ* remains stable after an initial adaptation period, showing that the control "
    "algorithm is stable."
)
END = "The value of τ* decreases at the end due to adjustment caused by the system reaching the resource budget"
DELTA = (
    "As expected, the gradient deviation δ is larger for Cases 2 and 4 where the data samples at different nodes are "
    "non-uniform."
)
RHO_AND_BETA = (
    "The same is observed for ρ and β, indicating that the model parameter w is in a less smooth region for Cases 2 "
    "and 4."
)
ZERO = "Thus, the estimated ρ and β values are zero by definition"
LARGER_C = (
    "Case 3 of SVM (DGD) has a much larger value of c because it processes more data than in other cases and thus "
    "takes more time, as explained before."
)
FLUCTUATES = "The value of b exhibits fluctuations because of the randomness of the wireless channel."

# Control parameter φ
ORDER = "We see that the relationship among τ* in different cases is mostly maintained with different values of φ."
LINEAR = "The value of τ* decreases approximately linearly with log φ"
SAME = "For Case 3, τ* remains the same with different φ"
SMALL_CHANGES = "We also see that small changes of φ does not change τ* much"

# Asynchronous descent
MUCH_WORSE = (
    "We see that the performance of asynchronous gradient descent is much worse than synchronous gradient descent for "
    "non-uniform data distribution in Cases 2 and 4, with slower convergence, sudden changes (indicating instability "
    "of the training process), and convergence to higher loss and lower accuracy values."
)
SIMILAR = (
    "With uniform data distribution (Cases 1 and 3), asynchronous gradient descent performs similar as or slightly "
    "better than synchronous gradient descent"
)
