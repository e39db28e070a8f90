"""`fedbudget reproduce`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fedbudget.cli.command import command
from fedbudget.cli.options import JOBS, Given
from fedbudget.option import option

if TYPE_CHECKING:
    from fedbudget.experiments.reproduce import FigureResult


@command
def reproduce(
    *,
    figures: tuple[str, ...] = option((), "Figures by name, or all.", argument=True),
    quick: bool = option(False, "A small grid and few runs, for a first look."),
    runs: int | None = option(None, "Runs of each setting.", shown="15, as the paper; 2 with --quick; 1 of networks"),
    with_cnn: bool = option(False, "Let all include the networks and the tuned rivals, which take hours."),
    out: Path = option(Path("reproduction"), "Where figures and report go."),
    engine: str = option(
        "in-process",
        "What makes the runs: in-process, or network, which is the prototype's experiment for real (figures that begin "
        "with instantaneous).",
    ),
    jobs: int | None = JOBS,
    given: Given,
) -> None:
    """Repeat the paper's evaluation: its figures and its claims.

    Each figure has a folder with its picture (PNG and SVG) and the runs behind it (Parquet); report.md and report.html
    show all figures that are there, and which of the paper's claims hold. What is done stays done: after Ctrl-C the
    same command goes on.

    Examples:

      fedbudget reproduce all --quick

      fedbudget reproduce svm-sgd nodes --runs 5 --data-dir ~/data

      fedbudget reproduce cnn-mnist cnn-cifar

      fedbudget reproduce rivals --quick

      fedbudget reproduce instantaneous --engine network
    """
    if engine == "network":
        from fedbudget.launch.options import require_network

        require_network()
    from fedbudget.cli.sweep import showing
    from fedbudget.data.published.find import DatasetMissing
    from fedbudget.experiments import reproduce as work
    from fedbudget.experiments.report import write_report

    chosen = work.choose(figures, with_cnn=with_cnn, engine=engine)
    for number, figure in enumerate(chosen, start=1):
        print(f"figure {number} of {len(chosen)}: {figure.name}", file=sys.stderr, flush=True)
        try:
            size = work.grid_size(figure, runs=runs, quick=quick)
            with showing(quiet=False) as progress:
                work.make(
                    figure, out, size, data_dir=given["data_dir"], jobs=jobs, progress=progress, expect=_print_expected
                )
        except DatasetMissing as error:
            if len(chosen) == 1:
                raise
            print(f"left out: {error}", file=sys.stderr)
    made = work.read_figures(out)
    _print_claims(made)
    for page in write_report(made, out):
        print(page)


def _print_expected(runs: int, seconds: float) -> None:
    length = f"{seconds / 3600:.1f} hours" if seconds >= 2 * 3600 else f"{max(1, round(seconds / 60))} minutes"
    print(f"{runs} runs to make, which will take about {length}", file=sys.stderr, flush=True)


def _print_claims(made: "list[FigureResult]") -> None:
    from fedbudget.cli.console import console, plain_table

    headings = ("holds", "claim", "measured")
    table = plain_table(headings, left=headings)
    for each in made:
        for claim in each.claims:
            table.add_row("yes" if claim.holds else "NO", claim.text, claim.measured)
    console().print(table, highlight=False)
