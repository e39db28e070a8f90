"""The aggregator's end of all connections, with real streams on loopback.

There are peers that break the rules, and nodes that are slow, late, away or back.

Whatever a peer does, the two nodes beside it train on to the same bits as without it.
"""

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fedbudget.engines.grpc import admission, codec
from fedbudget.engines.grpc import server as hub_module
from fedbudget.engines.grpc.certificates import make
from fedbudget.engines.grpc.codec import AggregatorReader, EncodedBroadcast, pack_ready, pack_report
from fedbudget.engines.grpc.credentials import aggregator_credentials, node_credentials
from fedbudget.engines.grpc.node import Refused
from fedbudget.engines.grpc.server import AggregatorServer
from fedbudget.engines.grpc.tokens import Tokens
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.compression import encode
from fedbudget.engines.remote.members import GONE_FOR_GOOD
from fedbudget.engines.remote.messages import Farewell, Welcome
from fedbudget.engines.remote.task import Samples
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.resources.usage import NodeCosts
from support.methods import bits
from support.networked import (
    COSTS,
    FEATURES,
    LONG,
    HeldWork,
    Network,
    RawPeer,
    network,
    node_data,
    until,
    without_network,
)

SHARED, OWN = "a-shared-token-0123456789", "another-token-9876543210"
EVERY = [[0, 1]] * 5


@pytest.fixture
def net() -> Iterator[Network]:
    """Two nodes that have made two rounds."""
    with network() as ours:
        two_rounds(ours)
        yield ours


def two_rounds(net: Network, **how: Any) -> None:
    for node in (0, 1):
        net.join(node, **how)
    net.start(2)
    net.round()
    net.round()


def assert_undisturbed(net: Network) -> None:
    """The two nodes make five rounds in all, as if nothing had happened."""
    while len(net.request) < len(EVERY):
        assert [int(answer.report.nodes[0]) for answer in net.round().answers] == [0, 1]
    assert bits(net.all_told) == bits(without_network(EVERY))


def assert_turned_away(peer: RawPeer, code: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """With a reason, which the log has too."""
    assert peer.ended()[0] == getattr(grpc.StatusCode, code)
    assert reason in peer.ended()[1]
    assert reason in caplog.text


# Who is let in.


def tokens(folder: Path, text: str) -> Tokens:
    file = folder / "tokens"
    file.write_text(text)
    file.chmod(0o600)
    return Tokens.load(file)


@pytest.mark.parametrize("token", [None, "", OWN, SHARED[:-1], SHARED + "0"])
def test_a_peer_without_the_token_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, token: str | None
) -> None:
    with network(tokens=tokens(tmp_path, SHARED)) as net:
        two_rounds(net, token=SHARED)
        assert_turned_away(net.peer(token=token), "UNAUTHENTICATED", "intruder has not given the right token", caplog)
        assert (net.server.counters.refused, net.server.counters.dropped) == (1, 0)
        assert_undisturbed(net)


def test_a_token_of_one_name_is_of_no_use_to_another(tmp_path: Path) -> None:
    with network(tokens=tokens(tmp_path, f"node-0 {SHARED}\nnode-1 {OWN}\n")) as net:
        net.join(0, token=SHARED)
        with pytest.raises(Refused, match="node-1 has not given the right token"):
            net.join(1, token=SHARED).result(LONG)
        net.join(1, token=OWN)
        net.start(2)
        assert len(net.round().answers) == 2


def test_who_guesses_tokens_does_not_keep_the_node_of_that_name_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_CONNECTIONS", 3)
    with network(tokens=tokens(tmp_path, SHARED)) as net:
        for _ in range(5):
            assert net.peer("node-0", token=OWN).ended()[0] == grpc.StatusCode.UNAUTHENTICATED
        net.join(0, token=SHARED)
        net.start(1)
        assert net.server.counters.refused == 5


def test_the_token_is_in_no_log_and_in_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    broadcast: list[str] = []
    with network(tokens=tokens(tmp_path, SHARED)) as net:
        two_rounds(net, token=SHARED, heard=broadcast.append)
        with pytest.raises(Refused) as refused:
            net.join(2, token=OWN).result(LONG)
        broadcast += [str(refused.value), repr(refused.value)]
        peer = net.peer(token=OWN)
        broadcast.append(str(peer.ended()))
        peer = net.peer(token=SHARED)
        peer.say(b"\xff")
        broadcast.append(str(peer.ended()))
        broadcast += [repr(net.server), repr(vars(net.server))]
    broadcast += [record.getMessage() for record in caplog.records] + [caplog.text]
    assert "node-0 has joined" in caplog.text
    for token in (SHARED, OWN):
        assert not any(token in text for text in broadcast)


@pytest.mark.parametrize("name", ["", "aggregator", "../node", "a name", "n" * 65])
def test_a_name_that_no_node_may_have_is_refused(net: Network, caplog: pytest.LogCaptureFixture, name: str) -> None:
    assert_turned_away(net.peer(name), "INVALID_ARGUMENT", "its name is not one that a node may have", caplog)
    assert net.server.counters.refused == 1
    assert not name or name == "aggregator" or name not in caplog.text
    assert_undisturbed(net)


class TestCertificates:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        make(tmp_path, hosts=["127.0.0.1"], nodes=["node-0", "node-1", "other"])
        make(tmp_path / "elsewhere", hosts=["127.0.0.1"], nodes=["node-2"])
        return tmp_path

    @pytest.fixture
    def net(self, folder: Path) -> Iterator[Network]:
        ours = aggregator_credentials(folder / "aggregator.pem", folder / "aggregator.key", folder / "ca.pem")
        with network(credentials=ours) as net:
            for node in (0, 1):
                net.join(node, credentials=shown(folder, f"node-{node}"))
            net.start(2)
            yield net
            assert_undisturbed(net)

    def test_of_another_name(self, net: Network, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        peer = net.peer("node-2", credentials=shown(folder, "other"))
        assert_turned_away(peer, "PERMISSION_DENIED", "node-2 is not a name that its certificate is for", caplog)
        assert net.server.counters.refused == 1

    def test_of_another_ca(self, net: Network, folder: Path) -> None:
        elsewhere = folder / "elsewhere"
        strangers = node_credentials(folder / "ca.pem", elsewhere / "node-2.pem", elsewhere / "node-2.key")
        assert net.peer("node-2", credentials=strangers).ended()[0] == grpc.StatusCode.UNAVAILABLE

    def test_none(self, net: Network, folder: Path) -> None:
        unknown = node_credentials(folder / "ca.pem", None, None)
        assert net.peer("node-0", credentials=unknown).ended()[0] == grpc.StatusCode.UNAVAILABLE

    def test_plain_text(self, net: Network) -> None:
        assert net.peer("node-0").ended()[0] == grpc.StatusCode.UNAVAILABLE


def shown(folder: Path, name: str) -> Any:
    return node_credentials(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")


def test_no_more_nodes_are_let_in_than_were_allowed(caplog: pytest.LogCaptureFixture) -> None:
    with network(most=2) as net:
        two_rounds(net)
        peer = net.peer()
        peer.say(peer.hello())
        assert_turned_away(peer, "RESOURCE_EXHAUSTED", "there are 2 nodes already", caplog)
        assert_undisturbed(net)


def test_a_peer_that_connects_too_often_is_refused_and_others_are_not(
    net: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(admission, "_CONNECTIONS", 3)
    monkeypatch.setattr(admission, "_WITHIN", 1000.0)
    for _ in range(3):
        peer = net.peer()
        peer.say(b"\xff")
        assert peer.ended()[0] == grpc.StatusCode.INVALID_ARGUMENT
    assert_turned_away(net.peer(), "RESOURCE_EXHAUSTED", "intruder connects too often", caplog)
    assert (net.server.counters.dropped, net.server.counters.refused) == (3, 1)
    other = net.peer("another")
    other.become_ready()
    other.leave()
    assert_undisturbed(net)


def test_a_name_that_is_connected_is_refused_to_another_instance(
    net: Network, caplog: pytest.LogCaptureFixture
) -> None:
    peer = net.peer("node-1", node=1)
    peer.say(peer.hello(instance="not the same"))
    assert_turned_away(peer, "ALREADY_EXISTS", "there is a node with the name node-1 already", caplog)
    assert net.server.counters.refused == 1
    assert_undisturbed(net)


def test_the_same_instance_takes_the_place_of_its_old_connection(net: Network) -> None:
    old, new = net.peer(), net.peer()
    old.become_ready(instance="same")
    net.ready(3)
    net.begin()
    old.hear()
    new.become_ready(instance="same")
    assert old.ended()[0] != grpc.StatusCode.OK
    net.finish()  # does not wait for the old one's report
    net.ready(3)
    net.begin()
    assert heard(new).base_round == 0
    new.leave()
    net.finish()
    assert (net.server.counters.dropped, net.server.counters.refused) == (0, 0)
    assert_undisturbed(net)


# What is said first.


def samples(**other: Any) -> Samples:
    return replace(node_data(2).samples(), **other)


def changed_hello(peer: RawPeer, **fields: Any) -> bytes:
    message = pb.FromNode.FromString(peer.hello())
    for name, value in fields.items():
        setattr(message.hello, name, value)
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("say", "reason"),
    [
        (lambda peer: changed_hello(peer, version=1), "it speaks version 1 of the protocol, and this is version 2"),
        (lambda peer: changed_hello(peer, version=0), "it speaks version 0 of the protocol"),
        (lambda peer: changed_hello(peer, instance="i" * 201), "a name of an instance of 201 characters"),
        (lambda peer: peer.hello(samples=samples(sizes=())), "a node without samples"),
        (lambda peer: peer.hello(samples=samples(sizes=(0,))), "numbers of samples that cannot be"),
        (lambda peer: peer.hello(samples=samples(scale=float("nan"))), "the scale of features is nan"),
        (lambda _: pack_ready(COSTS)[0], "'ready' where 'hello' was expected"),
        (lambda _: pb.FromNode(more=b"1234").SerializeToString(), "'more' where 'hello' was expected"),
        (lambda _: b"GET / HTTP/1.1\r\n\r\n", "bytes that are no message"),
        (lambda _: b"", "an empty message where 'hello' was expected"),
    ],
)
def test_a_hello_that_breaks_the_rules(
    net: Network, caplog: pytest.LogCaptureFixture, say: Callable[[RawPeer], bytes], reason: str
) -> None:
    peer = net.peer()
    peer.say(say(peer))
    assert_turned_away(peer, "INVALID_ARGUMENT", reason, caplog)
    assert (net.server.counters.dropped, net.server.counters.refused) == (1, 0)
    assert_undisturbed(net)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"shape": (7,)}, "features of shape (7,) here, (6,) elsewhere"),
        ({"stored": "uint8"}, "features stored as uint8 here"),
        ({"scale": 0.5}, "features scaled by 0.5 here"),
        ({"parity": True}, "classes told apart as even and odd: True here"),
        ({"values": True}, "targets that are numbers: True here"),
        ({"classes": ("no", "perhaps")}, "its class 'perhaps' is not one of no, yes"),
    ],
)
def test_data_for_another_model_are_refused(
    net: Network, caplog: pytest.LogCaptureFixture, other: dict[str, Any], reason: str
) -> None:
    peer = net.peer()
    peer.say(peer.hello(samples=samples(**other)))
    assert_turned_away(peer, "FAILED_PRECONDITION", reason, caplog)
    assert (net.server.counters.dropped, net.server.counters.refused) == (0, 1)
    assert_undisturbed(net)


def test_a_node_with_fewer_samples_than_a_mini_batch_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with network(batch=14) as net:
        two_rounds(net)
        peer = net.peer()
        peer.say(peer.hello())
        assert_turned_away(peer, "FAILED_PRECONDITION", "it has 11 samples, fewer than the mini-batches of 14", caplog)


def test_a_node_that_comes_back_with_another_number_of_nodes_is_refused(
    net: Network, caplog: pytest.LogCaptureFixture
) -> None:
    peer = net.peer()
    peer.become_ready()
    net.ready(3)
    peer.leave()
    until(lambda: "intruder has left" in caplog.text or len(net.server.descriptions()) == 2)
    peer = net.peer()
    peer.say(peer.hello(samples=samples(sizes=(11, 11))))
    assert_turned_away(peer, "FAILED_PRECONDITION", "intruder had 1 nodes, not 2", caplog)
    assert_undisturbed(net)


def test_a_peer_that_never_says_hello(
    net: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub_module, "_HELLO_PATIENCE", 0.05)
    assert_turned_away(net.peer(), "INVALID_ARGUMENT", "nothing was heard of it for 0.05 seconds", caplog)
    assert net.server.counters.dropped == 1
    assert_undisturbed(net)


def test_a_peer_that_never_gets_ready(
    net: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub_module, "_READY_PATIENCE", 0.05)
    peer = net.peer()
    peer.say(peer.hello())
    assert_turned_away(peer, "INVALID_ARGUMENT", "nothing was heard of it for 0.05 seconds", caplog)
    assert_undisturbed(net)


# What is said when asked, and when not.


def heard(peer: RawPeer) -> EncodedBroadcast:
    """The broadcast that a raw peer, which is told of everything anew, hears next."""
    reader = AggregatorReader()
    reader._task = peer._net.task
    found = reader.feed(peer.hear())
    assert isinstance(found, EncodedBroadcast)
    return found


def spoilt(**other: Any) -> NodeCosts:
    """Costs with another reading of time."""
    return NodeCosts({"time": replace(COSTS.readings["time"], **other)})


def report_of(
    broadcast: Broadcast, w: float = 0.5, nodes: int = 1, costs: NodeCosts = COSTS, **other: Any
) -> list[bytes]:
    """What a node would say, all of it made up; `other` fields replace those of the message."""
    each, none = np.full(nodes, 0.5), np.full(nodes, np.nan)
    vectors = np.full((nodes, FEATURES), w, np.float32)
    numbers = np.arange(nodes)
    made_up = Report(broadcast.round, numbers, numbers, each, each, vectors, none, none, None, none, none)
    first, *rest = pack_report(made_up, costs, encode("none", vectors))
    message = pb.FromNode.FromString(first)
    for name, value in other.items():
        if isinstance(value, list):
            del getattr(message.report, name)[:]
            getattr(message.report, name).extend(value)
        else:
            setattr(message.report, name, value)
    return [message.SerializeToString(), *rest]


GOOD_VECTORS = 4 * FEATURES


@pytest.mark.parametrize(
    ("say", "reason"),
    [
        (
            lambda broadcast: report_of(broadcast, size=10**10),
            "10000000000 bytes of vectors announced where there should be 24",
        ),
        (lambda broadcast: report_of(broadcast, size=0, vectors=b""), "0 bytes of vectors announced"),
        (
            lambda broadcast: report_of(broadcast, vectors=b"1234"),
            "a part of vectors of 4 bytes where there should be 24",
        ),
        (
            lambda broadcast: report_of(broadcast, vectors=b"1" * 25),
            "a part of vectors of 25 bytes where there should be 24",
        ),
        (
            lambda broadcast: report_of(broadcast, round=broadcast.round + 1),
            "a report of round 4 when asked for round 3",
        ),
        (
            lambda broadcast: report_of(broadcast, round=broadcast.round - 1),
            "a report of round 2 when asked for round 3",
        ),
        (lambda broadcast: report_of(broadcast, losses=[]), "a report with 0 numbers for losses, not 1"),
        (
            lambda broadcast: report_of(broadcast, best_losses=[0.5, 0.5]),
            "a report with 2 numbers for best losses, not 1",
        ),
        (lambda broadcast: report_of(broadcast, rho=[]), "a report with 0 numbers for rho, not 1"),
        (lambda broadcast: report_of(broadcast, corrected=[]), "a report with 0 numbers for corrected divergence"),
        (lambda broadcast: report_of(broadcast, costs=spoilt(whole=float("nan"))), "time (whole) is nan"),
        (lambda broadcast: report_of(broadcast, costs=spoilt(step=-1.0)), "time (step) is -1.0"),
        (lambda broadcast: report_of(broadcast, costs=spoilt(step=float("inf"))), "time (step) is inf"),
        (
            lambda broadcast: report_of(broadcast, costs=spoilt(host="h" * 201)),
            "a name of a host of 201 characters",
        ),
        (lambda _: pack_ready(COSTS), "'ready' where 'report' was expected"),
        (lambda _: [pb.FromNode(more=b"1" * GOOD_VECTORS).SerializeToString()], "'more' where 'report' was expected"),
        (lambda _: [b""], "an empty message where 'report' was expected"),
        (lambda _: [b"\x1a\xff"], "bytes that are no message"),
    ],
)
def test_a_report_that_breaks_the_rules(
    net: Network, caplog: pytest.LogCaptureFixture, say: Callable[[Broadcast], list[bytes]], reason: str
) -> None:
    peer = net.peer()
    peer.become_ready()
    net.ready(3)
    broadcast = net.begin()
    heard(peer)
    peer.say(*say(broadcast))
    assert_turned_away(peer, "INVALID_ARGUMENT", reason, caplog)
    gathered = net.finish()
    assert gathered.missed == (2,)
    assert (net.server.counters.dropped, net.server.counters.refused) == (1, 0)
    assert_undisturbed(net)


def test_half_a_report_and_then_silence(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(hub_module, "_PART_PATIENCE", 0.05)
    monkeypatch.setattr(codec, "PART", 1000)
    nodes = 50  # whose vectors take two messages then
    with network() as net:
        two_rounds(net)
        peer = net.peer()
        peer.become_ready(samples=samples(sizes=(20,) * nodes))
        net.ready(2 + nodes)
        broadcast = net.begin()
        heard(peer)
        first, last = report_of(broadcast, nodes=nodes)
        peer.say(first)
        assert_turned_away(peer, "INVALID_ARGUMENT", "nothing was heard of it for 0.05 seconds", caplog)
        assert net.finish().missed == tuple(range(2, 2 + nodes))
        assert net.server.counters.dropped == 1
        assert len(last) < len(first)
        assert_undisturbed(net)


def test_a_flood_is_read_no_further_than_its_first_message(net: Network, caplog: pytest.LogCaptureFixture) -> None:
    peer = net.peer()
    peer.become_ready()
    net.ready(3)
    before, extra = net.server.counters.received, pack_ready(COSTS)[0]
    peer.say_what_it_can(*[extra] * 1000)
    until(lambda: "is dropped: 'ready' where 'nothing' was expected" in caplog.text)
    until(lambda: len(net.server.descriptions()) == 2)
    assert net.server.counters.received - before == len(extra) + hub_module.FRAME
    assert net.server.counters.dropped == 1
    assert_undisturbed(net)


def test_a_report_that_nobody_asked_for(net: Network, caplog: pytest.LogCaptureFixture) -> None:
    broadcast = net.aggregator.pending
    assert broadcast is not None
    peer = net.peer()
    peer.become_ready()
    net.ready(3)
    peer.say(*report_of(broadcast))
    assert_turned_away(peer, "INVALID_ARGUMENT", "'report' where 'nothing' was expected", caplog)
    assert_undisturbed(net)


def test_a_report_said_twice_counts_once(net: Network, caplog: pytest.LogCaptureFixture) -> None:
    held = HeldWork(node_data(3))  # keeps the round open
    net.join(3, work=held)
    net.ready(3)
    peer = net.peer()
    peer.become_ready()
    net.ready(4)
    held.go.clear()
    broadcast = net.begin()
    heard(peer)
    peer.say_what_it_can(*report_of(broadcast), *report_of(broadcast))
    until(lambda: "is dropped: 'report' where 'nothing' was expected" in caplog.text)
    held.go.set()
    assert [int(answer.report.nodes[0]) for answer in net.finish().answers] == [0, 1, 2, 3]


@pytest.mark.parametrize("what", [float("nan"), float("inf"), -float("inf")])
def test_parameters_that_are_not_finite_are_set_aside_and_their_node_is_dropped_the_third_time(
    net: Network, caplog: pytest.LogCaptureFixture, what: float
) -> None:
    peer = net.peer()
    peer.become_ready()
    net.ready(3)
    for time in (1, 2, 3):
        broadcast = net.begin()
        assert heard(peer).base_round == 0  # none of its reports ever counted
        peer.say(*report_of(broadcast, w=what))
        gathered = net.finish()
        assert (gathered.broken, gathered.missed) == ((2,), ())
        assert caplog.text.count("intruder's report is not finite, and is set aside") == time
    assert peer.ended()[0] != grpc.StatusCode.OK
    until(lambda: "is dropped: 3 of its reports in a row were not finite" in caplog.text)
    assert net.server.counters.dropped == 1
    assert_undisturbed(net)


def test_losses_that_are_not_finite_are_set_aside_too(net: Network) -> None:
    peer = net.peer()
    peer.become_ready()
    net.ready(3)
    broadcast = net.begin()
    peer.hear()
    peer.say(*report_of(broadcast, losses=[float("nan")]))
    assert net.finish().broken == (2,)
    peer.leave()
    until(lambda: len(net.server.descriptions()) == 2)
    assert_undisturbed(net)


def test_when_no_report_is_finite_the_aggregator_gets_them_all() -> None:
    with network() as net:
        peers = [net.peer(f"peer-{number}") for number in (0, 1)]
        for peer in peers:
            peer.say(peer.hello())
        net.server.wait_for(2, lambda: False)
        net.server.start(net.task)
        for peer in peers:
            peer.hear()
            peer.say(*pack_ready(COSTS))
        net.ready(2)
        net.aggregator.start()
        broadcast = net.begin()
        for peer in peers:
            peer.hear()
            peer.say(*report_of(broadcast, w=float("nan"), rho=[], beta=[]))
        gathered = net.finish()
        assert (len(gathered.answers), gathered.broken) == (2, ())
        assert net.aggregator.last is not None
        assert net.aggregator.last.left_out == (0, 1)


def test_peers_that_vanish_while_they_are_sent_something_disturb_nobody(
    net: Network, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for number in range(5):
        peer = net.peer(f"short-{number}")
        peer.become_ready()
        net.ready(3)
        if number % 2:
            peer.leave()
            net.round()
        else:
            net.begin()
            peer.leave()
            net.finish()
        until(lambda: len(net.server.descriptions()) == 2)
    assert bits(net.all_told) == bits(without_network([[0, 1]] * 7))
    assert [record for record in caplog.records if record.name == "asyncio"] == []
    assert net.server.counters.dropped == 0


def test_a_peer_that_leaves_in_the_middle_of_a_large_broadcast(net: Network, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    broadcast = net.aggregator.pending
    assert broadcast is not None
    with network() as other:
        peer = other.peer()
        peer.say(peer.hello())
        other.server.wait_for(1, lambda: False)
        other.server.start(other.task)
        peer.hear()
        peer.say(*pack_ready(COSTS))
        other.ready(1)
        large = replace(broadcast, w=np.zeros(20_000_000, np.float32), catch_up=None)
        other.server.begin(large, least=1, timeout=LONG, left=LONG)
        peer.hear()
        peer.leave()
        until(lambda: not other.server.descriptions())
        other.server.wake()
        assert not other.server.finish().enough
        assert other.server.counters.sent < large.w.nbytes
    gc.collect()  # an exception that nobody has looked at is told of now
    assert [record for record in caplog.records if record.name in ("asyncio", "grpc._cython.cygrpc")] == []
    assert_undisturbed(net)


def test_names_that_came_once_are_not_kept_for_ever(net: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_NAMES", 5)
    monkeypatch.setattr(admission, "_WITHIN", 0.0)
    for number in range(20):
        peer = net.peer(f"passer-by-{number}")
        peer.say(b"\xff")
        peer.ended()
    assert len(net.server._reception._lately) <= 6
    assert_undisturbed(net)


# Nodes that are slow, late, away or back.


def numbers(gathered: Any) -> list[int]:
    return [int(answer.report.nodes[0]) for answer in gathered.answers]


@pytest.mark.parametrize("method", ["fixed", "paper", "frugal"])
@pytest.mark.parametrize("batch", [None, 5])
def test_a_slow_node_is_left_out_and_comes_back_as_if_it_had_never_heard_of_the_round(
    method: str, batch: int | None
) -> None:
    slow = HeldWork(node_data(2))
    with network(method, batch=batch) as net:
        net.join(0), net.join(1), net.join(2, work=slow)
        net.start(3)
        net.round(), net.round()
        slow.go.clear()
        # The deadline is over at once, and then the round ends with the two that it needs.
        late = net.round(least=2, timeout=0.0)
        assert (numbers(late), late.missed) == ([0, 1], (2,))
        again = net.round(least=2)  # it owes its report still, and is not asked
        assert (numbers(again), again.missed) == ([0, 1], ())
        assert net.server.counters.late == 0
        slow.go.set()
        until(lambda: net.server.counters.late == 1)
        for _ in range(3):
            assert numbers(net.round()) == [0, 1, 2]
        here = [[0, 1, 2], [0, 1, 2], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
        assert bits(net.all_told) == bits(without_network(here, method, batch))
        assert slow.made == 6  # one of them for nothing


def test_a_late_report_is_not_taken_for_one_of_the_next_round() -> None:
    slow = HeldWork(node_data(1))
    with network() as net:
        net.join(0), net.join(1, work=slow)
        net.start(2)
        slow.go.clear()
        assert numbers(net.round(least=1, timeout=0.0)) == [0]
        net.begin(least=2)  # both are needed: the late one is asked as soon as it has said what is too late
        slow.go.set()
        assert numbers(net.finish()) == [0, 1]
        assert net.server.counters.late == 1
        assert bits(net.all_told) == bits(without_network([[0], [0, 1]]))


def test_fewer_nodes_than_needed_are_waited_for_and_one_that_comes_is_asked_at_once(net: Network) -> None:
    net.begin(least=3, timeout=0.0)
    joining = threading.Timer(0.05, lambda: net.join(2))
    joining.start()
    gathered = net.finish()
    joining.join()
    assert (numbers(gathered), gathered.enough) == ([0, 1, 2], True)


def test_a_round_with_too_few_ends_when_the_time_is_gone(net: Network) -> None:
    gathered = net.round(least=3, left=0.05)
    assert not gathered.enough


def test_an_interruption_ends_the_waiting(net: Network) -> None:
    net.begin(least=3)
    net.server.wake()
    assert not net.finish().enough


def test_waiting_for_nodes_ends_when_interrupted() -> None:
    with network() as net:
        over = threading.Event()

        def interrupt() -> None:
            over.set()
            net.server.look()

        waiting = threading.Timer(0.02, interrupt)
        waiting.start()
        assert net.server.wait_for(1, over.is_set) is False
        waiting.join()


def test_a_node_that_joins_in_the_middle_of_a_round_takes_part_from_the_next() -> None:
    held = HeldWork(node_data(1))
    with network() as net:
        net.join(0), net.join(1, work=held)
        net.start(2)
        net.round()
        held.go.clear()
        net.begin()
        net.join(2)
        net.ready(3)
        held.go.set()
        gathered = net.finish()
        assert (numbers(gathered), gathered.missed) == ([0, 1], ())
        for _ in range(2):
            assert numbers(net.round()) == [0, 1, 2]
        assert bits(net.all_told) == bits(without_network([[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]))


def leave(net: Network, joined: Any, nodes: int) -> None:
    joined.cancel()
    until(lambda: len(net.server.descriptions()) == nodes)


@pytest.mark.parametrize("method", ["fixed", "paper", "frugal"])
def test_a_node_that_comes_back_with_its_memory_goes_on_where_it_was(method: str) -> None:
    work = Worker(node_data(2))
    with network(method, batch=5) as net:
        net.join(0), net.join(1)
        joined = net.join(2, work=work)
        net.start(3)
        net.round(), net.round()
        leave(net, joined, 2)
        net.round(), net.round()
        net.join(2, work=work)
        net.ready(3)
        net.round(), net.round()
        here = [[0, 1, 2], [0, 1, 2], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
        assert bits(net.all_told) == bits(without_network(here, method, batch=5))
        assert net.server.members["node-2"].numbers.tolist() == [2]


def test_a_node_that_comes_back_without_its_memory_keeps_its_number_and_is_lost_to_drift() -> None:
    with network() as net:
        net.join(0), net.join(1)
        joined = net.join(2)
        net.start(3)
        net.round()
        leave(net, joined, 2)
        net.round()
        peer = net.peer("node-2")
        peer.become_ready()
        net.ready(3)
        assert net.server.lost(3) == [2]
        assert net.server.lost(3) == []  # told of once
        net.begin()
        found = heard(peer)
        assert (found.base_round, found.found.catch_up) == (0, True)


def test_nodes_that_are_gone_for_long_are_forgotten() -> None:
    with network() as net:
        net.join(0)
        joined = net.join(1)
        net.start(2)
        net.round()
        leave(net, joined, 1)
        for number in range(2, GONE_FOR_GOOD + 2):
            assert net.server.lost(number) == []
            net.round()
        assert net.server.members["node-1"].base_round == 1
        assert net.server.lost(GONE_FOR_GOOD + 2) == [1]
        assert net.server.lost(GONE_FOR_GOOD + 2) == []
        assert net.server.members["node-1"].base_round == 0


def test_the_aggregator_can_hold_data_itself() -> None:
    with network() as net:
        net.server.hold(Worker(node_data(0)))
        net.join(1), net.join(2)
        net.start(3)
        gathered = [net.round() for _ in range(4)]
        assert bits(net.all_told) == bits(without_network([[0, 1, 2]] * 4))
        assert [answer.costs.here for answer in gathered[0].answers] == [True, False, False]
        assert len(net.server.trials()) == 3


def test_nodes_are_numbered_by_the_numbers_in_their_names() -> None:
    with network() as net:
        for name in ("node-10", "node-9", "node-2"):
            net.join(0, name=name)
        net.server.wait_for(3, lambda: False)
        assert list(net.server.descriptions()) == ["node-2", "node-9", "node-10"]
        net.start(3)
        found = {name: member.numbers.tolist() for name, member in net.server.standing().items()}
        assert found == {"node-2": [0], "node-9": [1], "node-10": [2]}


def test_what_peers_count_is_what_the_hub_counts() -> None:
    with network() as net:
        peers = [net.peer(f"peer-{number}") for number in range(3)]
        for peer in peers:
            peer.say(peer.hello())
        net.server.wait_for(3, lambda: False)
        net.server.start(net.task)
        for peer in peers:
            peer.hear()
            peer.say(*pack_ready(COSTS))
        net.ready(3)
        net.aggregator.start()
        for _ in range(3):
            broadcast = net.begin()
            for peer in peers:
                peer.hear()
                peer.say(*(report_of(broadcast) if broadcast.round > 1 else report_of(broadcast, rho=[], beta=[])))
            net.finish()
        until(lambda: net.server.counters.sent == sum(peer.received for peer in peers))
        assert net.server.counters.received == sum(peer.sent for peer in peers)


def test_all_hear_the_farewell() -> None:
    with network() as net:
        joined = [net.join(0), net.join(1)]
        net.start(2)
        net.server.close(Farewell("enough is enough"))
        assert [each.result(LONG) for each in joined] == [Farewell("enough is enough")] * 2


def test_a_port_that_is_taken_is_refused_in_words() -> None:
    with network() as net, pytest.raises(UserError, match="cannot be listened on"):
        AggregatorServer(net.address, run="another", tokens=Tokens()).open()


def test_a_welcome_has_the_task_and_the_numbers_of_the_fleet(net: Network) -> None:
    peer = net.peer()
    peer.say(peer.hello(samples=samples(sizes=(11, 12))))
    found = AggregatorReader().feed(peer.hear())
    assert isinstance(found, Welcome)
    assert (found.run, found.numbers) == ("a-run", (2, 3))
    assert bits(found.task) == bits(net.task)


def test_an_interruption_between_two_rounds_is_not_lost(net: Network) -> None:
    net.server.wake()
    net.server.standing()  # the hub has heard of it
    assert not net.round(least=3).enough


def test_what_goes_wrong_in_the_aggregators_own_work_is_heard() -> None:
    class Failing(Worker):
        def answer(self, request: Any) -> Any:
            if request.broadcast.round == 2:
                raise ZeroDivisionError("of our own")
            return super().answer(request)

    with network() as net:
        net.server.hold(Failing(node_data(0)))
        net.join(1)
        net.start(2)
        net.round(least=2)
        net.begin(least=2)
        with pytest.raises(ZeroDivisionError, match="of our own"):
            net.server.finish()


def test_a_node_that_restarts_after_its_report_is_not_thought_to_remember_it() -> None:
    """Its old process has answered, its new one has joined, and the round is not over yet."""
    with network() as net:
        held = HeldWork(node_data(1))
        first, _ = net.join(0), net.join(1, work=held)
        net.start(2)
        net.round(least=2)
        held.go.clear()
        net.begin(least=2)
        until(lambda: net.server.members["node-0"].rounds == 1 and net.server._gathering is not None)
        until(lambda: "node-0" in net.server._gathering.answers)  # type: ignore[union-attr]
        net.leave(first)
        net.join(0)
        net.ready(2)
        held.go.set()
        assert [answer.report.nodes.tolist() for answer in net.finish().answers] == [[0], [1]]
        assert net.server.members["node-0"].base_round == 0
        gathered = net.round(least=2)  # as one without a memory, and in order
        assert (len(gathered.answers), gathered.missed) == (2, ())
        assert net.server.counters.dropped == 0
