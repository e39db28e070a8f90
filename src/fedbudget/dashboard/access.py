"""Files of the page, and control of access to it.

Rules here:
- The page is read-only: GET and HEAD, and no other method.
- A request must name a host of this server. This refuses other sites whose DNS name was
  pointed at this machine (DNS rebinding).
- A token is needed, also on this machine, which may have other users. It comes once in the
  address, and then as a cookie that contains an HMAC with the token as its key.
- The page loads nothing from other servers; a content security policy enforces this.
"""

import hashlib
import hmac
import html
import ipaddress
import socket
from functools import cache
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


def is_own_host(host: str, own: str) -> bool:
    """Return whether the host of a request is the server that listens on `own`.

    >>> is_own_host("localhost", "127.0.0.1"), is_own_host("evil.example", "127.0.0.1")
    (True, False)
    """
    if host in _LOOPBACK or host == own.lower():
        return True
    # A server on all addresses has many. An IP address is safe: only a DNS name can be
    # pointed at another machine.
    return own in _ANY and (_is_ip(host) or host == socket.gethostname().lower())


class AccessMiddleware:
    """Checks every request before it reaches the app, and adds security headers.

    Args:
      app: receives the requests that pass.
      host: the address that the server listens on.
      token: the required token; None for access without a token.
      port: of the server; browsers send cookies of one host to all its ports.
    """

    def __init__(self, app: ASGIApp, host: str, token: str | None, port: int) -> None:
        self._name = f"{COOKIE}_{port}" if port else COOKIE
        self._app = app
        self._host = host
        self._cookie = None if token is None else _cookie(token)

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
        request = Request(scope)
        if request.method not in ("GET", "HEAD"):
            return error_response(scope, 405, "this page is read-only")
        if not is_own_host(_host(request.headers.get("host", "")), self._host):
            return error_response(
                scope,
                403,
                "wrong host name; open the page with the address that fedbudget printed",
            )
        if self._cookie is None:
            return None
        token = request.query_params.get("token")
        cookie = request.cookies.get(self._name, "") if token is None else _cookie(token)
        if not hmac.compare_digest(cookie.encode(), self._cookie.encode()):
            return error_response(
                scope, 401, "this page needs a token: open it once as /?token=TOKEN"
            )
        return None if token is None else _without_token(request, self._name, cookie)


def _cookie(token: str) -> str:
    """Return the value of the cookie that proves knowledge of a token."""
    secret = token.encode("utf-8", "surrogatepass")
    return hmac.new(secret, COOKIE.encode(), hashlib.sha256).hexdigest()


def _without_token(request: Request, name: str, cookie: str) -> Response:
    """Redirect to the same page, to keep the token out of the browser's history."""
    query = request.query_params.multi_items()
    rest = urlencode([(name, value) for name, value in query if name != "token"])
    path = "/" + request.scope["raw_path"].decode("latin-1").split("?")[0].lstrip("/")
    response = RedirectResponse(f"{path}?{rest}" if rest else path, status_code=303)
    response.set_cookie(name, cookie, httponly=True, samesite="strict", path="/")
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


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
