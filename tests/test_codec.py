"""The codec: dataclasses as plain values and arrays, and back."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta
from numpy.typing import NDArray

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.budget.control import Decision, Reason
from fedbudget.codec import Codec, file_codec
from fedbudget.data.sampling import Sampler
from fedbudget.protocol.features.drift import DriftCatchUp, DriftPart
from fedbudget.protocol.features.feature import wire_types
from fedbudget.protocol.messages import Broadcast, CatchUp, ReportLayout, TrainRound
from support.methods import bits


@dataclass(frozen=True)
class Inner:
    values: Float64 | None
    number: float


@dataclass(frozen=True)
class Outer:
    name: str
    inner: tuple[Inner, ...]
    w: Float32
    any_type: NDArray[Any]
    count: int = 0


OUTER = Outer(
    "a",
    (Inner(np.zeros(2), math.inf), Inner(None, 0.1)),
    np.ones(3, np.float32),
    np.zeros(1, np.int8),
    7,
)


OUTER_CODEC: Codec[Outer] = Codec(Outer)


def round_trip(value: Any, kind: Any = None) -> Any:
    """Return a value as read from JSON, after a check of MessagePack."""
    codec: Codec[Any] = file_codec(kind or type(value))
    plain, arrays = codec.plain(value)
    return codec.restore(json.loads(json.dumps(plain)), arrays)


def wire_trips(codec: Codec[Any], value: Any) -> list[Any]:
    """Return a value as read from MessagePack, with arrays outside and inside."""
    return [codec.decode(*codec.encode(value)), codec.unpack(codec.pack(value))]


def test_arrays_are_replaced_by_their_place() -> None:
    plain, arrays = file_codec(Outer).plain(OUTER)
    assert plain["inner"] == (
        {"values": 0, "number": math.inf},
        {"values": None, "number": 0.1},
    )
    assert (plain["w"], plain["any_type"]) == (1, 2)
    assert [each is OUTER.w for each in arrays] == [False, True, False]


def test_fields_have_no_names_on_the_wire() -> None:
    data, arrays = OUTER_CODEC.encode(OUTER)
    values = msgspec.msgpack.decode(data)
    assert values == ["a", [[0, math.inf], [None, 0.1]], 1, 2, 7]
    assert len(arrays) == 3


def test_repeated_arrays_are_stored_once() -> None:
    w = np.ones(2, np.float32)
    codec: Codec[tuple[DriftCatchUp, ...]] = Codec(tuple[DriftCatchUp, ...])
    parts = (DriftCatchUp(w, 1), DriftCatchUp(w, 2), DriftCatchUp(w.copy(), 3))
    data, arrays = codec.encode(parts)
    assert msgspec.msgpack.decode(data) == [[0, 1], [0, 2], [1, 3]]
    one, two, _ = codec.decode(data, arrays)
    assert one.mean is two.mean


@given(st.floats(), st.integers(-(2**200), 2**200), st.text())
def test_round_trip_keeps_bits(number: float, count: int, name: str) -> None:
    value = replace(
        OUTER, name=name, count=count, inner=(Inner(np.array([number]), number),)
    )
    assert bits(round_trip(value)) == bits(value)
    small = replace(value, count=7, any_type=np.zeros(1))
    assert bits(OUTER_CODEC.decode(*OUTER_CODEC.encode(small))) == bits(small)


def test_round_trip_of_messages() -> None:
    w = np.ones(2, np.float32)
    broadcast = TrainRound(
        round=3,
        w=w,
        report=ReportLayout(("losses",), ("w",)),
        tau=2,
        eta=0.1,
        effective=2.0,
        best=True,
        parts=(DriftPart(True, 0.5),),
        catch_up=CatchUp(w, (DriftCatchUp(-w, 2),)),
    )
    codec = file_codec(Broadcast, tuple(wire_types().items()))
    plain, arrays = codec.plain(broadcast)
    again = codec.restore(json.loads(json.dumps(plain)), arrays)
    assert bits(again) == bits(broadcast)
    for result in wire_trips(Codec(Broadcast, wire_types()), broadcast):
        assert bits(result) == bits(broadcast)
    sampler = Sampler(np.array([10, 12]), 3, 0)
    sampler.round(3)
    assert bits(round_trip(sampler.position)) == bits(sampler.position)
    assert round_trip(Decision(3, Reason.BUDGET)) == Decision(3, Reason.BUDGET)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Pair(NamedTuple):
    first: Int64
    second: Inner | None


class Feature:
    """An open base class."""


@dataclass(frozen=True)
class Plain(Feature):
    number: Annotated[int, Meta(ge=0)]


@dataclass(frozen=True)
class Vector(Feature):
    w: Float32
    inner: Inner | None = None


@dataclass(frozen=True)
class Everything:
    colour: Colour
    kind: Literal["a", "b"]
    pair: Pair
    pairs: list[Pair]
    by_name: Mapping[str, Float64]
    one_of: Plain | Vector | None
    text_or: str | Plain
    features: tuple[Feature, ...]
    nested: dict[str, tuple[Plain | Vector, ...]]
    data: bytes
    limited: Annotated[tuple[int, ...], Meta(max_length=3)] = ()


MEMBERS: dict[type, tuple[type, ...]] = {Feature: (Plain, Vector)}
PAIR = Pair(np.arange(3), Inner(np.ones(1), 2.0))
EVERYTHING = Everything(
    Colour.BLUE,
    "b",
    PAIR,
    [PAIR, Pair(np.arange(2), None)],
    {"x": np.zeros(2), "y": np.ones((2, 2))},
    Vector(np.ones(2, np.float32)),
    Plain(3),
    (Plain(4), Vector(np.zeros(1, np.float32), Inner(None, math.nan))),
    {"z": (Plain(5), Vector(np.ones(0, np.float32)))},
    b"\x00\xff",
    (1, 2),
)


@pytest.mark.parametrize("named", [False, True])
def test_all_supported_types(named: bool) -> None:
    codec: Codec[Any] = Codec(Everything, MEMBERS, named=named)
    others = replace(EVERYTHING, one_of=None, text_or="text", features=())
    for value in (EVERYTHING, others, replace(EVERYTHING, one_of=Plain(0))):
        for result in (*wire_trips(codec, value), codec.restore(*codec.plain(value))):
            assert repr(result) == repr(value)  # with the types of arrays
            assert isinstance(result.pair, Pair)
            assert result.colour is Colour.BLUE


def test_file_codec_with_members() -> None:
    codec = file_codec(Everything, tuple(MEMBERS.items()))
    plain, arrays = codec.plain(EVERYTHING)
    assert plain["features"][0] == {"class": "Plain", "number": 4}
    assert repr(codec.restore(json.loads(json.dumps(plain)), arrays)) == repr(EVERYTHING)


def test_union_of_messages() -> None:
    codec: Codec[Any] = Codec(Plain | Vector)
    assert msgspec.msgpack.decode(codec.pack(Plain(3))) == ["Plain", 3]
    for value in (Plain(3), Vector(np.ones(2, np.float32))):
        for result in wire_trips(codec, value):
            assert type(result) is type(value)
            assert bits(result) == bits(value)


S = TypeVar("S")


@dataclass(frozen=True)
class State(Generic[S]):
    own: S
    maybe: S | None
    inner: tuple[S, ...] = ()


def test_generic_dataclasses() -> None:
    value = State(Inner(np.ones(1), 0.5), None, (Inner(None, 1.0),))
    assert bits(round_trip(value, State[Inner])) == bits(value)
    assert round_trip(State(3, 4), State[int]) == State(3, 4)
    with pytest.raises(ValueError, match="Expected `int`, got `str`"):
        round_trip(State("a", 4), State[int])


def test_numbers_of_numpy() -> None:
    number: Any = np.float64(0.5)
    count: Any = np.int64(3)
    value = replace(OUTER, count=count, inner=(Inner(None, number),))
    result = round_trip(value)
    assert (type(result.count), type(result.inner[0].number)) == (int, float)
    assert (result.count, result.inner[0].number) == (3, 0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"more": 1}, "unknown field `more`"),
        ({"inner": [{"values": 0, "number": 1.0, "more": 1}]}, r"at `\$\.inner\[0\]`"),
        ({"inner": [{"values": None}]}, "missing required field `number`"),
        ({"inner": [[0, 1.0]]}, "Expected `object`, got `array`"),
        ({"w": "v"}, r"there is no array 'v' - at `\$\.w`"),
        ({"w": 3}, "there is no array 3"),
        ({"w": -1}, "there is no array -1"),
        ({"w": True}, "there is no array True"),
        ({"w": 1.0}, "there is no array 1.0"),
        ({"w": 2}, "an array has type int8, not float32"),
        ({"w": None}, "there is no array None"),
        ({"any_type": 1}, "1 arrays are not used"),
        ({"count": 1.5}, "Expected `int`, got `float`"),
        ({"count": True}, "Expected `int`, got `bool`"),
        ({"name": None}, "Expected `str`, got `null`"),
    ],
)
def test_invalid_values_are_refused(changes: dict[str, Any], message: str) -> None:
    plain, arrays = file_codec(Outer).plain(OUTER)
    with pytest.raises(ValueError, match=message):
        file_codec(Outer).restore(plain | changes, arrays)


def test_missing_and_extra_are_refused() -> None:
    """Also fields that have a default."""
    codec = file_codec(Outer)
    plain, arrays = codec.plain(OUTER)
    without = {name: value for name, value in plain.items() if name != "count"}
    with pytest.raises(ValueError, match="missing required field `count`"):
        codec.restore(without, arrays)
    with pytest.raises(ValueError, match="1 arrays are not used"):
        codec.restore(plain, [*arrays, OUTER.w])
    for wrong in (None, 3, [1], "Outer"):
        with pytest.raises(ValueError, match="Expected `object`"):
            codec.restore(wrong, [])


@pytest.mark.parametrize(
    "values",
    [
        ["a", [], 0, 1],
        ["a", [], 0, 1, 7, 8],
        ["a", [[None]], 0, 1, 7],
        ["a", [[None, 1.0, 2.0]], 0, 1, 7],
        ["a", None, 0, 1, 7],
        {"name": "a"},
        None,
    ],
)
def test_invalid_lists_are_refused(values: Any) -> None:
    arrays = [OUTER.w, OUTER.any_type]
    codec = OUTER_CODEC
    assert codec.decode(msgspec.msgpack.encode(["a", [], 0, 1, 7]), arrays) is not None
    with pytest.raises(ValueError, match="Expected"):
        codec.decode(msgspec.msgpack.encode(values), arrays)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["Vector", 0], "at least length 3"),
        (["Outer", 0], "Invalid value 'Outer'"),
        ([3], "Expected `str`"),
        (["Plain", -1], "Expected `int` >= 0"),
        (["Plain", 1, 2], "at most length"),
        (["Vector", [[2], bytes(4)], None], "cannot reshape"),
        (["Vector", [[1], bytes(3)], None], "buffer size"),
        (["Vector", [["1"], bytes(4)], None], "Expected `int`"),
        (["Vector", bytes(4), None], "Expected `array`"),
        (["Vector", 0, None], "Expected `array`"),
    ],
)
def test_invalid_members_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Codec(Plain | Vector).unpack(msgspec.msgpack.encode(value))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91", b"\x91" * 100_000 + b"\x90"])
def test_invalid_bytes_are_refused(data: bytes) -> None:
    codecs: list[Codec[Any]] = [OUTER_CODEC, Codec(Everything, MEMBERS), Codec(dict)]
    for codec in codecs:
        with pytest.raises(ValueError, match=r".+"):
            codec.decode(data, [])


def test_deep_values_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match=r"nested too deeply|Expected"):
        file_codec(Outer).restore(deep, [])


def test_unsupported_types_are_refused() -> None:
    @dataclass(frozen=True)
    class Odd:
        value: Any

    odd: Codec[Odd] = Codec(Odd)
    with pytest.raises(ValueError, match="objects of type object cannot be encoded"):
        odd.encode(Odd(object()))
    features: Codec[Any] = Codec(tuple[Feature, ...], MEMBERS)
    with pytest.raises(ValueError, match="Outer is not one of the known classes"):
        features.encode((OUTER,))
