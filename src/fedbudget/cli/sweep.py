"""`fedbudget sweep` and `fedbudget reproduce`: many runs, with their progress."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedbudget.cli.console import decimals, print_table
from fedbudget.cli.options import JOBS, EngineOptions, Given, OutputOptions, command
from fedbudget.errors import WorkError
from fedbudget.settings.option import REQUIRED, option

if TYPE_CHECKING:
    from fedbudget.experiments.cells import Progress
    from fedbudget.experiments.reproduce import FigureResult

SWEEPS = Path("sweeps")
_MAX_ROWS = 40  # shown of a table
_SPEED_PERIOD = 600.0  # seconds; runs can be long, so the time left needs a long average


@command
def sweep(
    *,
    given: Given,
    file: Path = option(
        REQUIRED,
        "A TOML file of settings, with a table [grid] of those that vary.",
        "data",
        argument=True,
    ),
    jobs: int | None = JOBS,
    engine: EngineOptions,
    output: OutputOptions,
) -> None:
    """Make a run for every cell of a grid over settings and seeds.

    Runs are made in parallel. The file has settings, as the config.toml of a run, and a
    table of those that vary:

    \b
      task = "svm-sgd-mnist"       # settings to start from; optional
      budget = ["time=5s"]
      each = "run"                 # or "round", for one row per round
      [grid]                       # all combinations, the first key slowest
      case = [1, 2]                # short for partition = ["case:1", "case:2"]
      tau = ["adaptive", 1, 10]
      seeds = 15                   # short for seed = [0, 1, ..., 14]

    All figures are in results.parquet in the sweep's folder. Finished runs are kept: after
    Ctrl-C, or with a larger grid, the same command makes only the missing runs. With
    --engine ray, runs are made on the machines of a Ray cluster. They need fedbudget, and
    the data at the same paths. With costs = "measured", use --jobs 1, because parallel
    runs slow each other down.

    Examples:

      fedbudget sweep examples/sweep.toml

      fedbudget sweep mine.toml --out results/mine --jobs 4 --json

      fedbudget sweep mine.toml --engine ray --ray-address auto
    """
    from fedbudget.experiments.sweep import RESULTS, Sweep, means, run

    grid = Sweep.read(file, data_dir=given["data_dir"])
    folder = output.out or SWEEPS / file.stem
    done = failed = 0
    try:
        with sweep_progress(quiet=output.json) as show:

            def progress(now_done: int, total: int, now_failed: int) -> None:
                nonlocal done, failed
                done = now_done
                failed = now_failed
                show(done, total, failed)

            table = run(
                grid,
                folder,
                jobs=jobs,
                progress=progress,
                engine=engine.engine,
                ray_address=engine.ray_address,
            )
    except KeyboardInterrupt:
        text = f"{done - failed} of {len(grid.cells)} runs are done"
        raise interrupted(text) from None

    results = folder / RESULTS
    rows = means(table) if grid.each == "run" else None
    if output.json:
        counts = {"results": str(results), "runs": done, "failed": failed}
        print(json.dumps(counts if rows is None else {**counts, "means": rows}))
    else:
        if rows is not None:
            _print_means(rows)
        print(f"results: {results}, {table.num_rows} rows")
    if failed:
        first = next(error for error in table["error"].to_pylist() if error is not None)
        raise WorkError(f"{failed} of {len(grid.cells)} runs failed; the first: {first}")


@command
def reproduce(
    *,
    figures: tuple[str, ...] = option((), "Figures by name, or all.", argument=True),
    quick: bool = option(False, "Use a small grid and few runs."),
    runs: int | None = option(
        None,
        "Runs per setting.",
        shown="15, as in the paper; 2 with --quick; 1 for networks; 5 for natural",
    ),
    with_cnn: bool = option(
        False, "With all: include the networks and natural, which take hours."
    ),
    out: Path = option(Path("reproduction"), "The folder of figures and report."),
    engine: str = option(
        "in-process",
        "The engine of the runs: in-process, or network for the prototype's experiment "
        "with real nodes (figures whose name begins with instantaneous).",
    ),
    jobs: int | None = JOBS,
    given: Given,
) -> None:
    """Repeat the paper's evaluation: its figures and its claims.

    Each figure has a folder with its picture (PNG and SVG) and its runs (Parquet).
    report.md and report.html show all figures in the folder and whether the paper's claims
    hold. Finished runs are kept: after Ctrl-C, run the same command to continue.

    The figure natural is not of the paper: it compares models of natural federations, such
    as hospitals, on held-out rows. Federations without data on this machine are left out.

    Examples:

      fedbudget reproduce all --quick

      fedbudget reproduce svm-sgd nodes --runs 5 --data-dir ~/data

      fedbudget reproduce cnn-mnist cnn-cifar

      fedbudget reproduce natural --quick

      fedbudget reproduce instantaneous --engine network
    """
    if engine == "network":
        from fedbudget.settings.network import require_network

        require_network()

    from fedbudget.data.published import DatasetMissing
    from fedbudget.experiments import reproduce as reproduction

    chosen = reproduction.choose(figures, with_cnn=with_cnn, engine=engine)
    for number, figure in enumerate(chosen, start=1):
        title = f"figure {number} of {len(chosen)}: {figure.name}"
        print(title, file=sys.stderr, flush=True)
        try:
            size = reproduction.grid_size(figure, runs=runs, quick=quick)
            with sweep_progress(quiet=False) as progress:
                reproduction.make(
                    figure,
                    out,
                    size,
                    data_dir=given["data_dir"],
                    jobs=jobs,
                    progress=progress,
                )
        except DatasetMissing as error:
            if len(chosen) == 1:
                raise
            print(f"skipped: {error}", file=sys.stderr)
    results = reproduction.read_figures(out)
    _print_claims(results)
    for page in reproduction.write_report(results, out):
        print(page)


def interrupted(text: str) -> typer.Exit:
    """Print that Ctrl-C ended the command, and return the exception that ends it."""
    line = f"fedbudget: interrupted; {text}; run the same command to continue"
    print(line, file=sys.stderr)
    return typer.Exit(130)


@contextmanager
def sweep_progress(*, quiet: bool) -> "Iterator[Progress]":
    """Yield a function that shows the progress of runs on standard error.

    It draws a bar on a terminal and prints about ten lines elsewhere.

    Args:
      quiet: show nothing.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if quiet:
        yield lambda done, total, failed: None
        return
    if not console.is_terminal:
        yield _plain_lines()
        return
    columns = (
        "runs",
        BarColumn(),
        MofNCompleteColumn(),
        "{task.description}",
        TimeElapsedColumn(),
        "left:",
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, speed_estimate_period=_SPEED_PERIOD
    ) as bar:

        def show(done: int, total: int, failed: int) -> None:
            if not bar.tasks:
                # Runs of an earlier command must not count for the speed.
                bar.add_task("0 failed", total=total, completed=done)
            text = f"{failed} failed"
            bar.update(bar.tasks[0].id, completed=done, total=total, description=text)

        yield show


def _plain_lines() -> "Progress":
    """Return a function that prints one line for about every tenth of the runs."""
    tenth = -1

    def show(done: int, total: int, failed: int) -> None:
        nonlocal tenth
        if done * 10 // total > tenth:
            tenth = done * 10 // total
            line = f"{done} of {total} runs done, {failed} failed"
            print(line, file=sys.stderr, flush=True)

    return show


def _print_means(rows: list[dict[str, Any]]) -> None:
    def text(name: str, value: Any) -> str:
        return decimals(value, ".4f" if name in ("loss", "accuracy") else "")

    print("mean over seeds")
    shown = [[text(*item) for item in row.items()] for row in rows[:_MAX_ROWS]]
    print_table(rows[0], shown)
    if len(rows) > _MAX_ROWS:
        print(f"and {len(rows) - _MAX_ROWS} more")


def _print_claims(results: "list[FigureResult]") -> None:
    headings = ("holds", "claim", "measured")
    rows = [
        ("yes" if claim.holds else "NO", claim.text, claim.measured)
        for result in results
        for claim in result.claims
    ]
    print_table(headings, rows, left=headings)
