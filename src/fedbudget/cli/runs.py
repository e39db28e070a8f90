"""Commands that read or remove runs: `fedbudget runs`, `show`, `report` and `explain`."""

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

from fedbudget.cli.console import console, decimals, print_table
from fedbudget.cli.options import RUN, OutputOptions, command, run_folders
from fedbudget.errors import UserError
from fedbudget.settings.option import REQUIRED, option

if TYPE_CHECKING:
    from rich.console import Console

    from fedbudget.runs.explain import Explanation, ReasonSummary
    from fedbudget.runs.folder import Run

_COLUMNS = ("run", "state", "what", "loss", "accuracy", "spent", "stopped by", "began")
_SPARE = ("what", "stopped by", "began", "spent", "accuracy")
_SHOWN_ROUNDS = 20
_SHOWN_FIGURES = (
    "loss",
    "validation_loss",
    "accuracy",
    "average_tau",
    "aggregations",
    "local_updates",
    "stopped_by",
    "status",
)
_BARS = 20  # of the chart of G, about
_BAR_WIDTH = 50


class _ListByDefault(typer.core.TyperGroup):
    """Makes `fedbudget runs PATHS` short for `fedbudget runs list PATHS`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {*self.commands, "--help"}
        return super().parse_args(ctx, args if args and args[0] in own else ["list", *args])


app = typer.Typer(
    cls=_ListByDefault,
    help="List runs, the newest first, or remove some. The default command is list.",
)


@app.command("list")
@command
def list_runs(
    *,
    paths: tuple[Path, ...] = option(
        (),
        "Folders of runs, or single runs.",
        argument=True,
        shown="runs",
        values=run_folders,
    ),
    output: OutputOptions,
) -> None:
    """List runs, the newest first.

    The table shows state, loss, accuracy, spending, and what stopped a run. A narrow
    terminal shows fewer columns. The state is
    "broken off" if the run was killed or its machine lost power. Such a run
    can be resumed: fedbudget run --resume or fedbudget serve --resume.

    Examples:

      fedbudget runs

      fedbudget runs sweeps/mine /mnt/runs/20260101-120000-svm-digits --json
    """
    from fedbudget.runs.overview import RUNS, find_runs, overview

    folders = paths or (RUNS,)
    overviews = []
    if paths or RUNS.is_dir():
        overviews = [{"run": str(path), **overview(path)} for path in find_runs(folders)]
    if output.json:
        print(json.dumps({"runs": overviews}))
        return
    if not overviews:
        print(f"no runs in {', '.join(map(str, folders))}")
        return

    left = ("run", "state", "what", "spent", "stopped by", "began")
    print_table(_COLUMNS, map(_cells, overviews), spare=_SPARE, left=left, overflow="fold")


def _cells(run: dict[str, Any]) -> tuple[str, ...]:
    """Return the row of a run in the list."""
    if run["state"] == "unreadable":
        return run["run"], run["state"], run["title"], *("" for _ in _COLUMNS[3:])
    spent = [f"{each['text']} ({each['share']:.0%})" for each in run["spent"]]
    return (
        run["run"],
        run["state"],
        run["title"],
        decimals(run["loss"]),
        decimals(run["accuracy"]),
        ", ".join(spent),
        run["stopped_by"] or "",
        f"{datetime.fromtimestamp(run['began']):%Y-%m-%d %H:%M}",
    )


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
    """Remove runs from disk permanently.

    Only the files that a run writes are removed, and its folder if it is empty then. If
    one of the runs is still running, none is removed.

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
    removed = {str(path): remove_run(path) for path in paths}
    if output.json:
        print(json.dumps({"removed": list(removed)}))
        return
    for name, with_folder in removed.items():
        rest = "" if with_folder else "; its folder stays because it has other files"
        print(f"removed {name}{rest}")


def _path(name: str) -> Path:
    """Return the folder as given, or the run with this name in runs/."""
    from fedbudget.runs.overview import RUNS

    path = Path(name)
    in_runs = RUNS / name
    if len(path.parts) == 1 and not path.exists() and in_runs.exists():
        return in_runs
    return path


def _ask(paths: list[Path]) -> None:
    if not sys.stdin.isatty():
        raise UserError("removal needs a confirmation, and there is no terminal: set `yes`")
    print("\n".join(map(str, paths)))
    these = "this run" if len(paths) == 1 else f"these {len(paths)} runs"
    if input(f"Remove {these} permanently? [y/N] ") != "y":
        raise UserError("nothing was removed")


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
        unfinished = {"status": "unfinished", "run": str(run), "rounds": len(opened.rounds)}
        print(json.dumps(opened.summary or unfinished))
        return

    from fedbudget.cli.view import LOSSES, PRIVACY, VALIDATED, rounds_table
    from fedbudget.runs.text import run_title

    out = console()
    title = run_title(opened.settings)
    limits = opened.settings.limits().limits
    out.print(title, style="bold")
    for warning in (opened.summary or {}).get("warnings", ()):
        out.print(f"warning: {warning}")
    records = opened.rounds
    if not all and len(records) > _SHOWN_ROUNDS:
        step = (len(records) - 1) / (_SHOWN_ROUNDS - 1)
        records = [opened.rounds[round(step * row)] for row in range(_SHOWN_ROUNDS)]
        text = f"{_SHOWN_ROUNDS} of {len(opened.rounds)} rounds; --all shows every round"
        out.print(text, style="dim")
    width = out.width if out.is_terminal else None
    out.print(rounds_table(records, limits, verbose=output.verbose, width=width))
    if PRIVACY not in limits and output.verbose:
        validated = any(record.validation is not None for record in records)
        out.print(VALIDATED if validated else LOSSES, style="dim")
    if opened.summary is None:
        out.print("the run has not finished")
    else:
        _print_summary(out, opened, opened.summary)
    if opened.rounds and find_spec("matplotlib") is not None:
        from fedbudget.runs.plot import plot_run

        durable_files.replace(run / PLOT, plot_run(opened.rounds, limits, title=title))
        out.print(f"plot: {run / PLOT}")


def _print_summary(out: "Console", run: "Run", summary: dict[str, Any]) -> None:
    from fedbudget.cli.view import PRIVACY, validation_stop_text
    from fedbudget.resources.privacy import replacement_text
    from fedbudget.runs.record import average_tau
    from fedbudget.runs.text import metrics_text, spread_text

    limits = run.settings.limits().limits
    # Summaries of earlier versions have another average of τ.
    taus = [record.effective_tau for record in run.rounds if record.tau]
    summary = summary | {"average_tau": average_tau(taus)}
    for name in _SHOWN_FIGURES:
        if summary.get(name) is not None and (name != "loss" or PRIVACY not in limits):
            value = summary[name]
            text = f"{value:.4g}" if isinstance(value, float) else value
            out.print(f"{name.replace('_', ' ')}: {text}")
    if summary.get("stopped_by") == "validation":
        improved = summary.get("improved_round")
        out.print(validation_stop_text(summary.get("spent") or {}, limits, improved))
    if PRIVACY in limits and summary.get("privacy_delta") is not None:
        epsilon = f"ε = {summary['spent'][PRIVACY]:.4g} of {limits[PRIVACY]:g}"
        if run.settings.privacy_noise == "seeded":
            epsilon += " (simulated: the noise follows from the seed)"
        delta = summary["privacy_delta"]
        unit = run.settings.privacy_unit or "node"
        other = replacement_text(summary["spent"][PRIVACY], delta, unit)
        out.print(f"privacy: {epsilon}, at δ = {delta:g}; {other}")
    accuracy = summary.get("accuracy")
    lines = [metrics_text(accuracy, summary.get("metrics") or {}, summary.get("to_beat"))]
    if summary.get("spread"):
        lines.append(
            spread_text(summary["spread"], "rmse" if accuracy is None else "accuracy")
        )
    for line in filter(None, lines):
        out.print(f"on test samples: {line}")


@command
def report(
    *,
    run: tuple[Path, ...] = option(
        REQUIRED, "Folders of runs.", argument=True, values=run_folders
    ),
    out: Path = option(Path("report.html"), "The file to write."),
) -> None:
    """Write runs into one HTML file.

    The file has charts and a description of each run. It opens in any browser and needs no
    network.

    Examples:

      fedbudget report runs/NAME

      fedbudget report runs/* --out comparison.html
    """
    from fedbudget import durable_files
    from fedbudget.dashboard.report import report as html_report
    from fedbudget.dashboard.run_reader import RunReader
    from fedbudget.runs.folder import require_run

    for path in run:
        require_run(path)
    text = html_report([RunReader(path.resolve()).read() for path in run])
    try:
        durable_files.replace(out, text.encode())
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}") from None
    print(out)


@command
def explain(
    *,
    run: Path = RUN,
    round: int | None = option(
        None, "The number of the round to explain.", shown="a summary of all rounds"
    ),
    output: OutputOptions,
) -> None:
    """Explain why each τ was chosen, in a run or in one round.

    One round has a curve of what each τ would have cost.

    Examples:

      fedbudget explain runs/NAME

      fedbudget explain runs/NAME --round 12
    """
    from fedbudget.launch.method import build_method
    from fedbudget.runs.explain import explain as recompute
    from fedbudget.runs.explain import reasons
    from fedbudget.runs.folder import Run

    opened = Run.open(run)
    controller = build_method(opened.settings).controller
    if round is None:
        summary = reasons(opened, controller)
        if output.json:
            fields: dict[str, Any] = {"reasons": [vars(each) for each in summary]}
            if solver := _solver(opened):
                fields["solver"] = solver
            print(json.dumps(fields))
        else:
            _print_reasons(opened, summary)
        return
    explanation = recompute(opened, round, controller)
    if output.json:
        _print_json(explanation)
        return
    out = console()
    out.print(
        f"round {round}: τ = {explanation.record.tau}, chosen by "
        f"{explanation.record.reason}: {explanation.sentence}."
    )
    eta = "η is chosen by each node and not reported"
    if explanation.record.eta:
        eta = f"η = {explanation.record.eta:.4g}"
    negation = "" if explanation.record.corrected else "not "
    out.print(f"{eta}; local updates were {negation}corrected for drift")
    if explanation.record.work is not None:
        out.print(f"{explanation.shared}.")
        out.print("\n".join(work_table(explanation.record.work)))
    if explanation.without:
        out.print(f"{explanation.without}.")
    estimates = explanation.estimates
    if estimates is not None:
        out.print(
            f"ρ̂ = {estimates.rho:.4g}, β̂ = {estimates.beta:.4g}, δ̂ = {estimates.delta:.4g}"
        )
    if len(explanation.curve):
        out.print()
        out.print("\n".join(chart(explanation)))


def _print_reasons(run: "Run", summary: "list[ReasonSummary]") -> None:
    """Print each reason with its rounds, its τ, and its sentence for the last of them."""
    from fedbudget.runs.text import run_title

    out = console()
    out.print(f"{run_title(run.settings)}: {len(run.rounds)} rounds")
    rows = []
    for each in summary:
        tau = f"{each.smallest}-{each.largest}"
        if each.smallest == each.largest:
            tau = str(each.smallest or "")
        rows.append((each.reason, str(each.rounds), str(each.last), tau))
    left = ("chosen by",)
    print_table(("chosen by", "rounds", "last", "τ"), rows, left=left, no_wrap=True)
    for each in summary:
        out.print(f"{each.reason}: round {each.last}: {each.sentence}.")
    if solver := _solver(run):
        out.print(f"{solver}.")
    out.print("explain one of them with --round N")


def _solver(run: "Run") -> str:
    """Return why the run solves or descends; empty if it is not known."""
    return str((run.summary or {}).get("solver", ""))


def _print_json(explanation: "Explanation") -> None:
    points = zip(explanation.candidates, explanation.curve, strict=True)
    record = explanation.record
    names = ("round", "tau", "eta", "corrected", "reason")
    fields = {name: getattr(record, name) for name in names}
    fields["quantity"] = explanation.quantity
    fields["curve"] = [{"tau": int(tau), "value": float(value)} for tau, value in points]
    if record.work is not None:
        fields["work"] = record.work
    if explanation.excluded:
        fields["excluded"] = explanation.excluded
    print(json.dumps(fields))


def work_table(work: dict[str, Any]) -> list[str]:
    """Return lines with each node's updates and idle time; none for too many nodes.

    Args:
      work: the field `work` of a round's record.
    """
    if not work["node"]:
        return []
    columns = (work[name] for name in ("node", "updates", "idle", "idle_equal"))
    lines = ["node  updates  idle  idle at equal τ"]
    for node, updates, idle, idle_equal in zip(*columns, strict=True):
        lines.append(f"{node:4d}  {updates:7d}  {idle:4.0%}  {idle_equal:15.0%}")
    return lines


def chart(explanation: "Explanation") -> list[str]:
    """Return lines that draw the controller's curve as bars; longer bars are worse.

    About 20 values of τ are drawn, the chosen τ among them. Costs are drawn relative to the
    smallest. G grows by many powers of ten beyond its minimum. The square root of log(G /
    smallest G) shows both: differences near the minimum, and the number of powers of ten
    far from it.
    """
    import numpy as np

    from fedbudget.runs.explain import COST

    costs = explanation.quantity == COST
    finite = explanation.curve[np.isfinite(explanation.curve)]
    if not len(finite):
        return [f"{explanation.quantity} is not finite at any τ"]
    low = float(finite.min())
    high = float(finite.max())
    longest = high if costs else _length(high, low)
    marked = {"smallest": explanation.minimum or 1, "chosen": explanation.record.tau}
    candidates = explanation.candidates
    spaced = np.geomspace(1, len(candidates), _BARS).round().astype(int)
    drawn = {*spaced.tolist(), *marked.values()} & set(candidates.tolist())
    lines = ["   τ  G(τ)       bars: √ of log(G / smallest G)"]
    if costs:
        lines = [f"   τ  {explanation.quantity}, relative to the smallest"]
    before = 13 if costs else 17  # characters in front of a bar
    width = max(10, min(_BAR_WIDTH, console().width - before - len(" chosen")))
    for tau in sorted(drawn):
        value = float(explanation.curve[tau - 1])
        bar = "∞"
        if math.isfinite(value):
            length = value if costs else _length(value, low)
            share = length / longest if longest > 0 else 0.0
            bar = "█" * (1 + round(share * (width - 1)))
        marks = " and ".join(mark for mark, at in marked.items() if at == tau)
        text = f"{value / low:<6.2f}" if costs else f"{value:<10.5g}"
        lines.append(f"{tau:4d}  {text} {bar} {marks}".rstrip())
    return lines


def _length(value: float, low: float) -> float:
    return math.sqrt(math.log(value) - math.log(low)) if low > 0 else value - low
