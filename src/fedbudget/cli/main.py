"""The command `fedbudget`.

Exit codes: 0 done, 1 the work failed, 2 the command was wrong, 130 interrupted.
"""

import io
import os
import re
import sys
from typing import Annotated, Any

import typer
import typer.core

from fedbudget import __version__
from fedbudget.cli import (
    compare,
    dashboard,
    data,
    forecast,
    nodes,
    run,
    runs,
    security,
    sweep,
    trained,
)
from fedbudget.cli.options import GroupedCommand
from fedbudget.errors import UserError, WorkError, flag, printable, suggestion

_LONGEST_LINE = 4000

# Help is plain text. With Rich, Typer would escape the brackets in it.
typer.core.HAS_RICH = False

app = typer.Typer(
    help="Train a model on data that stays on its nodes, within a budget of time, energy, "
    "bytes, money or privacy.",
    rich_markup_mode=None,
)
_TRAIN = (
    run.run,
    nodes.local,
    nodes.serve,
    nodes.join,
    security.certs,
    compare.compare,
    sweep.sweep,
    sweep.reproduce,
)
_USE_MODELS = (trained.predict, trained.evaluate, trained.export)
_READ_RUNS = (
    runs.show,
    runs.explain,
    forecast.forecast,
    dashboard.dashboard,
    runs.report,
)
for command in (data.describe, *_TRAIN, *_USE_MODELS, *_READ_RUNS, run.tasks):
    app.command(cls=GroupedCommand)(command)
app.add_typer(runs.app, name="runs")
app.add_typer(data.app, name="data")
app.add_typer(security.app, name="tokens")


@app.callback(invoke_without_command=True)
def _fedbudget(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"fedbudget {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit; a user's mistake prints one line on standard error.

    Args:
      arguments: of the command line; None for those of this process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # some terminals have no τ
    sys.exit(_exit_code(arguments))


def _exit_code(arguments: list[str] | None) -> int:
    try:
        returned: Any = typer.main.get_command(app).main(
            arguments, prog_name="fedbudget", standalone_mode=False
        )
        return returned if isinstance(returned, int) else 0
    except UserError as error:
        return _print_error(error.spelled(flag), 2)
    except KeyboardInterrupt:
        return _print_error("interrupted", 130)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except WorkError as error:
        return _print_error(str(error), 1)
    except OSError as error:
        return _print_error(_system_error_text(error), 1)
    except Exception as error:
        # Typer's usage errors: their module depends on the version of Typer.
        if not hasattr(error, "format_message"):
            raise
        hint = _option_hint(error)
        message = f"{error.args[0]}; {hint}" if hint else error.format_message()
        return _print_error(message, 2) if message else 2


_RENAMED = {("predict", "--data"): "--dataset"}
"""Options with another name in earlier versions, by command."""

_ELSEWHERE = {
    "--epochs": "--rounds and --tau; by default --budget decides both",
    "--steps": "--tau sets local updates per round",
    "--lr": "--step-size",
    "--learning-rate": "--step-size",
    "--clients": "--nodes",
    "--batch": "--batch-size",
    "--optimizer": "--update, the update rule of the aggregator",
    "--output": "--out",
}
"""What options of other programs are called here."""


def _option_hint(error: Any) -> str | None:
    """Return advice on an unknown option; None if there is none."""
    name = getattr(error, "option_name", "")
    context = getattr(error, "ctx", None)
    command = "" if context is None else context.info_name
    if (command, name) in _RENAMED:
        return f"it is now called {_RENAMED[command, name]}"
    known = (
        []
        if context is None
        else [text for each in context.command.params for text in each.opts]
    )
    meant = _ELSEWHERE.get(name)
    if meant is not None and meant.split()[0] in known:
        return f"use {meant}"
    # The dashes, which all options share, would make short names look similar.
    names = [text.lstrip("-") for text in known if text.startswith("--")]
    hint = suggestion(name.lstrip("-"), names) if name else None
    return None if hint is None else hint.replace("mean ", "mean --")


def _system_error_text(error: OSError) -> str:
    """Return the file and the reason; the name of a file, not that of its temporary one."""
    if error.filename is None or error.strerror is None:
        return str(error)
    path = re.sub(
        r"(^|/)\.([^/]+)\.[0-9a-f]{8}\.new$", r"\1\2", os.fsdecode(error.filename)
    )
    return f"{path}: {error.strerror}"


def _print_error(message: str, code: int) -> int:
    lines = [printable(line, _LONGEST_LINE) for line in message.split("\n")]
    print("fedbudget:", "\n".join(lines), file=sys.stderr)
    return code
