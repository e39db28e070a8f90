"""Messages on a stream between aggregator and node: what they are called, and how vectors are sent in parts.

There is no I/O here: whoever sends gets byte strings, one for each message; whoever receives adds byte strings until
there is a whole. What breaks the rules raises `PeerError` with a reason. No more is ever held than is expected: an
announcement of any other size is refused before the first byte of it is kept.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from fedbudget.arrays import Float32
from fedbudget.engines.remote import compression
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.compression import Kind
from fedbudget.protocol.messages import PeerError

METHOD = "/fedbudget.Aggregator/Converse"
NAME, TOKEN = "fedbudget-node", "fedbudget-token"
"""Keys of what a node says before the first message."""
LET_IN = "fedbudget-let-in"
"""What the aggregator says before its first message to one that has a place."""

PART = 2**18
"""Bytes of vectors in one message of a stream, at most: of every node one may wait in gRPC's buffers."""
LONGEST = 2**20 + 2**18
"""Bytes of one message of a stream, at most; a description may be as long."""

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", LONGEST),
    ("grpc.max_send_message_length", LONGEST),
    # A network that is away for less than 20 s breaks no connection: TCP sends again, and nothing is to be set up
    # anew. What is away for longer is found out within 40 s, before TCP would wait for minutes between attempts.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


class VectorBytes:
    """The bytes of vectors, as they come in, each vector in memory of its own: one may be needed longer than others.

    Args:
      sizes: how many bytes each must have.
      announced: how many the sender says that there are in all.
      first: those in the first message.
      field: the number of the field that has the others.
    """

    def __init__(self, sizes: Sequence[int], announced: int, first: bytes, field: int) -> None:
        self.expected = sum(sizes)
        if announced != self.expected:
            raise PeerError(f"{announced} bytes of vectors announced where there should be {self.expected}")
        self.vectors = [bytearray() for _ in sizes]
        self._sizes = sizes
        self._missing = self.expected
        self._field = field
        self.add(first)

    def add(self, part: bytes) -> None:
        """The next part, which is as long as it can be: so there are no more messages than needed."""
        if len(part) != self._due:
            raise PeerError(f"a part of vectors of {len(part)} bytes where there should be {self._due}")
        self._write(memoryview(part))

    def add_message(self, data: bytes) -> bool:
        """Adds the next part from a message as `more_parts` writes it; False of any other message."""
        head = _head(self._field, self._due)
        if len(data) != len(head) + self._due or not data.startswith(head):
            return False
        self._write(memoryview(data)[len(head) :])
        return True

    def _write(self, part: memoryview) -> None:
        self._missing -= len(part)
        for vector, size in zip(self.vectors, self._sizes, strict=True):
            free = size - len(vector)
            vector += part[:free]
            part = part[free:]

    @property
    def _due(self) -> int:
        return min(PART, self._missing)

    @property
    def complete(self) -> bool:
        return not self._missing


def first_part(vectors: bytes | memoryview) -> dict[str, Any]:
    """What goes with the message itself: how many bytes there are, and as many of them as fit."""
    return {"size": len(vectors), "vectors": bytes(vectors[:PART])}


def more_parts(field: int, vectors: bytes | memoryview) -> Iterator[bytes]:
    """What does not fit in the first message: messages with nothing but a part of it.

    They are written and read by hand, as protobuf would, which copies every part twice.
    """
    view = memoryview(vectors)
    for start in range(PART, len(vectors), PART):
        part = view[start : start + PART]
        yield b"".join((_head(field, len(part)), part))


def decode_vector(kind: Kind, data: bytearray, count: int) -> Float32:
    """The vector; a raw one is not copied, because nobody else uses these bytes."""
    if kind == "none":
        return np.frombuffer(data, "<f4").astype(np.float32, copy=False)
    return compression.decode(kind, memoryview(data), count)


def parse(message: pb.FromNode | pb.FromAggregator, data: bytes) -> str | None:
    """Fills a message in; gives its kind."""
    if len(data) > LONGEST:
        raise PeerError(f"a message of {len(data)} bytes")
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise PeerError("bytes that are no message") from None
    kind: str | None = message.WhichOneof("kind")
    return kind


def quoted(kind: str | None) -> str:
    return "an empty message" if kind is None else f"'{kind}'"


def _head(field: int, length: int) -> bytes:
    """What protobuf puts before so many bytes of a field of this number."""
    head = bytearray([field << 3 | 2])
    while length > 127:
        head.append(length & 127 | 128)
        length >>= 7
    head.append(length)
    return bytes(head)
