"""What a round took at a node, as the node tells it; and as bytes, for every network."""

import math
from dataclasses import dataclass
from typing import get_type_hints

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


_HINTS = {name: hint for name, hint in get_type_hints(NodeCosts).items() if name != "here"}
_DECODER = msgspec.msgpack.Decoder(tuple[tuple(_HINTS.values())])  # type: ignore[misc]  # made when the file is read


def pack_costs(costs: NodeCosts) -> bytes:
    """The fields one after the other, as MessagePack."""
    return msgspec.msgpack.encode([getattr(costs, name) for name in _HINTS])


def unpack_costs(data: bytes) -> NodeCosts:
    """Refuses what cannot be with `PeerError`."""
    if len(data) > _MOST_BYTES:
        raise PeerError(f"costs of {len(data)} bytes")
    try:
        values = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"costs that cannot be read: {error}") from None
    for name, value in zip(_HINTS, values, strict=True):
        if isinstance(value, str):
            if len(value) > _LONG_NAME:
                raise PeerError(f"a name of a {name} of {len(value)} characters")
        elif value is not None and not 0 <= value < math.inf:
            raise PeerError(f"{name} is {value}")
    return NodeCosts(*values)
