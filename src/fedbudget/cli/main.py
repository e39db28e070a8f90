"""The command `fedbudget`.

Exit codes: 0 done, 1 the work failed, 2 the command was wrong, 130 interrupted.
"""

import io
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from fedbudget.cli.options import GroupedCommand, command
from fedbudget.errors import UserError, WorkError, flag, printable, suggestion
from fedbudget.settings.option import option
from fedbudget.settings.settings import ELSEWHERE

if TYPE_CHECKING:
    from fedbudget.doctor import Finding

_LONGEST_LINE = 4000

# Help is plain text. With Rich, Typer would escape the brackets in it.
typer.core.HAS_RICH = False

app = typer.Typer(
    help="Train a model on data that stays on its nodes, within a budget of time, energy, "
    "bytes, money or privacy.",
    rich_markup_mode=None,
)
_TOUR = """\
fedbudget trains one model on data that stays at its sites, within a budget.

Try it, with the patients of four hospitals:
  fedbudget describe heart-disease
  fedbudget run --dataset heart-disease --budget time=5s --personal
  fedbudget explain runs/NAME

With your own table, one site per value of a column:
  fedbudget run --dataset visits.csv --target ill --partition by:hospital \\
      --budget time=1min

With real sites:
  fedbudget local --dataset heart-disease        all of them on this machine
  fedbudget serve 0.0.0.0:7700 --nodes 4         at the aggregator
  fedbudget join HOST:7700 --data visits.csv     at each site

fedbudget doctor checks this machine. fedbudget --help lists all commands.
"""


@command
def doctor(
    *,
    serve: str | None = option(
        None, "Also check what serve needs at this address, as HOST:PORT."
    ),
    join: str | None = option(
        None, "Also check what join needs for the aggregator at this address."
    ),
    cert: Path | None = option(None, "Certificate of this machine, as in serve or join."),
    key: Path | None = option(None, "Private key of --cert."),
    client_ca: Path | None = option(None, "CA of the nodes' certificates, as in serve."),
    ca: Path | None = option(None, "CA of the aggregator's certificate, as in join."),
    token_file: Path | None = option(None, "File of tokens, as in serve or join."),
) -> None:
    """Check this machine: packages, ports, certificates, clock.

    The exit code is 1 if there is a problem. Each problem comes with what to do. Nothing is
    sent to the aggregator except the opening of a connection.

    Examples:

      fedbudget doctor

      fedbudget doctor --serve 0.0.0.0:7700 --cert agg.pem --key agg.key

      fedbudget doctor --join edge.example:7700 --ca certs/ca.pem
    """
    from fedbudget import doctor

    findings = doctor.check_installation()
    problems = _print_findings(findings)
    if serve is not None:
        problems += _print_findings(
            doctor.check_aggregator(
                serve, cert=cert, key=key, client_ca=client_ca, token_file=token_file
            )
        )
    if join is not None:
        problems += _print_findings(
            doctor.check_node(join, ca=ca, cert=cert, key=key, token_file=token_file)
        )
    if problems:
        raise typer.Exit(1)


def _print_findings(findings: Iterable["Finding"]) -> int:
    """Print findings as they arrive, and return the number of problems."""
    problems = 0
    for each in findings:
        print(f"{each.status:<8} {printable(each.text, _LONGEST_LINE)}", flush=True)
        if each.advice:
            print(f"{'':<8} Try: {each.advice}", flush=True)
        problems += each.status == "problem"
    return problems


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
for each in (data.describe, *_TRAIN, *_USE_MODELS, *_READ_RUNS, run.tasks, doctor):
    app.command(cls=GroupedCommand)(each)
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
        print(_TOUR, end="")


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
        return _print_error(error.spelled(flag), 1)
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
    meant = ELSEWHERE.get(name.lstrip("-").replace("-", "_"))
    if meant is not None:
        text = UserError(meant).spelled(flag)
        if text.split()[0] in known:
            return f"use {text}"
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
