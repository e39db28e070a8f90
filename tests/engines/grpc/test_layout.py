"""Dataclasses without the names of their fields: what is encoded is what is built, and all
types are checked.
"""

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest

from fedbudget.arrays import Float32, Float64
from fedbudget.engines.grpc import messages as grpc_messages
from fedbudget.engines.grpc.messages import EncodedBroadcast, pack_broadcast, pack_report
from fedbudget.engines.grpc.stream import MessageLayout
from fedbudget.engines.remote import messages
from fedbudget.engines.remote.messages import Answer
from fedbudget.protocol.messages import NUMBERS, Broadcast, Report
from support.messages import NOTHING, TASK, expecting, welcomed
from support.methods import bits
from support.usage import node_costs


@dataclass(frozen=True)
class Inner:
    flag: bool
    vector: Float32 | None = None


@dataclass(frozen=True)
class Outer:
    number: int
    vector: Float32
    inner: Inner | None
    known: str = ""


LAYOUT = MessageLayout(Outer, without={"known"})
ONES, TWOS = np.ones(2, np.float32), np.full(2, 2, np.float32)


@pytest.mark.parametrize(
    ("inner", "names"),
    [
        (None, ["vector"]),
        (Inner(True), ["vector"]),
        (Inner(False, TWOS), ["vector", "inner.vector"]),
    ],
)
def test_what_is_encoded_is_built(inner: Inner | None, names: list[str]) -> None:
    data, arrays = LAYOUT.encode(Outer(7, ONES, inner, "both know"))
    assert b"both know" not in data
    values, found = LAYOUT.decode(data)
    assert list(arrays) == found == names
    assert bits(LAYOUT.build(values, arrays, known="both know")) == bits(
        Outer(7, ONES, inner, "both know")
    )


@pytest.mark.parametrize(
    "values",
    [
        [7, "vector"],
        [7, "vector", None, "more"],
        [7.5, "vector", None],
        [True, "vector", None],
        [7, None, None],
        [7, "inner.vector", None],
        [7, "vector", [True]],
        [7, "vector", [1, None]],
        [7, "vector", [True, "vector"]],
        {"number": 7},
        None,
    ],
)
def test_other_values_are_refused(values: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        LAYOUT.decode(msgspec.msgpack.encode(values))


# What must be touched for a new field: the dataclass itself, below, and whoever fills it in
# and uses it.


@dataclass(frozen=True)
class NewBroadcast(Broadcast):
    momentum: float = 0.0
    velocity: Float32 | None = None

    @property
    def report_fields(self) -> frozenset[str]:
        return super().report_fields | {"spread"}


@dataclass(frozen=True)
class NewReport(Report):
    spread: Float64 | None = None


def test_a_new_field_of_a_broadcast_is_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        grpc_messages, "_LAYOUT", MessageLayout(NewBroadcast, without={"request"})
    )
    w, velocity = np.zeros(3, np.float32), np.arange(3, dtype=np.float32)
    broadcast = NewBroadcast(
        1, w, 2, 0.1, NOTHING, False, False, momentum=0.9, velocity=velocity
    )
    (message,) = pack_broadcast(broadcast, 0, catch_up=False)
    encoded = welcomed(replace(TASK, request=NOTHING)).feed(message)
    assert isinstance(encoded, EncodedBroadcast)
    arrived = encoded.request(None).broadcast
    assert isinstance(arrived, NewBroadcast)
    assert arrived.momentum == 0.9
    assert arrived.velocity is not None
    assert arrived.velocity.tolist() == [0, 1, 2]


def test_a_new_field_of_a_report_is_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (grpc_messages, messages):
        monkeypatch.setattr(module, "NUMBERS", (*NUMBERS, "spread"))
    monkeypatch.setattr(grpc_messages, "Report", NewReport)
    broadcast = NewBroadcast(1, np.zeros(3, np.float32), 0, 0.1, NOTHING, False, False)
    one = np.ones(1)
    report = NewReport(1, np.array([7]), np.array([10]), one, 2 * one, spread=3 * one)
    answer = expecting(broadcast, 1).feed(pack_report(report, node_costs(1.0, 1.0), b"")[0])
    assert isinstance(answer, Answer)
    assert isinstance(answer.report, NewReport)
    assert answer.report.spread is not None
    assert answer.report.spread.tolist() == [3]
