"""`fedbudget reproduce`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbudget.cli import options as o

if TYPE_CHECKING:
    from fedbudget.experiments.reproduce import FigureResult


def reproduce(
    figures: Annotated[list[str] | None, typer.Argument(help="Figures by name, or all.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small grid and few runs, for a first look.")] = False,
    runs: Annotated[
        int | None, typer.Option(help="Runs of each setting.  [default: 15, as the paper; 2 with --quick]")
    ] = None,
    with_cnn: Annotated[
        bool, typer.Option("--with-cnn", help="Let all include the networks, which take hours.")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Where figures and report go.  [default: reproduction]", show_default=False)
    ] = Path("reproduction"),
    engine: Annotated[
        str,
        typer.Option(
            help="What makes the runs: in-process, or network, which is the prototype's experiment for real (figures "
            "that begin with instantaneous).  [default: in-process]",
            show_default=False,
        ),
    ] = "in-process",
    jobs: o.Jobs = None,
    data_dir: o.DataDir = None,
) -> None:
    """Repeat the paper's evaluation: its figures and its claims.

    Each figure has a folder with its picture (PNG and SVG) and the runs behind it (Parquet); report.md and report.html
    show all figures that are there, and which of the paper's claims hold. What is done stays done: after Ctrl-C the
    same command goes on.

    Examples:

      fedbudget reproduce all --quick

      fedbudget reproduce svm-sgd nodes --runs 5 --data-dir ~/data

      fedbudget reproduce cnn-mnist --quick

      fedbudget reproduce instantaneous --engine network
    """
    if engine == "network":
        from fedbudget.cli.network import require_network

        require_network()
    from fedbudget.cli.sweep import showing
    from fedbudget.data.published.find import DatasetMissing
    from fedbudget.experiments import reproduce as work
    from fedbudget.experiments.figures.figure import GridSize
    from fedbudget.experiments.report import write_report

    chosen = work.choose(figures or [], with_cnn=with_cnn, engine=engine)
    size = GridSize(runs or (work.QUICK_RUNS if quick else work.RUNS), quick)
    for number, figure in enumerate(chosen, start=1):
        print(f"figure {number} of {len(chosen)}: {figure.name}", file=sys.stderr, flush=True)
        try:
            with showing(quiet=False) as progress:
                work.make(figure, out, size, data_dir=data_dir, jobs=jobs, progress=progress)
        except DatasetMissing as error:
            if len(chosen) == 1:
                raise
            print(f"left out: {error}", file=sys.stderr)
    made = work.read_figures(out)
    _print_claims(made)
    for page in write_report(made, out):
        print(page)


def _print_claims(made: "list[FigureResult]") -> None:
    from rich.table import Table

    from fedbudget.cli.console import console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("holds", "claim", "measured"):
        table.add_column(heading)
    for each in made:
        for claim in each.claims:
            table.add_row("yes" if claim.holds else "NO", claim.text, claim.measured)
    console().print(table, highlight=False)
