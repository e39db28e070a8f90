"""`fedbudget show`."""

import json
from importlib.util import find_spec
from pathlib import Path

from fedbudget.cli.command import command
from fedbudget.cli.options import RUN, OutputOptions
from fedbudget.option import option

_ROWS = 20


@command
def show(*, run: Path = RUN, all: bool = option(False, "Show every round."), output: OutputOptions) -> None:
    """Print a run and draw its plot.

    Examples:

      fedbudget show runs/NAME

      fedbudget show runs/NAME --json
    """
    from fedbudget import atomic_file
    from fedbudget.runs.folder import PLOT, Run

    opened = Run.open(run)
    if output.json:
        print(json.dumps(opened.summary or {"status": "unfinished", "run": str(run), "rounds": len(opened.rounds)}))
        return

    from fedbudget.cli.console import console
    from fedbudget.cli.view import LOSSES, PRIVACY, rounds_table
    from fedbudget.runs.figures import metrics_text, spread_text
    from fedbudget.runs.record import average_tau
    from fedbudget.runs.title import run_title

    out, title, limits = console(), run_title(opened.settings), opened.settings.limits().limits
    out.print(title, style="bold", highlight=False)
    records = opened.rounds
    if not all and len(records) > _ROWS:
        step = (len(records) - 1) / (_ROWS - 1)
        records = [opened.rounds[round(step * row)] for row in range(_ROWS)]
        out.print(f"{_ROWS} of {len(opened.rounds)} rounds; --all shows every one", style="dim")
    out.print(rounds_table(records, limits))
    if PRIVACY not in limits:
        out.print(LOSSES, style="dim")
    if opened.summary is None:
        out.print("the run has not finished")
    else:
        # From the records: summaries of earlier versions have another average.
        summary = opened.summary | {"average_tau": average_tau([own.effective_tau for own in opened.rounds if own.tau])}
        for name in ("loss", "accuracy", "average_tau", "aggregations", "local_updates", "stopped_by", "status"):
            if name != "loss" or PRIVACY not in limits:
                out.print(f"{name.replace('_', ' ')}: {summary[name]}", highlight=False)
        if PRIVACY in limits:
            epsilon, delta = summary["spent"][PRIVACY], summary["privacy_delta"]
            out.print(f"privacy: ε = {epsilon:.4g} of {limits[PRIVACY]:g}, at δ = {delta:g}", highlight=False)
        metrics = metrics_text(summary["accuracy"], summary.get("metrics", {}), summary.get("to_beat"))
        spread = summary.get("spread") and spread_text(
            summary["spread"], "rmse" if summary["accuracy"] is None else "accuracy"
        )
        for line in filter(None, (metrics, spread)):
            out.print(f"on test samples: {line}", highlight=False)
    if opened.rounds and find_spec("matplotlib") is not None:
        from fedbudget.runs.plot import plot_run

        atomic_file.replace(run / PLOT, plot_run(opened.rounds, limits, title=title))
        out.print(f"plot: {run / PLOT}", highlight=False)
