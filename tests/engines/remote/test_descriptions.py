"""Descriptions of data and tasks, as bytes and back: they arrive to the bit, and what
cannot be is refused.
"""

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.data.agreement import Moments, TableDescription
from fedbudget.data.tables import Layout, LayoutColumn
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.encodings import (
    MAX_DESCRIPTION_BYTES,
    VERSION,
    describe,
    from_bytes,
    read,
)
from fedbudget.engines.remote.messages import Hello, Welcome
from fedbudget.engines.remote.task import SamplesDescription, Task
from fedbudget.errors import UserError
from fedbudget.models.description import ModelDescription
from fedbudget.protocol.messages import PeerError
from support.messages import MODELS, NAMES, SAMPLES, TASK, TASKS
from support.methods import bits

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
def test_a_hello_arrives(
    instance: str, samples: SamplesDescription, run: str, rounds: list[int], model: Any
) -> None:
    hello = Hello(instance, samples, run, tuple(rounds), model)
    assert bits(read(Hello, from_bytes(describe(hello).SerializeToString()))) == bits(hello)


@settings(deadline=None)
@given(NAMES, TASKS, st.sets(st.integers(0, 2**62 - 1), max_size=5))
def test_a_welcome_arrives(run: str, task: Task, numbers: set[int]) -> None:
    welcome = Welcome(run, task, tuple(sorted(numbers)))
    assert bits(read(Welcome, from_bytes(describe(welcome).SerializeToString()))) == bits(
        welcome
    )
    assert bits(read(Task, describe(task))) == bits(task)


def test_what_is_too_long_is_refused_where_it_is() -> None:
    columns = MAX_DESCRIPTION_BYTES // 16 + 1
    many = SamplesDescription(
        (10,), (columns,), features=Moments(np.ones(columns), np.ones(columns))
    )
    with pytest.raises(UserError, match="fewer columns to standardise"):
        describe(Hello("me", many))
    named = SamplesDescription((), (1,), classes=("name" * 40,) * 10_000)
    with pytest.raises(UserError, match="fewer classes"):
        describe(Welcome("run", replace(TASK, samples=named), (0,)))


def samples(**other: Any) -> dict[str, Any]:
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
        {"samples": None},
        samples(sizes=()),
        samples(sizes=(5, 0)),
        samples(sizes=(-5,)),
        samples(sizes=(2**40,)),
        samples(sizes=(1,) * 5001),
        samples(sizes=(True,)),
        samples(shape=()),
        samples(shape=(0,)),
        samples(shape=(-2, -3)),
        samples(shape=(1, 1, 1, 1, 6)),
        samples(shape=(10**4, 10**5)),
        samples(shape=(2**32 - 1,) * 200_000),
        samples(stored="object"),
        samples(scale=0.0),
        samples(scale=-1.0),
        samples(scale=math.nan),
        samples(scale=math.inf),
        samples(values=1),
        samples(classes=("",) * 100_001),
        samples(classes=("x" * 201,)),
        samples(features=moments([1.0] * 5, [1.0] * 6)),
        samples(features=moments([math.nan] * 6, [1.0] * 6)),
        samples(features=moments([1.0] * 6, [1.0] * 7)),
        samples(features=moments([1.0] * 6, [-1.0] * 6)),
        samples(features=moments([1.0] * 6, [math.inf] * 6)),
        samples(target=moments([1.0, 1.0], [1.0, 1.0])),
    ],
)
def test_a_hello_that_cannot_be(other: dict[str, Any]) -> None:
    assert read(Hello, describe(HELLO)) is not None
    with pytest.raises(PeerError):
        read(Hello, describe(replace(HELLO, **other)))


TABLE = TableDescription(
    ("a", "b"), ("number", "category"), 5, np.array([5.0, 0.0]), moments([1.0, 0.0], [2.0, 0.0]),
    ({"x": 3, "y": 2},), "median", np.array([1.5, math.nan]), np.array([5.0, 0.0]), ("id",), "t",
)  # fmt: skip
NAMED = Hello("me", SamplesDescription((5,), (2,), "float64", table=TABLE))


def test_what_a_table_tells_arrives() -> None:
    assert bits(read(Hello, describe(NAMED))) == bits(NAMED)


@pytest.mark.parametrize(
    "other",
    [
        {"names": ("a", "a")},
        {"names": ("a",)},
        {"names": ("a", "b\x1b[2J")},
        {"names": ("a", "x" * 201)},
        {"kinds": ("number",)},
        {"kinds": ("number", "date")},
        {"kinds": ("number", "number")},
        {"rows": 6},
        {"present": np.array([6.0, 0.0])},
        {"present": np.array([-1.0, 0.0])},
        {"present": np.array([1.5, 0.0])},
        {"present": np.array([math.nan, 0.0])},
        {"present": np.array([5.0])},
        {"numbers": moments([1], [2])},
        {"numbers": moments([math.inf, 0], [2, 0])},
        {"categories": ()},
        {"categories": ({"x": 6},)},
        {"categories": ({"x": 0},)},
        {"categories": ({str(number): 1 for number in range(1001)},)},
        {"categories": ({"x" * 201: 1},)},
        {"impute": "guess"},
        {"fills": None},
        {"fills": np.array([math.inf, 0.0])},
        {"weights": np.array([9.0, 0.0])},
    ],
)
def test_a_table_that_cannot_be(other: dict[str, Any]) -> None:
    wrong = replace(NAMED.samples, table=replace(TABLE, **other))
    with pytest.raises(PeerError):
        read(Hello, describe(replace(NAMED, samples=wrong)))


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
def test_a_layout_that_cannot_be(columns: tuple[LayoutColumn, ...]) -> None:
    fine = Layout((LayoutColumn("a", fill=0.5), LayoutColumn("b", ("x", "y"), "y")), "t")
    agreed = replace(TASK, samples=SamplesDescription((), (3,), layout=fine))
    assert read(Task, describe(agreed)) == agreed
    with pytest.raises(PeerError):
        read(
            Task,
            describe(
                replace(TASK, samples=replace(agreed.samples, layout=Layout(columns, "t")))
            ),
        )


def task(**other: Any) -> dict[str, Any]:
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
        {"task": None},
        task(model="x" * 201),
        task(parameters=0),
        task(parameters=2**34 + 1),
        task(batch=0),
        task(batch=2**32),
        task(seed=-1),
        task(compress="zip"),
        task(tau_max=0),
        task(tau_max=10**9 + 1),
        task(model_options={str(number): 1 for number in range(101)}),
        task(model_options={"x" * 201: 1}),
        task(model_options={"name": "x" * 201}),
        task(model_options={"name": math.nan}),
        task(model_options={"name": True}),
        task(model_options={"name": [1]}),
        task(model_options={"name": None}),
        task(request=None),
        task(readings=("cpu", "two words")),
        task(readings=("x" * 201,)),
        task(readings=("cpu",) * 65),
        task(readings=(1,)),
        task(samples=SamplesDescription((), (0,))),
    ],
)
def test_a_welcome_that_cannot_be(other: dict[str, Any]) -> None:
    assert read(Welcome, describe(WELCOME)) is not None
    with pytest.raises(PeerError):
        read(Welcome, describe(replace(WELCOME, **other)))


@pytest.mark.parametrize("version", [0, VERSION - 1, VERSION + 1])
def test_another_version_is_refused_in_words(version: int) -> None:
    """The first version had a hello of its own, whose first field is the same."""
    description = describe(HELLO)
    description.version = version
    with pytest.raises(
        PeerError,
        match=rf"uses version {version} of the protocol, and this is version {VERSION}",
    ):
        read(Hello, description)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xc1",
        b"\x80",
        msgspec.msgpack.encode({"instance": 1}),
        b"\x91" * 100_000 + b"\x90",
    ],
)
def test_what_is_no_description(value: bytes) -> None:
    kinds: list[Any] = [Hello, Welcome, Task]
    for kind in kinds:
        with pytest.raises(PeerError, match="cannot be read"):
            read(kind, pb.Description(version=VERSION, value=value))
    with pytest.raises(PeerError, match="bytes that are not a description"):
        from_bytes(b"\xff")


def test_what_is_shown_of_another_machines_model_has_no_control_characters() -> None:
    """It comes into logs and onto terminals."""
    hello = replace(HELLO, model=ModelDescription("net\x1b[2J", "TorchModel", (), "", ""))
    with pytest.raises(PeerError, match=r"\$\.model\.name"):
        read(Hello, describe(hello))
