"""`fedbudget report`."""

from pathlib import Path

from fedbudget.cli.command import command
from fedbudget.cli.options import run_folders
from fedbudget.option import REQUIRED, option


@command
def report(
    *,
    run: tuple[Path, ...] = option(REQUIRED, "Folders of runs.", argument=True, values=run_folders),
    out: Path = option(Path("report.html"), "The file to write."),
) -> None:
    """Write runs into one HTML file that opens anywhere.

    It has charts and words, and needs no network.

    Examples:

      fedbudget report runs/NAME

      fedbudget report runs/* --out comparison.html
    """
    from fedbudget import atomic_file
    from fedbudget.dashboard.report import report as html_of
    from fedbudget.dashboard.run_reader import RunReader
    from fedbudget.errors import UserError
    from fedbudget.runs.folder import require_run

    for path in run:
        require_run(path)
    text = html_of([RunReader(path.resolve()).read() for path in run])
    try:
        atomic_file.replace(out, text.encode())
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}") from None
    print(out)
