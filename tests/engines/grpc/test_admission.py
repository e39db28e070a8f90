"""Admission on real loopback streams: tokens, names, certificates, connection limits and
the audit log.
"""

import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from fedbudget.engines.grpc import admission
from fedbudget.engines.grpc.admission import AUDIT, AuditLog
from fedbudget.engines.grpc.certificates import make
from fedbudget.engines.grpc.credentials import aggregator_credentials, node_credentials
from fedbudget.engines.grpc.node import RefusedByAggregator
from fedbudget.engines.grpc.service import PeerLimits
from fedbudget.engines.grpc.tokens import TokenFile, Tokens, add_token, revoke_token
from fedbudget.launch.logs import log_handler, node_log
from fedbudget.settings.network import LogOptions
from support.networked import LONG, Network, network, wait_until
from support.raw_peers import (
    RawPeer,
    assert_refused,
    assert_undisturbed,
    samples,
    two_rounds,
)

SHARED, OWN = "a-shared-token-0123456789", "another-token-9876543210"


# Tokens, names and certificates.


def tokens(folder: Path, text: str) -> Tokens:
    file = folder / "tokens"
    file.write_text(text)
    file.chmod(0o600)
    return Tokens.load(file)


@pytest.mark.parametrize("token", [None, "", OWN, SHARED[:-1], SHARED + "0"])
def test_wrong_token_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, token: str | None
) -> None:
    with network(tokens=tokens(tmp_path, SHARED)) as net:
        two_rounds(net, token=SHARED)
        assert_refused(
            RawPeer(net, token=token),
            "UNAUTHENTICATED",
            "intruder has a wrong token or none",
            caplog,
        )
        assert (net.server.counters.refused, net.server.counters.dropped) == (1, 0)
        assert_undisturbed(net)


def test_token_is_bound_to_name(tmp_path: Path) -> None:
    with network(tokens=tokens(tmp_path, f"node-0 {SHARED}\nnode-1 {OWN}\n")) as net:
        net.join(0, token=SHARED)
        with pytest.raises(RefusedByAggregator, match="node-1 has a wrong token or none"):
            net.join(1, token=SHARED).result(LONG)
        net.join(1, token=OWN)
        net.start(2)
        assert len(net.round().answers) == 2


def test_token_guessing_does_not_block_node(
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


def test_tokens_never_appear_in_output(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []
    with network(tokens=tokens(tmp_path, SHARED)) as net:
        two_rounds(net, token=SHARED, notify=shown.append)
        with pytest.raises(RefusedByAggregator) as refused:
            net.join(2, token=OWN).result(LONG)
        shown += [str(refused.value), repr(refused.value)]
        peer = RawPeer(net, token=OWN)
        shown.append(str(peer.ended()))
        peer = RawPeer(net, token=SHARED)
        peer.send(b"\xff")
        shown.append(str(peer.ended()))
        shown += [repr(net.server), repr(vars(net.server))]
    shown += [record.getMessage() for record in caplog.records] + [caplog.text]
    assert "node-0 has joined" in caplog.text
    for token in (SHARED, OWN):
        assert not any(token in text for text in shown)


@pytest.mark.parametrize("name", ["", "aggregator", "../node", "a name", "n" * 65])
def test_invalid_names_are_refused(
    net: Network, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    assert_refused(
        RawPeer(net, name), "INVALID_ARGUMENT", "its name is not valid for a node", caplog
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

    def test_certificate_of_another_name(
        self, net: Network, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        peer = RawPeer(net, "node-2", credentials=shown(folder, "other"))
        assert_refused(
            peer, "PERMISSION_DENIED", "node-2 is not the name in its certificate", caplog
        )
        assert net.server.counters.refused == 1

    def test_certificate_of_another_ca(self, net: Network, folder: Path) -> None:
        elsewhere = folder / "elsewhere"
        strangers = node_credentials(
            folder / "ca.pem", elsewhere / "node-2.pem", elsewhere / "node-2.key"
        )
        assert (
            RawPeer(net, "node-2", credentials=strangers).ended()[0]
            == grpc.StatusCode.UNAVAILABLE
        )

    def test_missing_certificate(self, net: Network, folder: Path) -> None:
        unknown = node_credentials(folder / "ca.pem", None, None)
        assert (
            RawPeer(net, "node-0", credentials=unknown).ended()[0]
            == grpc.StatusCode.UNAVAILABLE
        )

    def test_plain_text_is_refused(self, net: Network) -> None:
        assert RawPeer(net, "node-0").ended()[0] == grpc.StatusCode.UNAVAILABLE

    def test_node_suggests_missing_options(self, net: Network, folder: Path) -> None:
        """gRPC returns no reason for a refused handshake, so the node lists the options to
        try.
        """
        for credentials, words in (
            (None, "ca"),
            (node_credentials(folder / "ca.pem", None, None), "cert and key"),
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


def test_frequent_connections_are_refused(
    net: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other peers are not affected."""
    monkeypatch.setattr(admission, "_CONNECTIONS", 3)
    monkeypatch.setattr(admission, "_WITHIN", 1000.0)
    for _ in range(3):
        peer = RawPeer(net)
        peer.send(b"\xff")
        assert peer.ended()[0] == grpc.StatusCode.INVALID_ARGUMENT
    assert_refused(
        RawPeer(net), "RESOURCE_EXHAUSTED", "intruder connects too often", caplog
    )
    assert (net.server.counters.dropped, net.server.counters.refused) == (3, 1)
    other = RawPeer(net, "another")
    other.become_ready()
    other.leave()
    assert_undisturbed(net)


def test_connection_counts_are_bounded(
    net: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_NAMES", 5)
    monkeypatch.setattr(admission, "_WITHIN", 0.0)
    for number in range(20):
        peer = RawPeer(net, f"visitor-{number}")
        peer.send(b"\xff")
        peer.ended()
    assert len(net.server._service.admission._connections) <= 6
    assert_undisturbed(net)


def test_only_allowed_nodes_join(caplog: pytest.LogCaptureFixture) -> None:
    with network(allowed={"node-0", "node-1"}) as net:
        two_rounds(net)
        assert_refused(
            RawPeer(net), "PERMISSION_DENIED", "intruder is not an allowed node", caplog
        )
        assert_undisturbed(net)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"sizes": (5,) * 4}, "intruder has 4 nodes; the limit is 3"),
        ({"classes": tuple(map(str, range(9)))}, "intruder has 9 classes; the limit is 8"),
    ],
)
def test_peer_limits(other: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with network(limits=PeerLimits(nodes=3, classes=8)) as net:
        two_rounds(net)
        peer = RawPeer(net)
        peer.send(peer.hello(samples=samples(**other)))
        assert_refused(peer, "FAILED_PRECONDITION", reason, caplog)
        assert_undisturbed(net)


def test_revoked_token_drops_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "tokens"
    first, second = (add_token(file, f"node-{node}") for node in (0, 1))
    with network(tokens=TokenFile(file)) as net:
        kept, revoked = net.join(0, token=first), net.join(1, token=second)
        net.start(2)
        revoke_token(file, "node-1")
        with pytest.raises(RefusedByAggregator, match="its token was revoked"):
            revoked.result(LONG)
        wait_until(lambda: "node-1 at " in caplog.text)
        assert "is revoked: its token was revoked" in caplog.text
        assert [int(answer.nodes[0]) for answer in net.round().answers] == [0]
        assert not kept.done()


def test_wrong_tokens_are_rate_limited() -> None:
    control = admission.AdmissionControl(Tokens())
    waits = [control._after_wrong_token("ipv4:192.0.2.1") for _ in range(12)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (0.04, 5.0)
    assert control._after_wrong_token("ipv4:192.0.2.2") == 0.04


def test_nodes_without_rounds_are_forgotten(
    net: Network, caplog: pytest.LogCaptureFixture
) -> None:
    """Each node joins, becomes ready, and leaves before a round."""
    for number in range(8):
        peer = RawPeer(net, f"ghost-{number}")
        peer.become_ready()
        peer.leave()
    wait_until(lambda: len(net.server.descriptions()) == 2)
    wait_until(lambda: set(net.server.members) == {"node-0", "node-1"})
    assert_undisturbed(net)
    assert len(net.server.state({})["members"]) == 2


LOG = logging.getLogger("fedbudget.tried")


def audit_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / AUDIT).read_text().splitlines()]


def test_audit_includes_earlier_events(tmp_path: Path) -> None:
    audit = AuditLog(LOG)
    audit.record("joined", "n1", "ipv4:192.0.2.1:40000", "14 samples")
    audit.open(tmp_path)
    audit.record("left", "n1", "ipv4:192.0.2.1:40000")
    audit.record("dropped", "n2", "ipv4:192.0.2.2:40000", "a \x1b[2Jreason")
    events = audit_lines(tmp_path)
    assert [(each["event"], each["node"]) for each in events] == [
        ("joined", "n1"),
        ("left", "n1"),
        ("dropped", "n2"),
    ]
    assert events[2]["reason"] == "a \ufffd[2Jreason"
    assert (tmp_path / AUDIT).stat().st_mode & 0o077 == 0


def test_audit_limits_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one line a second for events that any peer can cause."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    audit = AuditLog(LOG)
    audit.open(tmp_path)
    for each in range(1000):
        now[0] = 100 + each / 500
        audit.record("refused", "a peer", "ipv4:192.0.2.9:4", "no token", by_anyone=True)
        if each < 3:
            audit.record("dropped", f"n{each}", "ipv4:192.0.2.9:4", "a fault")
    events = audit_lines(tmp_path)
    assert [each.get("others") for each in events if each["event"] == "refused"] == [
        None,
        499,
    ]
    assert [each["node"] for each in events if each["event"] == "dropped"] == [
        "n0",
        "n1",
        "n2",
    ]


def test_departures_are_logged_at_intervals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """During rounds: ten messages at once, then one a second."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    audit = AuditLog(LOG)
    with caplog.at_level(logging.WARNING, LOG.name):
        audit.record("joined", "before", "ipv4:192.0.2.1:40000", "14 samples")
        audit.under_way = True
        for each in range(1000):
            audit.record("left", f"n{each}", "ipv4:192.0.2.1:40000")
            now[0] += 0.1 if each >= 500 else 0.0
        audit.under_way = False
        audit.record("left", "after", "ipv4:192.0.2.1:40000")
    assert caplog.messages[:10] == [f"n{each} has left" for each in range(10)]
    assert len(caplog.messages) in (59, 60)


def test_audit_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / AUDIT).symlink_to(tmp_path / "target")
    audit = AuditLog(LOG)
    audit.open(tmp_path)
    audit.record("left", "n1", "ipv4:192.0.2.1:40000")
    assert (tmp_path / "target").read_text() == "mine"


@pytest.mark.parametrize("form", ["text", "json"])
def test_logs_have_no_control_characters(
    form: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = log_handler(LogOptions(log_format=form, log_level="info"))
    LOG.addHandler(handler)
    try:
        AuditLog(LOG).record(
            "dropped", "n1", "ipv4:192.0.2.1:40000", "a \x1b]0;title\x07 text\r"
        )
        node_log(LogOptions(log_format=form))("n1", "bell\x07")
    finally:
        LOG.removeHandler(handler)
    shown = capsys.readouterr().err
    assert all(each.isprintable() or each == "\n" for each in shown)
    if form == "json":
        first, second = map(json.loads, shown.splitlines())
        assert (first["event"], first["node"], first["level"]) == (
            "dropped",
            "n1",
            "warning",
        )
        assert second["message"] == "bell\ufffd"
    else:
        times, texts = zip(
            *(line.split(" ", 1) for line in shown.splitlines()), strict=True
        )
        assert all(map(re.compile(r"\d\d:\d\d:\d\d").fullmatch, times))
        assert texts[1] == "n1: bell\ufffd"
