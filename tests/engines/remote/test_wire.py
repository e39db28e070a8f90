"""Costs and descriptions of data and tasks on the wire: exact round trips, and refusal of
invalid bytes.
"""

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.data.agreement import ColumnDescription, Moments, TableDescription
from fedbudget.data.tables import Layout, LayoutColumn
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.messages import Farewell, Hello, NodeRefusal, Ready, Welcome
from fedbudget.engines.remote.task import SamplesDescription, Task
from fedbudget.engines.remote.wire import LONGEST, VERSION, pack, read_ready, unpack
from fedbudget.errors import UserError
from fedbudget.models.description import ModelDescription
from fedbudget.protocol.messages import PeerError
from fedbudget.resources.resource import Reading, Usage
from support.messages import COSTS, MODELS, NAMES, SAMPLES, TASK, TASKS, frame
from support.methods import bits


def sent_costs(costs: Usage) -> Usage:
    """Return costs as they arrive in a `ready`."""
    return read_ready(unpack(pack(Ready(costs)).message)).costs


def sent(message: Any) -> Any:
    """Return a message as it arrives."""
    return wire.read(unpack(pack(message).message))


VALID_COSTS = Usage({"time": Reading(0.25, 2.0), "energy": Reading(3.0, 40.0, "host")})


@given(COSTS)
def test_costs_round_trip(costs: Usage) -> None:
    assert sent_costs(costs) == costs


def test_evaluation_costs_round_trip() -> None:
    costs = replace(
        VALID_COSTS, evaluation={"time": Reading(0.0, 0.5), "cpu": Reading(0.0, 0.25)}
    )
    assert sent_costs(costs) == costs
    with pytest.raises(PeerError, match=r"cpu \(whole\) is -1"):
        sent_costs(replace(costs, evaluation={"cpu": Reading(0.0, -1.0)}))


def test_peers_decide_only_about_readings() -> None:
    assert sent_costs(replace(VALID_COSTS, nodes=3, wire_bytes=9, here=True)) == VALID_COSTS


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("whole", math.nan, r"energy \(whole\) is nan"),
        ("whole", math.inf, r"energy \(whole\) is inf"),
        ("step", -0.1, r"energy \(step\) is -0.1"),
        ("step", -math.inf, r"energy \(step\) is -inf"),
        ("host", "x" * 201, "a host name of 201 characters"),
        ("whole", None, "cannot be read"),
        ("whole", "long", "cannot be read"),
        ("host", 1.0, "cannot be read"),
    ],
)
def test_invalid_readings_are_refused(field: str, value: Any, reason: str) -> None:
    energy = replace(VALID_COSTS.readings["energy"], **{field: value})
    with pytest.raises(PeerError, match=reason):
        sent_costs(Usage({**VALID_COSTS.readings, "energy": energy}))


@pytest.mark.parametrize("name", ["", "x" * 201, "two words", "émile"])
def test_invalid_resource_names_are_refused(name: str) -> None:
    with pytest.raises(PeerError, match="is not a name of a resource"):
        sent_costs(Usage({**VALID_COSTS.readings, name: Reading(1.0, 1.0)}))


TIME = {"time": [0.1, 0.5, "", 1]}


@pytest.mark.parametrize(
    ("readings", "reason"),
    [
        ({}, "without the time"),
        (
            {**TIME, **{"a" * count: [0.0, 0.0, "", 1] for count in range(1, 65)}},
            "costs of 65 readings",
        ),
        ({**TIME, "x" * 30_000: [0.0, 0.0, "", 1]}, "a ready of .* bytes"),
        ({"time": [0.1, 0.5, ""]}, "cannot be read"),
        ({"time": [0.1, 0.5, "", 1, 1]}, "cannot be read"),
        ([TIME], "cannot be read"),
        ({1: [0.1, 0.5, "", 1]}, "cannot be read"),
    ],
)
def test_invalid_costs_are_refused(readings: Any, reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        read_ready(unpack(frame("ready", [[readings, 1, 0, 1, False, {}, 1.0]])))


@pytest.mark.parametrize("header", [b"", b"\xc1", [1.0], b"\x91" * 1000])
def test_invalid_cost_bytes_are_refused(header: Any) -> None:
    with pytest.raises(PeerError, match="a ready cannot be read"):
        read_ready(unpack(frame("ready", header)))


def test_long_reasons_are_refused() -> None:
    for kind in (Farewell, NodeRefusal):
        assert sent(kind("x" * 2000)) == kind("x" * 2000)
        with pytest.raises(PeerError, match="length <= 2000"):
            sent(kind("x" * 2001))


HELLO = Hello("me", SamplesDescription((5,), (2, 3), features=Moments(*np.ones((2, 6)))))
WELCOME = Welcome("run", TASK, (0, 1))


@settings(deadline=None)
@given(
    NAMES,
    SAMPLES,
    NAMES,
    st.lists(st.integers(0, 2**32 - 1), max_size=8),
    st.none() | NAMES | MODELS,
)
def test_hello_round_trip(
    instance: str, samples: SamplesDescription, run: str, rounds: list[int], model: Any
) -> None:
    hello = Hello(instance, samples, run, tuple(rounds), model)
    assert bits(sent(hello)) == bits(hello)


@settings(deadline=None)
@given(NAMES, TASKS, st.sets(st.integers(0, 2**62 - 1), max_size=5))
def test_welcome_round_trip(run: str, task: Task, numbers: set[int]) -> None:
    welcome = Welcome(run, task, tuple(sorted(numbers)))
    assert bits(sent(welcome)) == bits(welcome)
    assert bits(wire.task_from_text(wire.task_to_text(task))) == bits(task)


def test_long_descriptions_are_refused_locally() -> None:
    columns = LONGEST // 16 + 1
    many = SamplesDescription(
        (10,), (columns,), features=Moments(np.ones(columns), np.ones(columns))
    )
    with pytest.raises(UserError, match="fewer columns to standardise"):
        pack(Hello("me", many))
    named = SamplesDescription((), (1,), classes=("name" * 40,) * 10_000)
    with pytest.raises(UserError, match="fewer classes"):
        pack(Welcome("run", replace(TASK, samples=named), (0,)))


def with_samples(**other: Any) -> dict[str, Any]:
    return {"samples": replace(HELLO.samples, **other)}


def moments(mean: list[float], deviation: list[float]) -> Moments:
    return Moments(np.array(mean), np.array(deviation))


@pytest.mark.parametrize(
    "other",
    [
        {"instance": "x" * 201},
        {"run": "x" * 201},
        {"rounds": (1,) * 17},
        {"rounds": (-1,)},
        {"rounds": (2**32,)},
        {"rounds": ("1",)},
        with_samples(sizes=()),
        with_samples(sizes=(5, 0)),
        with_samples(sizes=(-5,)),
        with_samples(sizes=(2**40,)),
        with_samples(sizes=(1,) * 5001),
        with_samples(sizes=(True,)),
        with_samples(shape=()),
        with_samples(shape=(0,)),
        with_samples(shape=(-2, -3)),
        with_samples(shape=(1, 1, 1, 1, 6)),
        with_samples(shape=(10**4, 10**5)),
        with_samples(shape=(2**32 - 1,) * 200_000),
        with_samples(stored="object"),
        with_samples(scale=0.0),
        with_samples(scale=-1.0),
        with_samples(scale=math.nan),
        with_samples(scale=math.inf),
        with_samples(values=1),
        with_samples(classes=("",) * 100_001),
        with_samples(classes=("x" * 201,)),
        with_samples(features=moments([1.0] * 5, [1.0] * 6)),
        with_samples(features=moments([math.nan] * 6, [1.0] * 6)),
        with_samples(features=moments([1.0] * 6, [1.0] * 7)),
        with_samples(features=moments([1.0] * 6, [-1.0] * 6)),
        with_samples(features=moments([1.0] * 6, [math.inf] * 6)),
        with_samples(target=moments([1.0, 1.0], [1.0, 1.0])),
        with_samples(features=Moments(np.ones((6, 1)), np.ones((6, 1)))),
        with_samples(features=Moments(np.ones((2, 3)), np.ones(6))),
        with_samples(target=Moments(np.array(1.0), np.array(1.0))),
    ],
)
def test_invalid_hellos_are_refused(other: dict[str, Any]) -> None:
    assert sent(HELLO) is not None
    with pytest.raises(PeerError):
        sent(replace(HELLO, **other))


AGE = ColumnDescription("number", 5, 1.0, 2.0, 1.5, 5)
WARD = ColumnDescription("category", 5, counts={"x": 3, "y": 2})
TABLE = TableDescription({"a": AGE, "b": WARD}, 5, "median", ("id",), "t")
MANY = {str(number): 1 for number in range(1001)}


def with_column(**other: Any) -> dict[str, Any]:
    """The columns with changes in the first."""
    return {"columns": {"a": replace(AGE, **other), "b": WARD}}


NAMED = Hello("me", SamplesDescription((5,), (2,), "float64", table=TABLE))


def test_table_description_round_trip() -> None:
    assert bits(sent(NAMED)) == bits(NAMED)


@pytest.mark.parametrize(
    "other",
    [
        {"columns": {"a": AGE}},
        {"columns": {"a": AGE, "b\x1b[2J": WARD}},
        {"columns": {"a": AGE, "x" * 201: WARD}},
        with_column(kind="date"),
        with_column(kind="category"),
        with_column(counts={"x": 1}),
        {"rows": 6},
        with_column(present=6),
        with_column(present=-1),
        with_column(present=1.5),
        with_column(present=math.nan),
        with_column(mean=math.inf),
        with_column(deviation=math.nan),
        with_column(deviation=-1.0),
        {"columns": {"a": AGE, "b": replace(WARD, counts={})}},
        {"columns": {"a": AGE, "b": replace(WARD, counts={"x": 6})}},
        {"columns": {"a": AGE, "b": replace(WARD, counts={"x": 0})}},
        {"columns": {"a": AGE, "b": replace(WARD, counts=MANY)}},
        {"columns": {"a": AGE, "b": replace(WARD, counts={"x" * 201: 1})}},
        {"impute": "guess"},
        with_column(fill=math.inf),
        with_column(weight=9),
    ],
)
def test_invalid_tables_are_refused(other: dict[str, Any]) -> None:
    wrong = replace(NAMED.samples, table=replace(TABLE, **other))
    with pytest.raises(PeerError):
        sent(replace(NAMED, samples=wrong))


@pytest.mark.parametrize(
    "columns",
    [
        (LayoutColumn("a"),),
        (LayoutColumn("a"), LayoutColumn("a"), LayoutColumn("b")),
        (LayoutColumn("a", fill="x"), LayoutColumn("b", ("x", "y"))),
        (LayoutColumn("a", fill=math.inf), LayoutColumn("b", ("x", "y"))),
        (LayoutColumn("a"), LayoutColumn("b", ("x", "x"))),
        (LayoutColumn("a"), LayoutColumn("b", ("x", "y"), "z")),
        (LayoutColumn("a\n"), LayoutColumn("b", ("x", "y"))),
    ],
)
def test_invalid_layouts_are_refused(columns: tuple[LayoutColumn, ...]) -> None:
    fine = Layout((LayoutColumn("a", fill=0.5), LayoutColumn("b", ("x", "y"), "y")), "t")
    agreed = replace(TASK, samples=SamplesDescription((), (3,), layout=fine))
    assert sent(Welcome("run", agreed, (0,))).task == agreed
    wrong = replace(agreed.samples, layout=Layout(columns, "t"))
    with pytest.raises(PeerError):
        sent(Welcome("run", replace(TASK, samples=wrong), (0,)))


def with_task(**other: Any) -> dict[str, Any]:
    return {"task": replace(TASK, **other)}


@pytest.mark.parametrize(
    "other",
    [
        {"run": "x" * 201},
        {"numbers": (2**62,)},
        {"numbers": (-1,)},
        {"numbers": (1, 1)},
        {"numbers": (2, 1)},
        {"numbers": tuple(range(5001))},
        with_task(model="x" * 201),
        with_task(parameters=0),
        with_task(parameters=2**34 + 1),
        with_task(batch=0),
        with_task(batch=2**32),
        with_task(seed=-1),
        with_task(compress="zip"),
        with_task(tau_max=0),
        with_task(tau_max=10**9 + 1),
        with_task(model_options={str(number): 1 for number in range(101)}),
        with_task(model_options={"x" * 201: 1}),
        with_task(model_options={"name": "x" * 201}),
        with_task(model_options={"name": math.nan}),
        with_task(model_options={"name": True}),
        with_task(model_options={"name": [1]}),
        with_task(model_options={"name": None}),
        with_task(readings=("cpu", "two words")),
        with_task(readings=("x" * 201,)),
        with_task(readings=("cpu",) * 65),
        with_task(readings=(1,)),
        with_task(samples=SamplesDescription((), (0,))),
    ],
)
def test_invalid_welcomes_are_refused(other: dict[str, Any]) -> None:
    assert sent(WELCOME) is not None
    with pytest.raises(PeerError):
        sent(replace(WELCOME, **other))


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (HELLO, ["samples"]),
        (HELLO, ["samples", "features"]),
        (WELCOME, ["task"]),
        (WELCOME, ["task", "features"]),
        (WELCOME, ["task", "samples"]),
    ],
)
@pytest.mark.parametrize("value", [None, 3, "text", [], {}, ...])
def test_incomplete_descriptions_are_refused(
    message: Any, path: list[str], value: Any
) -> None:
    """Each field has its type, and none is missing (...)."""
    given = unpack(pack(message).message)
    values = msgspec.msgpack.decode(given.header)
    part = values
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    if value is ...:
        del part[path[-1]]
    if (path, value) in ((["samples", "features"], None), (["task", "features"], [])):
        return
    with pytest.raises(PeerError, match=rf"cannot be read: .*{path[-1]}"):
        wire.read(unpack(frame(given.name, values)))


@pytest.mark.parametrize("version", [0, VERSION - 1, VERSION + 1])
def test_other_protocol_versions_are_refused(version: int) -> None:
    """The version is the second byte of every message."""
    for message in (HELLO, WELCOME, Farewell("over")):
        data = bytearray(pack(message).message)
        data[1] = version
        with pytest.raises(
            PeerError,
            match=rf"uses version {version} of the protocol, and this is version {VERSION}",
        ):
            unpack(bytes(data))


@pytest.mark.parametrize(
    "data", [b"\x0a\x08\x08\x07\x12\x04\x81\xa1a\x01", b'"\x06\n\x04over', b"\x82", b"\x80"]
)
def test_protobuf_messages_are_refused(data: bytes) -> None:
    """A hello and a farewell of version 7, and messages without a whole head."""
    with pytest.raises(PeerError, match="install the same fedbudget on both sides"):
        unpack(data)


@pytest.mark.parametrize("length", [0, 4, 2**32 - 1])
def test_header_length_must_match(length: int) -> None:
    data = bytearray(pack(Farewell("over")).message)
    data[2:6] = length.to_bytes(4, "little")
    with pytest.raises(PeerError, match=r"bytes that are not a message|cannot be read"):
        wire.read(unpack(bytes(data)))


@pytest.mark.parametrize(
    "header", [b"", b"\xc1", b"\x80", {"instance": 1}, b"\x91" * 100_000 + b"\x90"]
)
def test_invalid_descriptions_are_refused(header: Any) -> None:
    for name in ("hello", "welcome"):
        with pytest.raises(PeerError, match="cannot be read"):
            wire.read(unpack(frame(name, header)))
    data = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    with pytest.raises(PeerError, match="a task cannot be read"):
        wire.task_from_text(data.hex())


def test_model_names_are_printable() -> None:
    """Logs and terminals show them."""
    hello = replace(HELLO, model=ModelDescription("net\x1b[2J", "TorchModel", (), "", ""))
    with pytest.raises(PeerError, match=r"\$\.model\.name"):
        sent(hello)
