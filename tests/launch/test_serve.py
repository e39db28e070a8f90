"""Wrong options of a served run."""

from pathlib import Path
from typing import Any

import pytest

from fedbudget.errors import UserError
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
