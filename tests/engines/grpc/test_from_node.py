"""What a node sends: what is sent is what is read, and a report has what was asked for and
nothing else.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.engines.grpc.messages import NodeReader, pack_hello, pack_ready, pack_report
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.messages import Answer, Hello, Ready
from fedbudget.engines.remote.task import SamplesDescription
from fedbudget.protocol.compression import KINDS, with_feedback
from fedbudget.protocol.messages import PeerError
from fedbudget.resources.resource import NodeCosts
from support.messages import (
    COSTS,
    EVERYTHING,
    NOTHING,
    REQUESTS,
    a_broadcast,
    as_received,
    changed,
    expecting,
    report_to,
)
from support.methods import bits
from support.usage import node_costs

BROADCAST = a_broadcast(3, np.random.default_rng(0), EVERYTHING)
REPORT = pb.FromNode.FromString(
    pack_report(
        report_to(BROADCAST, 2, np.random.default_rng(0)),
        node_costs(1, 2, energy=(5, 6)),
        b"w" * 48,
    )[0]
)
NUMBERS = 8 * 2 * 6  # two losses, two estimates and two divergences of two nodes


def test_a_hello() -> None:
    hello = Hello("me", SamplesDescription((5,), (2, 3)), "run", (3, 4))
    assert NodeReader().feed(pack_hello(hello)[0]) == hello


@settings(deadline=None)
@given(COSTS)
def test_what_a_trial_has_cost(costs: NodeCosts) -> None:
    reader = NodeReader()
    reader.expect_ready()
    (message,) = pack_ready(costs)
    assert bits(reader.feed(message)) == bits(Ready(costs))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_report(data: st.DataObject) -> None:
    n, d = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 600))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    kind, request = data.draw(st.sampled_from(KINDS)), data.draw(REQUESTS)
    broadcast = a_broadcast(
        d,
        rng,
        request,
        round=data.draw(st.integers(1, 3)),
        tau=data.draw(st.integers(0, 3)),
    )
    report, costs = report_to(broadcast, n, rng), data.draw(COSTS)
    expected, vectors = as_received(report, broadcast, kind)
    reader = expecting(broadcast, n, kind)
    (message,) = pack_report(report, costs, vectors)
    assert bits(reader.feed(message)) == bits(Answer(expected, costs))


def test_what_compression_lost_comes_with_the_next() -> None:
    rng, lost = np.random.default_rng(2), None
    broadcast = a_broadcast(300, rng, NOTHING, round=1)
    report = report_to(broadcast, 2, rng)
    assert report.w is not None
    error = []
    for _ in range(2):
        reader = expecting(broadcast, 2, "8-bit")
        sent, lost = with_feedback("8-bit", report.w - broadcast.w, lost)
        answer = reader.feed(pack_report(report, node_costs(1, 1), sent.to_bytes())[0])
        assert isinstance(answer, Answer)
        assert answer.report.w is not None
        error.append(answer.report.w.astype(np.float64) - report.w)
    # The second brings what the first lacked: their mean is nearer than either.
    assert np.abs(sum(error)).mean() < np.abs(error[0]).mean()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("round", 2),
        ("round", 4),
        ("numbers", b""),
        ("numbers", bytes(NUMBERS - 8)),
        ("numbers", bytes(NUMBERS - 1)),
        ("numbers", bytes(NUMBERS + 8)),
        ("costs", b""),
        ("size", 47),
        ("size", 49),
        ("size", 24),
        ("size", 10**10),
        ("size", 2**64 - 1),
        ("vectors", b""),
        ("vectors", b"w" * 47),
        ("vectors", b"w" * 49),
    ],
)
def test_a_report_that_cannot_be(field: str, value: Any) -> None:
    assert isinstance(expecting(BROADCAST, 2).feed(REPORT.SerializeToString()), Answer)
    with pytest.raises(PeerError):
        expecting(BROADCAST, 2).feed(changed(REPORT, "report", field, value))


@pytest.mark.parametrize("more", [1, 2, 4])
def test_numbers_that_nobody_asked_for(more: int) -> None:
    broadcast = a_broadcast(3, np.random.default_rng(0), NOTHING)
    report = report_to(broadcast, 2, np.random.default_rng(0))
    message = pb.FromNode.FromString(pack_report(report, node_costs(1, 1), b"w" * 24)[0])
    assert isinstance(expecting(broadcast, 2).feed(message.SerializeToString()), Answer)
    with pytest.raises(PeerError, match="bytes of numbers instead of 32"):
        expecting(broadcast, 2).feed(
            changed(message, "report", "numbers", bytes(8 * 2 * (2 + more)))
        )
