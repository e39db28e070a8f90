"""`fedbudget compare`."""

import json as jsonlib
from typing import TYPE_CHECKING, Annotated

import typer

from fedbudget.cli import options as o

if TYPE_CHECKING:
    from fedbudget.experiments.compare import CaseComparison


def compare(
    task: o.Task = None,
    model: o.Model = None,
    dataset: o.Dataset = None,
    data_dir: o.DataDir = None,
    nodes: o.Nodes = None,
    cases: Annotated[str, typer.Option(help="Cases to compare in.")] = "1,2,3,4",
    taus: Annotated[str, typer.Option(help="Fixed τ to compare with.")] = "1,2,3,5,7,10,20,30,50,70,100",
    seeds: Annotated[int, typer.Option(help="Runs of each, with seeds 0, 1, ...")] = 5,
    method: o.Method = None,
    drift_correction: o.DriftCorrection = None,
    delta: o.Delta = None,
    budget: o.Budget = None,
    costs: o.Costs = None,
    aggregation_factor: o.AggregationFactor = None,
    participation: o.Participation = None,
    batch_size: o.BatchSize = None,
    step_size: o.StepSize = None,
    phi: o.Phi = None,
    gamma: o.Gamma = None,
    tau_max: o.TauMax = None,
    target: o.Target = None,
    test_share: o.TestShare = None,
    train_samples: o.TrainSamples = None,
    test_samples: o.TestSamples = None,
    clusters: o.Clusters = None,
    device: o.Device = None,
    watts: o.Watts = None,
    joules_per_byte: o.JoulesPerByte = None,
    price_per_hour: o.PricePerHour = None,
    price_per_gigabyte: o.PricePerGigabyte = None,
    config: o.Config = None,
    json: o.Json = False,
) -> None:
    """Compare adaptive τ with fixed τ, over cases and seeds.

    The regret is what not knowing the best fixed τ costs, of what the worst one would: 0 is as good as the best, less
    is better than any. Fixed τ is always that of plain federated averaging, whatever the method of adaptive τ.

    Examples:

      fedbudget compare --cases 1,2 --taus 1,10,100 --seeds 3

      fedbudget compare --task svm-sgd-mnist --data-dir ~/data --method paper

      fedbudget compare --model softmax --budget time=15s --budget bytes=1MB --json
    """
    settings = o.settings_from(locals())
    chosen_cases, chosen_taus = o.whole_numbers("cases", cases), o.whole_numbers("taus", taus)

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from fedbudget.experiments.compare import compare as run_all

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    quiet = json or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        runs = bar.add_task("runs", total=None)
        found = run_all(
            settings,
            cases=chosen_cases,
            taus=chosen_taus,
            seeds=range(seeds),
            progress=lambda done, of: bar.update(runs, completed=done, total=of),
        )
    if json:
        print(jsonlib.dumps({"cases": [case.to_json() for case in found]}))
    else:
        _print_table(found, seeds, settings.method)


def _print_table(found: "list[CaseComparison]", seeds: int, method: str) -> None:
    from rich.table import Table

    from fedbudget.cli.console import console

    print(f"loss at the end of the budget, mean of {seeds} runs; adaptive: method {method}, fixed: plain averaging")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("τ", justify="right")
    for case in found:
        table.add_column(f"case {case.case}", justify="right")
    for index, each in enumerate(found[0].fixed):
        row = [f"{case.fixed[index].loss:.4f}{'*' if case.fixed[index] is case.best else ' '}" for case in found]
        table.add_row(f"{each.tau:g}", *row)
    table.add_row()
    table.add_row("adaptive", *(f"{case.adaptive.loss:.4f} " for case in found))
    table.add_row("average τ", *(f"{case.adaptive.tau:.1f} " for case in found))
    table.add_row("regret", *("" if case.regret is None else f"{case.regret:.3f} " for case in found))
    console().print(table)
    print("* the best fixed τ in that case; regret is 0 for as good as that, 1 for as bad as the worst, < 0 for better")
