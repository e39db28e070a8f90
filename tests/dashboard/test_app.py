"""The dashboard over HTTP, from a running server."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedbudget.dashboard.app import PORT, Dashboard
from fedbudget.errors import UserError
from fedbudget.runs.folder import RunWriter
from support.synthetic_runs import SETTINGS, make_run, many_rounds, record

TOKEN = "a-token-of-enough-letters"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("app") / "runs"
    make_run(folder / "first")
    make_run(folder / "a name & ü")
    many_rounds(folder / "long", 4000)
    make_run(folder.parent / "outside")
    (folder / "link").symlink_to(folder.parent / "outside")
    return folder


@pytest.fixture(scope="module")
def page(runs: Path) -> Iterator[Dashboard]:
    with opened(runs) as page:
        yield page


@pytest.fixture(scope="module")
def guarded(runs: Path) -> Iterator[Dashboard]:
    with opened(runs, token=TOKEN) as page:
        yield page


@contextmanager
def opened(runs: Path, **options: Any) -> Iterator[Dashboard]:
    page = Dashboard(runs, port=0, **options)
    with page.in_background():
        yield page


class Response:
    """The response to one request."""

    def __init__(
        self, page: Dashboard, path: str, method: str = "GET", **headers: str
    ) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()
        connection.close()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def test_list_of_runs(page: Dashboard) -> None:
    assert {each["name"] for each in Response(page, "/api/runs").json["runs"]} == {
        "first",
        "a name & ü",
        "long",
    }


def test_escaped_run_name(page: Dashboard) -> None:
    response = Response(page, "/api/runs/a%20name%20%26%20%C3%BC")
    assert response.status == 200
    assert response.json["name"] == "a name & ü"
    assert response.json["rounds"] == 20
    assert page.address("a name & ü").endswith("/run/a%20name%20%26%20%C3%BC")


def test_long_run_is_thinned(page: Dashboard) -> None:
    assert len(Response(page, "/api/runs/long").json["columns"]["round"]) <= 3000
    rows = Response(page, "/api/runs/long/rows?from=2000&to=2100").json
    assert rows["columns"]["round"] == list(range(2000, 2101))


def test_round_has_its_curve(page: Dashboard) -> None:
    result = Response(page, "/api/runs/first/rounds/7").json
    assert (result["record"]["tau"], result["candidates"][-1]) == (5, 50)


@pytest.mark.parametrize(
    "path",
    [
        "/run/missing",
        "/run/..",
        "/run/%2e%2e",
        "/run/%2e%2e%2foutside",
        "/run/..%2foutside",
        "/run/link",
        "/run/first/../../outside",
        "/api/runs/missing",
        "/api/runs/%2e%2e",
        "/api/runs/..%2foutside",
        "/api/runs/%2e%2e%2foutside/rows?from=1&to=2",
        "/api/runs/link",
        "/api/runs/link/rounds/1",
        "/api/runs/link/events",
        "/api/runs//etc/passwd",
        "/page/../app.py",
        "/page/%2e%2e%2fapp.py",
        "/page/nothing.js",
        "//etc/passwd",
        "/etc/passwd",
        "/first/config.toml",
    ],
)
def test_other_paths_are_refused(page: Dashboard, path: str) -> None:
    response = Response(page, path)
    assert response.status == 404
    # The error may quote the requested name.
    assert b"outside" not in response.body.replace(b"outside' in", b"")
    if path.startswith("/api/"):
        assert "error" in response.json


def test_error_escapes_html(page: Dashboard) -> None:
    response = Response(page, "/run/%3Cscript%3Ealert(1)%3C%2Fscript%3E")
    assert response.status == 404
    assert b"<script>" not in response.body


@pytest.mark.parametrize(
    "query", ["", "?from=1", "?from=a&to=2", "?from=-1&to=2", "?from=1&to=2e3"]
)
def test_invalid_ranges_are_refused(page: Dashboard, query: str) -> None:
    response = Response(page, f"/api/runs/first/rows{query}")
    assert response.status == 422
    assert "must be the number of a round" in response.json["error"]


def test_missing_round_is_refused(page: Dashboard) -> None:
    assert Response(page, "/api/runs/first/rounds/99").json == {
        "error": "first has no round 99; it has rounds 1 to 20"
    }


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_writing_methods_are_refused(page: Dashboard, method: str) -> None:
    assert Response(page, "/api/runs", method).status == 405


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8700", "127.0.0.1.evil.example", "", "192.0.2.1"]
)
def test_foreign_hosts_are_refused(page: Dashboard, host: str) -> None:
    assert Response(page, "/api/runs", Host=host).status == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1234", "[::1]:8700", "LOCALHOST"])
def test_local_hosts_are_accepted(page: Dashboard, host: str) -> None:
    assert Response(page, "/api/runs", Host=host).status == 200


def test_open_host_accepts_only_addresses(
    runs: Path,
) -> None:
    with opened(runs, host="0.0.0.0", token=TOKEN) as page:
        assert Response(page, "/", Host="192.0.2.1:8700").status == 401
        assert Response(page, "/", Host="evil.example").status == 403


def test_security_headers(page: Dashboard) -> None:
    for path in ("/", "/api/runs", "/page/main.js", "/nothing"):
        headers = Response(page, path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe-eval" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


class TestToken:
    @pytest.mark.parametrize(
        "path", ["/", "/api/runs", "/api/runs/first/events", "/page/main.js"]
    )
    @pytest.mark.parametrize(
        "query", ["", "?token=", "?token=wrong", f"?token={TOKEN}x", f"?Token={TOKEN}"]
    )
    def test_missing_token_is_refused(
        self, guarded: Dashboard, path: str, query: str
    ) -> None:
        response = Response(guarded, path + query)
        assert (response.status, response.headers["set-cookie"]) == (401, None)
        assert TOKEN.encode() not in response.body

    def test_token_becomes_a_cookie(self, guarded: Dashboard) -> None:
        response = Response(guarded, f"/compare?run=first&token={TOKEN}&run=long")
        assert response.status == 303
        assert response.headers["location"] == "/compare?run=first&run=long"
        cookie = response.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert TOKEN not in cookie
        cookie_pair = cookie.partition(";")[0]
        assert Response(guarded, "/api/runs", Cookie=cookie_pair).status == 200
        assert Response(guarded, "/api/runs", Cookie=cookie_pair[:-1]).status == 401
        assert (
            Response(guarded, "/api/runs", Cookie=f"fedbudget_dashboard={TOKEN}").status
            == 401
        )

    def test_redirect_stays_on_this_host(self, guarded: Dashboard) -> None:
        assert (
            Response(guarded, f"//evil.example/?token={TOKEN}").headers["location"]
            == "/evil.example/"
        )


class Events:
    """A stream of server-sent events."""

    def __init__(self, page: Dashboard, path: str, **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
        self._connection.request("GET", path, headers=headers)
        self._answer = self._connection.getresponse()
        self.kind = self._answer.headers["content-type"]

    def next(self) -> tuple[str, int, Any]:
        """Return name, number and data of the next event; skip other lines."""
        result: dict[str, str] = {}
        while "data" not in result:
            line = self._answer.readline().decode()
            assert line, "the stream has ended"
            name, _, value = line.rstrip("\n").partition(": ")
            result[name] = value
        return result["event"], int(result["id"]), json.loads(result["data"])

    @property
    def ended(self) -> bool:
        return self._answer.read().strip() == b""

    def close(self) -> None:
        self._connection.close()


def test_events_of_rounds_and_end(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "runs" / "run", SETTINGS.to_toml())
    writer.append(record(1))
    with opened(tmp_path / "runs") as page:
        events = Events(page, "/api/runs/run/events?after=0")
        assert events.kind.startswith("text/event-stream")
        name, number, data = events.next()
        assert (name, number) == ("now", 1)
        assert data["columns"]["round"] == [1]
        assert data["state"] == "running"
        writer.append(record(2))
        writer.append(record(3))
        rounds: list[int] = []
        while number < 3:
            name, number, data = events.next()
            rounds += data["columns"]["round"]
        assert rounds == [2, 3]
        assert data["gauges"][0]["text"] == "0.3s of 20s"
        writer.append(record(4))
        writer.finish({"status": "finished", "stopped_by": "time"}, b"")
        while name == "now":
            name, number, data = events.next()
        assert (name, number, data["state"]) == ("end", 4, "finished")
        assert events.ended
        events.close()


def test_reconnection_resumes_the_stream(page: Dashboard) -> None:
    events = Events(page, "/api/runs/first/events?after=3", **{"Last-Event-ID": "18"})
    assert events.next()[2]["columns"]["round"] == [19, 20]
    events.close()


def test_removed_rounds_reset_the_stream(page: Dashboard) -> None:
    events = Events(page, "/api/runs/first/events?after=500")
    assert events.next()[:2] == ("reset", 20)
    events.close()


def test_open_stream_ends_with_server(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "run", finished=False)
    with opened(tmp_path / "runs") as page:
        events = Events(page, "/api/runs/run/events")
        events.next()
    assert events.ended
    events.close()
    with socket.socket() as other, pytest.raises(OSError, match="refused"):
        other.connect(("127.0.0.1", page.port))


def close(page: Dashboard) -> None:
    with page.in_background():
        pass


def test_busy_ports(
    tmp_path: Path,
) -> None:
    """The default port moves to a free one; a given port is an error."""
    make_run(tmp_path / "run")
    first = Dashboard(tmp_path)
    second = Dashboard(tmp_path)
    assert PORT <= first.port < second.port
    with pytest.raises(
        UserError,
        match=f"cannot listen on 127.0.0.1, port {first.port}: Address already in use",
    ):
        Dashboard(tmp_path, port=first.port)
    close(first)
    close(second)


def test_loopback_is_the_default(tmp_path: Path) -> None:
    page = Dashboard(tmp_path, port=0)
    with page.in_background():
        assert page.address() == f"http://127.0.0.1:{page.port}/"
        with socket.socket() as other, pytest.raises(OSError, match="refused"):
            other.connect(("127.0.0.2", page.port))


def test_foreign_addresses_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot listen on"):
        Dashboard(tmp_path, host="192.0.2.1")
    with pytest.raises(UserError, match="cannot listen on"):
        Dashboard(tmp_path, host="no.such.host.invalid")
