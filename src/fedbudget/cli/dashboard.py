"""`fedbudget dashboard`, and the page of a run with `--dashboard`."""

import html
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from fedbudget.cli.options import command
from fedbudget.errors import UserError
from fedbudget.settings.option import option


@command
def dashboard(
    *,
    runs: Path = option(Path("runs"), "A folder of runs, or one run.", argument=True),
    host: str = option(
        "127.0.0.1",
        "The address to listen on; an address that other machines reach needs a token.",
    ),
    port: int | None = option(
        None, "The port of the page.", shown="8700, or the next free"
    ),
    token_file: Path | None = option(
        None,
        "A file with the token that opens the page.",
        shown="FEDBUDGET_TOKEN, with --host",
    ),
    open: bool | None = option(
        None, "Open the page in a browser.", shown="only from a terminal"
    ),
) -> None:
    """Show runs in a web page, also while they are running.

    The page is read-only and loads nothing from other servers. The printed address has a
    key, without which other users of this machine cannot open it.

    Examples:

      fedbudget dashboard

      fedbudget dashboard runs/NAME --port 9000 --no-open

      FEDBUDGET_TOKEN=$(openssl rand -hex 32) fedbudget dashboard --host 0.0.0.0
    """
    require_dashboard()

    from fedbudget.dashboard.app import Dashboard

    token = _token(host, token_file)
    page = Dashboard(runs, host=host, port=port, token=token or secrets.token_urlsafe(24))
    hint = "/?token=TOKEN the first time; " if token is not None else ""
    address = page.address(key=token is None)
    print(f"{address}  ({hint}Ctrl-C to stop)", file=sys.stderr, flush=True)
    if open is None:
        open = sys.stderr.isatty() and token is None
    with _opened(page.address(key=True)) if open else nullcontext():
        page.serve()


@contextmanager
def _opened(address: str) -> Iterator[None]:
    """Open a page in a browser by a private file.

    Every user of this machine can read command lines, also that of a starting browser.
    """
    import webbrowser

    with TemporaryDirectory(prefix="fedbudget-") as folder:  # only this user can read it
        file = Path(folder, "open.html")
        link = html.escape(address)
        file.write_text(f'<meta http-equiv="refresh" content="0; url={link}">\n')
        webbrowser.open(file.as_uri())
        yield


@contextmanager
def run_dashboard(folder: Path, *, wanted: bool) -> Iterator[None]:
    """Serve the page of a run while the body executes, if wanted.

    Args:
      folder: the run's folder; it may not exist yet.
      wanted: False for no page.
    """
    if not wanted:
        yield
        return
    require_dashboard()

    from fedbudget.dashboard.app import Dashboard

    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    page = Dashboard(folder.parent, token=secrets.token_urlsafe(24))
    address = page.address(folder.name, key=True)
    print(f"dashboard: {address}", file=sys.stderr, flush=True)
    with page.in_background():
        yield


def require_dashboard() -> None:
    """Raise a UserError if a package of the dashboard is not installed."""
    if any(find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise UserError(
            "this needs a web server; install it with: pip install 'fedbudget[dashboard]'"
        )


def _token(host: str, token_file: Path | None) -> str | None:
    if token_file is None and host in ("127.0.0.1", "::1", "localhost"):
        return None

    from fedbudget.engines.grpc.tokens import node_token

    token = node_token(token_file)
    if token is None:
        raise UserError(
            f"--host {host} lets other machines see the runs, so it needs a token: give "
            "--token-file FILE, or set FEDBUDGET_TOKEN; openssl rand -hex 32 creates one"
        )
    return token
