"""`fedbudget dashboard`, and the page beside a run."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from fedbudget.cli.options import command
from fedbudget.errors import UserError
from fedbudget.settings.option import option


@command
def dashboard(
    *,
    runs: Path = option(
        Path("runs"), "A folder with runs, or a run's own folder.", argument=True
    ),
    host: str = option(
        "127.0.0.1",
        "The address to listen on; others than this machine's own need a token.",
    ),
    port: int | None = option(None, "Of the page.", shown="8700, or the next that is free"),
    token_file: Path | None = option(
        None,
        "A file with the token that the page needs.",
        shown="FEDBUDGET_TOKEN, with --host",
    ),
    open: bool | None = option(None, "Open it in a browser.", shown="from a terminal"),
) -> None:
    """Show runs in a web page, also while they are made.

    The page is read-only, and loads nothing from elsewhere. It is for this machine alone unless --host says otherwise.

    Examples:

      fedbudget dashboard

      fedbudget dashboard runs/NAME --port 9000 --no-open

      FEDBUDGET_TOKEN=$(openssl rand -hex 32) fedbudget dashboard --host 0.0.0.0
    """
    require_dashboard()

    from fedbudget.dashboard.app import Dashboard

    page = Dashboard(runs, host=host, port=port, token=_token(host, token_file))
    hint = "/?token=TOKEN the first time; " if page.needs_token else ""
    print(f"{page.address()}  ({hint}Ctrl-C ends it)", file=sys.stderr, flush=True)
    if open if open is not None else sys.stderr.isatty() and not page.needs_token:
        import webbrowser

        webbrowser.open(page.address())
    page.serve()


@contextmanager
def beside(folder: Path, *, wanted: bool) -> Iterator[None]:
    """The page of a run while it is made, where that is wanted.

    Args:
      folder: of the run; it need not be there yet.
    """
    if not wanted:
        yield
        return
    require_dashboard()

    from fedbudget.dashboard.app import Dashboard

    parent = folder.resolve().parent
    parent.mkdir(parents=True, exist_ok=True)
    page = Dashboard(parent)
    print(f"dashboard: {page.address(folder.resolve().name)}", file=sys.stderr, flush=True)
    with page.in_background():
        yield


def require_dashboard() -> None:
    if any(find_spec(name) is None for name in ("starlette", "uvicorn", "plotly")):
        raise UserError(
            "this needs a web server and plotly; install them with: pip install 'fedbudget[dashboard]'"
        )


def _token(host: str, token_file: Path | None) -> str | None:
    """The token that the page needs, if any."""
    if token_file is None and host in ("127.0.0.1", "::1", "localhost"):
        return None
    from fedbudget.engines.grpc.tokens import node_token

    token = node_token(token_file)
    if token is None:
        raise UserError(
            f"--host {host} lets other machines see the runs, so it needs a token: give --token-file FILE, or set "
            "FEDBUDGET_TOKEN; openssl rand -hex 32 makes a good one"
        )
    return token
