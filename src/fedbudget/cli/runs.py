"""`fedbudget runs`: list runs, and remove them.

`fedbudget show`.

`fedbudget report`.

`fedbudget explain`.
"""

import json
import math
import sys
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import typer
import typer.core

from fedbudget.cli.options import RUN, OutputOptions, command, run_folders
from fedbudget.errors import UserError
from fedbudget.settings.option import REQUIRED, option

_COLUMNS = ("run", "state", "what", "loss", "accuracy", "spent", "stopped by", "began")


class _ListByDefault(typer.core.TyperGroup):
    """`fedbudget runs PATHS` is short for `fedbudget runs list PATHS`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {*self.commands, "--help"}
        return super().parse_args(ctx, args if args and args[0] in own else ["list", *args])


app = typer.Typer(
    cls=_ListByDefault,
    help="List runs, the newest first, or remove some. Without a command, runs are listed.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command("list")
@command
def list_runs(
    *,
    paths: tuple[Path, ...] = option(
        (),
        "Folders with runs in them, or of runs.",
        argument=True,
        shown="runs",
        values=run_folders,
    ),
    output: OutputOptions,
) -> None:
    """List runs, the newest first: whether each goes on, loss, accuracy, what was spent, and what stopped it.

    A run that is broken off was killed, or lost its power. One whose nodes are elsewhere can go on: fedbudget serve
    --resume.

    Examples:

      fedbudget runs

      fedbudget runs sweeps/mine /mnt/runs/20260101-120000-svm-digits --json
    """
    from fedbudget.runs.overview import RUNS, find_runs, overview

    if not paths and not RUNS.is_dir():
        found = []
    else:
        found = [
            {"run": str(path), **overview(path)} for path in find_runs(paths or (RUNS,))
        ]
    if output.json:
        print(json.dumps({"runs": found}))
        return
    if not found:
        print(f"no runs in {', '.join(map(str, paths or (RUNS,)))}")
        return

    from fedbudget.cli.console import console, plain_table

    table = plain_table(
        _COLUMNS,
        left=("run", "state", "what", "spent", "stopped by", "began"),
        overflow="fold",
    )
    for each in found:
        table.add_row(*_cells(each))
    console().print(table, highlight=False)


@app.command()
@command
def remove(
    *,
    names: tuple[str, ...] = option(
        REQUIRED, "Runs in runs/, or folders of runs.", argument=True, values=run_folders
    ),
    yes: bool = option(False, "Do not ask."),
    output: OutputOptions,
) -> None:
    """Remove runs from disk, for good.

    Only the files that a run writes are removed, and its folder if nothing else is in it. A run that is being made is
    refused, and then none is removed.

    Examples:

      fedbudget runs remove 20260101-120000-svm-digits

      fedbudget runs remove runs/first runs/second --yes
    """
    from fedbudget.runs.overview import remove as remove_run
    from fedbudget.runs.overview import require_removable

    paths = list(dict.fromkeys(map(_path, names)))
    for path in paths:
        require_removable(path)
    if not yes:
        _ask(paths)
    gone = {str(path): remove_run(path) for path in paths}
    if output.json:
        print(json.dumps({"removed": list(gone)}))
        return
    for name, whole in gone.items():
        print(
            f"{name} is removed"
            + ("" if whole else "; its folder has other files, and stays")
        )


def _path(name: str) -> Path:
    """A folder as it is written, or the run of this name in runs/."""
    from fedbudget.runs.overview import RUNS

    path = Path(name)
    return (
        RUNS / name
        if len(path.parts) == 1 and not path.exists() and (RUNS / name).exists()
        else path
    )


def _ask(paths: list[Path]) -> None:
    if not sys.stdin.isatty():
        raise UserError("nobody can be asked whether to remove; say so with `yes`")
    print("\n".join(map(str, paths)))
    if (
        input(
            f"Remove {'this run' if len(paths) == 1 else f'these {len(paths)} runs'} for good? [y/N] "
        )
        != "y"
    ):
        raise UserError("nothing is removed")


def _cells(run: dict[str, Any]) -> tuple[str, ...]:
    """A row of the list."""
    if run["state"] == "unreadable":
        return run["run"], run["state"], run["title"], *("" for _ in _COLUMNS[3:])
    loss, accuracy = (
        ("" if run[name] is None else f"{run[name]:.4f}") for name in ("loss", "accuracy")
    )
    spent = ", ".join(f"{each['text']} ({each['share']:.0%})" for each in run["spent"])
    began = f"{datetime.fromtimestamp(run['began']):%Y-%m-%d %H:%M}"
    return (
        run["run"],
        run["state"],
        run["title"],
        loss,
        accuracy,
        spent,
        run["stopped_by"] or "",
        began,
    )


_ROWS = 20


@command
def show(
    *,
    run: Path = RUN,
    all: bool = option(False, "Show every round."),
    output: OutputOptions,
) -> None:
    """Print a run and draw its plot.

    Examples:

      fedbudget show runs/NAME

      fedbudget show runs/NAME --json
    """
    from fedbudget import durable_files
    from fedbudget.runs.folder import PLOT, Run

    opened = Run.open(run)
    if output.json:
        print(
            json.dumps(
                opened.summary
                or {"status": "unfinished", "run": str(run), "rounds": len(opened.rounds)}
            )
        )
        return

    from fedbudget.cli.console import console
    from fedbudget.cli.view import LOSSES, PRIVACY, rounds_table
    from fedbudget.runs.record import average_tau
    from fedbudget.runs.text import metrics_text, run_title, spread_text

    out = console()
    title = run_title(opened.settings)
    limits = opened.settings.limits().limits
    out.print(title, style="bold", highlight=False)
    records = opened.rounds
    if not all and len(records) > _ROWS:
        step = (len(records) - 1) / (_ROWS - 1)
        records = [opened.rounds[round(step * row)] for row in range(_ROWS)]
        out.print(
            f"{_ROWS} of {len(opened.rounds)} rounds; --all shows every one", style="dim"
        )
    out.print(rounds_table(records, limits))
    if PRIVACY not in limits:
        out.print(LOSSES, style="dim")
    if opened.summary is None:
        out.print("the run has not finished")
    else:
        # From the records: summaries of earlier versions have another average.
        summary = opened.summary | {
            "average_tau": average_tau(
                [own.effective_tau for own in opened.rounds if own.tau]
            )
        }
        for name in (
            "loss",
            "accuracy",
            "average_tau",
            "aggregations",
            "local_updates",
            "stopped_by",
            "status",
        ):
            if name != "loss" or PRIVACY not in limits:
                out.print(f"{name.replace('_', ' ')}: {summary[name]}", highlight=False)
        if PRIVACY in limits:
            epsilon = summary["spent"][PRIVACY]
            delta = summary["privacy_delta"]
            out.print(
                f"privacy: ε = {epsilon:.4g} of {limits[PRIVACY]:g}, at δ = {delta:g}",
                highlight=False,
            )
        metrics = metrics_text(
            summary["accuracy"], summary.get("metrics", {}), summary.get("to_beat")
        )
        spread = summary.get("spread") and spread_text(
            summary["spread"], "rmse" if summary["accuracy"] is None else "accuracy"
        )
        for line in filter(None, (metrics, spread)):
            out.print(f"on test samples: {line}", highlight=False)
    if opened.rounds and find_spec("matplotlib") is not None:
        from fedbudget.runs.plot import plot_run

        durable_files.replace(run / PLOT, plot_run(opened.rounds, limits, title=title))
        out.print(f"plot: {run / PLOT}", highlight=False)


@command
def report(
    *,
    run: tuple[Path, ...] = option(
        REQUIRED, "Folders of runs.", argument=True, values=run_folders
    ),
    out: Path = option(Path("report.html"), "The file to write."),
) -> None:
    """Write runs into one HTML file that opens anywhere.

    It has charts and words, and needs no network.

    Examples:

      fedbudget report runs/NAME

      fedbudget report runs/* --out comparison.html
    """
    from fedbudget import durable_files
    from fedbudget.dashboard.report import report as html_of
    from fedbudget.dashboard.run_reader import RunReader
    from fedbudget.errors import UserError
    from fedbudget.runs.folder import require_run

    for path in run:
        require_run(path)
    text = html_of([RunReader(path.resolve()).read() for path in run])
    try:
        durable_files.replace(out, text.encode())
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}") from None
    print(out)


if TYPE_CHECKING:
    from fedbudget.runs.explain import Explanation

_BARS = 20
_WIDTH = 50


@command
def explain(
    *,
    run: Path = RUN,
    round: int = option(REQUIRED, "Which round's choice to explain."),
    output: OutputOptions,
) -> None:
    """Show the G(τ) curve of a round, and why its τ was chosen.

    Examples:

      fedbudget explain runs/NAME --round 12
    """
    from fedbudget.launch.method import build_method
    from fedbudget.runs.explain import explain as recompute
    from fedbudget.runs.folder import Run

    opened = Run.open(run)
    explanation = recompute(opened, round, build_method(opened.settings).controller)
    if output.json:
        curve = [
            {"tau": int(t), "G": float(g)}
            for t, g in zip(explanation.candidates, explanation.curve, strict=True)
        ]
        about = {
            "round": round,
            "tau": explanation.tau,
            "eta": explanation.eta,
            "corrected": explanation.corrected,
        }
        work = {} if explanation.work is None else {"work": explanation.work}
        print(json.dumps({**about, "reason": explanation.reason, "curve": curve, **work}))
        return
    print(
        f"round {round}: τ = {explanation.tau}, chosen by {explanation.reason}: {explanation.sentence}."
    )
    eta = (
        f"η = {explanation.eta:.4g}"
        if explanation.eta
        else "η is each node's own, and not told"
    )
    print(
        f"{eta}; local updates were {'' if explanation.corrected else 'not '}corrected for drift"
    )
    if explanation.work is not None:
        print(f"{explanation.shared}.")
        print("\n".join(work_table(explanation.work)))
    if explanation.estimates is not None:
        estimates = explanation.estimates
        print(
            f"ρ̂ = {estimates.rho:.4g}, β̂ = {estimates.beta:.4g}, δ̂ = {estimates.delta:.4g}"
        )
        print()
        print("\n".join(chart(explanation)))


def work_table(work: dict[str, Any]) -> list[str]:
    """Every node's updates, and how long it waited; nothing where there are too many."""
    if not work["node"]:
        return []
    rows = zip(work["node"], work["updates"], work["idle"], work["idle_equal"], strict=True)
    return [
        "node  updates  waited  with the same τ",
        *(
            f"{node:4d}  {updates:7d}  {idle:6.0%}  {equal:15.0%}"
            for node, updates, idle, equal in rows
        ),
    ]


def chart(explanation: "Explanation") -> list[str]:
    """The curve as bars, thinned, always with the chosen τ; a longer bar is a worse bound on the loss.

    G grows by many powers of ten beyond its minimum, and what matters is near it. The root of log(G / smallest G) shows
    both: around the minimum it grows by steps of τ, further on with the number of powers of ten.
    """
    import numpy as np

    finite = explanation.curve[np.isfinite(explanation.curve)]
    if not len(finite):
        return ["G is not finite at any τ"]
    low = float(finite.min())
    longest = _length(float(finite.max()), low)
    spaced = np.unique(
        np.geomspace(1, len(explanation.candidates), _BARS).round().astype(int)
    )
    lines = ["   τ  G(τ)       bars: √ of log(G / smallest G)"]
    special = {"smallest": explanation.minimum or 1, "chosen": explanation.tau}
    for tau in sorted(
        {*spaced.tolist(), *special.values()} & set(explanation.candidates.tolist())
    ):
        value = float(explanation.curve[tau - 1])
        share = _length(value, low) / longest if longest > 0 and np.isfinite(value) else 0.0
        bar = "█" * (1 + round(share * (_WIDTH - 1))) if np.isfinite(value) else "∞"
        marks = [mark for mark, of in special.items() if of == tau]
        lines.append(f"{tau:4d}  {value:<10.5g} {bar} {' and '.join(marks)}".rstrip())
    return lines


def _length(value: float, low: float) -> float:
    return math.sqrt(math.log(value) - math.log(low)) if low > 0 else value - low
