"""What the aggregator sends: a welcome, broadcasts, and a farewell.

A broadcast's fields are sent in the order of the dataclass (layout.py), and the vectors after them. What is asked for
(`request`) is in the task, and not sent again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.engines.grpc.layout import MessageLayout
from fedbudget.engines.grpc.stream import VectorBytes, decode_vector, first_part, more_parts, parse, quoted
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.descriptions import describe, read
from fedbudget.engines.remote.messages import Farewell, RoundRequest, Welcome
from fedbudget.engines.remote.task import Task
from fedbudget.protocol import compression
from fedbudget.protocol.compression import Kind
from fedbudget.protocol.messages import Broadcast, PeerError
from fedbudget.secure import messages as masking

_MORE = pb.FromAggregator.MORE_FIELD_NUMBER
_MOST_NUMBERS, _BYTES_OF_UPDATES = 1000, 9  # bytes of all but vectors, and more of each node's number of updates
_LAYOUT = MessageLayout(Broadcast, without={"request"})
_DIFFERENCES = ("w", "mean")
"""What may be told as differences, to the w before and to w."""


NO_DIFFERENCES: Mapping[str, bytes] = {}


def pack_welcome(welcome: Welcome) -> list[bytes]:
    return [pb.FromAggregator(welcome=describe(welcome)).SerializeToString()]


def pack_broadcast(
    broadcast: Broadcast, base_round: int, *, catch_up: bool, differences: Mapping[str, bytes] = NO_DIFFERENCES
) -> list[bytes]:
    """A broadcast to nodes whose memory stands after the same round.

    Args:
      catch_up: whether they are told what they missed.
      differences: w less the w that they know, and `mean` less w, where there is one, compressed; all vectors are sent
        as they are when not given.
    """
    numbers, arrays = _LAYOUT.encode(broadcast if catch_up else replace(broadcast, catch_up=None))
    parts = [differences[name] if name in differences else compression.raw(array) for name, array in arrays.items()]
    vectors = b"".join(parts) if len(parts) > 1 else parts[0]
    message = pb.Broadcast(base_round=base_round, numbers=numbers, difference=bool(differences), **first_part(vectors))
    return [pb.FromAggregator(broadcast=message).SerializeToString(), *more_parts(_MORE, vectors)]


def pack_masking(message: masking.FromAggregator) -> list[bytes]:
    return [pb.FromAggregator(masking=masking.pack(message)).SerializeToString()]


def pack_farewell(farewell: Farewell) -> list[bytes]:
    message = pb.Farewell(reason=farewell.reason, again=farewell.again)
    return [pb.FromAggregator(farewell=message).SerializeToString()]


@dataclass(frozen=True)
class EncodedBroadcast:
    """A broadcast that may need the w before it to be understood.

    Args:
      values: all but its vectors, as layout.py has them.
      kinds: how its vectors are encoded.
      difference: whether w is told as the difference to the w before.
      vectors: the bytes of each.
    """

    base_round: int
    values: tuple[Any, ...]
    kinds: Mapping[str, Kind]
    difference: bool
    vectors: Sequence[bytearray]
    task: Task

    @property
    def number(self) -> int:
        """The round's."""
        return int(_LAYOUT.value(self.values, "round"))

    @property
    def updates(self) -> int:
        """The most local updates that are asked for."""
        work = _LAYOUT.value(self.values, "work")  # all but its vectors: plain numbers
        return max(int(_LAYOUT.value(self.values, "tau")), 0 if work is None else int(work[1]))

    def request(self, before: Float32 | None) -> RoundRequest:
        """The whole, given the w of the broadcast after which the node's memory stands."""
        broadcast = _LAYOUT.build(self.values, self._arrays(before), request=self.task.request)
        self._check(broadcast)
        return RoundRequest(broadcast, self.base_round)

    def _arrays(self, before: Float32 | None) -> dict[str, Float32]:
        arrays: dict[str, Float32] = {}
        for (name, kind), data in zip(self.kinds.items(), self.vectors, strict=True):
            arrays[name] = decode_vector(kind, data, self.task.parameters)
        if self.difference:
            if before is None:
                raise PeerError("a difference to parameters that were never told")
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found below
                arrays["w"] = before + arrays["w"]
                if "mean" in arrays:
                    arrays["mean"] = arrays["w"] + arrays["mean"]
        if not all(np.isfinite(array).all() for array in arrays.values()):
            raise PeerError("parameters that are not finite")
        return arrays

    def _check(self, broadcast: Broadcast) -> None:
        """What numbers may be; their types are those of the fields already."""
        task, catch_up = self.task, broadcast.catch_up
        if not 1 <= broadcast.round < 2**31 or not self.base_round < broadcast.round:
            raise PeerError(f"round {broadcast.round} after round {self.base_round}")
        if not 0 <= broadcast.tau <= task.tau_max:
            raise PeerError(f"tau is {broadcast.tau}, and no more than {task.tau_max} was agreed on")
        if not 0 < broadcast.eta < math.inf:
            raise PeerError(f"eta is {broadcast.eta}")
        if (work := broadcast.work) is not None and not (0 < work.effective <= work.most <= task.tau_max):
            raise PeerError(f"{work.most} updates, in effect {work.effective}, and {task.tau_max} were agreed on")
        if (private := broadcast.private) is not None and not (
            0 <= private.clip < math.inf and 0 < private.rho < math.inf
        ):
            raise PeerError(f"a private round is {private}")
        if broadcast.drift is not None and not 0 <= broadcast.drift.share <= 1:
            raise PeerError(f"the share of a round is {broadcast.drift.share}")
        if catch_up is not None and (catch_up.since < 0 or (catch_up.mean is not None) != task.request.drift):
            raise PeerError("what was missed is not what a node has to know")


FromAggregator = Welcome | EncodedBroadcast | Farewell | masking.FromAggregator
"""Whole messages."""


class AggregatorReader:
    """Reads what the aggregator sends: a welcome, then broadcasts, and a farewell at any time."""

    def __init__(self, task: Task | None = None) -> None:
        self._task = task
        self._nodes = 0
        self._broadcast: EncodedBroadcast | None = None
        self._vectors: VectorBytes | None = None

    def feed(self, data: bytes) -> "FromAggregator | None":
        """Gives a whole message when there is one."""
        if self._vectors is not None and self._vectors.add_message(data):
            return self._finish()
        message = pb.FromAggregator()
        kind = parse(message, data)
        if kind == "farewell":
            if len(message.farewell.reason) > 2000:
                raise PeerError(f"a reason of {len(message.farewell.reason)} characters")
            return Farewell(message.farewell.reason, message.farewell.again)
        if kind == "welcome" and self._task is None:
            welcome = read(Welcome, message.welcome)
            self._task, self._nodes = welcome.task, len(welcome.numbers)
            return welcome
        if kind == "masking" and self._vectors is None:
            return masking.from_aggregator(message.masking)
        if kind == "more" and self._vectors is not None:
            self._vectors.add(message.more)
        elif kind == "broadcast" and self._task is not None and self._vectors is None:
            self._begin(message.broadcast, self._task)
        else:
            raise PeerError(f"{quoted(kind)} where it was not expected")
        return self._finish()

    def _begin(self, message: pb.Broadcast, task: Task) -> None:
        if len(message.numbers) > _MOST_NUMBERS + _BYTES_OF_UPDATES * self._nodes:
            raise PeerError(f"a broadcast with {len(message.numbers)} bytes of numbers")
        values, names = _LAYOUT.decode(message.numbers)
        difference = message.difference
        kinds: dict[str, Kind] = dict.fromkeys(names, "none")
        if difference:
            kinds |= dict.fromkeys(set(_DIFFERENCES) & kinds.keys(), _LAYOUT.value(values, "compress") or "none")
        sizes = [compression.encoded_size(kind, task.parameters) for kind in kinds.values()]
        self._vectors = VectorBytes(sizes, message.size, message.vectors, _MORE)
        self._broadcast = EncodedBroadcast(message.base_round, values, kinds, difference, self._vectors.vectors, task)

    def _finish(self) -> EncodedBroadcast | None:
        if self._vectors is None or not self._vectors.complete:
            return None
        broadcast = self._broadcast
        self._broadcast = self._vectors = None
        return broadcast
