"""What a figure is: the runs behind it, how it is drawn, and which claims it bears out, the paper's or our own.

A figure is drawn and its claims are judged from the rows of its sweep alone, so that both can be made again from the
Parquet file at any time. A claim that does not hold is shown as not holding.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Picture

from fedbudget import tasks
from fedbudget.experiments import sweep
from fedbudget.experiments.figures.rows import Row, Rows
from fedbudget.experiments.sweep import Sweep
from fedbudget.setting_types import EngineName
from fedbudget.settings import Settings

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
        self, settings: Sequence[Settings], size: GridSize, folder: Path, *, jobs: int | None, progress: sweep.Progress
    ) -> Rows:
        """Makes the runs that the folder does not have yet, and writes all rows there.

        Args:
          settings: of its tasks.
          jobs: how many runs at a time; one where they measure time, and would be in each other's way.
        """
        alone = self.engine == "network"
        grid = self.sweep(settings, size)
        table = sweep.run(grid, folder, jobs=1 if alone else jobs, progress=progress, engine=self.engine)
        rows: list[Row] = table.to_pylist()
        return rows

    def made_of(self, settings: Sequence[Settings], size: GridSize, on: str) -> str:
        """How many runs, on which data, by which methods."""
        grid = self.sweep(settings, size)
        seeds, methods = len({cell.seed for cell in grid.cells}), dict.fromkeys(cell.method for cell in grid.cells)
        quick = ", a small grid for a first look" if size.quick else ""
        runs = f"{'one run' if seeds == 1 else f'mean of {seeds} runs'} of each setting{quick}"
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
        return [replace(each, method="paper", data_dir=data_dir, evaluations=1) for each in of_tasks]

    def sweep(self, settings: Sequence[Settings], size: GridSize) -> Sweep:
        """All its runs, from the settings of its tasks."""
        return joined(*(self.runs(each, size) for each in settings))


def joined(*sweeps: Sweep) -> Sweep:
    """Several sweeps as one, whose results have a column for whatever varies in any of them or between them."""
    if len(sweeps) == 1:
        return sweeps[0]
    varied = dict.fromkeys(name for sweep in sweeps for name in sweep.varied)
    between = [name for name in vars(sweeps[0].base) if len({getattr(sweep.base, name) for sweep in sweeps}) > 1]
    cells = tuple(cell for sweep in sweeps for cell in sweep.cells)
    names = [*between, *(name for name in varied if name not in between)]
    return Sweep(sweeps[0].base, tuple(names), cells, sweeps[0].each)
