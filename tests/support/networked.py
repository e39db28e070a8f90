"""A server on loopback with nodes in this process.

Each of four nodes has a small shard of one dataset. `without_network` computes the expected
result of a run: its fleets and aggregator communicate directly."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.budget.budget import Budget
from fedbudget.budget.control import AdaptiveTau, FixedTau
from fedbudget.budget.spending import CarefulSpending, PaperSpending, PrivateSpending
from fedbudget.budget.step_size import FixedStep
from fedbudget.data.dataset import Dataset, Part
from fedbudget.engines.engine import RoundTerms
from fedbudget.engines.grpc import node as node_module
from fedbudget.engines.grpc.masked_sums import MaskedSums
from fedbudget.engines.grpc.masking_node import MaskingOptions
from fedbudget.engines.grpc.node import run_node
from fedbudget.engines.grpc.server import AggregatorServer
from fedbudget.engines.grpc.tokens import Tokens
from fedbudget.engines.noise import SecretNoise
from fedbudget.engines.remote.members import Member
from fedbudget.engines.remote.messages import Farewell
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.round import CollectedRound
from fedbudget.engines.remote.task import Task, agree
from fedbudget.engines.remote.worker import Worker
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.compression import BroadcastCompressor
from fedbudget.protocol.features.feature import FeatureSettings
from fedbudget.protocol.features.node_privacy import NodePrivacy, PrivateAggregator
from fedbudget.protocol.features.sample_privacy import (
    SampleAggregator,
    SamplePrivacy,
    SampleSumAggregator,
    SampleSums,
)
from fedbudget.protocol.features.validation import Validation
from fedbudget.protocol.messages import Broadcast, Kind, Report
from fedbudget.protocol.method import Method, PrivateRule
from fedbudget.protocol.state import Outcome
from support.methods import accelerated
from support.problems import CHEAP, costs
from support.usage import node_costs

FEATURES = 6
RUN = "a-run"
COSTS = node_costs(0.001, 0.002, cpu=(0.001, 0.002))
LONG = 20.0
"""Timeout in seconds that no test reaches."""

METHODS = {
    "fixed": Method(FixedTau(3), FixedStep(0.1), delta="parameters"),
    "paper": Method(
        AdaptiveTau(phi=0.01, tau_max=8), FixedStep(0.1), spending=PaperSpending()
    ),
    "frugal": Method(
        AdaptiveTau(tau_max=8, leap=True),
        FixedStep(0.1),
        correct_drift=True,
        delta="parameters",
        spending=CarefulSpending(tau_max=8),
    ),
    "accelerated": accelerated(tau_max=8),
    "validated": replace(accelerated(tau_max=8), validation=Validation(0.3)),
    "private": Method(
        FixedTau(1),
        FixedStep(0.1),
        spending=PrivateSpending(50),
        private=PrivateRule(4, SecretNoise(), NodePrivacy(), tau=3),
        sums_only=True,
    ),
    "nodes": Method(
        FixedTau(1),
        FixedStep(0.1),
        spending=PrivateSpending(50),
        private=PrivateRule(4, SecretNoise(), NodePrivacy(), tau=3),
    ),
    "samples": Method(
        FixedTau(1),
        FixedStep(0.1),
        spending=PrivateSpending(50),
        private=PrivateRule(4, SecretNoise(), SamplePrivacy(), tau=3),
    ),
    "sums": Method(
        FixedTau(1),
        FixedStep(0.1),
        spending=PrivateSpending(50),
        private=PrivateRule(4, SecretNoise(), SampleSums(), tau=1),
        sums_only=True,
    ),
}

_SIZES = (14, 20, 11, 17)
_Result = TypeVar("_Result")


def small_dataset(dtype: str = "float32") -> Dataset:
    """A dataset of two classes that are separable by the features."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(sum(_SIZES), FEATURES))
    labels = (x @ rng.normal(size=FEATURES) > 0).astype(np.int64)
    return Dataset("small data", Part(x.astype(dtype), labels), classes=("no", "yes"))


def node_data(node: int) -> NodeData:
    end = sum(_SIZES[: node + 1])
    return NodeData(small_dataset(), [np.arange(end - _SIZES[node], end)])


def task(method: str = "frugal", compress: Kind = "none", batch: int | None = None) -> Task:
    samples = agree([node_data(node).samples() for node in range(len(_SIZES))])
    features = tuple(map(FeatureSettings.of, METHODS[method].features))
    return Task("svm", FEATURES, batch, 7, {}, compress, 8, samples, features)


def aggregator(method: str = "frugal", **more: Any) -> Aggregator:
    """An aggregator whose budget is never reached."""
    start = np.zeros(FEATURES, np.float32)
    known: dict[str, Any] = {
        "method": METHODS[method],
        "budget": Budget({"time": 1e6}),
        "expected": CHEAP,
    }
    if METHODS[method].private is not None:
        private: dict[str, Any] = {
            "budget": Budget({"time": 1e6, "privacy": 1.0}, 1e-5),
            "rounds": 200,
        }
        kinds = {"samples": SampleAggregator, "sums": SampleSumAggregator}
        kind = kinds.get(method, PrivateAggregator)
        return kind(
            start,
            **{**known, **private, "expected": costs([0.01, 0.0], [0.01, 0.0]), **more},
        )
    return Aggregator(start, **{**known, **more})


def without_network(
    present: Sequence[Sequence[int]], method: str = "frugal", batch: int | None = None
) -> list[Float32]:
    """Return the w of all broadcasts, including the next one.

    Args:
      present: the nodes that take part in each round.
    """
    ours = aggregator(method)
    fleets = [
        node_data(node).fleet(task(method, batch=batch), [node])
        for node in range(len(_SIZES))
    ]
    broadcast: Broadcast | Outcome = ours.start()
    sent = []
    for taking_part in present:
        assert isinstance(broadcast, Broadcast)
        sent.append(broadcast.w)
        broadcast = ours.receive(
            Report.merge([fleets[node].answer(broadcast) for node in taking_part]), CHEAP
        )
    assert isinstance(broadcast, Broadcast)
    return [*sent, broadcast.w]


def node_numbers(collected: CollectedRound) -> list[int]:
    """Numbers of the nodes that reported in a round."""
    return [int(answer.nodes[0]) for answer in collected.answers]


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    limit = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < limit, "timeout"
        time.sleep(0.002)


class PausableWorker(Worker):
    """A node that answers only while `go` is set."""

    def __init__(self, own: NodeData, **more: Any) -> None:
        super().__init__(own, **more)
        self.go = threading.Event()
        self.go.set()

    def start(self, welcome: Any) -> Any:
        self.go.wait(LONG / 4)
        return super().start(welcome)

    def answer(self, request: Any) -> Any:
        self.go.wait(LONG / 4)
        return super().answer(request)


class Network:
    """A server, its peers, and an aggregator that receives all collected reports."""

    def __init__(
        self,
        server: AggregatorServer,
        compressor: BroadcastCompressor,
        method: str,
        compress: Kind,
        batch: int | None,
    ) -> None:
        self.server = server
        self.task = task(method, compress, batch)
        self.aggregator = aggregator(method, quantize=compressor.quantize)
        self.private = METHODS[method].private is not None
        self.sent: list[Float32] = []  # the w of all broadcasts
        self.on_close: list[Callable[[], None]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    # Nodes and peers.

    def join(
        self,
        node: int,
        *,
        worker: Worker | None = None,
        name: str = "",
        address: str = "",
        **more: Any,
    ) -> "Future[Farewell]":
        """Start a real node."""
        own = worker or Worker(node_data(node))
        if isinstance(self.server._rounds.reports, MaskedSums):
            more.setdefault("masking", MaskingOptions(required=True))
        return self.spawn(
            run_node(address or self.address, own, name=name or f"node-{node}", **more)
        )

    def leave(self, node: "Future[Farewell]") -> None:
        """Disconnect a node, as if its process ended."""
        connected = self.server._rounds.count()
        node.cancel()
        wait_until(lambda: self.server._rounds.count() < connected)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def spawn(self, work: Coroutine[Any, Any, _Result]) -> "Future[_Result]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return self.spawn(work).result(LONG)

    # Rounds.

    def start(self, nodes: int) -> None:
        self.server.wait_for(nodes, lambda: False)
        self.server.start(self.task)
        self.ready(nodes)
        self.aggregator.start()

    def ready(self, nodes: int) -> None:
        self.server.wait_for(nodes, lambda: False, ready=True)

    def begin(
        self, *, least: int = 1, timeout: float = LONG, left: float = float("inf")
    ) -> Broadcast:
        broadcast = self.aggregator.pending
        assert broadcast is not None
        lost = self.server.lost(broadcast.round)
        if lost:
            broadcast = self.aggregator.forget(lost)
        self.sent.append(broadcast.w)
        needs_reports = self.aggregator.method.needs_reports
        self.server.begin(broadcast, RoundTerms(least, timeout, left, needs_reports))
        return broadcast

    def finish(self) -> CollectedRound:
        collected = self.server.finish()
        if collected.enough:
            costs = self.aggregator.ledger.costs if self.private else CHEAP
            self.aggregator.receive(collected.reports, costs, peers=collected.peers)
        return collected

    def round(self, **how: Any) -> CollectedRound:
        self.begin(**how)
        return self.finish()

    def restart(self, members: Mapping[str, Member], farewell: str) -> None:
        """Replace the server by one at the same address that resumes with `members`."""
        address = self.address
        self.server.close(Farewell(farewell, again=True))
        self.server = AggregatorServer(address, run=RUN, tokens=Tokens())
        self.server.open()
        self.server.start(self.task, members)
        self.ready(len(members))

    @property
    def all_w(self) -> list[Float32]:
        """The w of all broadcasts, as `without_network` returns them."""
        pending = self.aggregator.pending
        assert pending is not None
        return [*self.sent, pending.w]

    def close(self) -> None:
        for close in self.on_close:
            close()
        self.server.close(Farewell("the run is over"))

        async def end() -> None:
            tasks = [
                task for task in asyncio.all_tasks() if task is not asyncio.current_task()
            ]
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._loop.shutdown_default_executor()

        self.call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def network(
    method: str = "frugal",
    compress: Kind = "none",
    batch: int | None = None,
    **options: Any,
) -> Iterator[Network]:
    compressor = BroadcastCompressor(compress)
    server = AggregatorServer(
        "127.0.0.1:0", run=RUN, compressor=compressor, **{"tokens": Tokens(), **options}
    )
    server.open()
    ours = Network(server, compressor, method, compress, batch)
    try:
        # All nodes share one loop, so none may compute in it.
        with patch.object(node_module, "_QUICK", 0.0):
            yield ours
    finally:
        ours.close()
