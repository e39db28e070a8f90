"""Peers that say whatever a test wants, byte for byte, to a server that two well-behaved
nodes use at the same time.

Whatever a peer does, the two nodes beside it train on to the same bits as without it.
"""

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from fedbudget.engines.grpc.messages import (
    AggregatorReader,
    EncodedBroadcast,
    pack_hello,
    pack_ready,
    pack_report,
)
from fedbudget.engines.grpc.stream import METHOD, NAME, TOKEN
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.messages import Hello, report_numbers
from fedbudget.engines.remote.task import SamplesDescription
from fedbudget.protocol.compression import encode
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.resources.resource import NodeCosts
from support.methods import bits
from support.networked import COSTS, FEATURES, Network, node_data, numbers, without_network

EVERY = [[0, 1]] * 5


def two_rounds(net: Network, **how: Any) -> None:
    """By two nodes."""
    for node in (0, 1):
        net.join(node, **how)
    net.start(2)
    net.round()
    net.round()


def assert_undisturbed(net: Network) -> None:
    """The two nodes make five rounds in all, as if nothing had happened."""
    while len(net.sent) < len(EVERY):
        assert numbers(net.round()) == [0, 1]
    assert bits(net.all_w) == bits(without_network(EVERY))


def assert_turned_away(
    peer: "RawPeer", code: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With a reason, which the log has too."""
    assert peer.ended()[0] == getattr(grpc.StatusCode, code)
    assert reason in peer.ended()[1]
    assert reason in caplog.text


def samples(**other: Any) -> SamplesDescription:
    return replace(node_data(2).samples(), **other)


def hello_of_version(peer: "RawPeer", version: int) -> bytes:
    message = pb.FromNode.FromString(peer.hello())
    message.hello.version = version
    return message.SerializeToString()


def heard(peer: "RawPeer") -> EncodedBroadcast:
    """The broadcast that a raw peer, which is told of everything anew, hears next."""
    message = AggregatorReader(peer.net.task).feed(peer.hear())
    assert isinstance(message, EncodedBroadcast)
    return message


def report_of(
    broadcast: Broadcast,
    w: float = 0.5,
    loss: float = 0.5,
    nodes: int = 1,
    costs: NodeCosts = COSTS,
    **other: Any,
) -> list[bytes]:
    """What a node would say, all of it made up; `other` fields replace those of the
    message.
    """
    numbers = {name: np.full(nodes, loss) for name in report_numbers(broadcast)}
    vectors = np.full((nodes, FEATURES), w, np.float32)
    made_up = Report(broadcast.round, np.arange(nodes), np.arange(nodes), **numbers)
    first, *rest = pack_report(made_up, costs, encode("none", vectors))
    message = pb.FromNode.FromString(first)
    for name, value in other.items():
        setattr(message.report, name, value)
    return [message.SerializeToString(), *rest]


class RawPeer:
    """A peer that says what it is told to, byte for byte, and counts what passes."""

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
        net.on_close.append(self.leave)  # it does not listen to a farewell
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

    def say(self, *messages: bytes) -> None:
        async def write() -> None:
            for message in messages:
                await self._call.write(message)
                self.sent += len(message) + 5

        self.net.call(write())

    def say_what_it_can(self, *messages: bytes) -> None:
        """The aggregator may hang up in the middle."""
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            self.say(*messages)

    def hear(self) -> bytes:
        async def read() -> bytes:
            data = await self._call.read()
            assert data is not grpc.aio.EOF
            self.received += len(data) + 5
            return bytes(data)

        return self.net.call(read())

    def ended(self) -> tuple[Any, str]:
        """How the aggregator ended it; what it said before is not looked at."""

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
        return pack_hello(Hello(**known))[0]

    def become_ready(self, **other: Any) -> None:
        """Says hello, hears the welcome, and is ready."""
        self.say(self.hello(**other))
        self.hear()
        self.say(*pack_ready(COSTS))
