"""What the page asks for, and what it gets: JSON from the runs' folder, and events as a run goes on.

The page on a port of this machine: until it is told to end, or beside a run for as long as that takes.
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
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fedbudget.dashboard import series
from fedbudget.dashboard.access import (
    Access,
    AccessMiddleware,
    error_response,
    page_files,
    plotly_js,
)
from fedbudget.dashboard.run_reader import RunIndex, RunReader
from fedbudget.errors import UserError

POLL_SECONDS = 0.5
"""Between two looks at a run that is being written."""

_EVENT_ROWS = 200  # rows of an event, about; a page that was not there for a while asks for all anyway
_KEEP_ALIVE = 15.0  # seconds after which something is sent even when nothing happens, so that nobody hangs up


def make_app(
    index: RunIndex, access: Access, ending: Callable[[], bool] = lambda: False
) -> Starlette:
    """The app.

    Args:
      ending: whether it is to end, and events with it.
    """

    def run_page(request: Request) -> Response:
        _reader(request)
        return _file("index.html")

    def runs(request: Request) -> Response:
        return JSONResponse({"folder": index.shown, "runs": index.overviews()})

    def run(request: Request) -> Response:
        return JSONResponse(series.view(_reader(request).read()))

    def rows(request: Request) -> Response:
        first = _number(request, "from")
        last = _number(request, "to")
        return JSONResponse(series.rows(_reader(request).read(), first, last))

    def choice(request: Request) -> Response:
        return JSONResponse(
            series.choice(_reader(request).read(), request.path_params["number"])
        )

    async def events(request: Request) -> Response:
        reader = await run_in_threadpool(_reader, request)
        last = (
            request.headers.get("last-event-id") or request.query_params.get("after") or "0"
        )
        after = int(last) if last.isdecimal() else 0
        return StreamingResponse(
            _events(request, reader, after, ending), media_type="text/event-stream"
        )

    def _reader(request: Request) -> RunReader:
        name = request.path_params["name"]
        reader = index.reader(name)
        if reader is None:
            raise _NotFound(f"there is no run {name!r} in {index.shown}")
        return reader

    return Starlette(
        routes=[
            Route("/", lambda request: _file("index.html")),
            Route("/compare", lambda request: _file("index.html")),
            Route("/run/{name}", run_page),
            Route("/page/{name}", _page_file),
            Route("/plotly.js", _plotly),
            Route("/favicon.ico", lambda request: _file("icon.svg")),
            Route("/api/runs", runs),
            Route("/api/runs/{name}", run),
            Route("/api/runs/{name}/rows", rows),
            Route("/api/runs/{name}/rounds/{number:int}", choice),
            Route("/api/runs/{name}/events", events),
        ],
        middleware=[Middleware(AccessMiddleware, access=access)],
        exception_handlers={
            _NotFound: lambda request, error: error_response(
                request.scope, 404, str(error)
            ),
            UserError: lambda request, error: error_response(
                request.scope, 422, str(error)
            ),
            404: lambda request, error: error_response(
                request.scope, 404, "there is nothing here"
            ),
        },
    )


class _NotFound(Exception):
    pass


async def _events(
    request: Request, reader: RunReader, after: int, ending: Callable[[], bool]
) -> AsyncIterator[str]:
    """Rows after a round, as they are written, with gauges and nodes; the last event is the end of the run."""
    yield "retry: 1000\n\n"
    generation: int | None = None
    sent: dict[str, Any] = {}
    silence = 0.0
    while not await request.is_disconnected():
        last_time = ending()
        snapshot = await run_in_threadpool(reader.read)
        rounds = snapshot.run.rounds
        last = rounds[-1].round if rounds else 0
        if last < after or generation not in (None, snapshot.generation):
            yield _event("reset", {}, last)
            return
        generation = snapshot.generation
        now = await run_in_threadpool(series.now, snapshot)
        if now != sent or last > after:
            fresh = [record for record in rounds if record.round > after]
            kept = await run_in_threadpool(series.thinned, fresh, _EVENT_ROWS)
            content = {"columns": series.columns(kept), **now}
            yield _event("now" if snapshot.run.summary is None else "end", content, last)
            sent = now
            after = last
            silence = 0.0
        if last_time or snapshot.run.summary is not None:
            return
        if silence >= _KEEP_ALIVE:
            yield ": nothing new\n\n"
            silence = 0.0
        await asyncio.sleep(POLL_SECONDS)
        silence += POLL_SECONDS


def _event(name: str, content: dict[str, Any], number: int) -> str:
    return f"id: {number}\nevent: {name}\ndata: {json.dumps(content, allow_nan=False)}\n\n"


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    if not text.isdecimal():
        raise UserError(f"{name} must be the number of a round, not {text[:50]!r}")
    return int(text)


def _page_file(request: Request) -> Response:
    name = request.path_params["name"]
    return (
        _file(name)
        if name in page_files()
        else error_response(request.scope, 404, "there is nothing here")
    )


def _file(name: str) -> Response:
    content, media_type = page_files()[name]
    return Response(content, media_type=media_type, headers={"cache-control": "no-cache"})


def _plotly(request: Request) -> Response:
    return FileResponse(
        plotly_js(),
        media_type="text/javascript",
        headers={"cache-control": "max-age=86400"},
    )


PORT = 8700
_TRIES = 20  # ports after it, where it is taken


class Dashboard:
    """The page, on a port that is open already, so that its address is known before it is served.

    Args:
      port: None for the usual one, or the next that is free.
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
        self.host, self.port = host, int(self._socket.getsockname()[1])
        app = make_app(index, Access(host, token), ending=lambda: self._server.should_exit)
        config = uvicorn.Config(
            app,
            log_level="warning",
            lifespan="off",
            ws="none",
            access_log=False,
            timeout_graceful_shutdown=2,
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
        with contextlib.suppress(
            KeyboardInterrupt
        ):  # which uvicorn passes on when it has ended in good order
            self._server.run(sockets=[self._socket])

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """In a thread, while something else is done."""
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
                raise UserError(
                    f"cannot listen on {host}, port {candidate}: {error.strerror}"
                ) from None
        else:
            return listening
    raise UserError(f"cannot listen on {host}: is it an address of this machine?")
