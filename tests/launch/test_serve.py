"""What a run that goes on must not change, and what is refused at once."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedbudget.errors import UserError
from fedbudget.launch.serve import ServerOptions, require_same_settings, serving
from fedbudget.settings import Settings

TRIAL = Settings(nodes=5, partition="case:4", seed=3)


def test_a_run_goes_on_by_its_own_settings_only() -> None:
    require_same_settings(Path("run"), TRIAL, replace(TRIAL))
    with pytest.raises(UserError, match="run goes on as it began: tau is adaptive there, and cannot be 5 now"):
        require_same_settings(Path("run"), TRIAL, replace(TRIAL, tau=5))


@pytest.mark.parametrize(
    ("settings", "listening", "complaint"),
    [
        (
            Settings(method="asynchronous"),
            ServerOptions("127.0.0.1:0"),
            "asynchronous descent is not made over a network",
        ),
        (Settings(), ServerOptions("0.0.0.0:0"), "insecure"),
        (Settings(), ServerOptions("127.0.0.1:0", cert=Path("nowhere.pem")), "key"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_listens(
    settings: Settings, listening: ServerOptions, complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint), serving(settings, listening, interrupted=lambda: False):
        pass
