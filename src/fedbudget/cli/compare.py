"""`fedbudget compare`."""

import json
from typing import TYPE_CHECKING

from fedbudget.cli.command import command
from fedbudget.cli.options import OutputOptions
from fedbudget.option import Count, option
from fedbudget.settings import Settings

if TYPE_CHECKING:
    from fedbudget.experiments.compare import CaseComparison


@command
def compare(
    *,
    settings: Settings,
    cases: tuple[int, ...] = option((1, 2, 3, 4), "Cases to compare in.", "most used"),
    taus: tuple[Count, ...] = option((1, 2, 3, 5, 7, 10, 20, 30, 50, 70, 100), "Fixed τ to compare with.", "most used"),
    seeds: Count = option(5, "Runs of each, with seeds 0, 1, ...", "most used"),
    output: OutputOptions,
) -> None:
    """Compare adaptive τ with fixed τ, over cases and seeds.

    The regret is what not knowing the best fixed τ costs, of what the worst one would: 0 is as good as the best, less
    is better than any. Fixed τ is always that of plain federated averaging, whatever the method of adaptive τ.

    Examples:

      fedbudget compare --cases 1,2 --taus 1,10,100 --seeds 3

      fedbudget compare --task svm-sgd-mnist --data-dir ~/data --method paper

      fedbudget compare --model softmax --budget time=15s --budget bytes=1MB --json
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from fedbudget.experiments.compare import compare as run_all

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    quiet = output.json or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        runs = bar.add_task("runs", total=None)
        found = run_all(
            settings,
            cases=cases,
            taus=taus,
            seeds=range(seeds),
            progress=lambda done, of: bar.update(runs, completed=done, total=of),
        )
    if output.json:
        print(json.dumps({"cases": [case.to_json() for case in found]}))
    else:
        _print_table(found, seeds, settings.method)


def _print_table(found: "list[CaseComparison]", seeds: int, method: str) -> None:
    from fedbudget.cli.console import console, plain_table

    print(f"loss at the end of the budget, mean of {seeds} runs; adaptive: method {method}, fixed: plain averaging")
    table = plain_table(["τ", *(f"case {case.case}" for case in found)])
    for index, each in enumerate(found[0].fixed):
        row = [f"{case.fixed[index].loss:.4f}{'*' if case.fixed[index] is case.best else ' '}" for case in found]
        table.add_row(f"{each.tau:g}", *row)
    table.add_row()
    table.add_row("adaptive", *(f"{case.adaptive.loss:.4f} " for case in found))
    table.add_row("average τ", *(f"{case.adaptive.tau:.1f} " for case in found))
    table.add_row("regret", *("" if case.regret is None else f"{case.regret:.3f} " for case in found))
    console().print(table)
    print("* the best fixed τ in that case; regret is 0 for as good as that, 1 for as bad as the worst, < 0 for better")
