"""What the page is told over HTTP by the real server, and what it is refused."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedbudget.dashboard.app import Dashboard
from fedbudget.runs.folder import RunWriter
from support.made_runs import SETTINGS, make_run, many_rounds, record

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


class Answer:
    """What came back."""

    def __init__(
        self, page: Dashboard, path: str, method: str = "GET", **headers: str
    ) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        self.status, self.headers, self.body = answer.status, answer.headers, answer.read()
        connection.close()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def test_all_runs_are_listed(page: Dashboard) -> None:
    assert {each["name"] for each in Answer(page, "/api/runs").json["runs"]} == {
        "first",
        "a name & ü",
        "long",
    }


def test_a_run_is_found_by_its_name_however_that_is_written(page: Dashboard) -> None:
    answer = Answer(page, "/api/runs/a%20name%20%26%20%C3%BC")
    assert (answer.status, answer.json["name"], answer.json["rounds"]) == (
        200,
        "a name & ü",
        20,
    )
    assert page.address("a name & ü").endswith("/run/a%20name%20%26%20%C3%BC")


def test_a_long_run_comes_thinned_and_a_stretch_of_it_exactly(page: Dashboard) -> None:
    assert len(Answer(page, "/api/runs/long").json["columns"]["round"]) <= 3000
    rows = Answer(page, "/api/runs/long/rows?from=2000&to=2100").json
    assert rows["columns"]["round"] == list(range(2000, 2101))


def test_the_round_in_focus_comes_with_its_curve(page: Dashboard) -> None:
    found = Answer(page, "/api/runs/first/rounds/7").json
    assert (found["record"]["tau"], found["candidates"][-1]) == (5, 50)


@pytest.mark.parametrize(
    "path",
    [
        "/run/nobody",
        "/run/..",
        "/run/%2e%2e",
        "/run/%2e%2e%2foutside",
        "/run/..%2foutside",
        "/run/link",
        "/run/first/../../outside",
        "/api/runs/nobody",
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
def test_nothing_else_can_be_read(page: Dashboard, path: str) -> None:
    answer = Answer(page, path)
    assert answer.status == 404
    assert b"outside" not in answer.body.replace(
        b"outside' in", b""
    )  # but for the name that was asked for
    if path.startswith("/api/"):
        assert "error" in answer.json


def test_a_name_in_an_error_is_text_and_not_html(page: Dashboard) -> None:
    answer = Answer(page, "/run/%3Cscript%3Ealert(1)%3C%2Fscript%3E")
    assert answer.status == 404
    assert b"<script>" not in answer.body


@pytest.mark.parametrize(
    "query", ["", "?from=1", "?from=a&to=2", "?from=-1&to=2", "?from=1&to=2e3"]
)
def test_a_stretch_that_makes_no_sense_is_refused(page: Dashboard, query: str) -> None:
    answer = Answer(page, f"/api/runs/first/rows{query}")
    assert (answer.status, "must be the number of a round" in answer.json["error"]) == (
        422,
        True,
    )


def test_a_round_that_is_not_there_is_refused(page: Dashboard) -> None:
    assert Answer(page, "/api/runs/first/rounds/99").json == {
        "error": "first has no round 99; it has rounds 1 to 20"
    }


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_the_page_can_only_be_read(page: Dashboard, method: str) -> None:
    assert Answer(page, "/api/runs", method).status == 405


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8700", "127.0.0.1.evil.example", "", "192.0.2.1"]
)
def test_a_host_that_we_are_not_is_refused(page: Dashboard, host: str) -> None:
    assert Answer(page, "/api/runs", Host=host).status == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1234", "[::1]:8700", "LOCALHOST"])
def test_a_host_that_we_are_is_not(page: Dashboard, host: str) -> None:
    assert Answer(page, "/api/runs", Host=host).status == 200


def test_who_listens_on_all_addresses_answers_to_addresses_but_not_to_any_name(
    runs: Path,
) -> None:
    with opened(runs, host="0.0.0.0", token=TOKEN) as page:
        assert Answer(page, "/", Host="192.0.2.1:8700").status == 401
        assert Answer(page, "/", Host="evil.example").status == 403


def test_every_answer_forbids_what_is_not_ours(page: Dashboard) -> None:
    for path in ("/", "/api/runs", "/page/main.js", "/nothing"):
        headers = Answer(page, path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe-eval" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


class TestToken:
    @pytest.mark.parametrize(
        "path", ["/", "/api/runs", "/api/runs/first/events", "/plotly.js", "/page/main.js"]
    )
    @pytest.mark.parametrize(
        "query", ["", "?token=", "?token=wrong", f"?token={TOKEN}x", f"?Token={TOKEN}"]
    )
    def test_without_it_nothing_is_shown(
        self, guarded: Dashboard, path: str, query: str
    ) -> None:
        answer = Answer(guarded, path + query)
        assert (answer.status, answer.headers["set-cookie"]) == (401, None)
        assert TOKEN.encode() not in answer.body

    def test_with_it_a_cookie_comes_and_the_token_leaves_the_address(
        self, guarded: Dashboard
    ) -> None:
        answer = Answer(guarded, f"/compare?run=first&token={TOKEN}&run=long")
        assert (answer.status, answer.headers["location"]) == (
            303,
            "/compare?run=first&run=long",
        )
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert TOKEN not in cookie
        known = cookie.partition(";")[0]
        assert Answer(guarded, "/api/runs", Cookie=known).status == 200
        assert Answer(guarded, "/api/runs", Cookie=known[:-1]).status == 401
        assert (
            Answer(guarded, "/api/runs", Cookie=f"fedbudget_dashboard={TOKEN}").status
            == 401
        )

    def test_the_way_on_is_never_to_another_host(self, guarded: Dashboard) -> None:
        assert (
            Answer(guarded, f"//evil.example/?token={TOKEN}").headers["location"]
            == "/evil.example/"
        )


class Events:
    """A stream of events, as they come."""

    def __init__(self, page: Dashboard, path: str, **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
        self._connection.request("GET", path, headers=headers)
        self._answer = self._connection.getresponse()
        self.kind = self._answer.headers["content-type"]

    def next(self) -> tuple[str, int, Any]:
        """Name, number and data; what is not an event is passed over."""
        found: dict[str, str] = {}
        while "data" not in found:
            line = self._answer.readline().decode()
            assert line, "the stream has ended"
            name, _, value = line.rstrip("\n").partition(": ")
            found[name] = value
        return found["event"], int(found["id"]), json.loads(found["data"])

    @property
    def ended(self) -> bool:
        return self._answer.read().strip() == b""

    def close(self) -> None:
        self._connection.close()


def test_events_tell_of_new_rounds_and_of_the_end(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "runs" / "run", SETTINGS.to_toml())
    writer.append(record(1))
    with opened(tmp_path / "runs") as page:
        events = Events(page, "/api/runs/run/events?after=0")
        assert events.kind.startswith("text/event-stream")
        name, number, told = events.next()
        assert (name, number, told["columns"]["round"], told["state"]) == (
            "now",
            1,
            [1],
            "running",
        )
        writer.append(record(2))
        writer.append(record(3))
        rounds: list[int] = []
        while number < 3:
            name, number, told = events.next()
            rounds += told["columns"]["round"]
        assert rounds == [2, 3]
        assert told["gauges"][0]["text"] == "0.3s of 20s"
        writer.append(record(4))
        writer.finish({"status": "finished", "stopped_by": "time"}, b"")
        while name == "now":
            name, number, told = events.next()
        assert (name, number, told["state"]) == ("end", 4, "finished")
        assert events.ended
        events.close()


def test_who_comes_back_is_told_only_what_was_missed(page: Dashboard) -> None:
    events = Events(page, "/api/runs/first/events?after=3", **{"Last-Event-ID": "18"})
    assert events.next()[2]["columns"]["round"] == [19, 20]
    events.close()


def test_a_run_that_has_taken_rounds_back_is_to_be_read_again(page: Dashboard) -> None:
    events = Events(page, "/api/runs/first/events?after=500")
    assert events.next()[:2] == ("reset", 20)
    events.close()


def test_an_open_stream_does_not_keep_the_page_from_ending(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "run", finished=False)
    with opened(tmp_path / "runs") as page:
        events = Events(page, "/api/runs/run/events")
        events.next()
    assert events.ended
    events.close()
    with socket.socket() as other, pytest.raises(OSError, match="refused"):
        other.connect(("127.0.0.1", page.port))
