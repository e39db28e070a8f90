"""Anyone on the network, without credentials: connections that say nothing, half of a
handshake, wrong tokens.

The run goes on, and ends as it would. Rounds take at most half as long again, as compared
with the seconds before: this is a share of what the same machine did just then, and no test
of how quick it is. See docs/research/robustness.md."""

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
from support.processes import FEDBUDGET, commands, records

FEW = ("sh", "-c", 'ulimit -n 256; exec "$0" "$@"', FEDBUDGET)
OPTIONS = [
    "--model",
    "softmax",
    "--tau",
    "5",
    "--budget",
    "time=1000s",
    "--nodes",
    "2",
    "--out",
    "run",
]
BEFORE, FLOOD = 8.0, 30.0  # seconds
LONGER = 1.5  # times as long as before, at most
SECRET = "a-token-that-is-long-enough"


def pace(folder: Path, seconds: float) -> float:
    """Rounds in each of the coming seconds."""
    before, began = len(records(folder)), time.monotonic()
    time.sleep(seconds)
    return (len(records(folder)) - before) / (time.monotonic() - began)


@contextmanager
def connections(port: int, number: int, first: bytes = b"") -> Iterator[None]:
    """So many that say this and no more."""
    opened = []
    try:
        for _ in range(number):
            connection = socket.socket()
            connection.settimeout(1.0)
            try:
                connection.connect(("127.0.0.1", port))
                connection.sendall(first)
            except OSError:  # more than are accepted wait, or are turned away
                connection.close()
                continue
            opened.append(connection)
        yield
    finally:
        for connection in opened:
            connection.close()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "tls"), [(1000, False), (200, True)])
def test_connections_that_say_nothing(tmp_path: Path, number: int, tls: bool) -> None:
    with commands(tmp_path) as start:
        secure, trusting, first = [], [], b""
        if tls:
            assert start.run("certs", "certs").end() == 0
            secure = ["--cert", "certs/aggregator.pem", "--key", "certs/aggregator.key"]
            trusting, first = (
                ["--ca", "certs/ca.pem"],
                bytes.fromhex("16030102000100 01fc0303"),
            )
        aggregator = start.serve(*OPTIONS, *secure, program=FEW)
        nodes = start.nodes(aggregator.port, 2, *trusting)
        aggregator.wait_until(lambda: len(records(tmp_path / "run")) > 5)
        before = pace(tmp_path / "run", BEFORE)
        with connections(aggregator.port, number, first):
            during = pace(tmp_path / "run", FLOOD)
            assert aggregator.end(signal.SIGINT) == 0
        assert [node.end() for node in nodes] == [0, 0]
        assert during >= before / LONGER, (before, during)
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
        aggregator = start.serve(*OPTIONS, "--token-file", "token", program=FEW)
        nodes = start.nodes(aggregator.port, 2, "--token-file", "token")
        aggregator.wait_until(lambda: len(records(tmp_path / "run")) > 5)
        before, rounds, began = (
            pace(tmp_path / "run", BEFORE),
            len(records(tmp_path / "run")),
            time.monotonic(),
        )
        asyncio.run(guess(aggregator.port))
        during = (len(records(tmp_path / "run")) - rounds) / (time.monotonic() - began)
        assert aggregator.end(signal.SIGINT) == 0
        assert [node.end() for node in nodes] == [0, 0]
        refused = [
            line
            for line in (tmp_path / "run" / AUDIT).read_text().splitlines()
            if '"refused"' in line
        ]
        assert 1 <= len(refused) <= time.monotonic() - began + 1  # a line a second
        assert tries < 60 * FLOOD  # it was more than 600 a second
        assert during >= before / LONGER, (before, during)
