"""What a round took at a node, as it travels: readings by the name of their resource.

What comes from another machine is checked here: few readings, of finite numbers that are not negative, time among them.
"""

import math
from collections.abc import Iterable

from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.protocol.messages import PeerError
from fedbudget.resources import TIME
from fedbudget.resources.usage import NodeCosts, Reading

_MOST_READINGS = 64
_LONGEST = 200  # characters of a name


def costs_to_proto(costs: NodeCosts) -> pb.Costs:
    readings = [
        pb.Reading(name=name, step=reading.step, whole=reading.whole, host=reading.host)
        for name, reading in costs.readings.items()
    ]
    return pb.Costs(readings=readings)


def costs_from_proto(message: pb.Costs) -> NodeCosts:
    return costs_of((each.name, each.step, each.whole, each.host) for each in message.readings[: _MOST_READINGS + 1])


def costs_of(rows: Iterable[tuple[str, float, float, str]]) -> NodeCosts:
    """From name, step, whole and host of each reading, whatever carried them; raises `PeerError` for what cannot be."""
    readings: dict[str, Reading] = {}
    for name, step, whole, host in rows:
        check_name(name)
        if len(host) > _LONGEST:
            raise PeerError(f"a name of a host of {len(host)} characters")
        for part, value in (("step", step), ("whole", whole)):
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise PeerError(f"{name} ({part}) is {value}")
        if name in readings or len(readings) == _MOST_READINGS:
            raise PeerError(f"more than {_MOST_READINGS} readings, or {name} twice")
        readings[name] = Reading(step, whole, host)
    if TIME.name not in readings:
        raise PeerError("costs without the time of a round")
    return NodeCosts(readings)


def readings_from_proto(message: pb.Request) -> tuple[str, ...]:
    """The names of the readings that a node is asked for."""
    if len(message.readings) > _MOST_READINGS:
        raise PeerError(f"a task that asks for {len(message.readings)} readings")
    return tuple(check_name(name) for name in message.readings)


def check_name(name: str) -> str:
    """Refuses what is no name of a resource."""
    if not 1 <= len(name) <= _LONGEST or not name.isascii() or not name.isalpha():
        raise PeerError(f"{name[:20]!r} is no name of a resource")
    return name
