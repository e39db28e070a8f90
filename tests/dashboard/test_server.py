"""Where the page is served."""

import socket
from pathlib import Path

import pytest

from fedbudget.dashboard.app import PORT, Dashboard
from fedbudget.errors import UserError
from support.made_runs import make_run


def close(page: Dashboard) -> None:
    with page.in_background():
        pass


def test_a_port_that_is_taken_is_a_clear_error_and_the_usual_one_gives_way(
    tmp_path: Path,
) -> None:
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


def test_only_this_machine_can_reach_it_by_default(tmp_path: Path) -> None:
    page = Dashboard(tmp_path, port=0)
    with page.in_background():
        assert page.address() == f"http://127.0.0.1:{page.port}/"
        with socket.socket() as other, pytest.raises(OSError, match="refused"):
            other.connect(("127.0.0.2", page.port))


def test_an_address_that_is_not_ours_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot listen on"):
        Dashboard(tmp_path, host="192.0.2.1")
    with pytest.raises(UserError, match="cannot listen on"):
        Dashboard(tmp_path, host="no.such.host.invalid")
