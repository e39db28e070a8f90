"""Connections to the ports that a run opens for people and monitoring."""

import re
import signal
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from fedbudget.launch.monitoring import Metrics, serving
from support.processes import commands
from support.synthetic_runs import make_run


def status(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_silent_connections_are_bounded() -> None:
    """Silent connections to /metrics have few threads, and all are closed."""
    with serving(Metrics({"time": 1.0}), "0") as url:
        port = int(re.findall(r":(\d+)/", url)[0])
        before = threading.active_count()
        opened = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        opened[-1].settimeout(60.0)
        assert is_closed(opened[-1])  # the server has seen all others
        assert threading.active_count() - before < 20
        for each in opened:
            each.settimeout(60.0)
            assert is_closed(each)
            each.close()


def is_closed(connection: socket.socket) -> bool:
    """Wait until the other side closes a connection; it must send nothing."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    ("host", "code"), [("localhost", 200), ("127.0.0.1", 200), ("evil.example", 403)]
)
def test_metrics_answer_own_hosts(host: str, code: int) -> None:
    with serving(Metrics({"time": 1.0}), "0") as url:
        assert status(url, Host=host) == code


def test_dashboard_needs_its_key(tmp_path: Path) -> None:
    """Another user of this machine cannot read a private run through the page."""
    make_run(tmp_path / "runs" / "mine")
    with commands(tmp_path) as start:
        page = start.run("dashboard", "runs", "--port", "0", "--no-open")
        printed = page.wait_for(r"(http://127\.0\.0\.1:\d+/)\?token=(\S+)")
        assert status(f"{printed[1]}api/runs") == 401
        assert status(f"{printed[1]}api/runs?token=wrong") == 401
        key = f"?token={printed[2]}"
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(f"{printed[1]}api/runs{key}") as answer:
            assert b"mine" in answer.read()
        long = "1" * 5000
        for path in (f"rounds/{long}", f"rows?from={long}&to=1"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                opener.open(f"{printed[1]}api/runs/mine/{path}")
            assert refused.value.code == 422
            refused.value.close()
        page.end(signal.SIGINT)
