"""The settings of a golden run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

How = Literal[
    "train", "interrupted", "extended", "run", "local", "serve", "killed", "flower"
]


@dataclass(frozen=True)
class Cell:
    """One golden run.

    The values of `how`:

    - `train` calls `fedbudget.train`.
    - `interrupted` ends such a run by an exception and resumes it.
    - `extended` lets it finish and resumes it with more budget.
    - `run` and `local` run the commands with these names in a subprocess.
    - `serve` starts an aggregator and three nodes with files, each in a subprocess.
    - `killed` also kills the aggregator after some rounds and resumes it.
    - `flower` is Flower's simulation.

    Args:
      name: identifies the cell in hashes.json.
      options: settings, by the argument names of `fedbudget.train`.
      own: returns options that need objects or files, given a folder.
      how: how the run is started.
      more: the budget that `extended` adds.
      same_as: a cell whose hashes must be equal.
      same_w_as: a cell whose hash of w must be equal.
      needs: packages that this cell needs beyond the core.
      measured: whether costs are measured, so their fields are not hashed.
      quick: whether `make test` runs this cell.
    """

    name: str
    options: Mapping[str, Any]
    own: Callable[[Path], dict[str, Any]] | None = None
    how: How = "train"
    more: tuple[str, ...] = ()
    same_as: str | None = None
    same_w_as: str | None = None
    needs: tuple[str, ...] = ()
    measured: bool = False
    quick: bool = False


def settings(
    model: str | None, dataset: str, partition: str | None, **more: Any
) -> dict[str, Any]:
    """Return options with a budget of six simulated seconds, unless `more` sets another."""
    given = {"model": model, "dataset": dataset, "partition": partition}
    found = {name: value for name, value in given.items() if value is not None}
    return {"budget": "time=6s", **found, **more}
