"""`fedbudget runs`: list runs, and remove them."""

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import typer
import typer.core

from fedbudget.cli.command import command
from fedbudget.cli.options import OutputOptions, run_folders
from fedbudget.errors import UserError
from fedbudget.option import REQUIRED, option

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
        (), "Folders with runs in them, or of runs.", argument=True, shown="runs", values=run_folders
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
        found = [{"run": str(path), **overview(path)} for path in find_runs(paths or (RUNS,))]
    if output.json:
        print(json.dumps({"runs": found}))
        return
    if not found:
        print(f"no runs in {', '.join(map(str, paths or (RUNS,)))}")
        return

    from fedbudget.cli.console import console, plain_table

    table = plain_table(_COLUMNS, left=("run", "state", "what", "spent", "stopped by", "began"), overflow="fold")
    for each in found:
        table.add_row(*_cells(each))
    console().print(table, highlight=False)


@app.command()
@command
def remove(
    *,
    names: tuple[str, ...] = option(REQUIRED, "Runs in runs/, or folders of runs.", argument=True, values=run_folders),
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
    from fedbudget.runs.remove import remove as remove_run
    from fedbudget.runs.remove import require_removable

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
        print(f"{name} is removed" + ("" if whole else "; its folder has other files, and stays"))


def _path(name: str) -> Path:
    """A folder as it is written, or the run of this name in runs/."""
    from fedbudget.runs.overview import RUNS

    path = Path(name)
    return RUNS / name if len(path.parts) == 1 and not path.exists() and (RUNS / name).exists() else path


def _ask(paths: list[Path]) -> None:
    if not sys.stdin.isatty():
        raise UserError("nobody can be asked whether to remove; say so with `yes`")
    print("\n".join(map(str, paths)))
    if input(f"Remove {'this run' if len(paths) == 1 else f'these {len(paths)} runs'} for good? [y/N] ") != "y":
        raise UserError("nothing is removed")


def _cells(run: dict[str, Any]) -> tuple[str, ...]:
    """A row of the list."""
    if run["state"] == "unreadable":
        return run["run"], run["state"], run["title"], *("" for _ in _COLUMNS[3:])
    loss, accuracy = (("" if run[name] is None else f"{run[name]:.4f}") for name in ("loss", "accuracy"))
    spent = ", ".join(f"{each['text']} ({each['share']:.0%})" for each in run["spent"])
    began = f"{datetime.fromtimestamp(run['began']):%Y-%m-%d %H:%M}"
    return run["run"], run["state"], run["title"], loss, accuracy, spent, run["stopped_by"] or "", began
