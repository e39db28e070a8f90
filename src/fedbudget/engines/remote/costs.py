"""What a round took at a node, as the node tells it; and as bytes, for every network."""

import math
from dataclasses import dataclass, fields

import msgspec

from fedbudget.protocol.messages import PeerError

_LONG_NAME = 200
_MOST_BYTES = 2000


@dataclass(frozen=True)
class NodeCosts:
    """What a round took at a node.

    Args:
      step_seconds, step_cpu, step_joules: of one local update.
      seconds, cpu: of the whole round.
      step_joules, joules: where energy was measured.
      host: whose energy that is; several nodes may be on one machine.
      here: in the aggregator's own process, whose clock has it already.
    """

    step_seconds: float
    seconds: float
    step_cpu: float | None = None
    cpu: float | None = None
    step_joules: float | None = None
    joules: float | None = None
    host: str = ""
    here: bool = False


_SENT = tuple(field.name for field in fields(NodeCosts) if field.name != "here")


def pack_costs(costs: NodeCosts) -> bytes:
    """The fields one after the other, as MessagePack."""
    return msgspec.msgpack.encode([getattr(costs, name) for name in _SENT])


def unpack_costs(data: bytes) -> NodeCosts:
    """Refuses what cannot be with `PeerError`."""
    if len(data) > _MOST_BYTES:
        raise PeerError(f"costs of {len(data)} bytes")
    try:
        values = dict(zip(_SENT, msgspec.msgpack.decode(data, type=list[float | str | None]), strict=True))
        costs = msgspec.convert(values, NodeCosts)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"costs that cannot be read: {error}") from None
    for name, value in values.items():
        if isinstance(value, str):
            if len(value) > _LONG_NAME:
                raise PeerError(f"a name of a {name} of {len(value)} characters")
        elif value is not None and not 0 <= value < math.inf:
            raise PeerError(f"{name} is {value}")
    return costs
