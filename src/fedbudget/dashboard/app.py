"""The dashboard's web server: JSON from a folder of runs, and events of a live run.

`Dashboard` serves the page until Ctrl-C, or in the background of a run.
"""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fedbudget.dashboard import series
from fedbudget.dashboard.access import (
    AccessMiddleware,
    error_response,
    page_files,
)
from fedbudget.dashboard.run_reader import RunIndex, RunReader, RunSnapshot
from fedbudget.errors import UserError

PORT = 8700
POLL_SECONDS = 0.5
"""Seconds between two reads of a live run."""

_PORTS = 20  # tried from PORT on
_EVENT_ROWS = 200  # of one event, about; a page with a longer gap requests the whole run
_MOST_DIGITS = 15
_KEEP_ALIVE = 15.0  # seconds of silence before a comment keeps the connection open


class Dashboard:
    """The page on an open port. The address is known before the page is served.

    Args:
      folder: of runs, or of a single run.
      host: the address to listen on.
      port: None for 8700, or the next free port.
      token: required to open the page; None for no token.
    """

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        token: str | None = None,
    ) -> None:
        index = RunIndex(folder)
        self._socket = _listen(host, port)
        self.host = host
        self.port = int(self._socket.getsockname()[1])
        self._token = token
        app = make_app(
            index, host, token, ending=lambda: self._server.should_exit, port=self.port
        )
        config = uvicorn.Config(
            app,
            log_level="warning",
            lifespan="off",
            ws="none",
            access_log=False,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)

    def address(self, run: str | None = None, *, key: bool = False) -> str:
        """Return the address of a run's page, or of the list of runs.

        Args:
          key: whether to add the token, which opens the page once.
        """
        host = "localhost" if self.host in ("0.0.0.0", "::") else self.host
        page = "" if run is None else f"run/{quote(run, safe='')}"
        query = f"?token={quote(self._token)}" if key and self._token is not None else ""
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/{page}{query}"

    def serve(self) -> None:
        """Serve the page until Ctrl-C."""
        # uvicorn raises the interrupt again after an orderly shutdown.
        with contextlib.suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._socket])

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Serve the page in a thread while the body executes."""
        thread = threading.Thread(
            target=self._server.run,
            args=([self._socket],),
            name="fedbudget-dashboard",
            daemon=True,
        )
        thread.start()
        try:
            yield
        finally:
            self._server.should_exit = True
            thread.join()


def make_app(
    index: RunIndex,
    host: str,
    token: str | None,
    ending: Callable[[], bool],
    port: int = 0,
) -> Starlette:
    """Return the web app.

    Args:
      index: the runs to show.
      host: the address that the server listens on.
      token: required to open the page; None for no token.
      ending: returns whether the server is shutting down, which ends all events.
      port: distinguishes the cookies of servers of one host.
    """

    def run_page(request: Request) -> Response:
        _reader(request)
        return _file("index.html")

    def values(of: Callable[[RunSnapshot, Request], Any]) -> Callable[[Request], Response]:
        return lambda request: JSONResponse(of(_reader(request).read(), request))

    async def events(request: Request) -> Response:
        reader = await run_in_threadpool(_reader, request)
        last = request.headers.get("last-event-id") or request.query_params.get("after", "")
        after = _round(last) if last.isdecimal() else 0
        return StreamingResponse(
            _events(request, reader, after, ending), media_type="text/event-stream"
        )

    def _reader(request: Request) -> RunReader:
        name = request.path_params["name"]
        reader = index.reader(name)
        if reader is None:
            raise HTTPException(404, f"there is no run {name!r} in {index.shown}")
        return reader

    return Starlette(
        routes=[
            Route("/", lambda request: _file("index.html")),
            Route("/compare", lambda request: _file("index.html")),
            Route("/run/{name}", run_page),
            Route("/page/{name}", _page_file),
            Route("/favicon.ico", lambda request: _file("icon.svg")),
            Route(
                "/api/runs",
                lambda _: JSONResponse({"folder": index.shown, "runs": index.overviews()}),
            ),
            Route("/api/runs/{name}", values(lambda run, _: series.view(run))),
            Route("/api/runs/{name}/rows", values(_rows)),
            Route(
                "/api/runs/{name}/rounds/{number}",
                values(
                    lambda run, of: series.choice(run, _round(of.path_params["number"]))
                ),
            ),
            Route("/api/runs/{name}/events", events),
        ],
        middleware=[Middleware(AccessMiddleware, host, token, port)],
        exception_handlers={
            404: lambda request, error: error_response(
                request.scope, 404, error.detail.replace("Not Found", "page not found")
            ),
            UserError: lambda request, error: error_response(
                request.scope, 422, str(error)
            ),
        },
    )


async def _events(
    request: Request, reader: RunReader, after: int, ending: Callable[[], bool]
) -> AsyncIterator[str]:
    """Yield events with new rows, gauges and nodes, until the run has ended.

    Args:
      after: the last round that the page has.
    """
    yield "retry: 1000\n\n"
    generation: int | None = None
    sent: dict[str, Any] = {}
    silence = 0.0
    while not await request.is_disconnected():
        last_time = ending()
        snapshot = await run_in_threadpool(reader.read)
        rounds = snapshot.run.rounds
        ended = snapshot.run.summary is not None
        last = rounds[-1].round if rounds else 0
        if last < after or generation not in (None, snapshot.generation):
            yield _event("reset", {}, last)
            return
        generation = snapshot.generation
        now = await run_in_threadpool(series.now, snapshot)
        if now != sent or last > after:
            new = [record for record in rounds if record.round > after]
            kept = await run_in_threadpool(series.thinned, new, _EVENT_ROWS)
            content = {"columns": series.columns(kept), **now}
            yield _event("end" if ended else "now", content, last)
            sent = now
            after = last
            silence = 0.0
        if last_time or ended:
            return
        if silence >= _KEEP_ALIVE:
            yield ": nothing new\n\n"
            silence = 0.0
        await asyncio.sleep(POLL_SECONDS)
        silence += POLL_SECONDS


def _event(name: str, content: dict[str, Any], number: int) -> str:
    return f"id: {number}\nevent: {name}\ndata: {json.dumps(content, allow_nan=False)}\n\n"


def _rows(run: RunSnapshot, request: Request) -> dict[str, Any]:
    return series.rows(run, _number(request, "from"), _number(request, "to"))


def _number(request: Request, name: str) -> int:
    return _round(request.query_params.get(name, ""), name)


def _round(text: str, name: str = "this") -> int:
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise UserError(f"{name} must be the number of a round, not {text[:50]!r}")
    return int(text)


def _page_file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in page_files():
        raise HTTPException(404)
    return _file(name)


def _file(name: str) -> Response:
    content, media_type = page_files()[name]
    return Response(content, media_type=media_type, headers={"cache-control": "no-cache"})


def _listen(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in [*range(PORT, PORT + _PORTS), 0] if port is None else [port]:
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, candidate))
            listening.listen(128)
        except OSError as error:
            listening.close()
            if port is not None or isinstance(error, socket.gaierror):
                raise UserError(
                    f"cannot listen on {host}, port {candidate}: {error.strerror}"
                ) from None
        else:
            return listening
    raise UserError(f"cannot listen on {host}: is it an address of this machine?")
