"""What a round took, as bytes and back."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given

from fedbudget.engines.remote.costs import NodeCosts, pack_costs, unpack_costs
from fedbudget.protocol.messages import PeerError
from support.messages import COSTS

WHOLE = NodeCosts(0.25, 2.0, 0.125, 1.0, 3.0, 40.0, "host")


@given(COSTS)
def test_costs_arrive(costs: NodeCosts) -> None:
    assert unpack_costs(pack_costs(costs)) == costs


def test_where_it_was_is_not_sent() -> None:
    assert unpack_costs(pack_costs(replace(WHOLE, here=True))) == WHOLE


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("seconds", math.nan, "seconds is nan"),
        ("step_seconds", -1.0, "step_seconds is -1.0"),
        ("cpu", math.inf, "cpu is inf"),
        ("step_cpu", -math.inf, "step_cpu is -inf"),
        ("joules", math.nan, "joules is nan"),
        ("step_joules", -0.1, "step_joules is -0.1"),
        ("host", "x" * 201, "a name of a host of 201 characters"),
        ("seconds", None, "cannot be read"),
        ("seconds", "long", "cannot be read"),
        ("host", 1.0, "cannot be read"),
    ],
)
def test_costs_that_cannot_be(field: str, value: Any, reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        unpack_costs(pack_costs(replace(WHOLE, **{field: value})))


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode([1.0]), msgspec.msgpack.encode([0.0] * 300)])
def test_bytes_that_are_no_costs(data: bytes) -> None:
    with pytest.raises(PeerError):
        unpack_costs(data)
