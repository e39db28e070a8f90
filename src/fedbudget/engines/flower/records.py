"""Messages and memories as Flower's records, and back: arrays as arrays, numbers as metrics or configuration.

What comes from another machine is checked here before it is used: a report has all that was asked for, of the right
type and shape, and nothing else. There is no pickle in it. What a node says of its samples, and the task that all agree
on, are the bytes that every other network carries (engines/remote and engines/grpc/wire.py), which checks them.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedbudget.arrays import Float64, Int64
from fedbudget.data.sampling import Position
from fedbudget.engines.grpc.codec import AggregatorReader, NodeReader, pack_hello, pack_welcome
from fedbudget.engines.remote.costs import costs_of
from fedbudget.engines.remote.messages import Answer, Hello, RoundRequest, Welcome
from fedbudget.protocol.memory import FleetState
from fedbudget.protocol.messages import Broadcast, CatchUp, Drift, PeerError, Report
from fedbudget.resources.usage import NodeCosts

_Arrays = dict[str, NDArray[Any]]
_NUMBERS = ("losses", "best_losses", "rho", "beta", "plain", "corrected")
_REMEMBERED = ("w", "best", "losses", "best_known", "steep", "mean", "own", "shift")


def size(content: RecordDict) -> int:
    """Bytes of what is in a message; what Flower and HTTP put around it is not counted."""
    arrays = sum(len(array.data) for record in content.array_records.values() for array in record.values())
    numbers = [*content.config_records.values(), *content.metric_records.values()]
    return arrays + sum(len(record.deflate()) for record in numbers)


# What a node says before the first round, and is told.


def hello_out(hello: Hello, partition: int | None) -> RecordDict:
    broadcast: dict[str, Any] = {"hello": pack_hello(hello)[0]}
    return RecordDict({"hello": ConfigRecord(broadcast if partition is None else broadcast | {"partition": partition})})


def hello_in(content: RecordDict) -> tuple[Hello, int | None]:
    found = _config(content, "hello")
    hello, partition = NodeReader().feed(_bytes(found, "hello")), found.get("partition")
    assert isinstance(hello, Hello)
    return hello, partition if isinstance(partition, int) else None


def welcome_out(welcome: Welcome) -> RecordDict:
    return RecordDict({"welcome": ConfigRecord({"welcome": pack_welcome(welcome)[0]})})


def welcome_in(content: RecordDict) -> Welcome:
    welcome = AggregatorReader().feed(_bytes(_config(content, "welcome"), "welcome"))
    if not isinstance(welcome, Welcome):
        raise PeerError("no welcome where it was expected")
    return welcome


def costs_out(costs: NodeCosts) -> RecordDict:
    numbers: dict[str, Any] = {name: [reading.step, reading.whole] for name, reading in costs.readings.items()}
    hosts: dict[str, Any] = {name: reading.host for name, reading in costs.readings.items() if reading.host}
    return RecordDict({"costs": MetricRecord(numbers), "hosts": ConfigRecord(hosts)})


def costs_in(content: RecordDict) -> NodeCosts:
    hosts = content.config_records.get("hosts", ConfigRecord())
    rows = []
    for name, numbers in content.metric_records.get("costs", MetricRecord()).items():
        if not isinstance(numbers, list) or len(numbers) != 2:
            raise PeerError(f"{name[:20]} is {numbers}")
        rows.append((name, *numbers, str(hosts.get(name, ""))))
    return costs_of(rows)


def refusal_out(reason: str, *, lost: bool = False) -> RecordDict:
    """A node cannot do what it is asked to.

    Args:
      lost: because it does not remember what it must.
    """
    return RecordDict({"refusal": ConfigRecord({"reason": reason, "lost": lost})})


def refusal_in(content: RecordDict) -> tuple[str, bool] | None:
    found = content.config_records.get("refusal")
    return None if found is None else (str(found.get("reason"))[:2000], found.get("lost") is True)


# A round.


def request_out(request: RoundRequest, *, catch_up: bool) -> RecordDict:
    """A broadcast to nodes whose memory stands after the same round.

    Args:
      catch_up: whether they are told what they missed.
    """
    arrays, numbers = _said_out(request.broadcast, catch_up=catch_up)
    return RecordDict(
        {"vectors": _arrays_out(arrays), "broadcast": ConfigRecord(numbers | {"stands": request.base_round})}
    )


def request_in(content: RecordDict) -> RoundRequest:
    found = _config(content, "broadcast")
    try:
        return RoundRequest(_said_in(_arrays_in(content, "vectors"), found), int(found["stands"]))  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError) as error:
        raise PeerError(f"a broadcast that cannot be read: {error!r}") from None


def answer_out(report: Report, costs: NodeCosts) -> RecordDict:
    vectors = {"w": report.w, "gradients": report.gradients}
    numbers = {name: getattr(report, name) for name in _NUMBERS}
    content = costs_out(costs)
    content["vectors"] = _arrays_out({name: vector for name, vector in vectors.items() if vector is not None})
    found = {name: values.tolist() for name, values in numbers.items() if values is not None}
    content["report"] = MetricRecord({"round": report.round, **found})
    return content


def answer_in(content: RecordDict, broadcast: Broadcast, nodes: Int64, sizes: Int64) -> Answer:
    """A report by nodes of these numbers and sizes, with all that was asked for and nothing else."""
    found, vectors = dict(content.metric_records.get("report", {})), _arrays_in(content, "vectors")
    if found.pop("round", None) != broadcast.round:
        raise PeerError(f"a report that is not of round {broadcast.round}")
    estimates = broadcast.estimate and broadcast.round > 1 and broadcast.tau > 0
    asked = {"losses", "best_losses"}
    asked |= {"rho", "beta"} if estimates else set()
    asked |= {"plain", "corrected"} if broadcast.drift is not None and broadcast.tau > 0 else set()
    with_it = {"w"} if broadcast.tau > 0 else set()
    with_it |= {"gradients"} if estimates and broadcast.gradient else set()
    for those, wanted in ((found.keys(), asked), (vectors.keys(), with_it)):
        if those != wanted:
            raise PeerError(f"a report with {sorted(those)} where {sorted(wanted)} was asked for")
    for name, vector in vectors.items():
        if vector.dtype != np.float32 or vector.shape != (len(nodes), broadcast.w.size):
            raise PeerError(f"{name} of type {vector.dtype} and shape {vector.shape}")
    numbers = {name: _numbers(name, values, len(nodes)) for name, values in found.items()}
    return Answer(Report(broadcast.round, nodes, sizes, **numbers, **vectors), costs_in(content))  # type: ignore[arg-type]


# What a node remembers.


def memory_out(memory: FleetState) -> tuple[ArrayRecord, ConfigRecord]:
    broadcast, numbers = _said_out(memory.broadcast, catch_up=False)
    position = memory.position
    arrays = {"said": broadcast["w"]}
    arrays |= {name: getattr(memory, name) for name in _REMEMBERED if getattr(memory, name) is not None}
    arrays |= {f"left-{index}": left for index, left in enumerate(position.left)}
    if position.last is not None:
        arrays["last"] = position.last
    numbers |= {"generators": json.dumps(position.generators), "last_used": position.last_used}
    return _arrays_out(arrays), ConfigRecord(numbers)


def memory_in(arrays: ArrayRecord, numbers: ConfigRecord) -> FleetState:
    found = {name: array.numpy() for name, array in arrays.items()}
    generators = json.loads(str(numbers["generators"]))
    position = Position(
        tuple(generators),
        tuple(found[f"left-{index}"] for index in range(len(generators))),
        found.get("last"),
        int(numbers["last_used"]),  # type: ignore[arg-type]
    )
    remembered: dict[str, Any] = {name: found.get(name) for name in _REMEMBERED}
    return FleetState(broadcast=_said_in({"w": found["said"]}, numbers), position=position, **remembered)


# Parts of them.

_FLAGS = ("estimate", "best", "stop", "gradient", "curvature")


def _said_out(broadcast: Broadcast, *, catch_up: bool) -> tuple[_Arrays, dict[str, Any]]:
    arrays: _Arrays = {"w": broadcast.w}
    numbers: dict[str, Any] = {"round": broadcast.round, "tau": broadcast.tau, "eta": float(broadcast.eta)}
    numbers |= {name: bool(getattr(broadcast, name)) for name in _FLAGS}
    if broadcast.drift is not None:
        numbers |= {"correct": bool(broadcast.drift.correct), "share": float(broadcast.drift.share)}
    if catch_up and broadcast.catch_up is not None:
        arrays["best"] = broadcast.catch_up.best
        numbers["since"] = broadcast.catch_up.since
        if broadcast.catch_up.mean is not None:
            arrays["mean"] = broadcast.catch_up.mean
    return arrays, numbers


def _said_in(arrays: _Arrays, numbers: Mapping[str, Any]) -> Broadcast:
    flags = {name: bool(numbers[name]) for name in _FLAGS}
    return Broadcast(
        int(numbers["round"]),
        arrays["w"],
        int(numbers["tau"]),
        float(numbers["eta"]),
        **flags,
        drift=Drift(bool(numbers["correct"]), float(numbers["share"])) if "correct" in numbers else None,
        catch_up=CatchUp(arrays["best"], arrays.get("mean"), int(numbers["since"])) if "since" in numbers else None,
    )


def _arrays_out(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.ascontiguousarray(array)) for name, array in arrays.items()})


def _arrays_in(content: RecordDict, name: str) -> _Arrays:
    try:
        return {key: array.numpy() for key, array in content.array_records.get(name, ArrayRecord()).items()}
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


def _bytes(record: ConfigRecord, name: str) -> bytes:
    value = record.get(name)
    if not isinstance(value, bytes):
        raise PeerError(f"{name} is missing")
    return value
