"""Messages on a stream: dataclass layouts, vectors in parts, and bounds on size and
order.
"""

import contextlib
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float32, Float64
from fedbudget.engines.grpc import messages as grpc_messages
from fedbudget.engines.grpc.messages import (
    AggregatorReader,
    EncodedBroadcast,
    NodeReader,
    pack_broadcast,
    pack_hello,
    pack_report,
    pack_welcome,
)
from fedbudget.engines.grpc.stream import LONGEST, PART, MessageLayout
from fedbudget.engines.remote import messages
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.messages import Answer, Hello, Welcome
from fedbudget.engines.remote.task import SamplesDescription
from fedbudget.protocol.features.compression import KINDS, Kind, encoded_size
from fedbudget.protocol.messages import NUMBERS, Broadcast, PeerError, Report, Request
from support.messages import (
    EVERYTHING,
    NOTHING,
    TASK,
    as_received,
    random_broadcast,
    random_report,
    reader_after_welcome,
    reader_for_report,
)
from support.methods import bits
from support.usage import node_costs

ONE = node_costs(1.0, 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_large_vectors_are_sent_in_parts(kind: Kind) -> None:
    d, rng, request = 900_001, np.random.default_rng(1), Request(True, True, False, True)
    broadcast = random_broadcast(d, rng, request, round=2)
    report = random_report(broadcast, 1, rng)
    expected, vectors = as_received(report, broadcast, kind)
    messages = pack_report(report, ONE, vectors)
    assert len(messages) == -(-2 * encoded_size(kind, d) // PART)
    assert max(len(message) for message in messages) <= LONGEST
    parts = [vectors[at : at + PART] for at in range(PART, len(vectors), PART)]
    assert messages[1:] == [pb.FromNode(more=part).SerializeToString() for part in parts]
    reader, answers = reader_for_report(broadcast, 1, kind), []
    for message in messages:
        answers.append(reader.feed(message))
        assert reader.receiving == (len(vectors) if len(answers) < len(messages) else 0)
    assert answers[:-1] == [None] * (len(messages) - 1)
    assert bits(answers[-1]) == bits(Answer(expected, ONE))

    messages = pack_broadcast(broadcast, 1, catch_up=True)
    assert len(messages) == -(-3 * 4 * d // PART)  # three vectors
    other = reader_after_welcome(replace(TASK, parameters=d, request=request))
    *none, encoded = [other.feed(message) for message in messages]
    assert none == [None] * (len(messages) - 1)
    assert isinstance(encoded, EncodedBroadcast)
    assert bits(encoded.request(None).broadcast) == bits(broadcast)


SMALL = random_broadcast(3, np.random.default_rng(0), EVERYTHING)
REPORT = pb.FromNode.FromString(
    pack_report(random_report(SMALL, 2, np.random.default_rng(0)), ONE, b"w" * 48)[0]
)
HELLO = pb.FromNode.FromString(pack_hello(Hello("me", SamplesDescription((5,), (2, 3))))[0])
WELCOME = pb.FromAggregator.FromString(pack_welcome(Welcome("run", TASK, (0, 1)))[0])
BROADCAST = pb.FromAggregator.FromString(pack_broadcast(SMALL, 2, catch_up=True)[0])


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (NodeReader, pb.FromNode()),
        (NodeReader, pb.FromNode(more=b"1")),
        (NodeReader, pb.FromNode(ready=pb.Ready())),
        (NodeReader, REPORT),
        (lambda: fed(NodeReader(), HELLO), HELLO),
        (lambda: fed(NodeReader(), HELLO), pb.FromNode(ready=pb.Ready())),
        (lambda: reader_for_report(SMALL, 2), HELLO),
        (lambda: reader_for_report(SMALL, 2), pb.FromNode(more=b"w" * 48)),
        (lambda: fed(reader_for_report(SMALL, 2), REPORT), REPORT),
        (lambda: fed(reader_for_report(SMALL, 2), REPORT), pb.FromNode(more=b"w")),
        (AggregatorReader, pb.FromAggregator()),
        (AggregatorReader, BROADCAST),
        (AggregatorReader, pb.FromAggregator(more=b"1")),
        (reader_after_welcome, WELCOME),
        (reader_after_welcome, pb.FromAggregator(more=b"1")),
        (lambda: fed(reader_after_welcome(), BROADCAST), pb.FromAggregator(more=b"1")),
    ],
)
def test_wrong_order_is_refused(before: Callable[[], Any], message: Any) -> None:
    with pytest.raises(PeerError, match=r"instead of|unexpected"):
        before().feed(message.SerializeToString())


def fed(reader: Any, message: Any) -> Any:
    reader.feed(message.SerializeToString())
    return reader


LARGE = random_broadcast(PART, np.random.default_rng(0), NOTHING)  # four parts
LARGE_REPORT = pack_report(
    random_report(LARGE, 1, np.random.default_rng(0)), ONE, bytes(4 * PART)
)


@pytest.mark.parametrize("part", [b"", b"1", bytes(PART - 1), bytes(PART + 1)])
def test_part_length_must_match(part: bytes) -> None:
    reader = reader_for_report(LARGE, 1)
    reader.feed(LARGE_REPORT[0])
    with pytest.raises(PeerError, match="a part of vectors of"):
        reader.feed(pb.FromNode(more=part).SerializeToString())


def test_extra_parts_are_refused() -> None:
    reader = reader_for_report(LARGE, 1)
    assert [reader.feed(message) is None for message in LARGE_REPORT] == [
        True,
        True,
        True,
        False,
    ]
    with pytest.raises(PeerError, match="'more' instead of 'nothing'"):
        reader.feed(LARGE_REPORT[-1])


def test_interleaved_reports_are_refused() -> None:
    reader = reader_for_report(LARGE, 1)
    reader.feed(LARGE_REPORT[0])
    with pytest.raises(PeerError, match="'report' instead of 'more of a report'"):
        reader.feed(LARGE_REPORT[0])


def test_interleaved_broadcasts_are_refused() -> None:
    first, *_ = pack_broadcast(LARGE, 1, catch_up=False)
    reader = reader_after_welcome(replace(TASK, parameters=PART, request=NOTHING))
    assert reader.feed(first) is None
    with pytest.raises(PeerError, match="unexpected message: 'broadcast'"):
        reader.feed(first)


def test_announced_size_takes_no_memory() -> None:
    # So 16 GiB is a valid size.
    broadcast = replace(LARGE, w=np.broadcast_to(np.float32(0), 2**32))
    message = pb.FromNode(
        report=pb.Report(round=3, numbers=bytes(16), size=2**34, vectors=bytes(PART))
    )
    data = message.SerializeToString()
    tracemalloc.start()
    try:
        assert reader_for_report(broadcast, 1).feed(data) is None
        with pytest.raises(PeerError, match="announced"):
            reader_for_report(LARGE, 1).feed(data)
        assert tracemalloc.get_traced_memory()[1] < 10 * PART
    finally:
        tracemalloc.stop()


def test_long_messages_are_refused() -> None:
    for reader in (NodeReader(), AggregatorReader()):
        with pytest.raises(PeerError, match="a message of"):
            reader.feed(bytes(LONGEST + 1))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_peer_error_only(data: bytes) -> None:
    for reader in (
        NodeReader(),
        reader_for_report(SMALL, 2),
        AggregatorReader(),
        reader_after_welcome(),
    ):
        with contextlib.suppress(PeerError):
            reader.feed(data)


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
def test_layout_round_trip(inner: Inner | None, names: list[str]) -> None:
    data, arrays = LAYOUT.encode(Outer(7, ONES, inner, "agreed"))
    assert b"agreed" not in data
    values, result = LAYOUT.decode(data)
    assert list(arrays) == result == names
    assert bits(LAYOUT.build(values, arrays, known="agreed")) == bits(
        Outer(7, ONES, inner, "agreed")
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
def test_invalid_layout_values_are_refused(values: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        LAYOUT.decode(msgspec.msgpack.encode(values))


# A new field needs only a change of its dataclass and of the code that uses it.


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


def test_new_broadcast_field_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        grpc_messages, "_LAYOUT", MessageLayout(NewBroadcast, without={"request"})
    )
    w, velocity = np.zeros(3, np.float32), np.arange(3, dtype=np.float32)
    broadcast = NewBroadcast(
        1, w, 2, 0.1, NOTHING, False, False, momentum=0.9, velocity=velocity
    )
    (message,) = pack_broadcast(broadcast, 0, catch_up=False)
    encoded = reader_after_welcome(replace(TASK, request=NOTHING)).feed(message)
    assert isinstance(encoded, EncodedBroadcast)
    arrived = encoded.request(None).broadcast
    assert isinstance(arrived, NewBroadcast)
    assert arrived.momentum == 0.9
    assert arrived.velocity is not None
    assert arrived.velocity.tolist() == [0, 1, 2]


def test_new_report_field_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (grpc_messages, messages):
        monkeypatch.setattr(module, "NUMBERS", (*NUMBERS, "spread"))
    monkeypatch.setattr(grpc_messages, "Report", NewReport)
    broadcast = NewBroadcast(1, np.zeros(3, np.float32), 0, 0.1, NOTHING, False, False)
    one = np.ones(1)
    report = NewReport(1, np.array([7]), np.array([10]), one, 2 * one, spread=3 * one)
    answer = reader_for_report(broadcast, 1).feed(
        pack_report(report, node_costs(1.0, 1.0), b"")[0]
    )
    assert isinstance(answer, Answer)
    assert isinstance(answer.report, NewReport)
    assert answer.report.spread is not None
    assert answer.report.spread.tolist() == [3]
