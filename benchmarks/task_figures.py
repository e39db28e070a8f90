"""Figures of benchmarks, written as by `fedbudget reproduce`."""

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedbudget.experiments import reproduce
from fedbudget.experiments.figures.figure import Figure


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
