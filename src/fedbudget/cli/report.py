"""`fedbudget report`."""

from pathlib import Path
from typing import Annotated

import typer

from fedbudget.cli.options import run_folders
from fedbudget.cli.parameters import completion


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Folders of runs.", show_default=False, autocompletion=completion(run_folders)
        ),
    ],
    out: Annotated[Path, typer.Option(help="The file to write.  [default: report.html]", show_default=False)] = Path(
        "report.html"
    ),
) -> None:
    """Write runs into one HTML file that opens anywhere.

    It has charts and words, and needs no network.

    Examples:

      fedbudget report runs/NAME

      fedbudget report runs/* --out comparison.html
    """
    from fedbudget.dashboard.report import report as html_of
    from fedbudget.dashboard.run_reader import RunReader
    from fedbudget.errors import UserError
    from fedbudget.runs.folder import CONFIG, ROUNDS

    for path in runs:
        if not (path / CONFIG).is_file() or not (path / ROUNDS).is_file():
            raise UserError(f"{path} is not the folder of a run: {CONFIG} or {ROUNDS} is missing")
    text = html_of([RunReader(path.resolve()).read() for path in runs])
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}") from None
    print(out)
