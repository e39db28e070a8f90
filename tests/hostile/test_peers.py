"""Peers that flood the aggregator, with and without a valid token."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import numpy as np
import pytest

from fedbudget.engines.grpc import admission
from fedbudget.engines.grpc.admission import AdmissionControl, AuditLog, Refusal
from fedbudget.engines.grpc.peers import LOG
from fedbudget.engines.grpc.stream import NAME, TOKEN, pack
from fedbudget.engines.grpc.tokens import Tokens
from fedbudget.engines.remote.messages import Hello
from fedbudget.engines.remote.wire import ExpectedReport, Frame
from fedbudget.protocol.messages import PeerError, ReportLayout, TrainRound
from fedbudget.resources import within
from fedbudget.resources.energy import DeclaredEnergy, MeasuredEnergy
from fedbudget.resources.resource import Cost, Reading, Usage
from support.masked_network import masked, started
from support.masked_network import masked_sums as sums_of
from support.networked import Network
from support.raw_peers import RawPeer, assert_undisturbed, samples

WRONG = "wrong"
RIGHT = "right" * 10
LAYOUT = ReportLayout()


class Context:
    """What admission reads of a stream."""

    def __init__(self, token: str, address: str = "192.0.2.1") -> None:
        self._token = token
        self._address = address

    def invocation_metadata(self) -> Any:
        return ((NAME, "n1"), (TOKEN, self._token))

    def peer(self) -> str:
        return f"ipv4:{self._address}:40000"

    def auth_context(self) -> Any:
        return {}


def shared_token(monkeypatch: pytest.MonkeyPatch) -> Tokens:
    monkeypatch.setenv("FEDBUDGET_TOKEN", RIGHT)
    return Tokens.load(None)


def test_parallel_wrong_tokens_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 50 unanswered wrong tokens, an address learns nothing about further ones."""
    control = AdmissionControl(shared_token(monkeypatch))
    codes = []
    for _ in range(100):
        with pytest.raises(Refusal) as refused:
            control.admit(Context(WRONG))
        codes.append(refused.value.code)
    assert (
        codes
        == [grpc.StatusCode.UNAUTHENTICATED] * 50
        + [grpc.StatusCode.RESOURCE_EXHAUSTED] * 50
    )
    assert control.admit(Context(RIGHT, "192.0.2.2")) == ("n1", RIGHT)
    control.answered("ipv4:192.0.2.1")
    assert control.admit(Context(RIGHT)) == ("n1", RIGHT)


def test_dropped_nodes_wait_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is dropped at once returns 6 times in 60 seconds, not 60 times."""
    control = AdmissionControl(shared_token(monkeypatch))
    now = 1000.0
    admitted = 0
    for second in range(60):
        with patch(
            "fedbudget.engines.grpc.admission.time.monotonic", return_value=now + second
        ):
            try:
                control.admit(Context(RIGHT))
            except Refusal:
                continue
            admitted += 1
            control.count_fault("n1", Context(RIGHT))
    assert admitted == 7
    with patch(
        "fedbudget.engines.grpc.admission.time.monotonic", return_value=now + 60 + 900
    ):
        assert control.admit(Context(RIGHT))


def test_refused_hellos_cost_no_bytes(net: Network) -> None:
    """A node with a token cannot spend a budget of bytes by hellos that do not fit."""
    before = net.server.counters.received
    for number in range(5):
        peer = RawPeer(net, f"n-{number}")
        classes = tuple(f"{each:0100d}" for each in range(900))
        (hello,) = pack(Hello("me", samples(classes=classes)))
        peer.send(hello)
        assert peer.ended()[0] == grpc.StatusCode.FAILED_PRECONDITION
    assert len(hello) > 90_000
    assert net.server.counters.received == before
    assert_undisturbed(net)


def test_long_reports_are_refused() -> None:
    """Costs of a report have 8 kB at most, and test results only if they are requested."""

    broadcast = TrainRound(
        round=1, w=np.zeros(4, np.float32), tau=1, eta=0.1, effective=1, report=LAYOUT
    )
    expected = ExpectedReport.of(broadcast)
    header = memoryview(bytes(9_000))
    with pytest.raises(PeerError, match="a report of 9000 bytes"):
        expected.read(Frame("report", header, memoryview(b"")), 1)


@pytest.mark.parametrize("readers", [1, 2])
def test_energy_is_limited_by_watts(readers: int) -> None:
    """A node that claims a million joules is limited by 20 times the declared watts."""
    meter = MeasuredEnergy(DeclaredEnergy(watts=5.0, joules_per_byte=0.0))
    claims = {"energy": Reading(1e6, 1e6, nodes=readers)}
    usage = within(Usage(claims, nodes=3), 2.0, 1)
    cost = meter.read(usage, Cost(1.0, 1.0))
    spent = cost.step + cost.aggregation
    assert spent == pytest.approx(readers * 20 * 5 * 2 + (3 - readers) * 5 * 2)


def test_audit_log_survives_a_crash(tmp_path: Path) -> None:
    """Events before the folder exists are on disk as soon as it does."""
    audit = AuditLog(LOG)
    audit.record("joined", "n1", "ipv4:192.0.2.1:40000")
    audit.open(tmp_path)
    assert '"n1"' in (tmp_path / admission.AUDIT).read_text()


def test_masked_run_resumes_with_earlier_clock() -> None:
    """Nodes refuse numbers of attempts that do not rise; the clock is an hour back."""
    with masked() as net:
        started(net)
        net.round()
        saved = net.server.state({})["attempt"]
        sums = sums_of(net)
        sums.last_attempt = 0  # a new process
        sums.resume(saved)
        with patch(
            "fedbudget.engines.grpc.masked_sums.time.time", return_value=saved / 1000 - 3600
        ):
            assert len(net.round().answers) == 4


BOMB = """
import asyncio
import sys
import grpc
from fedbudget.engines.grpc.stream import METHOD, NAME

async def main():
    async with grpc.aio.insecure_channel(
        sys.argv[1],
        compression=grpc.Compression.Gzip,
        options=[("grpc.max_send_message_length", -1)],
    ) as channel:
        call = channel.stream_stream(METHOD)(metadata=[(NAME, "bomb")])
        await call.write(bytes(600_000_000))
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.RpcError:
            pass
        print((await call.code()).name)

asyncio.run(main())
"""


@pytest.mark.slow
def test_compressed_bombs_take_no_memory(net: Network) -> None:
    """A message of 600 MB, 600 kB compressed, is refused before it is inflated."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, "-c", BOMB, net.address],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert ended.stdout.strip() == "RESOURCE_EXHAUSTED"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < 100_000_000
    assert_undisturbed(net)
