"""Messages on a stream between aggregator and node: what they are called, and how vectors are sent in parts.

There is no I/O here: whoever sends gets byte strings, one for each message; whoever receives adds byte strings until
there is a whole. What breaks the rules raises `PeerError` with a reason. No more is ever held than is expected: an
announcement of any other size is refused before the first byte of it is kept.

A dataclass as values one after the other, without names, and back: what both sides know is not sent in every round.

    Broadcast(round=5, w=array, tau=3, drift=Drift(True, 0.5), ...)  <->  [5, "w", 3, [True, 0.5], ...], {"w": array}

The annotations of the fields say what may be there, and msgspec checks it while it reads: a new field needs no change
here. In the place of an array is its name, which is the path of its field.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from fedbudget.arrays import Float32
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.protocol import compression
from fedbudget.protocol.compression import Kind
from fedbudget.protocol.messages import PeerError

METHOD = "/fedbudget.Aggregator/Converse"
NAME = "fedbudget-node"
TOKEN = "fedbudget-token"
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

    def __init__(
        self, sizes: Sequence[int], announced: int, first: bytes, field: int
    ) -> None:
        self.expected = sum(sizes)
        if announced != self.expected:
            raise PeerError(
                f"{announced} bytes of vectors announced where there should be {self.expected}"
            )
        self.vectors = [bytearray() for _ in sizes]
        self._sizes = sizes
        self._missing = self.expected
        self._field = field
        self.add(first)

    def add(self, part: bytes) -> None:
        """The next part, which is as long as it can be: so there are no more messages than needed."""
        if len(part) != self._due:
            raise PeerError(
                f"a part of vectors of {len(part)} bytes where there should be {self._due}"
            )
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


def decode_vector(kind: Kind, data: bytearray, count: int, rows: int = 1) -> Float32:
    """The vectors; raw ones are not copied, because nobody else uses these bytes."""
    if kind == "none":
        return np.frombuffer(data, "<f4").astype(np.float32, copy=False)
    return compression.decode(kind, memoryview(data), count, rows)


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


Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")


class MessageLayout(Generic[T]):
    """How a dataclass is sent.

    Args:
      kind: the class.
      without: fields that are not sent, because both sides know them.
    """

    def __init__(
        self, kind: type[T], without: Collection[str] = (), path: str = ""
    ) -> None:
        self._kind = kind
        self._fields: list[
            tuple[str, str, MessageLayout[Any] | None]
        ] = []  # name, path of an array, layout of a dataclass
        types = []
        for name, hint in get_type_hints(kind).items():
            if name in without or name not in {field.name for field in fields(kind)}:  # type: ignore[arg-type]
                continue
            inside = f"{path}.{name}" if path else name
            optional = type(None) in get_args(hint)
            (one,) = (
                [part for part in get_args(hint) if part is not type(None)]
                if optional
                else [hint]
            )
            layout = (
                MessageLayout(one, path=inside)
                if isinstance(one, type) and is_dataclass(one)
                else None
            )
            is_array = get_origin(one) is np.ndarray
            self._fields.append((name, inside if is_array else "", layout))
            sent = str if is_array else one if layout is None else layout.type
            types.append(sent | None if optional else sent)
        self._index = {name: at for at, (name, *_) in enumerate(self._fields)}
        self.type: Any = tuple[tuple(types)]  # type: ignore[misc]
        self._decoder = msgspec.msgpack.Decoder(self.type)

    def encode(self, value: T) -> tuple[bytes, Arrays]:
        """The values as MessagePack, and the arrays, in the order of the fields."""
        arrays: Arrays = {}
        return msgspec.msgpack.encode(self._values(value, arrays)), arrays

    def decode(self, data: bytes) -> tuple[tuple[Any, ...], list[str]]:
        """The values, for `build`, and the names of the arrays that they need; refuses any others with `PeerError`."""
        names: list[str] = []
        try:
            values = self._decoder.decode(data)
            self._find_arrays(values, names)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self._unreadable(error) from None
        return values, names

    def build(self, values: tuple[Any, ...], arrays: Arrays, **known: Any) -> T:
        """The dataclass again.

        Args:
          known: the fields that were not sent.
        """
        for (name, path, layout), value in zip(self._fields, values, strict=True):
            if value is not None and path:
                value = arrays[path]
            elif value is not None and layout is not None:
                value = layout.build(value, arrays)
            known[name] = value
        try:
            return self._kind(**known)
        except ValueError as error:
            raise self._unreadable(error) from None

    def value(self, values: tuple[Any, ...], field: str) -> Any:
        """One of the values that `decode` gave, by the name of its field."""
        return values[self._index[field]]

    def _unreadable(self, error: Exception) -> PeerError:
        return PeerError(f"a {self._kind.__name__.lower()} that cannot be read: {error}")

    def _values(self, value: Any, arrays: Arrays) -> list[Any]:
        values = []
        for name, path, layout in self._fields:
            part = getattr(value, name)
            if part is not None and path:
                arrays[path], part = part, path
            elif part is not None and layout is not None:
                part = layout._values(part, arrays)
            values.append(part)
        return values

    def _find_arrays(self, values: tuple[Any, ...], names: list[str]) -> None:
        for (_, path, layout), value in zip(self._fields, values, strict=True):
            if value is not None and path:
                if value != path:
                    raise ValueError(f"{path} has another name")
                names.append(path)
            elif value is not None and layout is not None:
                layout._find_arrays(value, names)
