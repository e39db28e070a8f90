"""A local web server with configurable faults, and small datasets for it to serve."""

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
    """A received request, and the number of bytes sent."""

    path: str
    range: str | None
    agent: str
    sent: int = 0


@dataclass
class Web:
    """Files and faults of the server.

    Args:
      files: contents by path.
      cut: bytes of a response after which the connection closes, by path.
      ignores_range: answers a range request with the whole file.
      wrong_range: answers a range request with a range that starts elsewhere.
      refuses_range: answers a range request with 416, without the size of the file.
      endless: sends bytes forever, without Content-Length.
      no_length: omits Content-Length.
      encoding: Content-Encoding of the response.
      moved: redirects every path to the same path below `moved/`.
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
    """A tar archive; a member given as text is a symbolic link to that path."""
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
                self.close_connection = True  # the client has disconnected

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
    request.sent += len(body)  # before the write, which lets the client continue
    handler.wfile.write(body)
