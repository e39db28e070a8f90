"""Messages on a stream: vectors in parts, and bounds on size and order."""

import contextlib
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.engines.grpc.messages import AggregatorReader, NodeReader
from fedbudget.engines.grpc.stream import MORE, PART, frames, pack
from fedbudget.engines.remote.messages import Answer, Hello, Ready, Welcome
from fedbudget.engines.remote.task import SamplesDescription
from fedbudget.engines.remote.wire import (
    LONGEST,
    EncodedBroadcast,
    pack_broadcast,
    pack_report,
)
from fedbudget.protocol.features.compression import KINDS, encoded_size
from fedbudget.protocol.features.drift import DriftCorrection
from fedbudget.protocol.features.estimates import EstimateSlopes
from fedbudget.protocol.messages import Kind, PeerError
from support.messages import (
    EVERYTHING,
    NOTHING,
    TASK,
    as_received,
    random_broadcast,
    random_report,
    reader_after_welcome,
    reader_for_report,
    settings_of,
)
from support.methods import bits
from support.usage import node_costs

ONE = node_costs(1.0, 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_large_vectors_are_sent_in_parts(kind: Kind) -> None:
    d = 900_001
    rng = np.random.default_rng(1)
    features = (DriftCorrection(), EstimateSlopes(gradient=True))
    broadcast = random_broadcast(d, rng, features, round=2)
    report = random_report(broadcast, 1, rng)
    expected, vectors = as_received(report, broadcast, kind)
    messages = frames(pack_report(report, ONE, vectors))
    assert len(messages) == -(-2 * encoded_size(kind, d) // PART)
    assert max(len(message) for message in messages) <= LONGEST
    parts = [vectors[at : at + PART] for at in range(PART, len(vectors), PART)]
    assert messages[1:] == [MORE + part for part in parts]
    reader, answers = reader_for_report(broadcast, 1, kind), []
    for message in messages:
        answers.append(reader.feed(message))
        assert reader.receiving == (len(vectors) if len(answers) < len(messages) else 0)
    assert answers[:-1] == [None] * (len(messages) - 1)
    assert bits(answers[-1]) == bits(Answer(expected, ONE))

    messages = frames(pack_broadcast(broadcast, 1, catch_up=True))
    assert len(messages) == -(-3 * 4 * d // PART)  # three vectors
    other = reader_after_welcome(
        replace(TASK, parameters=d, features=settings_of(features))
    )
    *none, encoded = [other.feed(message) for message in messages]
    assert none == [None] * (len(messages) - 1)
    assert isinstance(encoded, EncodedBroadcast)
    assert bits(encoded.request(None).broadcast) == bits(broadcast)


SMALL = random_broadcast(3, np.random.default_rng(0), EVERYTHING)
(REPORT,) = frames(
    pack_report(random_report(SMALL, 2, np.random.default_rng(0)), ONE, b"w" * 48)
)
(HELLO,) = pack(Hello("me", SamplesDescription((5,), (2, 3))))
(READY,) = pack(Ready(ONE))
(WELCOME,) = pack(Welcome("run", TASK, (0, 1)))
(BROADCAST,) = frames(pack_broadcast(SMALL, 2, catch_up=True))


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (NodeReader, MORE + b"1"),
        (NodeReader, READY),
        (NodeReader, REPORT),
        (NodeReader, WELCOME),
        (lambda: fed(NodeReader(), HELLO), HELLO),
        (lambda: fed(NodeReader(), HELLO), READY),
        (lambda: reader_for_report(SMALL, 2), HELLO),
        (lambda: reader_for_report(SMALL, 2), MORE + b"w" * 48),
        (lambda: fed(reader_for_report(SMALL, 2), REPORT), REPORT),
        (lambda: fed(reader_for_report(SMALL, 2), REPORT), MORE + b"w"),
        (AggregatorReader, BROADCAST),
        (AggregatorReader, MORE + b"1"),
        (AggregatorReader, HELLO),
        (reader_after_welcome, WELCOME),
        (reader_after_welcome, MORE + b"1"),
        (lambda: fed(reader_after_welcome(), BROADCAST), MORE + b"1"),
    ],
)
def test_wrong_order_is_refused(before: Callable[[], Any], message: bytes) -> None:
    with pytest.raises(PeerError, match=r"instead of|unexpected"):
        before().feed(message)


def fed(reader: Any, message: Any) -> Any:
    reader.feed(message)
    return reader


LARGE = random_broadcast(PART, np.random.default_rng(0), NOTHING)  # four parts
LARGE_REPORT = frames(
    pack_report(random_report(LARGE, 1, np.random.default_rng(0)), ONE, bytes(4 * PART))
)


@pytest.mark.parametrize("part", [b"", b"1", bytes(PART - 1), bytes(PART + 1)])
def test_part_length_must_match(part: bytes) -> None:
    reader = reader_for_report(LARGE, 1)
    reader.feed(LARGE_REPORT[0])
    with pytest.raises(PeerError, match="a part of vectors of"):
        reader.feed(MORE + part)


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
    first, *_ = frames(pack_broadcast(LARGE, 1, catch_up=False))
    reader = reader_after_welcome(replace(TASK, parameters=PART, features=()))
    assert reader.feed(first) is None
    with pytest.raises(PeerError, match="unexpected message: 'broadcast'"):
        reader.feed(first)


def test_expected_size_takes_no_memory() -> None:
    broadcast = replace(LARGE, w=np.broadcast_to(np.float32(0), 2**32))  # 16 GiB
    task = replace(TASK, parameters=2**32, features=())
    first, *_ = frames(pack_broadcast(LARGE, 1, catch_up=False))
    tracemalloc.start()
    try:
        assert reader_for_report(broadcast, 1).feed(LARGE_REPORT[0]) is None
        assert reader_after_welcome(task).feed(first) is None
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
