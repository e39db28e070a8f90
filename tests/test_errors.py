"""Errors of fedbudget's own have one base, and are what Python calls such errors, too."""

import pytest

from fedbudget.errors import FedbudgetError, UserError, WorkError
from fedbudget.protocol.messages import LocalError, PeerError


@pytest.mark.parametrize(
    ("kind", "python"),
    [
        (UserError, ValueError),
        (WorkError, RuntimeError),
        (LocalError, RuntimeError),
        (PeerError, ValueError),
    ],
)
def test_one_base(kind: type[Exception], python: type[Exception]) -> None:
    with pytest.raises(FedbudgetError, match=r"^why$") as caught:
        raise kind("why")
    assert isinstance(caught.value, python)
