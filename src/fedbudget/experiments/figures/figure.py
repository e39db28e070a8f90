"""What a figure is, and the parts that all figures share.

A figure has runs (a sweep), a picture and claims. Picture and claims are computed from the
rows of the sweep alone, so both can be made again from the Parquet file. A claim that does
not hold is reported as such. A claim of the paper is quoted word for word.

A case has the same colour, marker and line style in every figure. No figure relies on
colour alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from fedbudget import tasks
from fedbudget.experiments import sweep
from fedbudget.experiments.cells import Progress
from fedbudget.experiments.sweep import Sweep
from fedbudget.runs.plot import BLUE, GREEN, GREY, PURPLE, VERMILION
from fedbudget.settings.settings import Settings
from fedbudget.settings.types import EngineName

CASES = (1, 2, 3, 4)
TAUS = (1, 2, 3, 5, 7, 10, 20, 30, 50, 70, 100)
FEW_TAUS = (1, 3, 10, 30, 100)

COLOURS = {1: BLUE, 2: VERMILION, 3: GREEN, 4: PURPLE}
MARKERS = {1: "o", 2: "s", 3: "^", 4: "D"}
LINES = {1: "-", 2: "--", 3: "-.", 4: ":"}
BASELINE = GREY
TAU = "average τ*, weighted by updates"

Row = dict[str, Any]
Rows = Sequence[Row]
Points = tuple[Sequence[float], Sequence[float]]
"""The x and y of a line."""
Table = Sequence[tuple[str, ...]]
"""The numbers of a figure as text, the head first."""
CaseLines = Callable[[int, str], Mapping[str, Points]]
"""The lines of a case and a column of results, by label."""


@dataclass(frozen=True)
class GridSize:
    """The size of a figure's grid.

    Args:
      runs: runs of each setting, with different seeds.
      quick: use a small grid.
    """

    runs: int
    quick: bool = False

    def choose(self, values: Sequence[Any], few: Sequence[Any]) -> Sequence[Any]:
        """Return `few` for a small grid, else `values`."""
        return few if self.quick else values


@dataclass(frozen=True)
class Claim:
    """A claim of the paper or of this project.

    Args:
      text: the claim.
      measured: the numbers that decide it.
      holds: whether the numbers support it.
      quote: the paper's words; empty for a claim of this project.
    """

    text: str
    measured: str
    holds: bool
    quote: str = ""


@dataclass(frozen=True)
class Figure(ABC):
    """A figure of the paper, or an additional one.

    Args:
      name: the name on the command line.
      title: the subject.
      tasks: the tasks of its runs; of several, those with data on this machine.
      long: whether it takes hours; `all` leaves it out.
      engine: the engine of its runs.
    """

    name: str
    title: str
    tasks: tuple[str, ...]
    long: bool = field(default=False, kw_only=True)
    engine: EngineName = field(default="in-process", kw_only=True)

    @abstractmethod
    def runs(self, base: Settings, size: GridSize) -> Sweep:
        """Return the runs of one task with these settings."""

    @abstractmethod
    def draw(self, rows: Rows) -> Picture:
        """Draw the rows."""

    @abstractmethod
    def claims(self, rows: Rows) -> list[Claim]:
        """Evaluate the claims on the rows."""

    def table(self, rows: Rows) -> Table | None:
        """Return the numbers as a table, if the figure has one."""
        return None

    def make(
        self,
        settings: Sequence[Settings],
        size: GridSize,
        folder: Path,
        *,
        jobs: int | None,
        progress: Progress,
    ) -> Rows:
        """Make the runs that are missing in the folder, and write all rows there.

        Args:
          settings: of the tasks.
          jobs: runs in parallel. Runs over a network measure time: they use one job.
        """
        table = sweep.run(
            self.sweep(settings, size),
            folder,
            jobs=1 if self.engine == "network" else jobs,
            progress=progress,
            engine=self.engine,
        )
        rows: Rows = table.to_pylist()
        return rows

    def default_runs(self, *, quick: bool) -> int:
        """Return the number of runs of each setting."""
        if self.long:
            return 1
        return 2 if quick else 15

    def made_of(self, settings: Sequence[Settings], size: GridSize, on: str) -> str:
        """Describe the number of runs, the data and the methods."""
        cells = self.sweep(settings, size).cells
        methods = list(dict.fromkeys(cell.method for cell in cells))
        small = ", a small grid" if size.quick else ""
        plural = "s" if len(methods) > 1 else ""
        runs = runs_text(len({cell.seed for cell in cells}))
        return f"{runs} of each setting{small}, on {on}, method{plural} {listed(methods)}"

    def claim(self, text: str, measured: str, holds: bool, quote: str = "") -> Claim:
        """Return a claim about the only task of the figure."""
        return Claim(f"{self.title}: {text}", measured, holds, quote)

    def settings(self, data_dir: str | None) -> list[Settings]:
        """Return the settings of each task, with the paper's method and one evaluation."""
        common = {"method": "paper", "data_dir": data_dir, "evaluations": 1}
        return [
            Settings(**{**Settings.from_toml(tasks.path(task)), **common})
            for task in self.tasks
        ]

    def sweep(self, settings: Sequence[Settings], size: GridSize) -> Sweep:
        """Return all runs of tasks with these settings."""
        return joined(*(self.runs(each, size) for each in settings))

    @property
    def whole_shards(self) -> bool:
        """Whether a local update uses the whole shard. Then it takes longer in Case 3."""
        return self.settings(None)[0].batch_size == "full"


def joined(*sweeps: Sweep) -> Sweep:
    """Join sweeps; the results have a column for each setting that differs anywhere."""
    first = sweeps[0]
    between = [
        name
        for name in vars(first.base)
        if len({getattr(sweep.base, name) for sweep in sweeps}) > 1
    ]
    varied = dict.fromkeys([*between, *(name for each in sweeps for name in each.varied)])
    cells = tuple(cell for sweep in sweeps for cell in sweep.cells)
    return replace(first, varied=tuple(varied), cells=cells)


def where(rows: Rows, **values: Any) -> list[Row]:
    """Return the rows with these values."""
    return [row for row in rows if values.items() <= row.items()]


def distinct(rows: Rows, name: str) -> list[Any]:
    """Return the values of a column, each once, in the order of the rows."""
    return list(dict.fromkeys(row[name] for row in rows if row[name] is not None))


def grouped(rows: Rows, name: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Return the rows by name, in the order of the rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return groups


def mean(rows: Rows, name: str) -> float:
    """Return the mean of a column without its missing values; NaN if there are none."""
    values = [row[name] for row in rows if row[name] is not None]
    return float(np.mean(values)) if values else float("nan")


def means(rows: Rows, over: str, values: Iterable[Any], name: str) -> list[float]:
    """Return the mean of a column for each value of another column."""
    return [mean(where(rows, **{over: value}), name) for value in values]


def by_fixed_tau(rows: Rows, case: int, name: str) -> dict[str, float]:
    """Return the mean of a column for each fixed τ, if finite."""
    paper = where(rows, method="paper", case=case)
    taus = [tau for tau in distinct(paper, "tau") if tau != "adaptive"]
    values = zip(taus, means(paper, "tau", taus, name), strict=True)
    return {tau: value for tau, value in values if np.isfinite(value)}


class CaseLosses:
    """Losses of one task in one case: of fixed τ, and of the paper's method.

    Args:
      name: the column. An accuracy counts as a negative loss.
    """

    def __init__(self, rows: Rows, case: int, name: str = "loss") -> None:
        sign = -1 if name == "accuracy" else 1
        fixed = by_fixed_tau(rows, case, name)
        losses = {tau: sign * value for tau, value in fixed.items()}
        adaptive = where(rows, case=case, tau="adaptive", method="paper")
        self.case = case
        self.best_tau = min(losses, key=losses.__getitem__)
        self.best = losses[self.best_tau]
        self.worst = max(losses.values())
        self.paper = sign * mean(adaptive, name)

    def regret(self, loss: float) -> float:
        """Return the regret: 0 equals the best fixed τ, 1 equals the worst."""
        spread = self.worst - self.best
        return (loss - self.best) / spread if spread > 0 else 0.0


def case_losses(rows: Rows, name: str = "loss") -> list[CaseLosses]:
    """Return the losses of one task in each case."""
    return [CaseLosses(rows, case, name) for case in CASES]


def listed(values: Iterable[Any], form: str = "") -> str:
    """Join formatted values by commas.

    >>> listed([1, 0.5], ".2f")
    '1.00, 0.50'
    """
    return ", ".join(f"{value:{form}}" for value in values)


def in_cases(values: Iterable[Any], form: str = "") -> str:
    """Format one value per case.

    >>> in_cases([1, 2, 3, 4])
    '1, 2, 3, 4 in Cases 1-4'
    """
    return f"{listed(values, form)} in Cases 1-4"


def per_case(values: Mapping[int, Any], form: str = "") -> str:
    """Format values of some cases.

    >>> per_case({2: 0.5, 4: 1}, ".1f")
    '0.5 in Case 2, 1.0 in Case 4'
    """
    return ", ".join(f"{value:{form}} in Case {case}" for case, value in values.items())


def runs_text(runs: int) -> str:
    return "one run" if runs == 1 else f"mean of {runs} runs"


def picture(width: float, height: float) -> Picture:
    """Return an empty picture of this size in inches."""
    return Picture(figsize=(width, height), layout="constrained", dpi=120)


def draw_tasks(
    by_task: Mapping[str, Rows], panel: Callable[[Axes, Rows], None], columns: int = 4
) -> Picture:
    """Draw a panel for each task."""
    columns = min(columns, len(by_task))
    lines = -(-len(by_task) // columns)
    drawn = picture(3.3 * columns + 0.6, 3.1 * lines + 0.4)
    axes = drawn.subplots(lines, columns, squeeze=False).ravel()
    for axis in axes[len(by_task) :]:
        axis.remove()
    for axis, (task, rows) in zip(axes, by_task.items(), strict=False):
        axis.set_title(task, fontsize="medium")
        panel(axis, rows)
    return drawn


def draw_cases(
    axes: Iterable[Iterable[Axes]],
    x_label: str,
    y_labels: Mapping[str, str],
    lines: CaseLines,
    *,
    markers: bool = True,
) -> None:
    """Draw a panel for each column of results and each case, with two lines each.

    Args:
      axes: of each column of results, the axes of the cases.
      y_labels: of each column of results.
      lines: two lines per panel; the first is the baseline.
    """
    width = 1.5 if markers else 1
    for line, (name, y_label) in zip(axes, y_labels.items(), strict=True):
        top = name == next(iter(y_labels))
        for axis, case in zip(line, CASES, strict=True):
            styles = (("x", "--", BASELINE), (MARKERS[case], "-", COLOURS[case]))
            pair = zip(lines(case, name).items(), styles, strict=True)
            for (label, points), (marker, dash, colour) in pair:
                (drawn,) = axis.plot(
                    *points, dash, color=colour, label=label, linewidth=width
                )
                if markers:
                    drawn.set(marker=marker, markersize=4)
            finish(axis, x_label, y_label if case == 1 else "", legend=top)
            if top:
                axis.set_title(f"Case {case}", fontsize="medium")


def case_line(
    axis: Axes, case: int, x: Sequence[float], y: Sequence[float], **changed: Any
) -> None:
    """Draw a line in the style of its case, with some changes."""
    style = {**case_style(case), **changed}
    axis.plot(x, y, linestyle=LINES[case], label=f"Case {case}", **style)


def case_style(case: int) -> dict[str, Any]:
    return {"color": COLOURS[case], "marker": MARKERS[case], "markersize": 4}


def log_scale(axis: Axes, ticks: Sequence[float]) -> None:
    """Make the x axis logarithmic, with these ticks."""
    axis.set_xscale("log")
    axis.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)


def finish(axis: Axes, x: str, y: str, *, legend: bool = False) -> None:
    """Add labels, grid and legend."""
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.25)
    if legend:
        axis.legend(fontsize="small")
