"""A server on loopback whose sums are masked, with nodes that can be made to die where a
test wants.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fedbudget.engines.grpc.masked_rounds import MaskingTerms
from fedbudget.engines.remote.round import CollectedRound
from fedbudget.protocol.messages import Broadcast
from fedbudget.secure.messages import Group, Relay, Survivors
from support.networked import LONG, Network, network

PHASES = [Group, Relay, Survivors]


class Died(Exception):
    """A node's process has ended."""


@contextmanager
def masked(
    method: str = "accelerated", threshold: float = 0.51, **more: Any
) -> Iterator[Network]:
    with network(method, masking=MaskingTerms(threshold), **more) as net:
        yield net


def started(net: Network, nodes: int = 4) -> list[Any]:
    joined = [net.join(node) for node in range(min(nodes, 4))]
    net.start(nodes)
    return joined


def die() -> None:
    raise Died


def made_again(net: Network, broadcast: Broadcast, left: float = LONG) -> CollectedRound:
    """A round that was made already, as after a crash of the aggregator, which has
    forgotten it.

    Args:
      left: seconds until it ends whatever it has.
    """
    for member in net.server.members.values():
        member.base_round = broadcast.round - 1
    net.server.begin(broadcast, least=1, timeout=LONG, left=left)
    return net.server.finish()


def chi_square(data: bytes) -> float:
    counts, expected = (
        np.bincount(np.frombuffer(data, np.uint8), minlength=256),
        len(data) / 256,
    )
    return float(((counts - expected) ** 2 / expected).sum())
