"""What a run that goes on must not change, and what is refused at once."""

from pathlib import Path
from typing import Any

import pytest

from fedbudget.errors import UserError
from fedbudget.launch.serve import serving
from fedbudget.settings.network import ListenOptions, SecurityOptions
from fedbudget.settings.settings import Settings


@pytest.mark.parametrize(
    ("settings", "address", "security", "complaint"),
    [
        (
            Settings(method="asynchronous"),
            "127.0.0.1:0",
            {},
            "asynchronous descent does not work over a network",
        ),
        (Settings(), "0.0.0.0:0", {}, "insecure"),
        (Settings(), "127.0.0.1:0", {"cert": Path("nowhere.pem")}, "key"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_listens(
    settings: Settings, address: str, security: dict[str, Any], complaint: str
) -> None:
    served = serving(
        settings,
        ListenOptions(address),
        SecurityOptions(**security),
        interrupted=lambda: False,
    )
    with pytest.raises(UserError, match=complaint), served:
        pass
