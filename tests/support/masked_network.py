"""A server with secure aggregation on loopback; tests can make its nodes die."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from fedbudget.engines.engine import RoundTerms
from fedbudget.engines.grpc.masked_sums import MaskedSums
from fedbudget.engines.remote.round import CollectedRound
from fedbudget.protocol.messages import Broadcast
from fedbudget.secure.identity import Trust
from fedbudget.secure.messages import Confirmations, Group, Relay, Survivors
from support.networked import LONG, RUN, Network, network

PHASES = [Group, Relay, Survivors, Confirmations]
LATE = (Survivors, Confirmations)
"""Messages after a node's vector has arrived."""


class Died(Exception):
    """The node's process has died."""


@contextmanager
def masked(
    method: str = "accelerated", threshold: float = 2 / 3, **more: Any
) -> Iterator[Network]:
    with network(method, reports=MaskedSums(RUN, threshold, Trust()), **more) as net:
        net.task = replace(net.task, most_counted=1000)
        yield net


def masked_sums(net: Network) -> MaskedSums:
    reports = net.server._rounds.reports
    assert isinstance(reports, MaskedSums)
    return reports


def started(net: Network, nodes: int = 4) -> list[Any]:
    joined = [net.join(node) for node in range(min(nodes, 4))]
    net.start(nodes)
    return joined


def die() -> None:
    raise Died


def repeat_round(net: Network, broadcast: Broadcast, left: float = LONG) -> CollectedRound:
    """Repeat a finished round, as an aggregator does after a crash.

    Args:
      left: seconds after which the round ends.
    """
    for member in net.server.members.values():
        member.base_round = broadcast.round - 1
    net.server.begin(broadcast, RoundTerms(1, LONG, left))
    return net.server.finish()


def chi_square(data: bytes) -> float:
    """χ² statistic of the byte values against a uniform distribution."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    expected = len(data) / 256
    return float(((counts - expected) ** 2 / expected).sum())
