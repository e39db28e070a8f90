"""The codec: dataclasses as plain values and arrays, and back."""

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedbudget.arrays import Float32, Float64
from fedbudget.budget.control import Decision, Reason
from fedbudget.codec import flatten, restore
from fedbudget.data.sampling import Sampler
from fedbudget.protocol.messages import Broadcast, CatchUp, Drift, Request
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


def round_trip(value: Any) -> Any:
    """Flatten, encode as JSON, and restore."""
    plain, arrays = flatten(value)
    return restore(type(value), json.loads(json.dumps(plain)), arrays)


def test_arrays_are_named_by_their_path() -> None:
    plain, arrays = flatten(OUTER)
    assert list(arrays) == ["inner.0.values", "w", "any_type"]
    assert plain["inner"] == [
        {"values": "inner.0.values", "number": math.inf},
        {"values": None, "number": 0.1},
    ]
    assert arrays["w"] is OUTER.w


@given(st.floats(), st.integers(-(2**200), 2**200), st.text())
def test_round_trip_keeps_bits(number: float, count: int, name: str) -> None:
    value = replace(
        OUTER, name=name, count=count, inner=(Inner(np.array([number]), number),)
    )
    assert bits(round_trip(value)) == bits(value)


def test_round_trip_of_messages() -> None:
    w = np.ones(2, np.float32)
    broadcast = Broadcast(
        3, w, 2, 0.1, Request(drift=True), True, False, Drift(True, 0.5), CatchUp(w, -w, 2)
    )
    assert bits(round_trip(broadcast)) == bits(broadcast)
    sampler = Sampler(np.array([10, 12]), 3, 0)
    sampler.round(3)
    assert bits(round_trip(sampler.position)) == bits(sampler.position)
    assert round_trip(Decision(3, Reason.BUDGET)) == Decision(3, Reason.BUDGET)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"more": 1},
            "needs name, inner, w, any_type, count, not .*, count, more",
        ),
        (
            {"inner": [{"values": "inner.0.values", "number": 1.0, "more": 1}]},
            "inner.0 needs values, number",
        ),
        ({"inner": [{"values": None}]}, "missing required field `number`"),
        ({"w": "v"}, "there is no array 'v'"),
        ({"w": 3}, "there is no array 3"),
        ({"w": "any_type"}, "any_type has type int8, not float32"),
        ({"count": 1.5}, "Expected `int`, got `float`"),
        ({"count": True}, "Expected `int`, got `bool`"),
        ({"name": None}, "Expected `str`, got `null`"),
    ],
)
def test_invalid_values_are_refused(changes: dict[str, Any], message: str) -> None:
    plain, arrays = flatten(OUTER)
    with pytest.raises(ValueError, match=message):
        restore(Outer, plain | changes, arrays)


def test_missing_and_extra_are_refused() -> None:
    plain, arrays = flatten(OUTER)
    with pytest.raises(ValueError, match="needs name, inner, w, any_type, count"):
        restore(
            Outer, {name: value for name, value in plain.items() if name != "count"}, arrays
        )
    with pytest.raises(ValueError, match="unknown arrays: v"):
        restore(Outer, plain, {**arrays, "v": OUTER.w})
    for wrong in (None, 3, [1], "Outer"):
        with pytest.raises(ValueError, match="Expected `object`"):
            restore(Outer, wrong, {})


def test_unsupported_types_are_refused() -> None:
    @dataclass(frozen=True)
    class Odd:
        value: Any

    with pytest.raises(ValueError, match="value: Encoding objects of type object"):
        flatten(Odd(object()))
    with pytest.raises(ValueError, match=r"two arrays are called value.a.b"):
        flatten(Odd({"a.b": np.zeros(1), "a": {"b": np.zeros(1)}}))
