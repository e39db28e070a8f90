"""Fixtures: a network after two rounds, actions at messages of secure aggregation, and a
record of what the aggregator reads.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fedbudget.engines.grpc.masking_node import NodeMasking
from fedbudget.engines.grpc.service import Service
from support.networked import Network, network
from support.raw_peers import two_rounds


@pytest.fixture
def net() -> Iterator[Network]:
    """Two nodes after two rounds."""
    with network() as ours:
        two_rounds(ours)
        yield ours


@pytest.fixture
def at_message(
    monkeypatch: pytest.MonkeyPatch,
) -> dict[tuple[str, type], Callable[[], None]]:
    """Actions that a node runs before it answers a message of secure aggregation."""
    actions: dict[tuple[str, type], Callable[[], None]] = {}
    answer = NodeMasking.answer

    def answering(self: NodeMasking, message: Any) -> list[bytes]:
        actions.pop((self._name, type(message)), lambda: None)()
        return answer(self, message)

    monkeypatch.setattr(NodeMasking, "answer", answering)
    return actions


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """All frames that the aggregator reads from now on."""
    messages: list[bytes] = []
    read = Service._read

    async def reading(self: Service, *given: Any, **options: Any) -> bytes | None:
        data = await read(self, *given, **options)
        if data is not None:
            messages.append(data)
        return data

    monkeypatch.setattr(Service, "_read", reading)
    return messages
