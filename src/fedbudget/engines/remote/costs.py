"""What a round took at a node, as bytes, for every network: readings by the name of their resource.

What comes from another machine is checked here: few readings, of finite numbers that are not negative, time among them.
"""

import math

import msgspec

from fedbudget.protocol.messages import PeerError
from fedbudget.resources import TIME
from fedbudget.resources.usage import NodeCosts, Reading

MOST_READINGS = 64

_LONG_NAME = 200
_MOST_BYTES = 20_000
_Rows = list[tuple[str, float, float, str]]
_DECODER = msgspec.msgpack.Decoder(tuple[_Rows, _Rows])


def pack_costs(costs: NodeCosts) -> bytes:
    """Of every reading its name, what a local update and the whole round took, and whose counter it is if shared; and
    the same of what evaluating took.
    """
    parts = costs.readings.items(), costs.evaluation.items()
    return msgspec.msgpack.encode([[(name, each.step, each.whole, each.host) for name, each in part] for part in parts])


def unpack_costs(data: bytes) -> NodeCosts:
    """Refuses what cannot be with `PeerError`."""
    if len(data) > _MOST_BYTES:
        raise PeerError(f"costs of {len(data)} bytes")
    try:
        whole, evaluation = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"costs that cannot be read: {error}") from None
    readings = _readings(whole)
    if TIME.name not in readings:
        raise PeerError("costs without the time of a round")
    return NodeCosts(readings, evaluation=_readings(evaluation))


def _readings(rows: _Rows) -> dict[str, Reading]:
    if len(rows) > MOST_READINGS:
        raise PeerError(f"costs of {len(rows)} readings")
    readings: dict[str, Reading] = {}
    for name, step, whole, host in rows:
        if check_resource(name) in readings:
            raise PeerError(f"{name} is read twice")
        if len(host) > _LONG_NAME:
            raise PeerError(f"a name of a host of {len(host)} characters")
        for part, value in (("step", step), ("whole", whole)):
            if not 0 <= value < math.inf:
                raise PeerError(f"{name} ({part}) is {value}")
        readings[name] = Reading(step, whole, host)
    return readings


def check_resource(name: str) -> str:
    """Refuses what is no name of a resource, known here or not."""
    if len(name) > _LONG_NAME or not (name.isascii() and name.isalpha()):
        raise PeerError(f"{name[:20]!r} is no name of a resource")
    return name
