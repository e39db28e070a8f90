"""The page on a port of this machine: until it is told to end, or beside a run for as long as that takes."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import uvicorn

from fedbudget.dashboard.access import Access
from fedbudget.dashboard.app import make_app
from fedbudget.dashboard.run_index import RunIndex
from fedbudget.errors import UserError

PORT = 8700
_TRIES = 20  # ports after it, where it is taken


class Dashboard:
    """The page, on a port that is open already, so that its address is known before it is served.

    Args:
      port: None for the usual one, or the next that is free.
    """

    def __init__(
        self, folder: Path, *, host: str = "127.0.0.1", port: int | None = None, token: str | None = None
    ) -> None:
        index = RunIndex(folder)
        self._socket = _listen(host, port)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        app = make_app(index, Access(host, token), ending=lambda: self._server.should_exit)
        config = uvicorn.Config(
            app, log_level="warning", lifespan="off", ws="none", access_log=False, timeout_graceful_shutdown=2
        )
        self._server = uvicorn.Server(config)
        self.needs_token = token is not None

    def address(self, run: str | None = None) -> str:
        """To open in a browser: all runs, or one of them."""
        host = "localhost" if self.host in ("0.0.0.0", "::") else self.host
        page = "" if run is None else f"run/{quote(run, safe='')}"
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/{page}"

    def serve(self) -> None:
        """Until Ctrl-C."""
        with contextlib.suppress(KeyboardInterrupt):  # which uvicorn passes on when it has ended in good order
            self._server.run(sockets=[self._socket])

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """In a thread, while something else is done."""
        thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="fedbudget-dashboard", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            self._server.should_exit = True
            thread.join()


def _listen(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in [port] if port is not None else [*range(PORT, PORT + _TRIES), 0]:
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, candidate))
            listening.listen(128)
        except OSError as error:
            listening.close()
            if port is not None or isinstance(error, socket.gaierror):
                raise UserError(f"cannot listen on {host}, port {candidate}: {error.strerror}") from None
        else:
            return listening
    raise UserError(f"cannot listen on {host}: is it an address of this machine?")
