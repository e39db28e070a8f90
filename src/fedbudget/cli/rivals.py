"""`fedbudget compare --rivals`: tunes, and prints a table for every way in which data is spread."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedbudget.cli.sweep import SWEEPS, showing
from fedbudget.settings import Settings

if TYPE_CHECKING:
    from fedbudget.experiments.rivals import RivalComparison


def tune_rivals(
    tasks: Sequence[Settings],
    *,
    seeds: int,
    taus: Sequence[int] | None,
    quick: bool,
    jobs: int | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Compares on every task, and prints a table as soon as it is known."""
    from fedbudget.experiments.rivals import compare_rivals, published_rivals

    rivals, found = published_rivals(taus=taus, quick=quick), []
    folder = folder or SWEEPS / "rivals"
    try:
        for settings in tasks:
            with showing(quiet=as_json) as show:
                found.append(
                    compare_rivals(settings, folder=folder, rivals=rivals, seeds=range(seeds), jobs=jobs, progress=show)
                )
            if not as_json:
                _print_table(found[-1], ", ".join(settings.budget), seeds)
    except KeyboardInterrupt:
        print(f"fedbudget: interrupted; runs are kept in {folder}, and the same command goes on", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps({"comparisons": [each.to_json() for each in found]}))


def _print_table(found: "RivalComparison", budget: str, seeds: int) -> None:
    from fedbudget.cli.console import console, plain_table

    runs = f"mean of {seeds} runs" if seeds > 1 else "one run"
    print(f"{found.title}: loss on all training samples at the end of {budget}, {runs}")
    headings = ("method", "loss", "accuracy", "ratio", "runs to tune", "tuned in hindsight to")
    table = plain_table(headings, left=("method", "tuned in hindsight to"))
    for each in (found.own, *found.others):
        ratio, accuracy = found.ratio(each), each.accuracy
        table.add_row(
            each.name,
            f"{each.loss:.4g}",
            "" if accuracy is None else f"{accuracy:.4f}",
            "" if ratio is None else f"{ratio:.3g}",
            str(each.runs),
            each.tuned_to,
        )
    console().print(table, highlight=False)
    print(f"ratio: how many times the loss of {found.own.name}; above 1 is worse")
