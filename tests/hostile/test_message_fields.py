"""Hostile values in every field of every message.

The messages and their fields are found in the dataclasses (support/hostile_messages.py): a
new one is attacked by default.
"""

import tracemalloc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedbudget.engines.grpc.messages import AggregatorReader
from fedbudget.engines.grpc.stream import frames, pack
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.messages import Hello, Ready, Welcome
from fedbudget.engines.remote.node_limits import NodeLimits
from fedbudget.engines.remote.task import Task
from fedbudget.engines.remote.wire import EncodedBroadcast
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError
from fedbudget.models.catalogue import MODELS
from fedbudget.protocol.features.feature import _REGISTERED, FeatureSettings
from fedbudget.protocol.messages import PeerError
from support.hostile_messages import Attack, attacks, attacks_inside, example
from support.networked import (
    COSTS,
    METHODS,
    RUN,
    Network,
    aggregator,
    network,
    node_data,
    node_numbers,
    task,
)
from support.raw_peers import (
    RawPeer,
    assert_undisturbed,
    next_broadcast,
    report_of,
    two_rounds,
)

MEMORY = 50_000_000  # bytes that one message may cost its receiver
LIMITS = NodeLimits(min_batch=8, max_tau=10_000)  # the defaults of a node
QUICK = ("accelerated", "samples")
SLOW = pytest.mark.slow

READERS: dict[str, Callable[[wire.Frame], Any]] = {
    "ready": wire.read_ready,
    "masked report": wire.read_masked,
    "abstention": wire.read_abstention,
}


@contextmanager
def harmless(attack: Attack) -> Iterator[None]:
    """Check that a message is refused or accepted, without another error."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    reason = ""
    try:
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            yield
    except (PeerError, UserError) as error:
        reason = str(error)
    except Exception as error:
        raise AssertionError(f"{attack}: {error!r}") from error
    assert len(reason) < 5000, str(attack)
    assert tracemalloc.get_traced_memory()[1] - before < MEMORY, str(attack)


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("name", wire._KINDS)
def test_fields_are_refused_or_read(name: str, traced: None) -> None:
    message = wire.pack(example(wire._KINDS[name])).message
    read = READERS.get(name, wire.read)
    found = list(attacks(message))
    for attack in found:
        with harmless(attack):
            read(wire.unpack(attack.message))
    assert len(found) > 40


def welcomed(attack: Attack) -> None:
    """Start a new node with a hostile task."""
    with harmless(attack):
        welcome = AggregatorReader().feed(attack.message)
        if isinstance(welcome, Welcome):
            Worker(node_data(0), limits=LIMITS).start(welcome)


def welcome_with(own: Task) -> bytes:
    (message,) = pack(Welcome(RUN, own, (0,)))
    return message


@pytest.fixture
def compiled() -> None:
    """Kernels are compiled before, because compilers use much memory."""
    for own in (*map(task, METHODS), *[replace(task(), model=name) for name in MODELS]):
        with suppress(UserError):
            Worker(node_data(0)).start(Welcome(RUN, own, (0,)))


@pytest.mark.parametrize(
    "method",
    [each if each in QUICK else pytest.param(each, marks=SLOW) for each in METHODS],
)
def test_node_withstands_tasks_and_broadcasts(
    method: str, compiled: None, traced: None
) -> None:
    known = welcome_with(task(method))
    for attack in attacks(known):
        welcomed(attack)
    worker = Worker(node_data(0), limits=LIMITS)
    worker.accept(Welcome(RUN, task(method), (0,)))
    broadcast = aggregator(method).start()
    (message,) = frames(wire.pack_broadcast(broadcast, 0, catch_up=False))
    at = list(wire.SentRequest.__dataclass_fields__).index("broadcast")
    for attack in (*attacks(message), *attacks_inside(message, at)):
        with harmless(attack):
            reader = AggregatorReader()
            reader.feed(known)
            received = reader.feed(attack.message)
            if isinstance(received, EncodedBroadcast):
                before = worker.w_after(received.sent.base_round)
                worker.encode(worker.answer(received.request(before)).report)


@pytest.mark.parametrize("name", sorted(_REGISTERED))
def test_node_withstands_features(name: str, compiled: None, traced: None) -> None:
    """Every feature alone, with hostile settings."""
    feature = example(_REGISTERED[name])
    own = replace(task(), features=(FeatureSettings.of(feature),))
    for attack in attacks(welcome_with(own)):
        if attack.place.startswith("task/features"):
            welcomed(attack)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=SLOW) if each == "mlp" else each for each in MODELS]
)
def test_node_withstands_models(name: str, compiled: None, traced: None) -> None:
    """Every model, with hostile options."""
    options = {**MODELS[name].options, "another": 1}
    own = replace(task(), model=name, model_options=options)
    for attack in attacks(welcome_with(own)):
        if attack.place.startswith(("task/model", "task/parameters")):
            welcomed(attack)


def some(found: Iterable[Attack], most: int) -> list[Attack]:
    """About `most` of the attacks, evenly spaced."""
    listed = list(found)
    return listed[:: max(1, len(listed) // most)]


@pytest.mark.parametrize("most", [40, pytest.param(400, marks=SLOW)])
def test_aggregator_withstands_nodes(most: int) -> None:
    """A peer sends a hostile hello, ready or report; the other nodes train on."""
    with network() as net:
        two_rounds(net)
        number = 0
        for kind in (Hello, Ready):
            for attack in some(attacks(valid(net, kind)), most):
                number += 1
                join_with(net, kind, attack, f"n-{number}")
        assert_undisturbed(net)


def valid(net: Network, kind: type) -> bytes:
    (message,) = pack(
        Hello("me", node_data(2).samples()) if kind is Hello else Ready(COSTS)
    )
    return message


def join_with(net: Network, kind: type, attack: Attack, name: str) -> None:
    peer = RawPeer(net, name)
    if kind is Hello:
        peer.send_if_open(attack.message)
    else:
        peer.send(peer.hello())
        peer.receive()
        peer.send_if_open(attack.message)
    peer.leave()
    net.on_close.remove(peer.leave)  # or its connection stays


@pytest.mark.parametrize("most", [40, pytest.param(400, marks=SLOW)])
def test_round_withstands_reports(most: int) -> None:
    """A peer that is ready sends a hostile report; the round counts the other nodes."""
    with network() as net:
        two_rounds(net)
        pending = net.aggregator.pending
        assert pending is not None
        for number in range(len(some(attacks(report_of(pending)[0]), most))):
            peer = RawPeer(net, f"n-{number}")
            peer.become_ready()
            net.ready(3)
            net.begin()
            broadcast = next_broadcast(peer).request(None).broadcast
            first, *rest = report_of(broadcast)
            attack = some(attacks(first), most)[number]
            peer.send_if_open(attack.message, *rest)
            peer.leave()
            net.on_close.remove(peer.leave)
            assert {0, 1} <= {*node_numbers(net.finish())}, str(attack)
            assert np.isfinite(net.all_w[-1]).all(), str(attack)
