"""Files of the page, and control of access to it.

Rules here:
- The page is read-only: GET and HEAD, and no other method.
- A request must name a host of this server. This refuses other sites whose DNS name was
  pointed at this machine (DNS rebinding).
- From other machines, a token is needed. It comes once in the address, and then as a
  cookie that contains an HMAC with the token as its key.
- The page loads nothing from other servers; a content security policy enforces this.
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

COOKIE = "fedbudget_dashboard"

_TYPES = {
    ".css": "text/css",
    ".js": "text/javascript",
    ".html": "text/html",
    ".svg": "image/svg+xml",
}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ANY = ("0.0.0.0", "::")
_HEADERS = {
    # Plotly adds styles to the page, and creates images from data: and blob: addresses.
    "content-security-policy": "default-src 'none'; script-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


@cache
def page_files() -> dict[str, tuple[str, str]]:
    """Return content and media type of the page's files, by name."""
    folder = files("fedbudget.dashboard").joinpath("page")
    return {
        file.name: (file.read_text(encoding="utf-8"), _TYPES[Path(file.name).suffix])
        for file in folder.iterdir()
        if Path(file.name).suffix in _TYPES
    }


def plotly_js() -> Path:
    """Return the path of plotly.js in the installed package plotly."""
    spec = find_spec("plotly")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        path = Path(folder, "package_data", "plotly.min.js")
        if path.is_file():
            return path
    raise UserError(
        "this needs plotly; install it with: pip install 'fedbudget[dashboard]'"
    )


@dataclass(frozen=True)
class Access:
    """The conditions for access.

    Args:
      host: the address that the server listens on.
      token: the required token; None for access without a token.
    """

    host: str
    token: str | None = field(default=None, repr=False)

    def is_own_host(self, host: str) -> bool:
        """Return whether the host of a request is this server.

        >>> access = Access("127.0.0.1")
        >>> access.is_own_host("localhost"), access.is_own_host("evil.example")
        (True, False)
        """
        if host in _LOOPBACK or host == self.host.lower():
            return True
        # A server on all addresses has many. An IP address is safe: only a DNS name can be
        # pointed at another machine.
        return self.host in _ANY and (_is_ip(host) or host == socket.gethostname().lower())

    def accepts_token(self, token: str) -> bool:
        """Return whether the token is correct; any is, if none is required."""
        return self.token is None or hmac.compare_digest(
            _digest(token), _digest(self.token)
        )

    def accepts_cookie(self, cookie: str | None) -> bool:
        """Return whether the cookie proves knowledge of the token."""
        return self.token is None or (
            cookie is not None
            and hmac.compare_digest(cookie.encode(), self.cookie.encode())
        )

    @property
    def cookie(self) -> str:
        """Value of the cookie that proves knowledge of the token."""
        if self.token is None:
            return ""
        return hmac.new(self.token.encode(), COOKIE.encode(), hashlib.sha256).hexdigest()


class AccessMiddleware:
    """Checks every request before it reaches the app, and adds security headers."""

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

        await (self._intercept(scope) or self._app)(scope, receive, send_with_headers)

    def _intercept(self, scope: Scope) -> Response | None:
        """Return a refusal or a redirection; None for a request that may pass."""
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return error_response(scope, 405, "this page is read-only")
        if not self._access.is_own_host(_host(headers.get("host", ""))):
            return error_response(
                scope,
                403,
                "wrong host name; open the page with the address that fedbudget printed",
            )
        if self._access.token is None:
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        token = dict(query).get("token")
        if token is not None and self._access.accepts_token(token):
            return self._without_token(scope, query)
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE)
        if token is None and self._access.accepts_cookie(cookie):
            return None
        return error_response(
            scope, 401, "this page needs a token: open it once as /?token=TOKEN"
        )

    def _without_token(self, scope: Scope, query: list[tuple[str, str]]) -> Response:
        """Redirect to the same page, to keep the token out of the browser's history."""
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        path = "/" + scope["raw_path"].decode("latin-1").split("?")[0].lstrip("/")
        address = f"{path}?{rest}" if rest else path
        response = RedirectResponse(address, status_code=303)
        response.set_cookie(
            COOKIE, self._access.cookie, httponly=True, samesite="strict", path="/"
        )
        return response


def error_response(scope: Scope, status: int, reason: str) -> Response:
    """Return an error as a page, or as JSON for a request of the page's own scripts."""
    if scope["path"].startswith("/api/"):
        return JSONResponse({"error": reason}, status)
    style, _ = page_files()["style.css"]  # inline: without access, no file can be loaded
    page = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{status}</title>
<style>{style}</style>
<main class="complaint"><h1>{status}</h1>
<p>{html.escape(reason)}</p><p><a href="/">All runs</a></p></main>
</html>
"""
    return Response(page, status, media_type="text/html")


def _host(header: str) -> str:
    """Return the host without port, and an IPv6 address without brackets."""
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
