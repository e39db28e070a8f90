"""Who is let in, with real streams on loopback: tokens, names, certificates, how often one
may come.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from fedbudget.engines.grpc import admission
from fedbudget.engines.grpc.certificates import make
from fedbudget.engines.grpc.credentials import aggregator_credentials, node_credentials
from fedbudget.engines.grpc.node import RefusedByAggregator
from fedbudget.engines.grpc.service import PeerLimits
from fedbudget.engines.grpc.tokens import TokenFile, Tokens, add_token, revoke_token
from support.networked import LONG, Network, network, until
from support.raw_peers import (
    RawPeer,
    assert_turned_away,
    assert_undisturbed,
    samples,
    two_rounds,
)

SHARED, OWN = "a-shared-token-0123456789", "another-token-9876543210"


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
        assert_turned_away(
            RawPeer(net, token=token),
            "UNAUTHENTICATED",
            "intruder has a wrong token or none",
            caplog,
        )
        assert (net.server.counters.refused, net.server.counters.dropped) == (1, 0)
        assert_undisturbed(net)


def test_a_token_of_one_name_is_of_no_use_to_another(tmp_path: Path) -> None:
    with network(tokens=tokens(tmp_path, f"node-0 {SHARED}\nnode-1 {OWN}\n")) as net:
        net.join(0, token=SHARED)
        with pytest.raises(RefusedByAggregator, match="node-1 has a wrong token or none"):
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
            assert (
                RawPeer(net, "node-0", token=OWN).ended()[0]
                == grpc.StatusCode.UNAUTHENTICATED
            )
        net.join(0, token=SHARED)
        net.start(1)
        assert net.server.counters.refused == 5


def test_the_token_is_in_no_log_and_in_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    broadcast: list[str] = []
    with network(tokens=tokens(tmp_path, SHARED)) as net:
        two_rounds(net, token=SHARED, notify=broadcast.append)
        with pytest.raises(RefusedByAggregator) as refused:
            net.join(2, token=OWN).result(LONG)
        broadcast += [str(refused.value), repr(refused.value)]
        peer = RawPeer(net, token=OWN)
        broadcast.append(str(peer.ended()))
        peer = RawPeer(net, token=SHARED)
        peer.say(b"\xff")
        broadcast.append(str(peer.ended()))
        broadcast += [repr(net.server), repr(vars(net.server))]
    broadcast += [record.getMessage() for record in caplog.records] + [caplog.text]
    assert "node-0 has joined" in caplog.text
    for token in (SHARED, OWN):
        assert not any(token in text for text in broadcast)


@pytest.mark.parametrize("name", ["", "aggregator", "../node", "a name", "n" * 65])
def test_a_name_that_no_node_may_have_is_refused(
    net: Network, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    assert_turned_away(
        RawPeer(net, name),
        "INVALID_ARGUMENT",
        "its name is not valid for a node",
        caplog,
    )
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
        ours = aggregator_credentials(
            folder / "aggregator.pem", folder / "aggregator.key", folder / "ca.pem"
        )
        with network(credentials=ours) as net:
            for node in (0, 1):
                net.join(node, credentials=shown(folder, f"node-{node}"))
            net.start(2)
            yield net
            assert_undisturbed(net)

    def test_of_another_name(
        self, net: Network, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        peer = RawPeer(net, "node-2", credentials=shown(folder, "other"))
        assert_turned_away(
            peer,
            "PERMISSION_DENIED",
            "node-2 is not a name in its certificate",
            caplog,
        )
        assert net.server.counters.refused == 1

    def test_of_another_ca(self, net: Network, folder: Path) -> None:
        elsewhere = folder / "elsewhere"
        strangers = node_credentials(
            folder / "ca.pem", elsewhere / "node-2.pem", elsewhere / "node-2.key"
        )
        assert (
            RawPeer(net, "node-2", credentials=strangers).ended()[0]
            == grpc.StatusCode.UNAVAILABLE
        )

    def test_none(self, net: Network, folder: Path) -> None:
        unknown = node_credentials(folder / "ca.pem", None, None)
        assert (
            RawPeer(net, "node-0", credentials=unknown).ended()[0]
            == grpc.StatusCode.UNAVAILABLE
        )

    def test_plain_text(self, net: Network) -> None:
        assert RawPeer(net, "node-0").ended()[0] == grpc.StatusCode.UNAVAILABLE

    def test_a_node_says_what_it_may_lack(self, net: Network, folder: Path) -> None:
        """Neither plain text nor TLS without a certificate is let in, which cannot know
        why, but says what may help.
        """
        for credentials, words in (
            (None, "--ca"),
            (node_credentials(folder / "ca.pem", None, None), "--cert and --key"),
        ):
            node = net.join(2, credentials=credentials, patience=0.0)
            with pytest.raises(
                RefusedByAggregator,
                match=f"closed the connection without a reason; .* set {words}",
            ):
                node.result(LONG)


def shown(folder: Path, name: str) -> Any:
    return node_credentials(
        folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key"
    )


def test_a_peer_that_connects_too_often_is_refused_and_others_are_not(
    net: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(admission, "_CONNECTIONS", 3)
    monkeypatch.setattr(admission, "_WITHIN", 1000.0)
    for _ in range(3):
        peer = RawPeer(net)
        peer.say(b"\xff")
        assert peer.ended()[0] == grpc.StatusCode.INVALID_ARGUMENT
    assert_turned_away(
        RawPeer(net), "RESOURCE_EXHAUSTED", "intruder connects too often", caplog
    )
    assert (net.server.counters.dropped, net.server.counters.refused) == (3, 1)
    other = RawPeer(net, "another")
    other.become_ready()
    other.leave()
    assert_undisturbed(net)


def test_names_that_came_once_are_not_kept_for_ever(
    net: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_NAMES", 5)
    monkeypatch.setattr(admission, "_WITHIN", 0.0)
    for number in range(20):
        peer = RawPeer(net, f"passer-by-{number}")
        peer.say(b"\xff")
        peer.ended()
    assert len(net.server._service.admission._connections) <= 6
    assert_undisturbed(net)


def test_only_nodes_that_are_allowed_come_in(caplog: pytest.LogCaptureFixture) -> None:
    with network(allowed={"node-0", "node-1"}) as net:
        two_rounds(net)
        assert_turned_away(
            RawPeer(net),
            "PERMISSION_DENIED",
            "intruder is not an allowed node",
            caplog,
        )
        assert_undisturbed(net)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"sizes": (5,) * 4}, "intruder has 4 nodes; the limit is 3"),
        (
            {"classes": tuple(map(str, range(9)))},
            "intruder has 9 classes; the limit is 8",
        ),
    ],
)
def test_one_peer_brings_only_so_much(
    other: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with network(limits=PeerLimits(nodes=3, classes=8)) as net:
        two_rounds(net)
        peer = RawPeer(net)
        peer.say(peer.hello(samples=samples(**other)))
        assert_turned_away(peer, "FAILED_PRECONDITION", reason, caplog)
        assert_undisturbed(net)


def test_a_node_whose_token_is_revoked_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tokens"
    first, second = (add_token(file, f"node-{node}") for node in (0, 1))
    with network(tokens=TokenFile(file)) as net:
        stays, goes = net.join(0, token=first), net.join(1, token=second)
        net.start(2)
        revoke_token(file, "node-1")
        with pytest.raises(RefusedByAggregator, match="its token was revoked"):
            goes.result(LONG)
        until(lambda: "node-1 at " in caplog.text)
        assert "is revoked: its token was revoked" in caplog.text
        assert [int(answer.report.nodes[0]) for answer in net.round().answers] == [0]
        assert not stays.done()


def test_wrong_tokens_wait_longer_each_time_and_right_ones_do_not() -> None:
    control = admission.AdmissionControl(Tokens())
    waits = [control._after_wrong_token("ipv4:192.0.2.1") for _ in range(12)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (0.04, 5.0)
    assert control._after_wrong_token("ipv4:192.0.2.2") == 0.04
    many = [control._after_wrong_token("ipv4:192.0.2.1") for _ in range(60)]
    assert many[-1] == 0.0  # so many wait already that no more are held


def test_names_that_never_took_part_are_forgotten(
    net: Network, caplog: pytest.LogCaptureFixture
) -> None:
    """Each joins, is ready, and leaves before a round."""
    for number in range(8):
        peer = RawPeer(net, f"ghost-{number}")
        peer.become_ready()
        peer.leave()
    until(lambda: len(net.server.descriptions()) == 2)
    until(lambda: set(net.server.members) == {"node-0", "node-1"})
    assert_undisturbed(net)
    assert len(net.server.state()["members"]) == 2
