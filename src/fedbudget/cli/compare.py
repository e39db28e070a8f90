"""`fedbudget compare --rivals`: tunes, and prints a table for every way in which data is spread.

`fedbudget compare`.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedbudget.cli.options import JOBS, Given, OutputOptions, command, settings_from
from fedbudget.cli.sweep import SWEEPS, showing
from fedbudget.errors import UserError
from fedbudget.settings.option import Count, option
from fedbudget.settings.settings import Settings

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

    rivals = published_rivals(taus=taus, quick=quick)
    found = []
    folder = folder or SWEEPS / "rivals"
    try:
        for settings in tasks:
            with showing(quiet=as_json) as show:
                found.append(
                    compare_rivals(
                        settings,
                        folder=folder,
                        rivals=rivals,
                        seeds=range(seeds),
                        jobs=jobs,
                        progress=show,
                    )
                )
            if not as_json:
                _print_rivals(found[-1], ", ".join(settings.budget), seeds)
    except KeyboardInterrupt:
        print(
            f"fedbudget: interrupted; runs are kept in {folder}, and the same command goes on",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps({"comparisons": [each.to_json() for each in found]}))


def _print_rivals(found: "RivalComparison", budget: str, seeds: int) -> None:
    from fedbudget.cli.console import console, plain_table

    runs = f"mean of {seeds} runs" if seeds > 1 else "one run"
    print(f"{found.title}: loss on all training samples at the end of {budget}, {runs}")
    headings = (
        "method",
        "loss",
        "accuracy",
        "ratio",
        "runs to tune",
        "tuned in hindsight to",
    )
    table = plain_table(headings, left=("method", "tuned in hindsight to"))
    for each in (found.own, *found.others):
        ratio = found.ratio(each)
        accuracy = each.accuracy
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


if TYPE_CHECKING:
    from fedbudget.experiments.compare import CaseComparison

TAUS = (1, 2, 3, 5, 7, 10, 20, 30, 50, 70, 100)


@command
def compare(
    *,
    given: Given,
    cases: tuple[int, ...] | None = option(
        None,
        "Cases to compare in.",
        "most used",
        shown="1,2,3,4; with --rivals --partition",
    ),
    taus: tuple[Count, ...] | None = option(
        None,
        "Fixed τ to compare with.",
        "most used",
        shown=f"{','.join(map(str, TAUS))}; fewer with --rivals",
    ),
    seeds: Count = option(5, "Runs of each, with seeds 0, 1, ...", "most used"),
    rivals: bool = option(
        False, "Compare with published methods, each tuned in hindsight.", "most used"
    ),
    quick: bool = option(False, "With --rivals: coarse grids, for a first look.", "method"),
    jobs: int | None = JOBS,
    output: OutputOptions,
) -> None:
    """Compare adaptive τ with fixed τ, or with tuned rivals.

    The regret is what not knowing the best fixed τ costs, of what the worst one would: 0 is as good as the best, less
    is better than any. Fixed τ is always that of plain federated averaging, whatever the method of adaptive τ.

    With --rivals, the method with nothing tuned is compared with the paper's and with FedAvg, FedAvgM, FedAdam, FedYogi
    and SCAFFOLD, at the same budget. Local updates, step sizes, momentum, and whether the step falls at the end are
    tuned for each of them, by the final loss, which flatters them. That takes hundreds of runs, made in parallel. What
    is done stays done, until the version, the settings or the folder are others: after Ctrl-C, the same command goes
    on; when samples in a file have changed, use another --out. With --costs measured use --jobs 1.

    Examples:

      fedbudget compare --cases 1,2 --taus 1,10,100 --seeds 3

      fedbudget compare --task svm-sgd-mnist --data-dir ~/data --method paper

      fedbudget compare --model softmax --budget time=15s --budget bytes=1MB --json

      fedbudget compare --rivals --dataset homes.csv --model linear --partition dirichlet:0.5 --seeds 3

      fedbudget compare --rivals --quick --model softmax --cases 1,2 --jobs 4
    """
    settings = settings_from(given, "compare")
    if rivals:
        if cases is not None and given["partition"] is not None:
            raise UserError("give `cases` or `partition`, not both")
        tasks = (
            [settings]
            if cases is None
            else [replace(settings, partition=f"case:{case}") for case in cases]
        )
        tune_rivals(
            tasks,
            seeds=seeds,
            taus=taus,
            quick=quick,
            jobs=jobs,
            folder=output.out,
            as_json=output.json,
        )
        return
    for name in ("partition", "quick", "jobs", "out"):
        if given[name]:
            raise UserError(f"`{name}` goes with `rivals`")

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from fedbudget.experiments.compare import compare as run_all

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    quiet = output.json or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        runs = bar.add_task("runs", total=None)
        found = run_all(
            settings,
            cases=(1, 2, 3, 4) if cases is None else cases,
            taus=TAUS if taus is None else taus,
            seeds=range(seeds),
            progress=lambda done, of: bar.update(runs, completed=done, total=of),
        )
    if output.json:
        print(json.dumps({"cases": [case.to_json() for case in found]}))
    else:
        _print_table(found, seeds, settings.method)


def _print_table(found: "list[CaseComparison]", seeds: int, method: str) -> None:
    from fedbudget.cli.console import console, plain_table

    print(
        f"loss at the end of the budget, mean of {seeds} runs; adaptive: method {method}, fixed: plain averaging"
    )
    table = plain_table(["τ", *(f"case {case.case}" for case in found)])
    for index, each in enumerate(found[0].fixed):
        row = [
            f"{case.fixed[index].loss:.4f}{'*' if case.fixed[index] is case.best else ' '}"
            for case in found
        ]
        table.add_row(f"{each.tau:g}", *row)
    table.add_row()
    table.add_row("adaptive", *(f"{case.adaptive.loss:.4f} " for case in found))
    table.add_row("average τ", *(f"{case.adaptive.tau:.1f} " for case in found))
    table.add_row(
        "regret", *("" if case.regret is None else f"{case.regret:.3f} " for case in found)
    )
    console().print(table)
    print(
        "* the best fixed τ in that case; regret is 0 for as good as that, 1 for as bad as the worst, < 0 for better"
    )
