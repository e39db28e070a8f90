"""The paper's evaluation, repeated, and what goes past it: each figure with its runs, and a report with all claims.

    OUT/NAME/results.parquet    the runs of a figure
    OUT/NAME/NAME.png, .svg     the figure
    OUT/NAME/made.json          what it was made of
    OUT/report.md, report.html  all figures in OUT, and all claims

Runs that are there already are not made again. Without the real MNIST, figures of the SVM are made of `digits`, and say
so; others are left out, with the reason. A figure of many tasks has those whose data are here.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fedbudget import atomic_file
from fedbudget.data.published.find import DatasetMissing
from fedbudget.errors import UserError
from fedbudget.experiments import sweep
from fedbudget.experiments.cells import CellStore
from fedbudget.experiments.duration import expected_seconds
from fedbudget.experiments.figures import FIGURES
from fedbudget.experiments.figures.figure import Claim, Figure, FigureTable, GridSize
from fedbudget.experiments.pool import workers
from fedbudget.experiments.table import read_rows
from fedbudget.launch.inputs import load_dataset
from fedbudget.settings import Settings

_RUNS, _QUICK_RUNS = 15, 2
_MADE = "made.json"

Expect = Callable[[int, float], None]
"""Told how many runs are to be made, and about how many seconds that will take."""


@dataclass(frozen=True)
class FigureResult:
    """A figure that was made.

    Args:
      name, title: of the figure.
      made_of: how many runs, on which data, by which method.
      claims: judged by it.
      table: its numbers, where it has a table.
      picture: the PNG.
    """

    name: str
    title: str
    made_of: str
    claims: tuple[Claim, ...]
    table: FigureTable | None
    picture: Path


def choose(names: Sequence[str], *, with_cnn: bool, engine: str = "in-process") -> list[Figure]:
    """The figures of some names, or of `all`; the first part of a name stands for all that begin with it."""
    engines = sorted({figure.engine for figure in FIGURES.values()})
    if engine not in engines:
        raise UserError(f"engine must be one of {', '.join(engines)}, not {engine!r}")
    figures = {name: figure for name, figure in FIGURES.items() if figure.engine == engine}
    if not names:
        raise UserError(f"which figures? all, or some of {', '.join(figures)}")
    for asked in names:
        if asked != "all" and not any(_is_called(name, asked) for name in figures):
            raise UserError(f"unknown figure {asked!r}; use all, or some of {', '.join(figures)}")
    return [
        figure
        for name, figure in figures.items()
        if any(_is_called(name, asked) for asked in names) or ("all" in names and (with_cnn or not figure.long))
    ]


def grid_size(figure: Figure, *, runs: int | None = None, quick: bool = False) -> GridSize:
    """How much to make of a figure: as many runs of each setting as are asked for, or as it has time for."""
    return GridSize(runs or (1 if figure.long else _QUICK_RUNS if quick else _RUNS), quick)


def _is_called(name: str, asked: str) -> bool:
    return name == asked or name.startswith(f"{asked}-")


def make(
    figure: Figure,
    out: Path,
    size: GridSize,
    *,
    data_dir: str | None = None,
    jobs: int | None = None,
    progress: sweep.Progress = lambda done, of, failed: None,
    expect: Expect = lambda runs, seconds: None,
) -> None:
    """Makes a figure's runs and its picture.

    Args:
      expect: told of a figure that takes hours, before it is made.

    Raises:
      DatasetMissing: its data are not on this machine.
    """
    settings, on = _data(figure, data_dir)
    folder = out / figure.name
    if figure.long:
        grid = figure.sweep(settings, size)
        missing = CellStore(folder, grid.each, figure.engine, grid.testbed).missing(grid.cells)
        if missing:
            expect(len(missing), expected_seconds(missing) / workers(jobs, len(missing)))
    rows = figure.make(settings, size, folder, jobs=jobs, progress=progress)
    errors = [row["error"] for row in rows if row["error"] is not None]
    if errors:
        raise RuntimeError(f"{figure.name}: {len(errors)} of its runs failed, the first with: {errors[0]}")
    made = {"of": figure.made_of(settings, size, on)}
    atomic_file.replace(folder / _MADE, (json.dumps(made) + "\n").encode())
    picture = figure.draw(rows)
    picture.suptitle(f"{figure.title}, on {on}", fontsize="medium")
    for form in ("png", "svg"):
        with atomic_file.replacing(folder / f"{figure.name}.{form}") as file:
            picture.savefig(file, format=form)


def read_figures(out: Path) -> list[FigureResult]:
    """All figures that a folder has, with their claims judged by the runs there."""
    results = []
    for figure in FIGURES.values():
        folder = out / figure.name
        if (folder / _MADE).is_file() and (folder / sweep.RESULTS).is_file():
            rows = read_rows(folder / sweep.RESULTS)
            made_of = json.loads((folder / _MADE).read_text(encoding="utf-8"))["of"]
            claims, picture = tuple(figure.claims(rows)), folder / f"{figure.name}.png"
            results.append(FigureResult(figure.name, figure.title, made_of, claims, figure.table(rows), picture))
    return results


def _data(figure: Figure, data_dir: str | None) -> tuple[list[Settings], str]:
    """The settings of a figure's tasks with data that are here, and what these are."""
    asked = figure.settings(data_dir)
    if len(asked) == 1:
        settings, on = _or_digits(asked[0])
        return [settings], on
    available = []
    for settings in asked:
        with suppress(DatasetMissing):
            load_dataset(settings)
            available.append(settings)
    return available, ", ".join(dict.fromkeys(settings.dataset for settings in available))


def _or_digits(settings: Settings) -> tuple[Settings, str]:
    """Settings with data that are here, and what these are."""
    try:
        dataset = load_dataset(settings)
    except DatasetMissing:
        if settings.model != "svm":
            raise
        # No sample of the test data, which are fewer than the paper's 1,000.
        return replace(settings, dataset="digits", test_samples=None), "digits in place of MNIST"
    return settings, f"{settings.dataset} ({dataset.note})" if dataset.note else settings.dataset
