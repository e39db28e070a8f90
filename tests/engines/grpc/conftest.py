"""A network that has made rounds; what happens to messages of masked sums, and what the
aggregator reads.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fedbudget.engines.grpc.masking_node import NodeMasking
from fedbudget.engines.grpc.service import Service
from fedbudget.engines.remote import wire_pb2 as pb
from support.networked import Network, network
from support.raw_peers import two_rounds


@pytest.fixture
def net() -> Iterator[Network]:
    """Two nodes that have made two rounds."""
    with network() as ours:
        two_rounds(ours)
        yield ours


@pytest.fixture
def at_message(
    monkeypatch: pytest.MonkeyPatch,
) -> dict[tuple[str, type], Callable[[], None]]:
    """What happens at a node when it gets a message of a kind, before it answers."""
    happens: dict[tuple[str, type], Callable[[], None]] = {}
    answer = NodeMasking.answer

    def answering(self: NodeMasking, message: Any) -> list[bytes]:
        happens.pop((self._name, type(message)), lambda: None)()
        return answer(self, message)

    monkeypatch.setattr(NodeMasking, "answer", answering)
    return happens


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[pb.FromNode]:
    """All that the aggregator reads, from now on."""
    found: list[pb.FromNode] = []
    read = Service._read

    async def reading(self: Service, context: Any, patience: float | None) -> bytes | None:
        data = await read(self, context, patience)
        if data is not None:
            found.append(pb.FromNode.FromString(data))
        return data

    monkeypatch.setattr(Service, "_read", reading)
    return found
