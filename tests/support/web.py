"""A real web server on this machine, which can be told to misbehave, and small datasets for
it to serve.
"""

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fedbudget.data.download import File
from fedbudget.data.published import PublishedDataset


@dataclass
class Request:
    """What the server saw, and how much it sent."""

    path: str
    range: str | None
    agent: str
    sent: int = 0


@dataclass
class Web:
    """What is served, and how.

    Args:
      files: contents by path.
      cut: after how many bytes of an answer the connection is closed, by path.
      ignores_range: answers with everything, whatever was asked for.
      wrong_range: answers a request for the rest with a rest that starts elsewhere.
      refuses_range: answers 416, with or without the size of the whole.
      endless: sends bytes without end and without saying how many.
      no_length: does not say how many bytes come.
      encoding: what it says of the encoding of what comes.
      moved: sends on from every path to the same below `moved/`, once.
    """

    files: dict[str, bytes]
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)
    ignores_range: bool = False
    wrong_range: bool = False
    refuses_range: bool = False
    endless: bool = False
    no_length: bool = False
    encoding: str | None = None
    moved: bool = False

    @property
    def paths(self) -> list[str]:
        return [request.path for request in self.requests]


@contextmanager
def serving(files: Mapping[str, bytes]) -> Iterator[Web]:
    web = Web(dict(files))
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(web))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    web.url = f"http://127.0.0.1:{server.server_port}/"
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def dataset_of(contents: Mapping[str, bytes], **more: object) -> PublishedDataset:
    """A dataset with these files."""
    files = tuple(
        File(name, len(text), hashlib.sha256(text).hexdigest())
        for name, text in contents.items()
    )
    request = {
        "title": "small",
        "samples": 3,
        "folders": ("small", "SMALL/raw"),
        "sources": (),
        "licence": "none",
    }
    return PublishedDataset(name="small", files=files, **{**request, **more})  # type: ignore[arg-type]


def tar_of(members: Mapping[str, bytes | str], mode: str = "w:gz") -> bytes:
    """An archive; a member given as text is a symbolic link to it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for path, contents in members.items():
            member = tarfile.TarInfo(path)
            if isinstance(contents, str):
                member.type, member.linkname = tarfile.SYMTYPE, contents
                archive.addfile(member)
            else:
                member.size = len(contents)
                archive.addfile(member, io.BytesIO(contents))
    return buffer.getvalue()


def _handler(web: Web) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            request = Request(
                self.path.lstrip("/"), self.headers["Range"], self.headers["User-Agent"]
            )
            web.requests.append(request)
            try:
                _answer(web, self, request)
            except ConnectionError:
                self.close_connection = True  # the client has had enough

        def log_message(self, format: str, *arguments: object) -> None: ...

    return Handler


def _answer(web: Web, handler: BaseHTTPRequestHandler, request: Request) -> None:
    if web.moved and not request.path.startswith("moved/"):
        handler.send_response(302)
        handler.send_header("Location", f"/moved/{request.path}")
        handler.end_headers()
        return
    whole = web.files.get(request.path.removeprefix("moved/"))
    if whole is None:
        handler.send_error(404)
        return
    start = (
        int(request.range.removeprefix("bytes=").removesuffix("-")) if request.range else 0
    )
    if start and (web.refuses_range or start >= len(whole)):
        handler.send_response(416)
        if not web.refuses_range:
            handler.send_header("Content-Range", f"bytes */{len(whole)}")
        handler.end_headers()
        return
    if web.ignores_range:
        start = 0
    handler.send_response(206 if start else 200)
    body = whole[start:]
    if start:
        handler.send_header(
            "Content-Range",
            f"bytes {start + web.wrong_range}-{len(whole) - 1}/{len(whole)}",
        )
    if web.encoding is not None:
        handler.send_header("Content-Encoding", web.encoding)
    if not web.endless and not web.no_length:
        handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    _send(handler, request, body[: web.cut.get(request.path, len(body))])
    while web.endless:
        _send(handler, request, bytes(1 << 16))
    handler.close_connection = True


def _send(handler: BaseHTTPRequestHandler, request: Request, body: bytes) -> None:
    request.sent += len(body)  # before the client can have it all and look
    handler.wfile.write(body)
