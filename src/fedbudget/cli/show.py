"""`fedbudget show`."""

import json as jsonlib
from typing import Annotated

import typer

from fedbudget.cli import options as o

_ROWS = 20


def show(
    run: o.RunFolder,
    every: Annotated[bool, typer.Option("--all", help="Show every round.")] = False,
    json: o.Json = False,
) -> None:
    """Print a run and draw its plot.

    Examples:

      fedbudget show runs/NAME

      fedbudget show runs/NAME --json
    """
    from fedbudget.runs.folder import PLOT, Run

    found = Run.open(run)
    if json:
        print(jsonlib.dumps(found.summary or {"status": "unfinished", "run": str(run), "rounds": len(found.rounds)}))
        return

    from rich.console import Console

    from fedbudget.cli.view import rounds_table
    from fedbudget.runs.plot import plot_run

    settings, console = found.settings, Console()
    limits = settings.limits().limits
    title = f"{settings.model} on {settings.dataset}, {settings.nodes} nodes, {settings.partition}, tau {settings.tau}"
    console.print(title, style="bold")
    records = found.rounds
    if not every and len(records) > _ROWS:
        step = (len(records) - 1) / (_ROWS - 1)
        records = [found.rounds[round(step * row)] for row in range(_ROWS)]
        console.print(f"{_ROWS} of {len(found.rounds)} rounds; --all shows every one", style="dim")
    console.print(rounds_table(records, limits))
    if found.summary is None:
        console.print("the run has not finished")
    else:
        for name in ("loss", "accuracy", "average_tau", "aggregations", "local_updates", "stopped_by", "status"):
            console.print(f"{name.replace('_', ' ')}: {found.summary[name]}", highlight=False)
    if found.rounds:
        (run / PLOT).write_bytes(plot_run(found.rounds, limits, title=title))
        console.print(f"plot: {run / PLOT}", highlight=False)
