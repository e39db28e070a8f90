"""A node's costs as they travel: what cannot be is refused."""

import math

import pytest

from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.costs import costs_from_proto, costs_to_proto, readings_from_proto
from fedbudget.protocol.messages import PeerError
from fedbudget.resources.usage import NodeCosts, Reading

COSTS = NodeCosts({"time": Reading(0.1, 0.5), "energy": Reading(0.0, 2.0, "a-host")})


def message(**other: object) -> pb.Costs:
    """Costs with a second reading that says something else."""
    known = {"name": "energy", "step": 1.0, "whole": 2.0, **other}
    return pb.Costs(readings=[pb.Reading(name="time", step=0.1, whole=0.5), pb.Reading(**known)])  # type: ignore[arg-type]


def test_costs_come_back_as_they_were() -> None:
    assert costs_from_proto(pb.Costs.FromString(costs_to_proto(COSTS).SerializeToString())) == COSTS


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.1])
@pytest.mark.parametrize("part", ["step", "whole"])
def test_numbers_are_finite_and_not_negative(part: str, value: float) -> None:
    with pytest.raises(PeerError, match=rf"energy \({part}\) is {value}"):
        costs_from_proto(message(**{part: value}))


@pytest.mark.parametrize("name", ["", "x" * 201, "two words", "émile", "time"])
def test_names_are_of_letters_and_once(name: str) -> None:
    with pytest.raises(PeerError, match=r"no name of a resource|twice"):
        costs_from_proto(message(name=name))


def test_hosts_are_short() -> None:
    with pytest.raises(PeerError, match="host of 201 characters"):
        costs_from_proto(message(host="h" * 201))


def test_time_is_always_read() -> None:
    with pytest.raises(PeerError, match="without the time"):
        costs_from_proto(pb.Costs())


def test_readings_are_few() -> None:
    names = [letter * count for letter in "abcdefghij" for count in range(1, 11)]
    with pytest.raises(PeerError, match="more than 64 readings"):
        costs_from_proto(pb.Costs(readings=[pb.Reading(name=name) for name in ("time", *names)]))
    with pytest.raises(PeerError, match="asks for 100 readings"):
        readings_from_proto(pb.Request(readings=names))
