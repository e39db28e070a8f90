"""Messages on a stream: vectors in parts, in their order, and never more than was expected."""

import contextlib
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.engines.grpc.messages import (
    AggregatorReader,
    EncodedBroadcast,
    NodeReader,
    pack_broadcast,
    pack_hello,
    pack_report,
    pack_welcome,
)
from fedbudget.engines.grpc.stream import LONGEST, PART
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.messages import Answer, Hello, Welcome
from fedbudget.engines.remote.task import SamplesDescription
from fedbudget.protocol.compression import KINDS, Kind, encoded_size
from fedbudget.protocol.messages import PeerError, Request
from support.messages import (
    EVERYTHING,
    NOTHING,
    TASK,
    a_broadcast,
    as_received,
    expecting,
    report_to,
    welcomed,
)
from support.methods import bits
from support.usage import node_costs

ONE = node_costs(1.0, 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_of_megabytes_come_in_parts(kind: Kind) -> None:
    d, rng, request = 900_001, np.random.default_rng(1), Request(True, True, False, True)
    broadcast = a_broadcast(d, rng, request, round=2)
    report = report_to(broadcast, 1, rng)
    expected, vectors = as_received(report, broadcast, kind)
    messages = pack_report(report, ONE, vectors)
    assert len(messages) == -(-2 * encoded_size(kind, d) // PART)
    assert max(len(message) for message in messages) <= LONGEST
    parts = [vectors[at : at + PART] for at in range(PART, len(vectors), PART)]
    assert messages[1:] == [pb.FromNode(more=part).SerializeToString() for part in parts]
    reader, answers = expecting(broadcast, 1, kind), []
    for message in messages:
        answers.append(reader.feed(message))
        assert reader.receiving == (len(vectors) if len(answers) < len(messages) else 0)
    assert answers[:-1] == [None] * (len(messages) - 1)
    assert bits(answers[-1]) == bits(Answer(expected, ONE))

    messages = pack_broadcast(broadcast, 1, catch_up=True)
    assert len(messages) == -(-3 * 4 * d // PART)  # of three vectors
    other = welcomed(replace(TASK, parameters=d, request=request))
    *none, encoded = [other.feed(message) for message in messages]
    assert none == [None] * (len(messages) - 1)
    assert isinstance(encoded, EncodedBroadcast)
    assert bits(encoded.request(None).broadcast) == bits(broadcast)


SMALL = a_broadcast(3, np.random.default_rng(0), EVERYTHING)
REPORT = pb.FromNode.FromString(
    pack_report(report_to(SMALL, 2, np.random.default_rng(0)), ONE, b"w" * 48)[0]
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
        (lambda: expecting(SMALL, 2), HELLO),
        (lambda: expecting(SMALL, 2), pb.FromNode(more=b"w" * 48)),
        (lambda: fed(expecting(SMALL, 2), REPORT), REPORT),
        (lambda: fed(expecting(SMALL, 2), REPORT), pb.FromNode(more=b"w")),
        (AggregatorReader, pb.FromAggregator()),
        (AggregatorReader, BROADCAST),
        (AggregatorReader, pb.FromAggregator(more=b"1")),
        (welcomed, WELCOME),
        (welcomed, pb.FromAggregator(more=b"1")),
        (lambda: fed(welcomed(), BROADCAST), pb.FromAggregator(more=b"1")),
    ],
)
def test_what_comes_in_the_wrong_order(before: Callable[[], Any], message: Any) -> None:
    with pytest.raises(PeerError, match=r"instead of|unexpected"):
        before().feed(message.SerializeToString())


def fed(reader: Any, message: Any) -> Any:
    reader.feed(message.SerializeToString())
    return reader


LARGE = a_broadcast(PART, np.random.default_rng(0), NOTHING)  # 4 MiB
LARGE_REPORT = pack_report(
    report_to(LARGE, 1, np.random.default_rng(0)), ONE, bytes(4 * PART)
)


@pytest.mark.parametrize("part", [b"", b"1", bytes(PART - 1), bytes(PART + 1)])
def test_parts_are_as_long_as_they_can_be(part: bytes) -> None:
    reader = expecting(LARGE, 1)
    reader.feed(LARGE_REPORT[0])
    with pytest.raises(PeerError, match="a part of vectors of"):
        reader.feed(pb.FromNode(more=part).SerializeToString())


def test_no_more_parts_than_were_announced() -> None:
    reader = expecting(LARGE, 1)
    assert [reader.feed(message) is None for message in LARGE_REPORT] == [
        True,
        True,
        True,
        False,
    ]
    with pytest.raises(PeerError, match="'more' instead of 'nothing'"):
        reader.feed(LARGE_REPORT[-1])


def test_another_report_before_the_end_of_one() -> None:
    reader = expecting(LARGE, 1)
    reader.feed(LARGE_REPORT[0])
    with pytest.raises(PeerError, match="'report' instead of 'more of a report'"):
        reader.feed(LARGE_REPORT[0])


def test_another_broadcast_before_the_end_of_one() -> None:
    first, *_ = pack_broadcast(LARGE, 1, catch_up=False)
    reader = welcomed(replace(TASK, parameters=PART, request=NOTHING))
    assert reader.feed(first) is None
    with pytest.raises(PeerError, match="unexpected message: 'broadcast'"):
        reader.feed(first)


def test_an_announcement_of_any_size_takes_no_memory() -> None:
    broadcast = replace(
        LARGE, w=np.broadcast_to(np.float32(0), 2**32)
    )  # 16 GiB would be right
    message = pb.FromNode(
        report=pb.Report(round=3, numbers=bytes(16), size=2**34, vectors=bytes(PART))
    )
    data = message.SerializeToString()
    tracemalloc.start()
    try:
        assert expecting(broadcast, 1).feed(data) is None
        with pytest.raises(PeerError, match="announced"):
            expecting(LARGE, 1).feed(data)
        assert tracemalloc.get_traced_memory()[1] < 10 * PART
    finally:
        tracemalloc.stop()


def test_a_message_that_is_too_long() -> None:
    for reader in (NodeReader(), AggregatorReader()):
        with pytest.raises(PeerError, match="a message of"):
            reader.feed(bytes(LONGEST + 1))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    for reader in (NodeReader(), expecting(SMALL, 2), AggregatorReader(), welcomed()):
        with contextlib.suppress(PeerError):
            reader.feed(data)
