"""`fedbudget compare`: runs, adaptive τ with fixed τ, or with published methods."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedbudget.cli.console import console, decimals, loss_text, print_table
from fedbudget.cli.options import (
    JOBS,
    Given,
    OutputOptions,
    command,
    run_folders,
    settings_from,
)
from fedbudget.cli.sweep import SWEEPS, interrupted, sweep_progress
from fedbudget.errors import flag
from fedbudget.settings.compatibility import require_compatible
from fedbudget.settings.option import Count, option
from fedbudget.settings.settings import Settings

if TYPE_CHECKING:
    from fedbudget.experiments.compare import CaseComparison
    from fedbudget.experiments.rivals import RivalComparison

CASES = (1, 2, 3, 4)
TAUS = (1, 2, 3, 5, 7, 10, 20, 30, 50, 70, 100)


@command
def compare(
    *,
    runs: tuple[Path, ...] = option(
        (),
        "Folders of runs to compare, instead of making new ones.",
        argument=True,
        values=run_folders,
    ),
    given: Given,
    cases: tuple[int, ...] | None = option(
        None,
        "Cases to compare in.",
        "most used",
        shown="1,2,3,4; with --rivals --partition",
    ),
    taus: tuple[Count, ...] | None = option(
        None,
        "Fixed values of τ to compare with.",
        "most used",
        shown=f"{','.join(map(str, TAUS))}; fewer with --rivals",
    ),
    seeds: Count = option(5, "Runs per setting, with seeds 0, 1, ...", "most used"),
    rivals: bool = option(
        False, "Compare with published methods, each tuned in hindsight.", "most used"
    ),
    quick: bool = option(False, "With --rivals: use coarse grids.", "method"),
    jobs: int | None = JOBS,
    output: OutputOptions,
) -> None:
    """Compare runs, or adaptive τ with fixed τ, or with tuned rivals.

    With folders of runs, the command prints their figures and the settings in which they
    differ. Without, it makes new runs.

    The regret is the cost of not knowing the best fixed τ: 0 equals the best fixed τ, 1
    equals the worst, and below 0 is better than any. Runs with a fixed τ use plain
    federated averaging, whatever the method of adaptive τ.

    With --rivals, the untuned method is compared with the paper's method and with FedAvg,
    FedAvgM, FedAdam, FedYogi, SCAFFOLD, FedProx and FedNova at the same budget. Local
    updates, step size, momentum and the final decay of each rival are tuned by its final
    loss, which favours the rivals. FedExP, Prodigy, Δ-SGD and DoG need no tuning, and are
    not tuned. This takes hundreds of runs, which are made in parallel. Finished runs are
    kept: after Ctrl-C, run the same command to continue. A new version, other settings or
    another folder start again. If samples in a file have changed, use another --out. With
    --costs measured, use --jobs 1.

    Examples:

      fedbudget compare runs/first runs/second

      fedbudget compare --cases 1,2 --taus 1,10,100 --seeds 3

      fedbudget compare --task svm-sgd-mnist --data-dir ~/data --method paper

      fedbudget compare --model softmax --budget time=15s --budget bytes=1MB --json

      fedbudget compare --rivals --dataset homes.csv --model linear --seeds 3

      fedbudget compare --rivals --quick --model softmax --cases 1,2 --jobs 4
    """
    if runs:
        _compare_runs(runs, json_only=output.json)
        return
    settings = settings_from(given, "compare")
    own = {name: given[name] for name in ("partition", "quick", "jobs", "out")}
    require_compatible(settings, engine="in-process", rivals=rivals, cases=cases, **own)
    if rivals:
        tasks = [settings]
        if cases is not None:
            tasks = [replace(settings, partition=f"case:{case}") for case in cases]
        _compare_rivals(tasks, seeds, taus, quick=quick, jobs=jobs, output=output)
        return

    from fedbudget.experiments.compare import compare as compare_cases

    quiet = output.json or not sys.stderr.isatty()
    with sweep_progress(quiet=quiet) as show:
        comparisons = compare_cases(
            settings,
            cases=CASES if cases is None else cases,
            taus=TAUS if taus is None else taus,
            seeds=range(seeds),
            progress=lambda done, total: show(done, total, 0),
        )
    if output.json:
        print(json.dumps({"cases": [case.to_json() for case in comparisons]}))
    else:
        _print_cases(comparisons, seeds, settings.method)


def _compare_runs(paths: Sequence[Path], *, json_only: bool) -> None:
    """Print the figures of runs, and the settings in which they differ."""
    from fedbudget.runs.folder import Run
    from fedbudget.runs.overview import figures

    opened = [Run.open(path) for path in paths]
    shown = [figures(path) for path in paths]
    everything = [vars(run.settings) for run in opened]
    different = {
        name: [values[name] for values in everything]
        for name in everything[0]
        if any(values[name] != everything[0][name] for values in everything)
    }
    if json_only:
        runs = [{"run": str(path), **each} for path, each in zip(paths, shown, strict=True)]
        print(json.dumps({"runs": runs, "different": different}, default=str))
        return
    rows: dict[str, list[str]] = {
        "state": [each["status"] or "unfinished" for each in shown],
        "loss": [loss_text(each["loss"]) for each in shown],
        "validation loss": [
            loss_text((run.summary or {}).get("validation_loss")) for run in opened
        ],
        "accuracy": [decimals(each["accuracy"]) for each in shown],
        "rounds": [str(each["rounds"]) for each in shown],
    }
    for name in dict.fromkeys(part["name"] for each in shown for part in each["spent"]):
        amounts = [{part["name"]: part for part in each["spent"]} for each in shown]
        rows[f"{name} spent"] = [
            each[name]["text"] if name in each else "" for each in amounts
        ]
    rows["stopped by"] = [each["stopped_by"] or "" for each in shown]
    for name, values in different.items():
        rows[flag(name)] = [_setting_text(value) for value in values]
    kept = [[name, *texts] for name, texts in rows.items() if any(texts)]
    print_table(["", *(path.name for path in paths)], kept, left=("",), overflow="fold")


def _setting_text(value: object) -> str:
    if value is None:
        return "default"
    if isinstance(value, float):
        return f"{value:.6g}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _compare_rivals(
    tasks: Sequence[Settings],
    seeds: int,
    taus: Sequence[int] | None,
    *,
    quick: bool,
    jobs: int | None,
    output: OutputOptions,
) -> None:
    """Compare on every task, and print each table as soon as it is complete."""
    from fedbudget.experiments.rivals import (
        compare_rivals,
        published_rivals,
        untuned_rivals,
    )

    candidates = (*published_rivals(taus=taus, quick=quick), *untuned_rivals())
    comparisons = []
    folder: Path = output.out or SWEEPS / "rivals"
    try:
        for settings in tasks:
            with sweep_progress(quiet=output.json) as show:
                comparison = compare_rivals(
                    settings,
                    folder=folder,
                    rivals=candidates,
                    seeds=range(seeds),
                    jobs=jobs,
                    progress=show,
                )
            comparisons.append(comparison)
            if not output.json:
                _print_rivals(comparison, ", ".join(settings.budget), seeds)
    except KeyboardInterrupt:
        raise interrupted(f"finished runs are kept in {folder}") from None
    if output.json:
        print(json.dumps({"comparisons": [each.to_json() for each in comparisons]}))


def _print_rivals(comparison: "RivalComparison", budget: str, seeds: int) -> None:
    runs = f"mean of {seeds} runs" if seeds > 1 else "one run"
    console().print(
        f"{comparison.title}: loss on all training samples at the end of {budget}, {runs}"
    )
    headings = (
        "method",
        "loss",
        "accuracy",
        "ratio",
        "runs to tune",
        "tuned in hindsight to",
    )
    rows = []
    for each in (comparison.own, *comparison.others):
        ratio = comparison.ratio(each)
        row = (
            each.name,
            f"{each.loss:.4g}",
            decimals(each.accuracy),
            decimals(ratio, ".3g"),
            str(each.runs),
            each.tuned_to,
        )
        rows.append(row)
    left = ("method", "tuned in hindsight to")
    print_table(headings, rows, spare=("runs to tune",), left=left)
    console().print(
        f"ratio: loss divided by the loss of {comparison.own.name}; above 1 is worse"
    )


def _print_cases(comparisons: "list[CaseComparison]", seeds: int, method: str) -> None:
    runs = f"mean of {seeds} runs" if seeds > 1 else "one run"
    console().print(
        f"loss at the end of the budget, {runs}; "
        f"adaptive: method {method}, fixed: plain averaging"
    )
    rows = []
    for index, each in enumerate(comparisons[0].fixed):
        row = [f"{each.tau:g}"]
        for case in comparisons:
            result = case.fixed[index]
            row.append(f"{result.loss:.4f}{'*' if result is case.best else ' '}")
        rows.append(row)
    rows.append([])
    rows.append(["adaptive", *(f"{case.adaptive.loss:.4f} " for case in comparisons)])
    rows.append(["average τ", *(f"{case.adaptive.tau:.1f} " for case in comparisons)])
    regrets = ["" if case.regret is None else f"{case.regret:.3f} " for case in comparisons]
    rows.append(["regret", *regrets])
    print_table(["τ", *(f"case {case.case}" for case in comparisons)], rows)
    console().print(
        "* best fixed τ of the case; regret: 0 equals the best fixed τ, 1 the worst, "
        "below 0 is better than any"
    )
