"""Messages as bytes, for every transport.

A packed message is

    1 byte     kind of the message
    1 byte     version of this protocol
    4 bytes    length of the header, little-endian
    header     the dataclass of the message, in the form of codec.py

and, for a broadcast and a report, the bytes of its vectors. The transport decides how it
sends vectors: gRPC in parts (engines/grpc/stream.py), Flower in one array.

- A broadcast's vectors are float32, in the order of the codec. If both sides hold the
  previous w, w is sent as its compressed difference to that, and a further vector as its
  difference to w.
- A report has 64 bits for each number of each node, and then its vectors. The broadcast
  determines which, so no names are sent (`ExpectedReport`).
- A masked report has one vector of 64-bit integers (secure/messages.py).

Everything from another machine is checked before use. A broken rule raises `PeerError` with
a reason. The dataclasses define the fields of messages: a new field needs a new VERSION and
no other change here.

Threads: no shared state.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.codec import Codec
from fedbudget.engines.remote import checks
from fedbudget.engines.remote.messages import (
    Answer,
    Farewell,
    Hello,
    MaskedReport,
    NodeRefusal,
    Ready,
    RoundRequest,
    Welcome,
)
from fedbudget.engines.remote.tallies import MAX_TALLIES_BYTES, pack_tallies, unpack_tallies
from fedbudget.engines.remote.task import Task
from fedbudget.errors import UserError, printable
from fedbudget.evaluation.metrics import Tally
from fedbudget.protocol.features import compression
from fedbudget.protocol.features.feature import (
    expected_layout,
    registered_features,
    wire_types,
)
from fedbudget.protocol.messages import (
    Broadcast,
    Kind,
    PeerError,
    Report,
    ReportLayout,
)
from fedbudget.resources.resource import Usage
from fedbudget.secure import messages as masking

VERSION = 9
"""Version of this protocol. Up to version 7, messages were protobuf."""

LONGEST = 2**20 + 2**18
"""Maximum number of bytes of a message, with the first part of its vectors."""

MOST_COST_BYTES = 8_000
Bytes = bytes | memoryview

_HEAD = struct.Struct("<BBI")
_FIRST_KIND = 0x81  # no message of protobuf starts with a byte from 0x80 on
_MOST_VECTORS = 8
_LONG_ERROR = 300  # characters
# most bytes of a broadcast without its vectors, and more for the updates of each node
_MOST_NUMBERS = 1000
_BYTES_OF_UPDATES = 9
_encoded_size = lru_cache(compression.encoded_size)
_NOT_SENT = ReportLayout()
_SAME_VERSION = "install the same fedbudget on both sides"


@dataclass(frozen=True)
class SentRequest:
    """A `RoundRequest` on the wire.

    Args:
      vectors: number of vectors.
      differences: places of the vectors that are sent as differences, w first.
      kind: compression of the differences; None without any.
      broadcast: the broadcast in the form of codec.py.
    """

    base_round: Annotated[int, Meta(ge=0, lt=2**32)]
    vectors: Annotated[int, Meta(ge=0, le=_MOST_VECTORS)]
    differences: Annotated[
        tuple[Annotated[int, Meta(ge=0, lt=_MOST_VECTORS)], ...], Meta(max_length=2)
    ]
    kind: Kind | None
    broadcast: bytes


@dataclass(frozen=True)
class SentReport:
    """An `Answer` on the wire.

    Args:
      numbers: of all nodes, [numbers * nodes].
      tallies: in the form of tallies.py.
    """

    round: int
    numbers: Float64
    costs: Usage
    tallies: bytes


_KINDS: dict[str, type] = {
    "hello": Hello,
    "ready": Ready,
    "refusal": NodeRefusal,
    "report": SentReport,
    "masked report": MaskedReport,
    "introduction": masking.Introduction,
    "shares": masking.Shares,
    "opened": masking.Opened,
    "welcome": Welcome,
    "broadcast": SentRequest,
    "farewell": Farewell,
    "terms": masking.Terms,
    "group": masking.Group,
    "relay": masking.Relay,
    "survivors": masking.Survivors,
    "confirmations": masking.Confirmations,
    "abstention": masking.Abstention,
    "confirmed": masking.Confirmed,
}
_CODES = {kind: code for code, kind in enumerate(_KINDS.values(), _FIRST_KIND)}
_NAMES = dict(enumerate(_KINDS, _FIRST_KIND))
# Descriptions have the names of fields, for clear errors: they are sent once.
_CODECS: dict[str | type, Codec[Any]] = {
    kind: Codec(kind, named=kind in (Hello, Welcome)) for kind in _KINDS.values()
}
_CODECS.update({name: _CODECS[kind] for name, kind in _KINDS.items()})
_CHECKS: dict[str, Callable[[Any], None]] = {
    "hello": checks.check_hello,
    "welcome": checks.check_welcome,
}
_TASK: Codec[Task] = Codec(Task)


@lru_cache(4)
def _broadcast_codec(features: int) -> Codec[Broadcast]:
    """Return the codec of broadcasts, with the messages of all features known by now."""
    return Codec(Broadcast, wire_types())


class Packed(NamedTuple):
    """A message as bytes.

    Args:
      message: everything but vectors.
      vectors: bytes of all vectors.
    """

    message: bytes
    vectors: Bytes = b""


class Frame(NamedTuple):
    """A received message.

    Args:
      name: kind of the message.
      header: not decoded yet.
      rest: the bytes after the header.
    """

    name: str
    header: memoryview
    rest: memoryview


def pack(message: Any) -> Packed:
    """Pack a message; raise `UserError` if it is too long."""
    kind = type(message)
    if kind is MaskedReport:
        header, (vector,) = _CODECS[kind].encode(message)
        return _packed(kind, header, vector.astype("<u8", copy=False).data.cast("B"))
    header = _CODECS[kind].pack(message)
    if len(header) > LONGEST - 100:
        raise UserError(
            f"the description of the samples has {len(header)} bytes, and at most "
            f"{LONGEST} fit: use fewer classes, fewer columns to standardise "
            "(a .npz is not standardised), or fewer named parameters"
        )
    return _packed(kind, header)


def pack_broadcast(
    broadcast: Broadcast,
    base_round: int,
    *,
    catch_up: bool,
    differences: Sequence[tuple[Float32, bytes]] = (),
) -> Packed:
    """Pack a broadcast for nodes whose memory is of the same round.

    Args:
      base_round: that round.
      catch_up: whether to include what they missed.
      differences: vectors of the broadcast with their compressed differences, to the w of
        these nodes and to the new w. Vectors without a difference are sent unchanged.
    """
    missed = broadcast.catch_up if catch_up else None
    # Nodes know the layout of the report from the task.
    sent_broadcast = replace(broadcast, catch_up=missed, report=_NOT_SENT)
    header, arrays = _broadcast_codec(registered_features()).encode(sent_broadcast)
    vectors: list[Bytes] = [compression.raw(array) for array in arrays]
    places = []
    for held, difference in differences:
        place = next(at for at, array in enumerate(arrays) if array is held)
        vectors[place] = difference
        places.append(place)
    kind = broadcast.compress if places else None
    sent = SentRequest(base_round, len(vectors), tuple(places), kind, header)
    return _packed(SentRequest, _CODECS[SentRequest].pack(sent), *vectors)


def contents_of(broadcast: Broadcast) -> tuple[bytes, list[NDArray[Any]]]:
    """A broadcast without the number of its round and its catch-up, and its vectors."""
    content = replace(broadcast, round=0, catch_up=None, report=_NOT_SENT)
    return _broadcast_codec(registered_features()).encode(content)


def pack_report(
    report: Report, costs: Usage, vectors: Bytes, tallies: Sequence[Tally] = ()
) -> Packed:
    """Pack a report.

    Args:
      vectors: its vectors, already encoded.
    """
    flat = np.concatenate([np.empty(0), *report.numbers.values()])
    packed_tallies = pack_tallies(tallies) if tallies else b""
    sent = SentReport(report.round, flat, costs, packed_tallies)
    return _packed(SentReport, _CODECS[SentReport].pack(sent), vectors)


def _packed(kind: type, header: bytes, *vectors: Bytes) -> Packed:
    message = _HEAD.pack(_CODES[kind], VERSION, len(header)) + header
    return Packed(message, vectors[0] if len(vectors) == 1 else b"".join(vectors))


def unpack(data: bytes | memoryview) -> Frame:
    """Split a message; raise `PeerError` if it is none of this version."""
    if not data:
        raise PeerError("an empty message")
    if len(data) > LONGEST:
        raise PeerError(f"a message of {len(data)} bytes")
    if data[0] < _FIRST_KIND or len(data) < _HEAD.size:
        raise PeerError(
            f"bytes that are not a message of version {VERSION} of the protocol; "
            f"{_SAME_VERSION}"
        )
    code, version, length = _HEAD.unpack_from(data)
    if version != VERSION:
        raise PeerError(
            f"it uses version {version} of the protocol, and this is version {VERSION}; "
            f"{_SAME_VERSION}"
        )
    if code not in _NAMES or length > len(data) - _HEAD.size:
        raise PeerError("bytes that are not a message")
    view = memoryview(data)
    end = _HEAD.size + length
    return Frame(_NAMES[code], view[_HEAD.size : end], view[end:])


def read(
    frame: Frame, most: int = LONGEST, arrays: Sequence[NDArray[Any]] | None = None
) -> Any:
    """Decode and check the header of a message.

    Args:
      most: maximum number of bytes of the header.
      arrays: of the message, if they are not in the header.
    """
    name = frame.name
    if len(frame.header) > most:
        raise PeerError(f"a {name} of {len(frame.header)} bytes")
    try:
        if arrays is None:
            message = _CODECS[name].unpack(frame.header)
        else:
            message = _CODECS[name].decode(frame.header, arrays)
    except ValueError as error:
        raise PeerError(
            f"a {name} cannot be read: {printable(str(error), _LONG_ERROR)}"
        ) from None
    if name in _CHECKS:
        _CHECKS[name](message)
    return message


def read_ready(frame: Frame) -> Ready:
    ready: Ready = read(frame, MOST_COST_BYTES)
    return Ready(checks.checked_costs(ready.costs))


def read_masked(frame: Frame) -> MaskedReport:
    """Decode and check a masked report; its vector is still empty."""
    report: MaskedReport = read(frame, MOST_COST_BYTES, [np.empty(0, np.uint64)])
    return replace(report, costs=checks.checked_costs(report.costs))


def read_abstention(frame: Frame) -> masking.Abstention:
    message: masking.Abstention = read(frame, MOST_COST_BYTES)
    return replace(message, costs=checks.checked_costs(message.costs))


def task_to_text(task: Task) -> str:
    """Encode a task for a checkpoint."""
    return _TASK.pack(task).hex()


def task_from_text(text: str) -> Task:
    """Decode and check a task."""
    try:
        task = _TASK.unpack(bytes.fromhex(text))
    except ValueError as error:
        raise PeerError(
            f"a task cannot be read: {printable(str(error), _LONG_ERROR)}"
        ) from None
    checks.check_task(task)
    return task


@dataclass(frozen=True)
class EncodedBroadcast:
    """A received broadcast; decoding it may need the previous w.

    Args:
      sent: everything but vectors.
      vectors: bytes of each vector.
    """

    sent: SentRequest
    vectors: Sequence[bytearray | memoryview]
    task: Task

    def request(self, before: Float32 | None) -> RoundRequest:
        """Decode and check the broadcast.

        Args:
          before: w of the broadcast of `base_round`.
        """
        sent = self.sent
        count = self.task.parameters
        kind = sent.kind or "none"
        arrays = [
            decode_vector("none" if place not in sent.differences else kind, data, count)
            for place, data in enumerate(self.vectors)
        ]
        known = before
        for place in sent.differences:
            if known is None:
                raise PeerError("a difference to parameters that were never sent")
            # An overflow is detected below.
            with np.errstate(over="ignore", invalid="ignore"):
                arrays[place] = known + arrays[place]
            known = arrays[sent.differences[0]]
        if not all(np.isfinite(array).all() for array in arrays):
            raise PeerError("parameters that are not finite")
        try:
            codec = _broadcast_codec(registered_features())
            broadcast = codec.decode(sent.broadcast, arrays)
        except ValueError as error:
            raise PeerError(
                f"a broadcast cannot be read: {printable(str(error), _LONG_ERROR)}"
            ) from None
        layout = expected_layout(self.task.built_features, broadcast)
        request = RoundRequest(replace(broadcast, report=layout), sent.base_round)
        checks.check_request(request, self.task)
        return request


def read_request(frame: Frame, nodes: int, task: Task) -> tuple[SentRequest, list[int]]:
    """Decode the header of a broadcast, and compute the bytes of each vector.

    Args:
      nodes: number of nodes that receive it.
    """
    sent: SentRequest = read(frame, _MOST_NUMBERS + _BYTES_OF_UPDATES * nodes)
    sizes = [_encoded_size("none", task.parameters)] * sent.vectors
    for place in sent.differences:
        if place >= sent.vectors:
            raise PeerError("a broadcast with more differences than vectors")
        sizes[place] = _encoded_size(sent.kind or "none", task.parameters)
    return sent, sizes


@dataclass(frozen=True)
class ExpectedReport:
    """The contents of a report of a broadcast, computed once for all nodes.

    Args:
      kind: compression of the vectors.
      vector_bytes: bytes of one node's vector.
      tallies: number of test results.
    """

    broadcast: Broadcast
    kind: Kind
    vector_bytes: int
    tallies: int

    @classmethod
    def of(cls, broadcast: Broadcast) -> "ExpectedReport":
        kind = broadcast.compress
        return cls(
            broadcast,
            kind,
            _encoded_size(kind, broadcast.w.size),
            broadcast.tallies,
        )

    def read(self, frame: Frame, nodes: int) -> tuple[SentReport, list[int]]:
        """Decode and check everything but vectors; also return the bytes of each vector."""
        due = nodes * len(self.broadcast.report.numbers)
        tallies = MAX_TALLIES_BYTES if self.tallies else 0
        sent: SentReport = read(frame, MOST_COST_BYTES + tallies + 8 * due)
        if sent.round != self.broadcast.round:
            raise PeerError(
                f"a report of round {sent.round} instead of round {self.broadcast.round}"
            )
        if sent.numbers.shape != (due,):
            raise PeerError(f"{sent.numbers.nbytes} bytes of numbers instead of {8 * due}")
        return sent, [nodes * self.vector_bytes] * len(self.broadcast.report.vectors)

    def answer(
        self,
        sent: SentReport,
        encoded: Sequence[bytearray | memoryview],
        nodes: Int64,
        sizes: Int64,
    ) -> Answer:
        """Return the answer of nodes of these numbers and sizes."""
        broadcast = self.broadcast
        shape = (len(nodes), broadcast.w.size)
        rows = sent.numbers.reshape(-1, len(nodes))
        layout = broadcast.report
        vectors = {}
        for name, data in zip(layout.vectors, encoded, strict=True):
            values = decode_vector(self.kind, data, shape[1], shape[0]).reshape(shape)
            if name == "w" and self.kind != "none":
                # Compressed w_i are differences. An overflow is detected in the result.
                with np.errstate(over="ignore", invalid="ignore"):
                    values += broadcast.w
            vectors[name] = values
        report = broadcast.answer(
            round=broadcast.round,
            nodes=nodes,
            sizes=sizes,
            numbers=dict(zip(layout.numbers, rows, strict=True)),
            vectors=vectors,
        )
        costs = checks.checked_costs(sent.costs)
        tallies = unpack_tallies(sent.tallies, self.tallies) if sent.tallies else ()
        return Answer(report, costs, tallies, len(sent.tallies))


def decode_vector(
    kind: Kind, data: bytearray | memoryview, count: int, rows: int = 1
) -> Float32:
    """Decode vectors. Raw ones are not copied: `data` has no other user."""
    if kind == "none":
        return np.frombuffer(data, "<f4").astype(np.float32, copy=False)
    return compression.decode(kind, memoryview(data), count, rows)


def split_vectors(data: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Split the bytes of all vectors of a message."""
    if len(data) != sum(sizes):
        raise PeerError(f"{len(data)} bytes of vectors instead of {sum(sizes)}")
    ends = np.cumsum(sizes).tolist()
    return [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]
