"""Protocol rules on real loopback streams: a peer that breaks them is dropped, and the
others continue.
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from fedbudget.engines.engine import RoundTerms
from fedbudget.engines.grpc import service as service_module
from fedbudget.engines.grpc import stream
from fedbudget.engines.grpc.peers import FRAME
from fedbudget.engines.grpc.stream import pack
from fedbudget.engines.remote.messages import Ready
from fedbudget.engines.remote.wire import VERSION
from fedbudget.protocol.messages import Broadcast
from fedbudget.resources.resource import Reading, Usage
from support.methods import bits
from support.networked import COSTS, LONG, Network, network, wait_until, without_network
from support.raw_peers import (
    RawPeer,
    assert_refused,
    assert_undisturbed,
    hello_of_version,
    next_broadcast,
    report_of,
    samples,
    two_rounds,
)

# Hellos.


OLD_HELLO = b"\x0a\x08\x08\x07\x12\x04\x81\xa1a\x01"
"""A hello of version 7, which was protobuf."""


@pytest.mark.parametrize(
    ("send", "reason"),
    [
        (
            lambda peer: hello_of_version(peer, 1),
            f"it uses version 1 of the protocol, and this is version {VERSION}",
        ),
        (lambda peer: peer.hello(samples=samples(sizes=())), "a node without samples"),
        (
            lambda peer: peer.hello(samples=samples(scale=float("nan"))),
            "`float` >= 1e-30 - at `$.samples.scale`",
        ),
        (lambda _: pack(Ready(COSTS))[0], "'ready' instead of 'hello'"),
        (lambda _: OLD_HELLO, "install the same fedbudget on both sides"),
        (lambda _: b"GET / HTTP/1.1\r\n\r\n", "bytes that are not a message"),
        (lambda _: b"", "an empty message"),
    ],
)
def test_invalid_hello_drops_peer(
    net: Network,
    caplog: pytest.LogCaptureFixture,
    send: Callable[[RawPeer], bytes],
    reason: str,
) -> None:
    """test_wire.py and test_stream.py check all invalid hellos."""
    peer = RawPeer(net)
    peer.send(send(peer))
    assert_refused(peer, "INVALID_ARGUMENT", reason, caplog)
    assert (net.server.counters.dropped, net.server.counters.refused) == (1, 0)
    assert_undisturbed(net)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"shape": (7,)}, "features of shape (7,) here, (6,) elsewhere"),
        ({"classes": ("no", "perhaps")}, "its class 'perhaps' is not one of no, yes"),
    ],
)
def test_mismatched_data_are_refused(
    net: Network, caplog: pytest.LogCaptureFixture, other: dict[str, Any], reason: str
) -> None:
    """test_task.py checks all mismatches."""
    peer = RawPeer(net)
    peer.send(peer.hello(samples=samples(**other)))
    assert_refused(peer, "FAILED_PRECONDITION", reason, caplog)
    assert (net.server.counters.dropped, net.server.counters.refused) == (0, 1)
    assert_undisturbed(net)


def test_changed_number_of_nodes_is_refused(
    net: Network, caplog: pytest.LogCaptureFixture
) -> None:
    peer = RawPeer(net)
    peer.become_ready()
    net.ready(3)
    broadcast = net.begin()
    peer.send(*report_of(broadcast))
    assert len(net.finish().answers) == 3
    peer.leave()
    wait_until(lambda: len(net.server.descriptions()) == 2)
    peer = RawPeer(net)
    peer.send(peer.hello(samples=samples(sizes=(11, 11))))
    assert_refused(peer, "FAILED_PRECONDITION", "intruder had 1 nodes, not 2", caplog)
    assert len(net.round().answers) == 2


def test_silent_peer_is_dropped(
    net: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_module, "_HELLO_PATIENCE", 0.05)
    assert_refused(
        RawPeer(net), "INVALID_ARGUMENT", "it was silent for 0.05 seconds", caplog
    )
    assert net.server.counters.dropped == 1
    assert_undisturbed(net)


def test_peer_that_never_becomes_ready(
    net: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_module, "_READY_PATIENCE", 0.05)
    peer = RawPeer(net)
    peer.send(peer.hello())
    assert_refused(peer, "INVALID_ARGUMENT", "it was silent for 0.05 seconds", caplog)
    assert_undisturbed(net)


def test_maximum_number_of_nodes(caplog: pytest.LogCaptureFixture) -> None:
    with network(most=2) as net:
        two_rounds(net)
        peer = RawPeer(net)
        peer.send(peer.hello())
        assert_refused(peer, "RESOURCE_EXHAUSTED", "there are 2 nodes already", caplog)
        assert_undisturbed(net)


def test_name_belongs_to_one_instance(
    net: Network, caplog: pytest.LogCaptureFixture
) -> None:
    peer = RawPeer(net, "node-1", node=1)
    peer.send(peer.hello(instance="another"))
    assert_refused(
        peer, "ALREADY_EXISTS", "there is a node with the name node-1 already", caplog
    )
    assert net.server.counters.refused == 1
    assert_undisturbed(net)


def test_reconnection_replaces_old_connection(net: Network) -> None:
    old, new = RawPeer(net), RawPeer(net)
    old.become_ready(instance="same")
    net.ready(3)
    net.begin()
    old.receive()
    new.become_ready(instance="same")
    assert old.ended()[0] != grpc.StatusCode.OK
    net.finish()  # without the report of the old connection
    net.ready(3)
    net.begin()
    assert next_broadcast(new).sent.base_round == 0
    new.leave()
    net.finish()
    assert (net.server.counters.dropped, net.server.counters.refused) == (0, 0)
    assert_undisturbed(net)


# Reports.

INVALID_COSTS = Usage({"time": Reading(0.1, float("nan"))})


@pytest.mark.parametrize(
    ("send", "reason"),
    [
        (
            lambda broadcast: report_of(broadcast, rest=b"1234"),
            "a part of vectors of 4 bytes instead of 24",
        ),
        (
            lambda broadcast: report_of(broadcast, rest=bytes(48)),
            "a part of vectors of 48 bytes instead of 24",
        ),
        (
            lambda broadcast: report_of(broadcast, round=broadcast.round + 1),
            "a report of round 4 instead of round 3",
        ),
        (
            lambda broadcast: report_of(broadcast, numbers=[[0], b""]),
            "0 bytes of numbers instead of 48",
        ),
        (
            lambda broadcast: report_of(broadcast, costs=INVALID_COSTS),
            "time (whole) is nan",
        ),
        (lambda _: pack(Ready(COSTS)), "'ready' instead of 'report'"),
        (lambda _: [b""], "an empty message"),
        (lambda _: [b"\x1a\xff"], "bytes that are not a message"),
    ],
)
def test_invalid_report_drops_peer(
    net: Network,
    caplog: pytest.LogCaptureFixture,
    send: Callable[[Broadcast], list[bytes]],
    reason: str,
) -> None:
    """test_messages.py and test_wire.py check all invalid reports."""
    peer = RawPeer(net)
    peer.become_ready()
    net.ready(3)
    broadcast = net.begin()
    next_broadcast(peer)
    peer.send(*send(broadcast))
    assert_refused(peer, "INVALID_ARGUMENT", reason, caplog)
    collected = net.finish()
    assert collected.missed == (2,)
    assert (net.server.counters.dropped, net.server.counters.refused) == (1, 0)
    assert_undisturbed(net)


def test_incomplete_report_drops_peer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_module, "_PART_PATIENCE", 0.05)
    monkeypatch.setattr(stream, "PART", 1000)
    nodes = 50  # their vectors take two messages
    with network() as net:
        two_rounds(net)
        peer = RawPeer(net)
        peer.become_ready(samples=samples(sizes=(20,) * nodes))
        net.ready(2 + nodes)
        broadcast = net.begin()
        next_broadcast(peer)
        first, last = report_of(broadcast, nodes=nodes)
        peer.send(first)
        assert_refused(peer, "INVALID_ARGUMENT", "it was silent for 0.05 seconds", caplog)
        assert net.finish().missed == tuple(range(2, 2 + nodes))
        assert net.server.counters.dropped == 1
        assert len(last) < len(first)
        assert_undisturbed(net)


def test_flood_is_read_once(net: Network, caplog: pytest.LogCaptureFixture) -> None:
    """The server reads only the first message."""
    peer = RawPeer(net)
    peer.become_ready()
    net.ready(3)
    before, extra = net.server.counters.received, pack(Ready(COSTS))[0]
    peer.send_if_open(*[extra] * 1000)
    wait_until(lambda: "is dropped: 'ready' instead of 'nothing'" in caplog.text)
    wait_until(lambda: len(net.server.descriptions()) == 2)
    assert net.server.counters.received - before == len(extra) + FRAME
    assert net.server.counters.dropped == 1
    assert_undisturbed(net)


def test_unrequested_report_drops_peer(
    net: Network, caplog: pytest.LogCaptureFixture
) -> None:
    broadcast = net.aggregator.pending
    assert broadcast is not None
    peer = RawPeer(net)
    peer.become_ready()
    net.ready(3)
    peer.send(*report_of(broadcast))
    assert_refused(peer, "INVALID_ARGUMENT", "'report' instead of 'nothing'", caplog)
    assert_undisturbed(net)


def test_vanishing_peers_do_not_disturb(
    net: Network, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for number in range(5):
        peer = RawPeer(net, f"short-{number}")
        peer.become_ready()
        net.ready(3)
        if number % 2:
            peer.leave()
            net.round()
        else:
            net.begin()
            peer.leave()
            net.finish()
        wait_until(lambda: len(net.server.descriptions()) == 2)
    assert bits(net.all_w) == bits(without_network([[0, 1]] * 7))
    assert [record for record in caplog.records if record.name == "asyncio"] == []
    assert net.server.counters.dropped == 0


def test_peer_leaving_during_large_broadcast(
    net: Network, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    broadcast = net.aggregator.pending
    assert broadcast is not None
    with network() as other:
        peer = RawPeer(other)
        peer.send(peer.hello())
        other.server.wait_for(1, lambda: False)
        other.server.start(other.task)
        peer.receive()
        peer.send(*pack(Ready(COSTS)))
        other.ready(1)
        large = replace(broadcast, w=np.zeros(20_000_000, np.float32), catch_up=None)
        other.server.begin(large, RoundTerms(1, LONG, LONG))
        peer.receive()
        peer.leave()
        wait_until(lambda: not other.server.descriptions())
        other.server.wake()
        assert not other.server.finish().enough
        assert other.server.counters.sent < large.w.nbytes
    gc.collect()  # reports exceptions that were never retrieved
    assert [
        record
        for record in caplog.records
        if record.name in ("asyncio", "grpc._cython.cygrpc")
    ] == []
    assert_undisturbed(net)
