"""Wrong options of a served run."""

from collections.abc import Callable
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest

from fedbudget.errors import UserError
from fedbudget.launch import serve
from fedbudget.launch.serve import serving
from fedbudget.settings.network import ListenOptions, SecurityOptions
from fedbudget.settings.settings import Settings


@pytest.mark.parametrize(
    ("settings", "address", "security", "message"),
    [
        (Settings(), "0.0.0.0:0", {}, "insecure"),
        (Settings(), "127.0.0.1:0", {"cert": Path("nowhere.pem")}, "key"),
    ],
)
def test_wrong_options_are_refused(
    settings: Settings, address: str, security: dict[str, Any], message: str
) -> None:
    """`serving` raises before it opens a port."""
    server = serving(
        settings,
        ListenOptions(address),
        SecurityOptions(**security),
        interrupted=lambda: False,
    )
    with pytest.raises(UserError, match=message), server:
        pass


@pytest.mark.parametrize(("tls", "joined"), [(True, 1), (False, 1), (True, 2)])
def test_missing_nodes_are_explained(
    tls: bool,
    joined: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """gRPC does not report a node that distrusts the certificate of the aggregator."""
    timers: list[Timer] = []

    def timer(seconds: float, action: Callable[[], None]) -> Timer:
        assert seconds > 1
        timers.append(Timer(0, action))
        return timers[-1]

    monkeypatch.setattr("threading.Timer", timer)
    waiting = serve._Waiting(2, quiet=False, any_port=False, tls=tls)
    waiting.changed(joined, 0)
    server: Any = SimpleNamespace(port=7700)
    waiting.opened(server)
    timers[0].join()
    shown = capsys.readouterr().err
    assert ("1 of 2 nodes have joined; logs of the others" in shown) == (joined < 2)
    assert ("with another CA" in shown) == (tls and joined < 2)
