"""Refusals in private runs: the aggregator reads no reason that follows from samples."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedbudget.engines.grpc.node import RefusedByAggregator
from fedbudget.engines.grpc.peers import Peer, Peers
from fedbudget.engines.grpc.stream import pack
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.messages import Welcome
from fedbudget.engines.remote.node_limits import PrivacyAccount
from fedbudget.engines.remote.worker import Worker
from fedbudget.protocol.messages import PrivateRound
from fedbudget.resources.privacy import rho_of
from support.masked_network import masked
from support.networked import LONG, network, node_data, wait_until


def test_class_names_stay_at_the_node(
    received: list[bytes],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An aggregator asks for classes that a node lacks."""
    send = Peers.send

    def lying(self: Peers, peer: Peer, messages: list[bytes]) -> None:
        frame = wire.unpack(messages[0])
        if frame.name == "welcome":
            welcome: Welcome = wire.read(frame)
            samples = replace(welcome.task.samples, classes=("maybe", "yes"))
            task = replace(welcome.task, samples=samples)
            messages = list(pack(replace(welcome, task=task)))
        send(self, peer, messages)

    monkeypatch.setattr(Peers, "send", lying)
    with network("private") as net:
        joined = net.join(1)
        net.server.wait_for(1, lambda: False)
        received.clear()  # without a schema, its hello has the names of its classes
        net.server.start(net.task)
        with pytest.raises(RefusedByAggregator, match="this node has class 'no'"):
            joined.result(LONG)
        wait_until(lambda: "so only its own output contains it" in caplog.text)
    assert b"'no'" not in b"".join(received)


def test_digest_of_samples_stays_at_the_node(
    received: list[bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file of an account is named after a digest of the samples."""
    path = tmp_path / "0123456789abcdef.json"
    account = PrivacyAccount(path, 1.0, 1e-5)
    almost = 0.999999 * rho_of(1.0, 1e-5)
    w = np.zeros(3, np.float32)
    account.pay("earlier", PrivateRound(round=1, w=w, tau=1, eta=0.1, clip=1, rho=almost))
    with network("private") as net:
        joined = net.join(1, worker=Worker(node_data(1), account=account))
        net.start(1)
        net.begin(left=2.0)
        with pytest.raises(RefusedByAggregator, match=rf"account: .*{path.name}"):
            joined.result(LONG)
        wait_until(lambda: "--privacy-limit is ε = 1 at" in caplog.text)
    sent = b"".join(received)
    assert b"--privacy-limit is" in sent
    assert path.stem.encode() not in sent


def test_damaged_account_stays_at_the_node(
    received: list[bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An account that becomes unreadable in a masked run is not named either."""
    path = tmp_path / "0123456789abcdef.json"
    account = PrivacyAccount(path, 4.0, 1e-5)
    with masked("private") as net:
        joined = net.join(3, worker=Worker(node_data(3), account=account))
        for node in (0, 1, 2):
            net.join(node)
        net.start(4)
        net.round()
        path.write_text("damaged")
        net.begin(left=5.0)
        with pytest.raises(RefusedByAggregator, match=path.name):
            joined.result(LONG)
        wait_until(lambda: "so only its own output contains it" in caplog.text)
    assert path.stem.encode() not in b"".join(received)
