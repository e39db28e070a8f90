"""Peers that send arbitrary bytes to a server with two honest nodes.

A peer must not affect the two nodes: they train to the same bits as without it.
"""

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from fedbudget.engines.grpc.messages import AggregatorReader
from fedbudget.engines.grpc.stream import METHOD, NAME, TOKEN, frames, pack
from fedbudget.engines.remote.messages import Hello, Ready
from fedbudget.engines.remote.task import SamplesDescription
from fedbudget.engines.remote.wire import EncodedBroadcast, pack_report
from fedbudget.protocol.features.compression import encode
from fedbudget.protocol.messages import Broadcast
from fedbudget.resources.resource import Usage
from support.messages import with_field
from support.methods import bits
from support.networked import (
    COSTS,
    FEATURES,
    Network,
    node_data,
    node_numbers,
    without_network,
)

EVERY = [[0, 1]] * 5


def two_rounds(net: Network, **how: Any) -> None:
    """Run two rounds with two nodes."""
    for node in (0, 1):
        net.join(node, **how)
    net.start(2)
    net.round()
    net.round()


def assert_undisturbed(net: Network) -> None:
    """Check that both nodes finish five rounds with the expected bits."""
    while len(net.sent) < len(EVERY):
        assert node_numbers(net.round()) == [0, 1]
    assert bits(net.all_w) == bits(without_network(EVERY))


def assert_refused(
    peer: "RawPeer", code: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Check the status, and that peer and log have the reason."""
    assert peer.ended()[0] == getattr(grpc.StatusCode, code)
    assert reason in peer.ended()[1]
    assert reason in caplog.text


def samples(**other: Any) -> SamplesDescription:
    return replace(node_data(2).samples(), **other)


def hello_of_version(peer: "RawPeer", version: int) -> bytes:
    hello = bytearray(peer.hello())
    hello[1] = version
    return bytes(hello)


def next_broadcast(peer: "RawPeer") -> EncodedBroadcast:
    """Receive the next broadcast with the state of a new node."""
    message = AggregatorReader(peer.net.task).feed(peer.receive())
    assert isinstance(message, EncodedBroadcast)
    return message


def report_of(
    broadcast: Broadcast,
    w: float = 0.5,
    loss: float = 0.5,
    nodes: int = 1,
    costs: Usage = COSTS,
    **other: Any,
) -> list[bytes]:
    """A made-up report as messages; `other` fields replace those of the first message."""
    numbers = {name: np.full(nodes, loss) for name in broadcast.report.numbers}
    vectors = np.full((nodes, FEATURES), w, np.float32)
    made_up = broadcast.answer(
        round=broadcast.round,
        nodes=np.arange(nodes),
        sizes=np.arange(nodes),
        numbers=numbers,
    )
    first, *rest = frames(pack_report(made_up, costs, encode("none", vectors)))
    for name, value in other.items():
        first = with_field(first, name, value)
    return [first, *rest]


class RawPeer:
    """A peer that sends given bytes, and counts the bytes in both directions."""

    def __init__(
        self,
        net: Network,
        name: str = "intruder",
        *,
        token: str | None = None,
        credentials: Any = None,
        node: int = 2,
    ) -> None:
        self.sent = self.received = 0
        self.net = net
        net.on_close.append(self.leave)  # a raw peer ignores the farewell
        self._node = node
        metadata = [(NAME, name)] + ([] if token is None else [(TOKEN, token)])

        async def connect() -> Any:
            options = [("grpc.use_local_subchannel_pool", 1)]
            self._channel = (
                grpc.aio.insecure_channel(net.address, options=options)
                if credentials is None
                else grpc.aio.secure_channel(net.address, credentials, options=options)
            )
            return self._channel.stream_stream(METHOD)(metadata=metadata)

        self._call = net.call(connect())

    def send(self, *messages: bytes) -> None:
        async def write() -> None:
            for message in messages:
                await self._call.write(message)
                self.sent += len(message) + 5

        self.net.call(write())

    def send_if_open(self, *messages: bytes) -> None:
        """Send until the aggregator closes the stream."""
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            self.send(*messages)

    def receive(self) -> bytes:
        async def read() -> bytes:
            data = await self._call.read()
            assert data is not grpc.aio.EOF
            self.received += len(data) + 5
            return bytes(data)

        return self.net.call(read())

    def ended(self) -> tuple[Any, str]:
        """Status and details at the end of the stream; skips earlier messages."""

        async def end() -> tuple[Any, str]:
            try:
                while await self._call.read() is not grpc.aio.EOF:
                    pass
            except grpc.RpcError:
                pass
            return await self._call.code(), await self._call.details() or ""

        return self.net.call(end())

    def leave(self) -> None:
        self.net.call(self._channel.close())

    def hello(self, **other: Any) -> bytes:
        known = {"instance": "one", "samples": node_data(self._node).samples(), **other}
        return pack(Hello(**known))[0]

    def become_ready(self, **other: Any) -> None:
        """Send hello, receive the welcome, and send ready."""
        self.send(self.hello(**other))
        self.receive()
        self.send(*pack(Ready(COSTS)))
