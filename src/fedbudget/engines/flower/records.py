"""Messages and memories as Flower's records, and back: arrays as arrays, numbers as metrics or configuration.

What comes from another machine is checked here before it is used: a report has all that was asked for, of the right
type and shape, and nothing else. There is no pickle in it. The fields of messages and memories are those of their
dataclasses, so a new one needs no change here. What a node says of its samples, the task that all agree on, and costs
are the bytes that every other network carries (engines/remote), which checks them.
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
from fedbudget.resources.resource import NodeCosts

_T = TypeVar("_T")
_ENCODED = "encoded"  # vectors of a report, one after the other, with fewer bits
NO_DIFFERENCES: Mapping[str, bytes] = {}


def size(content: RecordDict) -> int:
    """Bytes of what is in a message; what Flower and HTTP put around it is not counted."""
    arrays = sum(
        len(array.data)
        for record in content.array_records.values()
        for array in record.values()
    )
    numbers = [*content.config_records.values(), *content.metric_records.values()]
    return arrays + sum(len(record.deflate()) for record in numbers)


# What a node says before the first round, and is told.


def hello_out(hello: Hello, partition: int | None) -> RecordDict:
    content: dict[str, Any] = {"hello": encodings.describe(hello).SerializeToString()}
    return RecordDict(
        {
            "hello": ConfigRecord(
                content if partition is None else content | {"partition": partition}
            )
        }
    )


def hello_in(content: RecordDict) -> tuple[Hello, int | None]:
    hello = encodings.read(Hello, encodings.from_bytes(_bytes(content, "hello")))
    partition = content.config_records["hello"].get("partition")
    return hello, partition if isinstance(partition, int) else None


def welcome_out(welcome: Welcome) -> RecordDict:
    return RecordDict(
        {
            "welcome": ConfigRecord(
                {"welcome": encodings.describe(welcome).SerializeToString()}
            )
        }
    )


def welcome_in(content: RecordDict) -> Welcome:
    return encodings.read(Welcome, encodings.from_bytes(_bytes(content, "welcome")))


def costs_out(costs: NodeCosts) -> RecordDict:
    return RecordDict({"costs": ConfigRecord({"costs": pack_costs(costs)})})


def costs_in(content: RecordDict) -> NodeCosts:
    return unpack_costs(_bytes(content, "costs"))


def refusal_out(reason: str, *, lost: bool = False) -> RecordDict:
    """A node cannot do what it is asked to.

    Args:
      lost: because it does not remember what it must.
    """
    return RecordDict({"refusal": ConfigRecord({"reason": reason, "lost": lost})})


def refusal_in(content: RecordDict) -> tuple[str, bool] | None:
    record = content.config_records.get("refusal")
    return (
        None
        if record is None
        else (str(record.get("reason"))[:2000], record.get("lost") is True)
    )


# A round.


def request_out(
    request: RoundRequest,
    *,
    catch_up: bool,
    differences: Mapping[str, bytes] = NO_DIFFERENCES,
) -> RecordDict:
    """A broadcast to nodes whose memory stands after the same round.

    Args:
      catch_up: whether they are told what they missed.
      differences: w less the w that they know, and `mean` less w, where there is one, compressed.
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
    """The round after which a broadcast comes."""
    base_round = _config(content, "broadcast").get("base_round")
    if not isinstance(base_round, int):
        raise PeerError("a broadcast that does not say after which round it comes")
    return base_round


def request_in(content: RecordDict, before: Float32 | None = None) -> RoundRequest:
    """A broadcast.

    Args:
      before: the w that the node knows, [parameters].
    """
    base_round = base_round_in(content)
    arrays = _arrays_in(content, "vectors")
    differences = {}
    if "differences" in content.array_records:
        differences = _arrays_in(content, "differences")
        arrays |= dict.fromkeys(differences, np.empty(0, np.float32))
    try:
        broadcast = _value_in(Broadcast, arrays, _config(content, "broadcast"))
    except ValueError as error:
        raise PeerError(f"a broadcast that cannot be read: {error}") from None
    return RoundRequest(_with_differences(broadcast, differences, before), base_round)


def _with_differences(
    broadcast: Broadcast, differences: Mapping[str, NDArray[Any]], before: Float32 | None
) -> Broadcast:
    """With w, and then with what is told as a difference to it."""
    if not differences:
        return broadcast
    if (
        before is None
        or broadcast.compress is None
        or not differences.keys() <= {"w", "mean"}
    ):
        raise PeerError("a difference to parameters that were never told")
    for name in sorted(differences, reverse=True):
        known = before if name == "w" else broadcast.w
        told = decode(broadcast.compress, differences[name].tobytes(), before.size)
        with np.errstate(over="ignore", invalid="ignore"):
            held: Any = {name: known + told}
        broadcast = replace(broadcast, **held)
    return broadcast


def answer_out(
    report: Report,
    costs: NodeCosts,
    tallies: Sequence[Tally] = (),
    encoded: bytes | memoryview | None = None,
) -> RecordDict:
    """A report and what it cost.

    Args:
      encoded: its vectors, where they are sent with fewer bits.
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
    """A report by nodes of these numbers and sizes, with all that was asked for and nothing else."""
    metrics = dict(content.metric_records.get("report", {}))
    vectors = _arrays_in(content, "vectors")
    if metrics.pop("round", None) != broadcast.round:
        raise PeerError(f"a report that is not of round {broadcast.round}")
    if _ENCODED in vectors and broadcast.compress not in (None, "none"):
        vectors = _decoded(vectors[_ENCODED].tobytes(), broadcast, len(nodes))
    for names, asked in (
        (metrics, report_numbers(broadcast)),
        (vectors, report_vectors(broadcast)),
    ):
        if names.keys() != set(asked):
            raise PeerError(
                f"a report with {sorted(names)} where {sorted(asked)} was asked for"
            )
    for name, vector in vectors.items():
        if vector.dtype != np.float32 or vector.shape != (len(nodes), broadcast.w.size):
            raise PeerError(f"{name} of type {vector.dtype} and shape {vector.shape}")
    numbers = {name: _numbers(name, values, len(nodes)) for name, values in metrics.items()}
    tallies = _bytes(content, "tallies") if "tallies" in content.config_records else b""
    report = Report(broadcast.round, nodes, sizes, **numbers, **vectors)  # type: ignore[arg-type]
    return Answer(
        report, costs_in(content), unpack_tallies(tallies, broadcast.tallies), len(tallies)
    )


def _decoded(data: bytes, broadcast: Broadcast, rows: int) -> dict[str, NDArray[Any]]:
    """A report's vectors, which were told with fewer bits."""
    kind = broadcast.compress or "none"
    names = report_vectors(broadcast)
    count = broadcast.w.size
    size = rows * encoded_size(kind, count)
    if len(data) != len(names) * size:
        raise PeerError(
            f"{len(data)} bytes of vectors where there should be {len(names) * size}"
        )
    parts = {name: data[at * size : (at + 1) * size] for at, name in enumerate(names)}
    vectors = {
        name: decode(kind, part, count, rows).reshape(rows, count)
        for name, part in parts.items()
    }
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # what is not finite is found in the result
        vectors["w"] = broadcast.w + vectors["w"]
    return {**vectors}


# What a node remembers.


def memory_out(memory: FleetState) -> tuple[ArrayRecord, ConfigRecord]:
    return _value_out(replace(memory, broadcast=replace(memory.broadcast, catch_up=None)))


def memory_in(arrays: ArrayRecord, numbers: ConfigRecord) -> FleetState:
    """Raises `ValueError` where it cannot be read."""
    return _value_in(
        FleetState, {name: array.numpy() for name, array in arrays.items()}, numbers
    )


# Parts of them.


def _value_out(value: object) -> tuple[ArrayRecord, ConfigRecord]:
    """A dataclass: its arrays, and the rest as JSON."""
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
        raise PeerError(f"{name} that cannot be read: {error}") from None


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
