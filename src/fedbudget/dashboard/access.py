"""The files that the page is made of, and the pages that are made without JavaScript.

Who may look at the page, and what the page may do.

Rules here:
- Everything is read, nothing is written: GET and HEAD, and no other method.
- A request must name a host that we are: a page elsewhere, whose name was made to point here, is refused.
- Beyond this machine a token is needed. It comes once in the address, and then as a cookie, which holds a digest of it.
- The page loads nothing from elsewhere, and the browser is told to see to it.
"""

import hashlib
import hmac
import html
import ipaddress
import socket
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedbudget.errors import UserError

_TYPES = {
    ".css": "text/css",
    ".js": "text/javascript",
    ".html": "text/html",
    ".svg": "image/svg+xml",
}


@cache
def page_files() -> dict[str, tuple[str, str]]:
    """Contents and media type of each, by name."""
    folder = files("fedbudget.dashboard").joinpath("page")
    return {
        file.name: (file.read_text(encoding="utf-8"), _TYPES[Path(file.name).suffix])
        for file in folder.iterdir()
        if Path(file.name).suffix in _TYPES
    }


def plotly_js() -> Path:
    """The charts' library, as the installed plotly carries it."""
    spec = find_spec("plotly")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        path = Path(folder, "package_data", "plotly.min.js")
        if path.is_file():
            return path
    raise UserError(
        "this needs plotly; install it with: pip install 'fedbudget[dashboard]'"
    )


def error_page(status: int, why: str) -> str:
    """A page that says what is wrong."""
    style = page_files()["style.css"][
        0
    ]  # in the page itself: who is not let in gets no other file
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{status}</title>
<style>{style}</style>
<main class="complaint"><h1>{status}</h1><p>{html.escape(why)}</p><p><a href="/">All runs</a></p></main>
</html>
"""


COOKIE = "fedbudget_dashboard"

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ANY = ("0.0.0.0", "::")
_HEADERS = {
    # Plotly puts styles of its own into the page, and makes pictures from data: and blob: addresses.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class Access:
    """Who is let in.

    Args:
      host: that we listen on.
      token: that must be known; None where all may look.
    """

    host: str
    token: str | None = field(default=None, repr=False)

    def is_own_host(self, host: str) -> bool:
        """Whether we are the host of a request.

        >>> Access("127.0.0.1").is_own_host("localhost"), Access("127.0.0.1").is_own_host("evil.example")
        (True, False)
        """
        if host in _LOOPBACK or host == self.host.lower():
            return True
        # Who listens on all addresses has many; but only a name can be made to point to somebody else.
        return self.host in _ANY and (_is_ip(host) or host == socket.gethostname().lower())

    def accepts_token(self, token: str | None) -> bool:
        return self.token is None or (
            token is not None and hmac.compare_digest(_digest(token), _digest(self.token))
        )

    def accepts_cookie(self, cookie: str | None) -> bool:
        return self.token is None or (
            cookie is not None
            and hmac.compare_digest(cookie.encode(), self.cookie.encode())
        )

    @property
    def cookie(self) -> str:
        """What shows that the token was known."""
        return (
            ""
            if self.token is None
            else hmac.new(self.token.encode(), COOKIE.encode(), hashlib.sha256).hexdigest()
        )


class AccessMiddleware:
    """Stands before the app."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await (self._error(scope) or self._app)(scope, receive, send_with_headers)

    def _error(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return error_response(scope, 405, "this page can only be read")
        if not self._access.is_own_host(_host(headers.get("host", ""))):
            return error_response(
                scope, 403, "this page has another address; open it as fedbudget printed it"
            )
        if self._access.token is None:
            return None
        asked = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        token = dict(asked).get("token")
        if token is not None and self._access.accepts_token(token):
            # To the same page without the token, which should not stay in the browser's history.
            rest = urlencode([(name, value) for name, value in asked if name != "token"])
            path = "/" + scope["raw_path"].decode("latin-1").split("?")[0].lstrip("/")
            response = RedirectResponse(
                path + (f"?{rest}" if rest else ""), status_code=303
            )
            response.set_cookie(
                COOKIE, self._access.cookie, httponly=True, samesite="strict", path="/"
            )
            return response
        if token is None and self._access.accepts_cookie(
            cookie_parser(headers.get("cookie", "")).get(COOKIE)
        ):
            return None
        return error_response(
            scope, 401, "this page needs a token: open it once as /?token=TOKEN"
        )


def error_response(scope: Scope, status: int, why: str) -> Response:
    """An error as those who ask want it: a page, or JSON for the page's own requests."""
    if scope["path"].startswith("/api/"):
        return JSONResponse({"error": why}, status)
    return Response(error_page(status, why), status, media_type="text/html")


def _host(header: str) -> str:
    """Without the port, and an IPv6 address without its brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
