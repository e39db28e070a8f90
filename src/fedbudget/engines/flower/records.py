"""Messages and memories as Flower records, and back.

Arrays become arrays; numbers become metrics or configuration. There is no pickle.

Everything from another machine is checked here before use: a report has exactly the
requested fields, with the right types and shapes. The fields of messages and memories are
those of their dataclasses, so a new field needs no change here. Descriptions, tasks, costs
and tallies use the byte encodings of engines/remote, which checks them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.codec import flatten, restore
from fedbudget.engines.remote import encodings
from fedbudget.engines.remote.encodings import (
    pack_costs,
    pack_tallies,
    unpack_costs,
    unpack_tallies,
)
from fedbudget.engines.remote.messages import (
    Answer,
    Hello,
    RoundRequest,
    Welcome,
    report_numbers,
    report_vectors,
)
from fedbudget.evaluation.metrics import Tally
from fedbudget.protocol.compression import decode, encoded_size
from fedbudget.protocol.messages import NUMBERS, VECTORS, Broadcast, PeerError, Report
from fedbudget.protocol.state import FleetState
from fedbudget.resources.resource import Usage

_T = TypeVar("_T")
_ENCODED = "encoded"  # name of a report's concatenated, compressed vectors
NO_DIFFERENCES: Mapping[str, bytes] = {}


def size(content: RecordDict) -> int:
    """Bytes of a message's content, without the overhead of Flower and HTTP."""
    total = 0
    for record in content.array_records.values():
        total += sum(len(array.data) for array in record.values())
    for numbers in (*content.config_records.values(), *content.metric_records.values()):
        total += len(numbers.deflate())
    return total


# Before the first round.


def hello_out(hello: Hello, partition: int | None) -> RecordDict:
    content: dict[str, Any] = {"hello": encodings.describe(hello).SerializeToString()}
    if partition is not None:
        content["partition"] = partition
    return RecordDict({"hello": ConfigRecord(content)})


def hello_in(content: RecordDict) -> tuple[Hello, int | None]:
    hello = encodings.read(Hello, encodings.from_bytes(_bytes(content, "hello")))
    partition = content.config_records["hello"].get("partition")
    return hello, partition if isinstance(partition, int) else None


def welcome_out(welcome: Welcome) -> RecordDict:
    data = encodings.describe(welcome).SerializeToString()
    return RecordDict({"welcome": ConfigRecord({"welcome": data})})


def welcome_in(content: RecordDict) -> Welcome:
    return encodings.read(Welcome, encodings.from_bytes(_bytes(content, "welcome")))


def costs_out(costs: Usage) -> RecordDict:
    return RecordDict({"costs": ConfigRecord({"costs": pack_costs(costs)})})


def costs_in(content: RecordDict) -> Usage:
    return unpack_costs(_bytes(content, "costs"))


def refusal_out(reason: str, *, lost: bool = False) -> RecordDict:
    """A node's refusal of a request.

    Args:
      lost: whether the reason is missing memory.
    """
    return RecordDict({"refusal": ConfigRecord({"reason": reason, "lost": lost})})


def refusal_in(content: RecordDict) -> tuple[str, bool] | None:
    """Reason of a refusal, and whether memory is missing; None if it is no refusal."""
    record = content.config_records.get("refusal")
    if record is None:
        return None
    return str(record.get("reason"))[:2000], record.get("lost") is True


# A round.


def request_out(
    request: RoundRequest,
    *,
    catch_up: bool,
    differences: Mapping[str, bytes] = NO_DIFFERENCES,
) -> RecordDict:
    """A broadcast to nodes with the same base round.

    Args:
      catch_up: whether to include what they missed.
      differences: compressed differences: of w to the w of the base round, and of `mean`
        to w.
    """
    broadcast = request.broadcast if catch_up else replace(request.broadcast, catch_up=None)
    arrays, numbers = _value_out(broadcast)
    numbers["base_round"] = request.base_round
    content = RecordDict({"vectors": arrays, "broadcast": numbers})
    if differences:
        content["vectors"] = ArrayRecord(
            {name: array for name, array in arrays.items() if name not in differences}
        )
        content["differences"] = _arrays_out(
            {name: np.frombuffer(data, np.uint8) for name, data in differences.items()}
        )
    return content


def base_round_in(content: RecordDict) -> int:
    """The round from whose state the node must start."""
    base_round = _config(content, "broadcast").get("base_round")
    if not isinstance(base_round, int):
        raise PeerError("a broadcast without its base round")
    return base_round


def request_in(content: RecordDict, before: Float32 | None = None) -> RoundRequest:
    """Read a broadcast.

    Args:
      before: the w of the base round, [parameters].
    """
    base_round = base_round_in(content)
    arrays = _arrays_in(content, "vectors")
    differences = _arrays_in(content, "differences")
    arrays |= dict.fromkeys(differences, np.empty(0, np.float32))
    try:
        broadcast = _value_in(Broadcast, arrays, _config(content, "broadcast"))
    except ValueError as error:
        raise PeerError(f"a broadcast cannot be read: {error}") from None
    return RoundRequest(_with_differences(broadcast, differences, before), base_round)


def _with_differences(
    broadcast: Broadcast, differences: Mapping[str, NDArray[Any]], before: Float32 | None
) -> Broadcast:
    """Apply the difference of w, and then that of `mean`, which refers to the new w."""
    if not differences:
        return broadcast
    kind = broadcast.compress
    if before is None or kind is None or not differences.keys() <= {"w", "mean"}:
        raise PeerError("a difference to parameters that were never sent")
    with np.errstate(over="ignore", invalid="ignore"):
        if "w" in differences:
            change = decode(kind, differences["w"].tobytes(), before.size)
            broadcast = replace(broadcast, w=before + change)
        if "mean" in differences:
            change = decode(kind, differences["mean"].tobytes(), before.size)
            broadcast = replace(broadcast, mean=broadcast.w + change)
    return broadcast


def answer_out(
    report: Report,
    costs: Usage,
    tallies: Sequence[Tally] = (),
    encoded: bytes | memoryview | None = None,
) -> RecordDict:
    """A report and its costs.

    Args:
      tallies: metrics on the node's test samples.
      encoded: the report's vectors, if they are compressed.
    """
    fields = {
        name: getattr(report, name)
        for name in (*NUMBERS, *VECTORS)
        if getattr(report, name) is not None
    }
    content = costs_out(costs)
    if tallies:
        content["tallies"] = ConfigRecord({"tallies": pack_tallies(tallies)})
    vectors = {name: vector for name, vector in fields.items() if name in VECTORS}
    if encoded is not None and vectors:
        vectors = {_ENCODED: np.frombuffer(encoded, np.uint8)}
    content["vectors"] = _arrays_out(vectors)
    numbers = {name: values.tolist() for name, values in fields.items() if name in NUMBERS}
    content["report"] = MetricRecord({"round": report.round, **numbers})
    return content


def answer_in(
    content: RecordDict, broadcast: Broadcast, nodes: Int64, sizes: Int64
) -> Answer:
    """Read the report of these nodes; raise `PeerError` if it is invalid."""
    metrics = dict(content.metric_records.get("report", {}))
    vectors = _arrays_in(content, "vectors")
    if metrics.pop("round", None) != broadcast.round:
        raise PeerError(f"a report of another round than {broadcast.round}")
    if _ENCODED in vectors and broadcast.compress not in (None, "none"):
        vectors = _decoded(vectors[_ENCODED].tobytes(), broadcast, len(nodes))
    for names, requested in (
        (metrics, report_numbers(broadcast)),
        (vectors, report_vectors(broadcast)),
    ):
        if names.keys() != set(requested):
            raise PeerError(f"a report with {sorted(names)} instead of {sorted(requested)}")
    for name, vector in vectors.items():
        if vector.dtype != np.float32 or vector.shape != (len(nodes), broadcast.w.size):
            raise PeerError(f"{name} of type {vector.dtype} and shape {vector.shape}")
    numbers = {name: _numbers(name, values, len(nodes)) for name, values in metrics.items()}
    report = Report(broadcast.round, nodes, sizes, **numbers, **vectors)  # type: ignore[arg-type]
    data = _bytes(content, "tallies") if "tallies" in content.config_records else b""
    tallies = unpack_tallies(data, broadcast.tallies)
    return Answer(report, costs_in(content), tallies, len(data))


def _decoded(data: bytes, broadcast: Broadcast, rows: int) -> dict[str, NDArray[Any]]:
    """Decode a report's compressed vectors."""
    kind = broadcast.compress or "none"
    names = report_vectors(broadcast)
    count = broadcast.w.size
    size = rows * encoded_size(kind, count)
    if len(data) != len(names) * size:
        raise PeerError(f"{len(data)} bytes of vectors instead of {len(names) * size}")
    vectors: dict[str, NDArray[Any]] = {}
    for index, name in enumerate(names):
        part = data[index * size : (index + 1) * size]
        vectors[name] = decode(kind, part, count, rows).reshape(rows, count)
    # Non-finite results are detected later.
    with np.errstate(over="ignore", invalid="ignore"):
        vectors["w"] = broadcast.w + vectors["w"]
    return vectors


# Memory of a node.


def memory_out(memory: FleetState) -> tuple[ArrayRecord, ConfigRecord]:
    return _value_out(replace(memory, broadcast=replace(memory.broadcast, catch_up=None)))


def memory_in(arrays: ArrayRecord, numbers: ConfigRecord) -> FleetState:
    """Read a memory; raise `ValueError` if it is invalid."""
    return _value_in(
        FleetState, {name: array.numpy() for name, array in arrays.items()}, numbers
    )


# Parts of messages and memories.


def _value_out(value: object) -> tuple[ArrayRecord, ConfigRecord]:
    """Split a dataclass into its arrays and the rest, as JSON."""
    plain, arrays = flatten(value)
    return _arrays_out(arrays), ConfigRecord({"numbers": json.dumps(plain)})


def _value_in(
    kind: type[_T], arrays: Mapping[str, NDArray[Any]], numbers: ConfigRecord
) -> _T:
    try:
        return restore(kind, json.loads(str(numbers.get("numbers"))), arrays)
    except RecursionError:
        raise ValueError("numbers that are nested too deeply") from None


def _arrays_out(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    return ArrayRecord(
        {name: Array(np.ascontiguousarray(array)) for name, array in arrays.items()}
    )


def _arrays_in(content: RecordDict, name: str) -> dict[str, NDArray[Any]]:
    try:
        return {
            key: array.numpy()
            for key, array in content.array_records.get(name, ArrayRecord()).items()
        }
    except (ValueError, TypeError, OSError, EOFError) as error:
        raise PeerError(f"{name} cannot be read: {error}") from None


def _numbers(name: str, values: object, count: int) -> Float64:
    if not isinstance(values, list) or len(values) != count:
        raise PeerError(f"a report without {count} numbers for {name}")
    return np.array(values, np.float64)


def _config(content: RecordDict, name: str) -> ConfigRecord:
    if name not in content.config_records:
        raise PeerError(f"a message without {name}")
    return content.config_records[name]


def _bytes(content: RecordDict, name: str) -> bytes:
    value = _config(content, name).get(name)
    if not isinstance(value, bytes):
        raise PeerError(f"{name} is missing")
    return value
