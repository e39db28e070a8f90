"""Every error of fedbudget has one base class and a matching built-in class."""

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
def test_errors_share_a_base_class(kind: type[Exception], python: type[Exception]) -> None:
    with pytest.raises(FedbudgetError, match=r"^why$") as caught:
        raise kind("why")
    assert isinstance(caught.value, python)
