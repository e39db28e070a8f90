"""Messages and memories as Flower records, and back.

A message is the bytes of engines/remote/wire.py in a ConfigRecord, under the name of its
kind, and the bytes of its vectors in one array. A memory is JSON and arrays in the form of
codec.py. There is no pickle.

Everything from another machine is checked by wire.py before use.
"""

import json

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedbudget.arrays import Int64
from fedbudget.codec import Codec, file_codec
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.messages import Answer
from fedbudget.engines.remote.task import Task
from fedbudget.engines.remote.wire import EncodedBroadcast, ExpectedReport, Frame, Packed
from fedbudget.protocol.features.feature import FleetState, wire_types
from fedbudget.protocol.messages import PeerError

_MESSAGE = "message"
_VECTORS = "vectors"
_MEMORY = "memory"


def size(content: RecordDict) -> int:
    """Bytes of a message's content, without the overhead of Flower and HTTP."""
    total = 0
    for record in content.array_records.values():
        total += sum(len(array.data) for array in record.values())
    for numbers in (*content.config_records.values(), *content.metric_records.values()):
        total += len(numbers.deflate())
    return total


def to_content(packed: Packed) -> RecordDict:
    """Return the content of a message."""
    name = wire.unpack(packed.message).name
    content = RecordDict({name: ConfigRecord({_MESSAGE: packed.message})})
    if packed.vectors:
        vectors = Array(np.frombuffer(packed.vectors, np.uint8))
        content[_VECTORS] = ArrayRecord({_VECTORS: vectors})
    return content


def frame(content: RecordDict, name: str) -> Frame:
    """Return a message of this kind, not decoded; raise `PeerError` if it is missing."""
    data = content.config_records.get(name, ConfigRecord()).get(_MESSAGE)
    if not isinstance(data, bytes):
        raise PeerError(f"a message without {name}")
    received = wire.unpack(data)
    if received.name != name:
        raise PeerError(f"'{received.name}' instead of '{name}'")
    return received


def broadcast(content: RecordDict, task: Task, nodes: int) -> EncodedBroadcast:
    """Return the broadcast in a message to this number of nodes."""
    sent, sizes = wire.read_request(frame(content, "broadcast"), nodes, task)
    vectors = wire.split_vectors(_vectors(content), sizes)
    return EncodedBroadcast(sent, vectors, task)


def answer(
    content: RecordDict, expected: ExpectedReport, nodes: Int64, sizes: Int64
) -> Answer:
    """Return the report of these nodes; raise `PeerError` if it is invalid."""
    sent, vector_sizes = expected.read(frame(content, "report"), len(nodes))
    vectors = wire.split_vectors(_vectors(content), vector_sizes)
    return expected.answer(sent, vectors, nodes, sizes)


def _vectors(content: RecordDict) -> memoryview:
    """Return the bytes of all vectors."""
    record = content.array_records.get(_VECTORS)
    if record is None:
        return memoryview(b"")
    try:
        vectors = record[_VECTORS].numpy()
    except (ValueError, TypeError, KeyError, OSError, EOFError) as error:
        raise PeerError(f"vectors cannot be read: {error}") from None
    if vectors.dtype != np.uint8 or vectors.ndim != 1:
        raise PeerError(f"vectors of type {vectors.dtype} and shape {vectors.shape}")
    return vectors.data


def _memory_codec() -> Codec[FleetState]:
    return file_codec(FleetState, tuple(wire_types().items()))


def memory_out(memory: FleetState) -> tuple[ArrayRecord, ConfigRecord]:
    """Return the arrays of a memory, and the rest."""
    plain, arrays = _memory_codec().plain(memory)
    named = {str(at): Array(np.ascontiguousarray(each)) for at, each in enumerate(arrays)}
    return ArrayRecord(named), ConfigRecord({_MEMORY: json.dumps(plain)})


def memory_in(arrays: ArrayRecord, rest: ConfigRecord) -> FleetState:
    """Read a memory; raise `ValueError` or `KeyError` if it is invalid."""
    in_order = [arrays[str(at)].numpy() for at in range(len(arrays))]
    try:
        plain = json.loads(str(rest.get(_MEMORY)))
    except RecursionError:
        raise ValueError("values are nested too deeply") from None
    return _memory_codec().restore(plain, in_order)
