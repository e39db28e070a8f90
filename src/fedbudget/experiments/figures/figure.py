"""What a figure of the paper is: the runs behind it, how it is drawn, and which claims of the paper it bears out.

A figure is drawn and its claims are judged from the rows of its sweep alone, so that both can be made again from the
Parquet file at any time. A claim that does not hold is shown as not holding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.figure import Figure as Picture

from fedbudget import tasks
from fedbudget.experiments.figures.rows import Rows
from fedbudget.experiments.sweep import Sweep
from fedbudget.runs.settings import Settings

CASES = (1, 2, 3, 4)
TAUS = (1, 2, 3, 5, 7, 10, 20, 30, 50, 70, 100)


@dataclass(frozen=True)
class Scope:
    """How much of a figure to make.

    Args:
      runs: of each setting, with other seeds.
      quick: a smaller grid, for a first look.
    """

    runs: int
    quick: bool = False

    def some(self, values: Sequence[Any], few: Sequence[Any]) -> Sequence[Any]:
        """All values, or the few for a first look."""
        return few if self.quick else values


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    Args:
      text: what the paper says.
      measured: the numbers that decide.
      holds: whether they bear it out.
    """

    text: str
    measured: str
    holds: bool


@dataclass(frozen=True)
class Figure:
    """A figure of the paper.

    Args:
      name: what it is called on the command line.
      title: what it shows.
      task: the task that its runs start from.
      sweep: its runs, from the task's settings.
      draw: the picture of the rows.
      claims: what the rows say of the paper's claims.
      long: whether it takes hours, and is made only when it is asked for.
    """

    name: str
    title: str
    task: str
    sweep: Callable[[Settings, Scope], Sweep]
    draw: Callable[[Rows], Picture]
    claims: Callable[[Rows], list[Claim]]
    long: bool = False

    def settings(self, data_dir: str | None) -> Settings:
        """Of all its runs; accuracy is looked at once, at the end."""
        found = Settings(**Settings.from_toml(tasks.path(self.task)))
        return replace(found, data_dir=data_dir, evaluations=1)


def joined(*sweeps: Sweep) -> Sweep:
    """Several sweeps as one, whose results have a column for whatever varies in any of them or between them."""
    varied = dict.fromkeys(name for sweep in sweeps for name in sweep.varied)
    between = [name for name in vars(sweeps[0].base) if len({getattr(sweep.base, name) for sweep in sweeps}) > 1]
    cells = tuple(cell for sweep in sweeps for cell in sweep.cells)
    names = [*between, *(name for name in varied if name not in between)]
    return Sweep(sweeps[0].base, tuple(names), cells, sweeps[0].each)
