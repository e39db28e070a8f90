"""Sums over samples on a real network: the bits of a simulation, and no plain report."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbudget.arrays import UInt64
from fedbudget.engines.grpc.node import RefusedByAggregator
from fedbudget.engines.noise import SimulatedSums
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.node_limits import PrivacyAccount
from fedbudget.engines.remote.worker import Worker
from fedbudget.protocol.messages import (
    Broadcast,
    Private,
    Report,
    SampleSumNormRound,
    SampleSumRound,
)
from fedbudget.protocol.sums import NoisySums
from fedbudget.randomness import Stream, generator
from fedbudget.resources.privacy import rho_of
from fedbudget.secure.contents import PrivateContents
from support.masked_network import masked, repeat_round, started
from support.networked import LONG, aggregator, network, node_data, node_numbers, task

ROUNDS = 5
SHARERS = 2  # three of four nodes must stay


def without_network() -> list[bytes]:
    """The bits of all w of a simulated run with the same nodes."""
    run = aggregator("sums")
    secure = SimulatedSums(SHARERS, seed=6)
    fleets = [node_data(node).fleet(task("sums"), [node]) for node in range(4)]
    message: Any = run.start()
    bits = []
    for _ in range(ROUNDS):
        assert isinstance(message, Broadcast)
        bits.append(message.w.tobytes())
        report = Report.merge([fleet.answer(message) for fleet in fleets])
        message = run.receive(secure.opened(report, message), run.ledger.costs)
    return [*bits, message.w.tobytes()]


def test_network_has_bits_of_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise in the sum gives the same w; one node adds all of it here."""

    def encode(self: PrivateContents, report: Report) -> UInt64:
        values = self.values(report)
        if report.nodes[0] == 0:
            random = generator(6, Stream.NOISE_SHARES, report.round).bytes
            values += self.noise(4, random)
        return values.view(np.uint64)

    monkeypatch.setattr(PrivateContents, "encode", encode)
    with masked("sums", 2 / 3) as net:
        started(net)
        for _ in range(ROUNDS):
            assert node_numbers(net.round()) == [0, 1, 2, 3]
        assert [w.tobytes() for w in net.all_w] == without_network()


def test_first_round_requests_norms() -> None:
    with masked("sums", 2 / 3) as net:
        started(net)
        first = net.begin()
        assert isinstance(first, SampleSumNormRound)
        summed = net.finish().summed
        assert isinstance(summed, NoisySums)
        assert (summed.updates, summed.samples) == (None, 62)
        assert isinstance(net.begin(), SampleSumRound)
        summed = net.finish().summed
        assert isinstance(summed, NoisySums)
        assert summed.updates is not None
        assert summed.samples == 62


def test_limited_weights_do_not_scale_sums() -> None:
    """A gradient sum contains all samples of a node, so the mean is over all of them."""
    with masked("sums", 2 / 3) as net:
        started(net)
        net.begin()
        for member in net.server.members.values():
            member.counted = np.ones(1, np.int64)
        summed = net.server.finish().summed
        assert isinstance(summed, NoisySums)
        assert summed.samples == 62


def test_plain_sums_never_leave_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without masks, a node has no noise of its own. It refuses before it sends."""
    packed: list[Any] = []
    pack = wire.pack_report

    def record(*arguments: Any) -> Any:
        packed.append(arguments)
        return pack(*arguments)

    monkeypatch.setattr("fedbudget.engines.grpc.node.pack_report", record)
    with network("sums") as net:
        joined = started(net)
        assert not net.round(left=2.0).enough
        for node in joined:
            with pytest.raises(RefusedByAggregator, match="without masks"):
                node.result(LONG)
    assert not packed


def test_account_of_samples_pays(tmp_path: Path) -> None:
    account = PrivacyAccount(tmp_path / "account.json", 2.0, 1e-5, per_sample=True)
    with masked("sums", 2 / 3) as net:
        net.join(3, worker=Worker(node_data(3), account=account))
        for node in (0, 1, 2):
            net.join(node)
        net.start(4)
        paid = 0.0
        for _ in range(3):
            broadcast = net.begin()
            assert isinstance(broadcast, Private)
            paid += broadcast.rho
            net.finish()
    assert rho_of(account.spent, 1e-5) == pytest.approx(paid, rel=1e-6)


def test_repeated_sum_has_same_noise() -> None:
    """As after a crash of the aggregator: fresh noise would halve the variance."""
    with masked("sums", 2 / 3) as net:
        started(net)
        net.round()
        net.round()
        broadcast = net.begin()
        first = net.server.finish().summed
        again = repeat_round(net, broadcast).summed
        assert isinstance(first, NoisySums)
        assert isinstance(again, NoisySums)
        assert first.updates is not None
        assert again.updates is not None
        assert (first.updates == again.updates).all()
