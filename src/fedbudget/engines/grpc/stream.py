"""Framing of messages on a stream between aggregator and node.

There is no I/O here. The sender obtains byte strings, one for each gRPC message. The
receiver adds byte strings until a message is complete.

    first frame     a packed message (engines/remote/wire.py), and the first 256 KiB of its
                    vectors
    other frames    1 byte (`MORE`), and the next 256 KiB of the vectors

The receiver knows the size of each vector before the first byte arrives, and never holds
more. A part of another length raises `PeerError`.

Threads: no shared state; each reader and writer belongs to one stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedbudget.engines.remote import wire
from fedbudget.engines.remote.wire import LONGEST, Packed
from fedbudget.protocol.messages import PeerError

METHOD = "/fedbudget.Aggregator/Converse"
NAME = "fedbudget-node"
TOKEN = "fedbudget-token"
"""Metadata keys that a node sends before its first message."""
ADMITTED = "fedbudget-let-in"
"""Metadata key that the aggregator sends to an admitted node before the node's hello."""
PRIVATE = "fedbudget-private"
"""Metadata key beside `ADMITTED`: the run is private, and a hello has no statistics."""

PART = 2**18
"""Most bytes of vectors in one message; gRPC may buffer one message for every node."""
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", LONGEST),
    ("grpc.max_send_message_length", LONGEST),
    # A network outage of less than 20 s breaks no connection: TCP sends again. A longer
    # one is detected within 40 s, before TCP would wait for minutes between attempts.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]

MORE = b"\x80"
"""First byte of a frame with the next part of vectors."""


def frames(packed: Packed) -> list[bytes]:
    """Return the frames of a message."""
    message, vectors = packed
    if len(vectors) <= PART:
        return [b"".join((message, vectors))]
    view = memoryview(vectors)
    starts = range(PART, len(vectors), PART)
    parts = [b"".join((MORE, view[start : start + PART])) for start in starts]
    return [b"".join((message, view[:PART])), *parts]


def pack(message: Any) -> list[bytes]:
    """Return the frames of a message; a broadcast and a report have their own functions."""
    return frames(wire.pack(message))


@dataclass
class VectorBytes:
    """Collects the bytes of vectors. Each vector has its own memory and may outlive the
    others.

    Args:
      sizes: expected bytes of each vector.
      missing: bytes of all vectors that have not arrived.
      vectors: what has arrived.
    """

    sizes: Sequence[int]
    missing: int
    vectors: Sequence[bytearray]

    def add(self, part: memoryview) -> None:
        """Add the next part. It must have full length, so that there are few messages."""
        due = min(PART, self.missing)
        if len(part) != due:
            raise PeerError(f"a part of vectors of {len(part)} bytes instead of {due}")
        self.missing -= due
        for vector, size in zip(self.vectors, self.sizes, strict=True):
            free = size - len(vector)
            vector += part[:free]
            part = part[free:]
