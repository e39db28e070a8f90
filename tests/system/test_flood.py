"""Floods without credentials: silent connections, half a TLS handshake, wrong tokens.

The run continues and ends normally. Rounds take at most 1.5 times as long as in the seconds
before the flood, so the test does not depend on the speed of the machine. See
docs/research/robustness.md."""

import asyncio
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from fedbudget.engines.grpc.admission import AUDIT
from fedbudget.engines.grpc.stream import METHOD, NAME, TOKEN
from support.processes import FEDBUDGET, cli_options, commands, records

FEW_FILES = ("sh", "-c", 'ulimit -n 256; exec "$0" "$@"', FEDBUDGET)
OPTIONS = cli_options(model="softmax", tau=5, budget="time=1000s", nodes=2, out="run")
BEFORE, FLOOD = 8.0, 30.0  # seconds
MAX_SLOWDOWN = 1.5
SECRET = "a-token-that-is-long-enough"


def pace(folder: Path, seconds: float) -> float:
    """Rounds per second during the next `seconds`."""
    before, began = len(records(folder)), time.monotonic()
    time.sleep(seconds)
    return (len(records(folder)) - before) / (time.monotonic() - began)


@contextmanager
def connections(port: int, number: int, first: bytes = b"") -> Iterator[None]:
    """Open connections that send `first` and then nothing."""
    opened = []
    try:
        for _ in range(number):
            connection = socket.socket()
            connection.settimeout(1.0)
            try:
                connection.connect(("127.0.0.1", port))
                connection.sendall(first)
            except OSError:  # the server accepts no more connections
                connection.close()
                continue
            opened.append(connection)
        yield
    finally:
        for connection in opened:
            connection.close()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "tls"), [(1000, False), (200, True)])
def test_silent_connections(tmp_path: Path, number: int, tls: bool) -> None:
    with commands(tmp_path) as start:
        secure, trusting, first = [], [], b""
        if tls:
            assert start.run("certs", "certs").end() == 0
            secure = ["--cert", "certs/aggregator.pem", "--key", "certs/aggregator.key"]
            trusting = ["--ca", "certs/ca.pem"]
            first = bytes.fromhex("16030102000100 01fc0303")
        aggregator = start.serve(*OPTIONS, *secure, program=FEW_FILES)
        nodes = start.nodes(aggregator.port, 2, *trusting)
        aggregator.wait_until(lambda: len(records(tmp_path / "run")) > 5)
        before = pace(tmp_path / "run", BEFORE)
        with connections(aggregator.port, number, first):
            during = pace(tmp_path / "run", FLOOD)
            assert aggregator.end(signal.SIGINT) == 130
        assert [node.end() for node in nodes] == [0, 0]
        assert during >= before / MAX_SLOWDOWN, (before, during)
        assert "Too many open files" not in aggregator.errors


@pytest.mark.slow
def test_wrong_tokens_at_full_speed(tmp_path: Path) -> None:
    tries = 0

    async def guess(port: int) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

            async def one() -> None:
                nonlocal tries
                while time.monotonic() < end:
                    call = channel.stream_stream(METHOD)(
                        metadata=[(NAME, "n1"), (TOKEN, "wrong" * 5)]
                    )
                    try:
                        await call.read()
                    except grpc.RpcError:
                        tries += 1

            end = time.monotonic() + FLOOD
            await asyncio.gather(*(one() for _ in range(200)))

    with commands(tmp_path) as start:
        (tmp_path / "token").write_text(SECRET)
        (tmp_path / "token").chmod(0o600)
        aggregator = start.serve(*OPTIONS, "--token-file", "token", program=FEW_FILES)
        nodes = start.nodes(aggregator.port, 2, "--token-file", "token")
        aggregator.wait_until(lambda: len(records(tmp_path / "run")) > 5)
        before = pace(tmp_path / "run", BEFORE)
        rounds = len(records(tmp_path / "run"))
        began = time.monotonic()
        asyncio.run(guess(aggregator.port))
        during = (len(records(tmp_path / "run")) - rounds) / (time.monotonic() - began)
        assert aggregator.end(signal.SIGINT) == 130
        assert [node.end() for node in nodes] == [0, 0]
        refused = [
            line
            for line in (tmp_path / "run" / AUDIT).read_text().splitlines()
            if '"refused"' in line
        ]
        assert 1 <= len(refused) <= time.monotonic() - began + 1  # a line a second
        assert tries < 60 * FLOOD  # more than 600 a second without a rate limit
        assert during >= before / MAX_SLOWDOWN, (before, during)
