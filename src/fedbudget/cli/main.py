"""The command `fedbudget`.

Exit codes: 0 done, 1 the work failed, 2 the command was wrong, 130 interrupted.
"""

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
from fedbudget.errors import UserError, WorkError, flag, suggestion

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
for command in (*_TRAIN, *_USE_MODELS, *_READ_RUNS, run.tasks):
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
    except (OSError, WorkError) as error:
        return _print_error(str(error), 1)
    except Exception as error:
        # Typer's usage errors: their module depends on the version of Typer.
        if not hasattr(error, "format_message"):
            raise
        hint = suggestion(
            getattr(error, "option_name", ""), getattr(error, "possibilities", None) or ()
        )
        message = f"{error.args[0]}; {hint}" if hint else error.format_message()
        return _print_error(message, 2) if message else 2


def _print_error(message: str, code: int) -> int:
    print(f"fedbudget: {message}", file=sys.stderr)
    return code
