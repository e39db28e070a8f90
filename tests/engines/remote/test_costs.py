"""What a round took, as bytes and back; what cannot be is refused."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given

from fedbudget.engines.remote.encodings import pack_costs, unpack_costs
from fedbudget.protocol.messages import PeerError
from fedbudget.resources.resource import NodeCosts, Reading
from support.messages import COSTS

WHOLE = NodeCosts({"time": Reading(0.25, 2.0), "energy": Reading(3.0, 40.0, "host")})


@given(COSTS)
def test_costs_arrive(costs: NodeCosts) -> None:
    assert unpack_costs(pack_costs(costs)) == costs


def test_what_an_evaluation_took_arrives_beside_it() -> None:
    costs = replace(
        WHOLE, evaluation={"time": Reading(0.0, 0.5), "cpu": Reading(0.0, 0.25)}
    )
    assert unpack_costs(pack_costs(costs)) == costs
    with pytest.raises(PeerError, match=r"cpu \(whole\) is -1"):
        unpack_costs(pack_costs(replace(costs, evaluation={"cpu": Reading(0.0, -1.0)})))


def test_where_it_was_is_not_sent() -> None:
    assert unpack_costs(pack_costs(replace(WHOLE, here=True))) == WHOLE


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("whole", math.nan, r"energy \(whole\) is nan"),
        ("whole", math.inf, r"energy \(whole\) is inf"),
        ("step", -0.1, r"energy \(step\) is -0.1"),
        ("step", -math.inf, r"energy \(step\) is -inf"),
        ("host", "x" * 201, "a host name of 201 characters"),
        ("whole", None, "cannot be read"),
        ("whole", "long", "cannot be read"),
        ("host", 1.0, "cannot be read"),
    ],
)
def test_readings_that_cannot_be(field: str, value: Any, reason: str) -> None:
    energy = replace(WHOLE.readings["energy"], **{field: value})
    with pytest.raises(PeerError, match=reason):
        unpack_costs(pack_costs(NodeCosts({**WHOLE.readings, "energy": energy})))


@pytest.mark.parametrize("name", ["", "x" * 201, "two words", "émile"])
def test_names_are_of_letters(name: str) -> None:
    with pytest.raises(PeerError, match="is not a name of a resource"):
        unpack_costs(pack_costs(NodeCosts({**WHOLE.readings, name: Reading(1.0, 1.0)})))


TIME = ("time", 0.1, 0.5, "")


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "without the time"),
        ([TIME, TIME], "time is read twice"),
        (
            [TIME, *(("a" * count, 0.0, 0.0, "") for count in range(1, 65))],
            "costs of 65 readings",
        ),
        ([TIME] * 2000, "costs of .* bytes"),
        ([TIME[:3]], "cannot be read"),
    ],
)
def test_rows_that_cannot_be(rows: list[Any], reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        unpack_costs(msgspec.msgpack.encode([rows, []]))


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", msgspec.msgpack.encode([1.0]), b"\x91" * 1000]
)
def test_bytes_that_are_no_costs(data: bytes) -> None:
    with pytest.raises(PeerError):
        unpack_costs(data)
