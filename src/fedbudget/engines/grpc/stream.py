"""Encoding of messages on a stream between aggregator and node.

There is no I/O here. The sender obtains byte strings, one for each message. The receiver
adds byte strings until a message is complete. A broken rule raises `PeerError` with a
reason. The receiver never holds more than it expects: an announcement of another size is
refused before its first byte is stored.

Vectors are sent in parts of at most 256 KiB (`VectorBytes`, `first_part`, `more_parts`).

`MessageLayout` sends a dataclass as a list of values without field names:

    Broadcast(round=5, w=array, tau=3, drift=Drift(True, 0.5), ...)
    <->  [5, "w", 3, [True, 0.5], ...], {"w": array}

msgspec checks the values against the annotations of the fields, so a new field needs no
change here. An array is replaced by its name, the path of its field.

Threads: no shared state; each reader and writer belongs to one stream.
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
from fedbudget.protocol.features.compression import Kind
from fedbudget.protocol.messages import PeerError

METHOD = "/fedbudget.Aggregator/Converse"
NAME = "fedbudget-node"
TOKEN = "fedbudget-token"
"""Metadata keys that a node sends before its first message."""
ADMITTED = "fedbudget-let-in"
"""Metadata key that the aggregator sends to an admitted node before its first message."""

PART = 2**18
"""Most bytes of vectors in one message; gRPC may buffer one message for every node."""
LONGEST = 2**20 + 2**18
"""Most bytes of one message; descriptions may be that long."""

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", LONGEST),
    ("grpc.max_send_message_length", LONGEST),
    # A network outage of less than 20 s breaks no connection: TCP sends again. A longer
    # one is detected within 40 s, before TCP would wait for minutes between attempts.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]

Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")


class VectorBytes:
    """Collects the bytes of vectors. Each vector has its own memory and may outlive the
    others.

    Args:
      sizes: expected bytes of each vector.
      announced: total that the sender announced.
      first: bytes in the first message.
      field: protobuf field number of the other parts.
    """

    def __init__(
        self, sizes: Sequence[int], announced: int, first: bytes, field: int
    ) -> None:
        self.expected = sum(sizes)
        if announced != self.expected:
            raise PeerError(
                f"{announced} bytes of vectors announced instead of {self.expected}"
            )
        self.vectors = [bytearray() for _ in sizes]
        self._sizes = sizes
        self._missing = self.expected
        self._field = field
        self.add(first)

    def add(self, part: bytes) -> None:
        """Add the next part. It must have full length, so that there are few messages."""
        if len(part) != self._due:
            raise PeerError(
                f"a part of vectors of {len(part)} bytes instead of {self._due}"
            )
        self._write(memoryview(part))

    def add_message(self, data: bytes) -> bool:
        """Add the next part from a message of `more_parts`; False for any other message."""
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
    """Fields of the first message: the total size, and the first part."""
    return {"size": len(vectors), "vectors": bytes(vectors[:PART])}


def more_parts(field: int, vectors: bytes | memoryview) -> Iterator[bytes]:
    """Messages with the remaining parts.

    They are written and read without protobuf, which would copy every part twice.
    """
    view = memoryview(vectors)
    for start in range(PART, len(vectors), PART):
        part = view[start : start + PART]
        yield b"".join((_head(field, len(part)), part))


def _head(field: int, length: int) -> bytes:
    """The bytes that protobuf puts before a field of this number and length."""
    head = bytearray([field << 3 | 2])
    while length > 127:
        head.append(length & 127 | 128)
        length >>= 7
    head.append(length)
    return bytes(head)


def decode_vector(kind: Kind, data: bytearray, count: int, rows: int = 1) -> Float32:
    """Decode vectors. Raw ones are not copied: `data` has no other user."""
    if kind == "none":
        return np.frombuffer(data, "<f4").astype(np.float32, copy=False)
    return compression.decode(kind, memoryview(data), count, rows)


def parse(message: pb.FromNode | pb.FromAggregator, data: bytes) -> str | None:
    """Parse data into `message`; returns its kind."""
    if len(data) > LONGEST:
        raise PeerError(f"a message of {len(data)} bytes")
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise PeerError("bytes that are not a message") from None
    kind: str | None = message.WhichOneof("kind")
    return kind


def quoted(kind: str | None) -> str:
    return "an empty message" if kind is None else f"'{kind}'"


class MessageLayout(Generic[T]):
    """Layout of a dataclass on the wire.

    Args:
      kind: the class.
      without: fields that are not sent, because both sides have them.
      path: of the field that contains the dataclass, if it is nested.
    """

    def __init__(
        self, kind: type[T], without: Collection[str] = (), path: str = ""
    ) -> None:
        self._kind = kind
        # name, path of an array, layout of a dataclass
        self._fields: list[tuple[str, str, MessageLayout[Any] | None]] = []
        types = []
        hints = get_type_hints(kind)
        for name in [field.name for field in fields(kind)]:  # type: ignore[arg-type]
            if name in without:
                continue
            field_path = f"{path}.{name}" if path else name
            hint = hints[name]
            optional = type(None) in get_args(hint)
            if optional:
                (hint,) = [part for part in get_args(hint) if part is not type(None)]
            array_path = ""
            layout = None
            if get_origin(hint) is np.ndarray:
                array_path = field_path
                hint = str
            elif isinstance(hint, type) and is_dataclass(hint):
                layout = MessageLayout(hint, path=field_path)
                hint = layout.type
            self._fields.append((name, array_path, layout))
            types.append(hint | None if optional else hint)
        self._index = {name: at for at, (name, *_) in enumerate(self._fields)}
        self.type: Any = tuple[tuple(types)]  # type: ignore[misc]
        self._decoder = msgspec.msgpack.Decoder(self.type)

    def encode(self, value: T) -> tuple[bytes, Arrays]:
        """Return the values as MessagePack, and the arrays in the order of fields."""
        arrays: Arrays = {}
        return msgspec.msgpack.encode(self._values(value, arrays)), arrays

    def decode(self, data: bytes) -> tuple[tuple[Any, ...], list[str]]:
        """Return the values for `build`, and the names of the arrays that it needs.

        Raises:
          PeerError: the data are invalid.
        """
        names: list[str] = []
        try:
            values = self._decoder.decode(data)
            self._find_arrays(values, names)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self._unreadable(error) from None
        return values, names

    def build(self, values: tuple[Any, ...], arrays: Arrays, **known: Any) -> T:
        """Return the dataclass.

        Args:
          known: fields that were not sent.
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
        """Return one of the decoded values by its field name."""
        return values[self._index[field]]

    def _unreadable(self, error: Exception) -> PeerError:
        return PeerError(f"a {self._kind.__name__.lower()} that cannot be read: {error}")

    def _values(self, value: Any, arrays: Arrays) -> list[Any]:
        values = []
        for name, path, layout in self._fields:
            part = getattr(value, name)
            if part is not None and path:
                arrays[path] = part
                part = path
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
