"""All bytes that nodes send in a private run, over gRPC: they are the same for other data,
except for the fields that noise or masks protect, random numbers and costs.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedbudget.arrays import Float32
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.messages import Hello, MaskedReport
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.wire import SentReport
from fedbudget.engines.remote.worker import Worker
from fedbudget.secure.messages import Confirmed, Introduction, Opened, Shares
from support.masked_network import masked
from support.networked import (
    FEATURES,
    Network,
    network,
    node_data,
    node_numbers,
    wait_until,
)

NODES = 4
RUNS: dict[str, Callable[[], AbstractContextManager[Network]]] = {
    "nodes": lambda: network("nodes"),
    "samples": lambda: network("samples"),
    "nodes, masked": lambda: masked("private"),
    "samples, masked": lambda: masked("sums"),
}


def other_data(node: int) -> NodeData:
    """As many samples of the same classes, with other values and in another order."""
    own = node_data(node)
    train = own.dataset.train
    assert train.labels is not None
    rng = np.random.default_rng(node)
    other = replace(train, x=rng.uniform(-9, 9, train.x.shape).astype(np.float32))
    other = replace(other, labels=train.labels[::-1].copy())
    return replace(own, dataset=replace(own.dataset, train=other))


def fixed_part(data: bytes) -> Any:
    """A message without random numbers, times, costs and protected fields.

    Only the sizes of these are left. Numbers of attempts follow from the clock.
    """
    frame = wire.unpack(data)
    if frame.name == "ready":
        return frame.name
    if frame.name == "report":
        sent: SentReport = wire._CODECS["report"].unpack(frame.header)
        return frame.name, sent.round, len(sent.numbers), sent.tallies, len(frame.rest)
    if frame.name == "masked report":
        report: MaskedReport = wire.read_masked(frame)
        return frame.name, report.round, len(frame.rest)
    message = wire.read(frame)
    match message:
        case Hello():
            return replace(message, instance="")
        case Introduction(key=key):
            return frame.name, key.name, message.tally, message.least
        case Shares():
            sizes = {name: len(each) for name, each in message.shares.items()}
            return frame.name, sorted(sizes.items()), len(message.seeds)
        case Confirmed():
            return frame.name, sorted(message.proofs)
        case Opened():
            return frame.name, sorted(message.own), sorted(message.pairs)
    return data


def sent_with(
    samples: Callable[[int], NodeData], kind: str, received: list[bytes]
) -> list[bytes]:
    """All messages of the nodes in three rounds."""
    received.clear()
    with RUNS[kind]() as net:
        for node in range(NODES):
            net.join(node, worker=Worker(samples(node)))
        net.start(NODES)
        for _ in range(3):
            assert node_numbers(net.round()) == list(range(NODES))
        # A sum is open before the last node has answered.
        names = ("opened", "masked report")
        wait_until(lambda: len({count_of(name, received) for name in names}) == 1)
        return list(received)


def count_of(name: str, received: list[bytes]) -> int:
    return sum(wire.unpack(data).name == name for data in received)


def spellings(x: Float32) -> Iterator[bytes]:
    """Features as floats in both byte orders, and as text; at least six bytes each.

    Random bytes could contain a single float of 32 bits, so these are in pairs.
    """
    for row in x:
        for kind in ("<f4", ">f4"):
            yield from (row[at : at + 2].astype(kind).tobytes() for at in range(5))
        for value in row.tolist():
            yield from (np.array(value, kind).tobytes() for kind in ("<f8", ">f8"))
            yield f"{value:.6f}".encode()


@pytest.mark.parametrize("kind", RUNS)
def test_other_data_change_protected_fields_only(kind: str, received: list[bytes]) -> None:
    first = sent_with(node_data, kind, received)
    second = sent_with(other_data, kind, received)
    assert len(first) >= 5 * NODES
    kept = [Counter(map(repr, map(fixed_part, sent))) for sent in (first, second)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    ("kind", "name", "first", "later"),
    [
        ("nodes", "report", 0, 4 * FEATURES),
        ("samples", "report", 0, 4 * FEATURES),
        ("nodes, masked", "masked report", 144, 8 * (FEATURES + 2)),
        ("samples, masked", "masked report", 16, 8 * (FEATURES + 1)),
    ],
)
def test_vectors_have_stated_size(
    kind: str, name: str, first: int, later: int, received: list[bytes]
) -> None:
    """As in the guide: with masks, each number takes 8 bytes, and so does a final 1."""
    frames = map(wire.unpack, sent_with(node_data, kind, received))
    sizes = [len(each.rest) for each in frames if each.name == name]
    assert sizes == [first] * NODES + [later] * 2 * NODES


@pytest.mark.parametrize("kind", RUNS)
def test_no_sample_is_on_the_wire(kind: str, received: list[bytes]) -> None:
    sent = b"".join(sent_with(other_data, kind, received))
    x = np.concatenate([other_data(node).dataset.train.x[:4] for node in range(NODES)])
    assert x.shape == (4 * NODES, FEATURES)
    assert not [each for each in spellings(x) if each in sent]


def test_hello_with_a_statistic_is_noticed(
    received: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison fails if a description follows from values."""
    samples = NodeData.samples

    def leaking(self: NodeData) -> Any:
        mean = np.abs(self.dataset.train.x).mean()
        return replace(samples(self), test_samples=round(1000 * mean))

    first = sent_with(node_data, "samples", received)
    monkeypatch.setattr(NodeData, "samples", leaking)
    second = sent_with(other_data, "samples", received)
    kept = [Counter(map(repr, map(fixed_part, sent))) for sent in (first, second)]
    assert kept[0] != kept[1]
