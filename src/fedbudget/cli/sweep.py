"""`fedbudget sweep`.

`fedbudget reproduce`.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedbudget.cli.options import JOBS, EngineOptions, Given, OutputOptions, command
from fedbudget.settings.option import REQUIRED, option

if TYPE_CHECKING:
    from fedbudget.experiments.sweep import Progress

SWEEPS = Path("sweeps")
_ROWS = 40  # that are shown, at most
_PACE = 600.0  # seconds of the past from which the time left is figured; runs can be long


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
    backend: str | None = option(
        None, "Of joblib: loky or dask.", "engine", shown="loky", values=("loky", "dask")
    ),
    engine: EngineOptions,
    output: OutputOptions,
) -> None:
    """Make a run for every cell of a grid over settings and seeds.

    Runs are made in parallel. The file has settings, as the config.toml of a run, and a table of those that vary:

    \b
      task = "svm-sgd-mnist"       # settings to start from; may be left out
      budget = ["time=5s"]
      each = "run"                 # or "round", for a row of each round
      [grid]                       # all combinations, the first key slowest
      case = [1, 2]                # short for partition = ["case:1", "case:2"]
      tau = ["adaptive", 1, 10]
      seeds = 15                   # short for seed = [0, 1, ..., 14]

    All figures are in results.parquet in the sweep's folder. What is done stays done: after Ctrl-C, or when the grid
    has grown, the same command makes only the runs that are missing, here or on a cluster: with --engine ray, runs are
    made on the machines of a Ray cluster, which need fedbudget and the data where this one has them. With
    costs = "measured" use --jobs 1, or runs measure each other.

    Examples:

      fedbudget sweep examples/sweep.toml

      fedbudget sweep mine.toml --out results/mine --jobs 4 --json

      fedbudget sweep mine.toml --engine ray --ray-address auto

      DASK_SCHEDULER_ADDRESS=tcp://host:8786 fedbudget sweep mine.toml --backend dask
    """
    from fedbudget.experiments.sweep import RESULTS, Sweep, means, run

    asked = Sweep.read(file, data_dir=given["data_dir"])
    folder = output.out or SWEEPS / file.stem
    done = failed = 0
    try:
        with showing(quiet=output.json) as show:

            def progress(now_done: int, of: int, now_failed: int) -> None:
                nonlocal done, failed
                done = now_done
                failed = now_failed
                show(done, of, failed)

            found = run(
                asked,
                folder,
                jobs=jobs,
                backend=backend,
                progress=progress,
                engine=engine.engine,
                ray_address=engine.ray_address,
            )
    except KeyboardInterrupt:
        kept = f"{done - failed} of {len(asked.cells)} runs are done"
        print(
            f"fedbudget: interrupted; {kept}, and the same command goes on from there",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    rows = means(found) if asked.each == "run" else None
    if output.json:
        summary = {} if rows is None else {"means": rows}
        print(
            json.dumps(
                {
                    "results": str(folder / RESULTS),
                    "runs": done,
                    "failed": failed,
                    **summary,
                }
            )
        )
    else:
        if rows is not None:
            _print_means(rows)
        print(f"results: {folder / RESULTS}, {found.num_rows} rows")
    if failed:
        first = next(error for error in found["error"].to_pylist() if error is not None)
        print(
            f"fedbudget: {failed} of {len(asked.cells)} runs failed; the first: {first}",
            file=sys.stderr,
        )
        raise typer.Exit(1)


@contextmanager
def showing(*, quiet: bool) -> "Iterator[Progress]":
    """Gives what shows how far the sweep is: a bar on a terminal, a line now and then elsewhere, nothing when quiet."""
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
        yield lambda done, of, failed: None
        return
    if not console.is_terminal:
        yield _plain_lines()
        return
    elapsed = TimeElapsedColumn()
    left = TimeRemainingColumn()
    columns = (
        "runs",
        BarColumn(),
        MofNCompleteColumn(),
        "{task.description}",
        elapsed,
        "left:",
        left,
    )
    with Progress(
        *columns, console=console, transient=True, speed_estimate_period=_PACE
    ) as bar:

        def show(done: int, of: int, failed: int) -> None:
            if not bar.tasks:
                bar.add_task(
                    "0 failed", total=of, completed=done
                )  # what was done before tells nothing about the pace
            bar.update(
                bar.tasks[0].id, completed=done, total=of, description=f"{failed} failed"
            )

        yield show


def _plain_lines() -> "Progress":
    """A line for about every tenth of the runs."""
    tenth = -1

    def show(done: int, of: int, failed: int) -> None:
        nonlocal tenth
        if done * 10 // of > tenth:
            tenth = done * 10 // of
            print(f"{done} of {of} runs done, {failed} failed", file=sys.stderr, flush=True)

    return show


def _print_means(rows: list[dict[str, Any]]) -> None:
    from fedbudget.cli.console import console, plain_table

    print("mean over seeds")
    table = plain_table(rows[0])
    for row in rows[:_ROWS]:
        table.add_row(
            *("" if value is None else _text(name, value) for name, value in row.items())
        )
    console().print(table, highlight=False)
    if len(rows) > _ROWS:
        print(f"and {len(rows) - _ROWS} more")


def _text(name: str, value: Any) -> str:
    return f"{value:.4f}" if name in ("loss", "accuracy") else str(value)


if TYPE_CHECKING:
    from fedbudget.experiments.reproduce import FigureResult


@command
def reproduce(
    *,
    figures: tuple[str, ...] = option((), "Figures by name, or all.", argument=True),
    quick: bool = option(False, "A small grid and few runs, for a first look."),
    runs: int | None = option(
        None,
        "Runs of each setting.",
        shown="15, as the paper; 2 with --quick; 1 of networks",
    ),
    with_cnn: bool = option(
        False, "Let all include the networks and the tuned rivals, which take hours."
    ),
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
        from fedbudget.settings.network import require_network

        require_network()
    from fedbudget.data.published import DatasetMissing
    from fedbudget.experiments import reproduce as work
    from fedbudget.experiments.reproduce import write_report

    chosen = work.choose(figures, with_cnn=with_cnn, engine=engine)
    for number, figure in enumerate(chosen, start=1):
        print(
            f"figure {number} of {len(chosen)}: {figure.name}", file=sys.stderr, flush=True
        )
        try:
            size = work.grid_size(figure, runs=runs, quick=quick)
            with showing(quiet=False) as progress:
                work.make(
                    figure,
                    out,
                    size,
                    data_dir=given["data_dir"],
                    jobs=jobs,
                    progress=progress,
                    expect=_print_expected,
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
    length = (
        f"{seconds / 3600:.1f} hours"
        if seconds >= 2 * 3600
        else f"{max(1, round(seconds / 60))} minutes"
    )
    print(
        f"{runs} runs to make, which will take about {length}", file=sys.stderr, flush=True
    )


def _print_claims(made: "list[FigureResult]") -> None:
    from fedbudget.cli.console import console, plain_table

    headings = ("holds", "claim", "measured")
    table = plain_table(headings, left=headings)
    for each in made:
        for claim in each.claims:
            table.add_row("yes" if claim.holds else "NO", claim.text, claim.measured)
    console().print(table, highlight=False)
