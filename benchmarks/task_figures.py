"""Figures with a panel for each of many tasks, written as by `fedbudget reproduce`."""

from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from fedbudget.experiments import reproduce
from fedbudget.experiments.figures.figure import Figure, Row, Rows, picture


def make(figures: Mapping[str, Figure], name: str, arguments: Sequence[str]) -> None:
    """Make figures and their report.

    Args:
      figures: by name.
      name: of the benchmark.
      arguments: of its command line.
    """
    parser = ArgumentParser(prog=f"python -m benchmarks {name}")
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=", ".join(figures))
    parser.add_argument("--runs", type=int, help="of each setting")
    parser.add_argument("--quick", action="store_true", help="use a small grid")
    parser.add_argument("--data-dir", help="folder of datasets")
    parser.add_argument("--jobs", type=int, help="runs in parallel")
    parser.add_argument("--out", type=Path, default=Path("reproduction"))
    asked = parser.parse_args(arguments)
    if unknown := set(asked.figures) - figures.keys():
        parser.error(f"unknown figure {min(unknown)}; known are {', '.join(figures)}")
    for each in asked.figures or figures:
        figure = figures[each]
        size = reproduce.grid_size(figure, runs=asked.runs, quick=asked.quick)
        reproduce.make(figure, asked.out, size, data_dir=asked.data_dir, jobs=asked.jobs)
    results = reproduce.read_figures(asked.out, figures.values())
    for page in reproduce.write_report(results, asked.out):
        print(page)


def grouped(rows: Rows, name: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Return the rows by name, in the order of the rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return groups


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
