"""A node's end of the connection: what it sends, reconnection, and aggregators that
misbehave.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fedbudget.data.dataset import Dataset, Part
from fedbudget.engines.engine import RoundTerms
from fedbudget.engines.grpc import node as node_module
from fedbudget.engines.grpc.messages import AggregatorReader
from fedbudget.engines.grpc.node import RefusedByAggregator, run_node
from fedbudget.engines.grpc.stream import METHOD, MORE, frames, pack
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.messages import Farewell, Hello, Welcome
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.task import agree
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError
from fedbudget.launch.inputs import from_file
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.feature import FeatureSettings
from fedbudget.protocol.messages import Broadcast, FinalRound
from support.messages import with_field
from support.methods import bits
from support.networked import (
    LONG,
    METHODS,
    RUN,
    PausableWorker,
    aggregator,
    network,
    node_data,
    task,
    wait_until,
    without_network,
)

# What leaves a node.


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """All messages that nodes send from now on."""
    result: list[bytes] = []
    send = node_module._send

    async def recording(call: Any, messages: list[bytes]) -> None:
        result.extend(messages)
        await send(call, messages)

    monkeypatch.setattr(node_module, "_send", recording)
    return result


FEATURES = 64


@pytest.mark.parametrize("stored", ["uint8", "float32", "float64"])
@pytest.mark.parametrize("method", ["paper", "frugal"])
def test_raw_data_never_leave_node(sent: list[bytes], stored: str, method: str) -> None:
    rng = np.random.default_rng(3)
    x = (
        rng.integers(0, 17, (60, FEATURES))
        if stored == "uint8"
        else rng.normal(size=(60, FEATURES))
    )
    scale = 1 / 16 if stored == "uint8" else 0.5
    data = Dataset(
        "d", Part(x.astype(stored), rng.integers(0, 2, 60)), classes=("a", "b"), scale=scale
    )
    own = [NodeData(data, [np.arange(30)]), NodeData(data, [np.arange(30, 60)])]
    with network(method, batch=4) as net:
        samples = agree([each.samples() for each in own])
        net.task = replace(net.task, parameters=FEATURES, samples=samples)
        start = np.zeros(FEATURES, np.float32)
        net.aggregator = large_aggregator(method, start)
        joined = [net.join(node, worker=Worker(each)) for node, each in enumerate(own)]
        net.start(2)
        for _ in range(6):
            net.round()
        net.server.close(Farewell("the run is over"))
        assert [each.result(LONG).reason for each in joined] == ["the run is over"] * 2
        received = net.server.counters.received

    kinds = [wire.unpack(message).name for message in sent]
    assert sorted(kinds) == ["hello"] * 2 + ["ready"] * 2 + ["report"] * 12
    assert sum(len(message) + 5 for message in sent) == received
    everything, pieces = b"|".join(sent), 0
    for row in data.train.x:
        for values in (row, row * scale):
            for form in ("<f4", "<f8", ">f4", ">f8", "u1"):
                if form == "u1" and (stored != "uint8" or values is not row):
                    continue
                for at in range(0, FEATURES, 16):  # not even a quarter of a sample
                    piece = values[at : at + 16].astype(form).tobytes()
                    assert piece not in everything
                    pieces += 1
    assert pieces >= 60 * 4 * 8


def large_aggregator(method: str, start: Any) -> Aggregator:
    known = aggregator(method)
    return Aggregator(
        start,
        method=METHODS[method],
        budget=known.ledger.budget,
        expected=known.ledger.costs,
    )


def csv(folder: Path, rows: int) -> Path:
    rng, path = np.random.default_rng(rows), folder / f"{rows}.csv"
    lines = [
        ",".join(f"{value:.6f}" for value in rng.normal(3, 2, size=4)) for _ in range(rows)
    ]
    path.write_text("\n".join(["a,b,c,target", *lines]) + "\n")
    return path


def test_csv_hello_has_only_moments(tmp_path: Path) -> None:
    """Column names, means and deviations; its size does not depend on the rows."""
    sizes = []
    for rows in (10, 1000):
        own = from_file(csv(tmp_path, rows))
        (message,) = pack(Hello("me", own.samples()))
        samples = wire.read(wire.unpack(message)).samples
        assert samples.table is not None
        assert samples.target is not None
        x, values = own.dataset.train.x.astype(np.float64), own.dataset.train.values
        assert values is not None
        columns = samples.table.columns.values()
        np.testing.assert_allclose([each.mean for each in columns], x.mean(axis=0))
        np.testing.assert_allclose([each.deviation for each in columns], x.std(axis=0))
        np.testing.assert_allclose(samples.target.mean, [values.mean()])
        sizes.append(len(message))
    # 100 times the samples need five wider integers: two totals, and one per column.
    assert abs(sizes[0] - sizes[1]) <= 10
    with pytest.raises(UserError, match="has 9 samples; standardisation needs 10"):
        from_file(csv(tmp_path, 9)).samples()


def test_byte_counts_of_nodes_match(
    sent: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_messages: list[bytes] = []

    class Counting(AggregatorReader):
        def feed(self, data: bytes) -> Any:
            read_messages.append(data)
            return super().feed(data)

    monkeypatch.setattr(node_module, "AggregatorReader", Counting)
    with network("paper") as net:
        joined = [net.join(node) for node in range(3)]
        net.start(3)
        for _ in range(4):
            net.round()
        net.server.close(Farewell("over"))
        for each in joined:
            each.result(LONG)
        assert net.server.counters.received == sum(len(message) + 5 for message in sent)
        assert net.server.counters.sent == sum(
            len(message) + 5 for message in read_messages
        )
    assert len(read_messages) == 3 * (1 + 4 + 1)


# Reconnection.


def test_node_survives_aggregator_restart() -> None:
    notices: list[str] = []
    with network(batch=5) as net:
        joined = [net.join(node, notify=notices.append) for node in (0, 1)]
        net.start(2)
        net.round(), net.round()
        net.restart(net.server.members.snapshot(), "back soon")
        net.round(), net.round()
        assert bits(net.all_w) == bits(without_network([[0, 1]] * 4, batch=5))
        assert any("back soon" in text for text in notices)
        net.server.close(Farewell("over"))
        assert [each.result(LONG) for each in joined] == [Farewell("over")] * 2


def test_uncounted_round_is_repeated() -> None:
    works = [Worker(node_data(node)) for node in (0, 1)]
    with network(batch=5) as net:
        for node in (0, 1):
            net.join(node, worker=works[node])
        net.start(2)
        net.round()
        members, broadcast = net.server.members.snapshot(), net.aggregator.pending
        assert broadcast is not None
        # It crashes after the nodes have answered.
        net.server.begin(broadcast, RoundTerms(2, LONG, LONG))
        wait_until(lambda: [work.made for work in works] == [2, 2])
        net.server.finish()
        net.restart(members, "a crash")
        net.round(), net.round()
        assert bits(net.all_w) == bits(without_network([[0, 1]] * 3, batch=5))


def test_unreachable_aggregator_is_reported() -> None:
    with network() as net:
        address = net.address
    with pytest.raises(
        RefusedByAggregator, match=f"{address} could not be reached for 0 seconds"
    ):
        asyncio.run(run_node(address, Worker(node_data(0)), name="node-0", patience=0.0))


def test_farewell_interrupts_a_round() -> None:
    """Also during a trial round, which may compile kernels for a minute."""
    notices: list[str] = []
    working, preparing = PausableWorker(node_data(0)), PausableWorker(node_data(1))
    with network() as net:
        joined = [net.join(0, worker=working, notify=notices.append)]
        net.start(1)
        for worker in (working, preparing):
            worker.go.clear()
        net.begin()
        joined.append(net.join(1, worker=preparing, notify=notices.append))
        wait_until(
            lambda: (
                net.server._rounds.count() == 2
                and all(peer.welcomed for peer in net.server._peers)
            )
        )
        net.server.close(Farewell("over"))
        assert [each.result(LONG) for each in joined] == [Farewell("over")] * 2
        assert (working.made, preparing.made) == (0, 0)
        for worker in (working, preparing):
            worker.go.set()
    assert sum("joined" in text for text in notices) == 1


def test_node_reports_waiting() -> None:
    notices: list[str] = []
    with network() as net:
        net.join(0, notify=notices.append)
        wait_until(lambda: bool(notices))
        assert notices == [f"connected to {net.address}; waiting for a task"]
        net.start(1)
        wait_until(lambda: len(notices) == 2)
        assert notices[1] == f"joined {net.address} as node-0, to train svm (6 parameters)"


# An aggregator that misbehaves.


async def run_against(*connections: list[bytes], code: Any = None) -> list[str]:
    """Run a node against an aggregator that sends these bytes on each connection. Return
    the notices of the node.
    """
    notices: list[str] = []
    coming = iter(connections)

    async def converse(_: Any, context: Any) -> None:
        if code is not None:
            await context.abort(code, "go away")
        for message in next(coming):
            await context.write(message)
        while await context.read() is not grpc.aio.EOF:
            pass

    server = grpc.aio.server()
    service, name = METHOD.strip("/").split("/")
    handler = grpc.stream_stream_rpc_method_handler(converse)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {name: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        await run_node(
            f"127.0.0.1:{port}", Worker(node_data(0)), name="node-0", notify=notices.append
        )
    finally:
        await server.stop(None)
    return notices


def welcome(**other: Any) -> bytes:
    return pack(Welcome(RUN, replace(task(), **other), (0,)))[0]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([b"\xff"], "bytes that are not a message"),
        ([b""], "an empty message"),
        (
            [MORE + b"123"],
            "unexpected message: 'more'",
        ),
        ([welcome(), welcome()], "unexpected message: 'welcome'"),
        (
            [pack(Welcome(RUN, task(), (0, 1)))[0]],
            "numbers for 2 nodes instead of 1",
        ),
        ([pack(Farewell("not now", again=True))[0]], "not now"),
    ],
)
def test_node_retries_after_protocol_errors(
    messages: list[bytes], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "_FIRST_WAIT", 0.001)
    last = pack(Farewell("over"))
    notices = asyncio.run(run_against(messages, last))
    assert any(reason in text and "trying again" in text for text in notices)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"round": 5, "base_round": 4}, "this node has no memory of round 4"),
        ({"tau": 9, "effective": 9.0}, "tau is 9; the task allows 8"),
        ({"effective": float("nan")}, "1 updates, nan in effect; the task allows 8"),
        ({"eta": float("nan")}, "eta is nan"),
        ({"rest": bytes(25)}, "a part of vectors of 25 bytes instead of 24"),
        ({"vectors": 3}, "a part of vectors of 24 bytes instead of 72"),
        (
            {"rest": np.full(6, np.inf, np.float32).tobytes()},
            "parameters that are not finite",
        ),
    ],
)
def test_invalid_broadcasts_are_reported(
    other: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "_FIRST_WAIT", 0.001)
    start = aggregator().start()
    broadcast = replace(
        start, **{name: value for name, value in other.items() if hasattr(start, name)}
    )
    (message,) = frames(wire.pack_broadcast(broadcast, 0, catch_up=False))
    for name, value in other.items():
        if not hasattr(start, name):
            message = with_field(message, name, value)
    notices = asyncio.run(run_against([welcome(), message], pack(Farewell("over"))))
    assert any(f"it broke the protocol: {reason}" in text for text in notices)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"model": "no-such-model"}, "unknown model"),
        ({"parameters": 7}, "7 at the aggregator"),
        (
            {"features": (FeatureSettings("NoSuchFeature", {}),)},
            "uses the feature NoSuchFeature, which is not known here: import",
        ),
    ],
)
def test_impossible_task_stops_node(other: dict[str, Any], reason: str) -> None:
    with pytest.raises(RefusedByAggregator, match=reason):
        asyncio.run(run_against([welcome(**other)]))


def test_private_run_has_no_training_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its report would have no noise."""
    monkeypatch.setattr(node_module, "_FIRST_WAIT", 0.001)
    private = pack(Welcome(RUN, task("private"), (0,)))[0]
    first = aggregator("fixed").start()
    assert isinstance(first, Broadcast)
    for broadcast in (first, FinalRound(round=1, w=first.w)):
        (message,) = frames(wire.pack_broadcast(broadcast, 0, catch_up=False))
        notices = asyncio.run(run_against([private, message], pack(Farewell("over"))))
        reason = f"it broke the protocol: {type(broadcast).__name__} is no round"
        assert any(reason in text for text in notices)


@pytest.mark.parametrize("code", sorted(node_module._FINAL, key=str))
def test_final_refusals_stop_node(code: Any) -> None:
    with pytest.raises(RefusedByAggregator, match="refused node-0: go away"):
        asyncio.run(run_against(code=code))
