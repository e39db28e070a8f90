"""A hub on loopback with nodes in this process, and raw peers that say whatever a test wants.

Four nodes have small shards of one dataset each. What a run with them must come to is worked out without a network, by
`without_network`: fleets and an aggregator that talk to each other directly.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from unittest.mock import patch

import grpc
import numpy as np

from fedbudget.arrays import Float32
from fedbudget.budget import Budget
from fedbudget.control import AdaptiveTau, FixedTau
from fedbudget.data.dataset import Dataset, Part
from fedbudget.engines.grpc import node as node_module
from fedbudget.engines.grpc.codec import METHOD, NAME, TOKEN, pack_hello, pack_ready
from fedbudget.engines.grpc.node import run_node
from fedbudget.engines.grpc.server import AggregatorServer
from fedbudget.engines.grpc.tokens import Tokens
from fedbudget.engines.remote.compression import BroadcastCompressor, Kind
from fedbudget.engines.remote.messages import Farewell, Hello
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.round import CollectedRound
from fedbudget.engines.remote.task import Request, Task, agree
from fedbudget.engines.remote.worker import Worker
from fedbudget.protocol.aggregator import Aggregator, Outcome
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.step_size import FixedStep
from support.problems import CHEAP
from support.usage import node_costs

FEATURES = 6
RUN = "a-run"
COSTS = node_costs(0.001, 0.002, cpu=(0.001, 0.002))
LONG = 20.0
"""Seconds that nothing takes."""

METHODS: dict[str, tuple[Request, dict[str, Any]]] = {
    "fixed": (
        Request(estimate=False, gradient=False, curvature=False, drift=False),
        {"controller": FixedTau(3), "delta": "parameters"},
    ),
    "paper": (
        Request(estimate=True, gradient=True, curvature=False, drift=False),
        {"controller": AdaptiveTau(phi=0.01, tau_max=8)},
    ),
    "frugal": (
        Request(estimate=True, gradient=False, curvature=False, drift=True),
        {"controller": AdaptiveTau(tau_max=8, leap=True), "correct_drift": True, "delta": "parameters"},
    ),
}

_SIZES = (14, 20, 11, 17)
_Result = TypeVar("_Result")


def small_dataset(dtype: str = "float32") -> Dataset:
    """Of two classes that depend on the features."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(sum(_SIZES), FEATURES))
    labels = (x @ rng.normal(size=FEATURES) > 0).astype(np.int64)
    return Dataset("small data", Part(x.astype(dtype), labels), classes=("no", "yes"))


def node_data(node: int) -> NodeData:
    end = sum(_SIZES[: node + 1])
    return NodeData(small_dataset(), [np.arange(end - _SIZES[node], end)])


def task(method: str = "frugal", compress: Kind = "none", batch: int | None = None) -> Task:
    samples = agree([node_data(node).samples() for node in range(len(_SIZES))])
    return Task("svm", FEATURES, batch, 7, 4, compress, 8, samples, METHODS[method][0])


def aggregator(method: str = "frugal", **more: Any) -> Aggregator:
    """With costs that do not matter."""
    start = np.zeros(FEATURES, np.float32)
    how = {"budget": Budget({"time": 1e6}), "step_size": FixedStep(0.1), "expected": CHEAP, **METHODS[method][1]}
    return Aggregator(start, **{**how, **more})


def without_network(
    present: Sequence[Sequence[int]], method: str = "frugal", batch: int | None = None
) -> list[Float32]:
    """The w of all broadcasts, and of the one that would come next, when these nodes take part in each round."""
    ours = aggregator(method)
    fleets = [node_data(node).fleet(task(method, batch=batch), [node]) for node in range(len(_SIZES))]
    broadcast: Broadcast | Outcome = ours.start()
    request = []
    for here in present:
        assert isinstance(broadcast, Broadcast)
        request.append(broadcast.w)
        broadcast = ours.receive(Report.merge([fleets[node].answer(broadcast) for node in here]), CHEAP)
    assert isinstance(broadcast, Broadcast)
    return [*request, broadcast.w]


def until(condition: Callable[[], bool]) -> None:
    """Waits for it."""
    limit = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.002)


class HeldWork(Worker):
    """A node that answers only while it is let."""

    def __init__(self, own: NodeData) -> None:
        super().__init__(own)
        self.go = threading.Event()
        self.go.set()

    def answer(self, request: Any) -> Any:
        self.go.wait(LONG / 4)
        return super().answer(request)


class Network:
    """A hub, and whoever talks to it; an aggregator that is told of all that is gathered."""

    def __init__(
        self, server: AggregatorServer, shortener: BroadcastCompressor, method: str, compress: Kind, batch: int | None
    ) -> None:
        self.server = server
        self.task = task(method, compress, batch)
        self.aggregator = aggregator(method, quantize=shortener.quantize)
        self.request: list[Float32] = []  # the w of all broadcasts
        self._peers: list[RawPeer] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    # Nodes and peers.

    def join(self, node: int, *, work: Worker | None = None, name: str = "", **more: Any) -> "Future[Farewell]":
        """A real node."""
        own = work or Worker(node_data(node))
        return self.spawn(run_node(self.address, own, name=name or f"node-{node}", **more))

    def leave(self, node: "Future[Farewell]") -> None:
        """A node's process ends."""
        connected = self.server._count()
        node.cancel()
        until(lambda: self.server._count() < connected)

    def peer(self, name: str = "intruder", **more: Any) -> "RawPeer":
        self._peers.append(RawPeer(self, name, **more))
        return self._peers[-1]

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

    def begin(self, *, least: int = 1, timeout: float = LONG, left: float = float("inf")) -> Broadcast:
        broadcast = self.aggregator.pending
        assert broadcast is not None
        lost = self.server.lost(broadcast.round)
        if lost:
            broadcast = self.aggregator.forget(lost)
        self.request.append(broadcast.w)
        self.server.begin(broadcast, least=least, timeout=timeout, left=left)
        return broadcast

    def finish(self) -> CollectedRound:
        gathered = self.server.finish()
        if gathered.enough:
            self.aggregator.receive(Report.merge([answer.report for answer in gathered.answers]), CHEAP)
        return gathered

    def round(self, **how: Any) -> CollectedRound:
        self.begin(**how)
        return self.finish()

    @property
    def all_told(self) -> list[Float32]:
        """As `without_network` gives it."""
        pending = self.aggregator.pending
        assert pending is not None
        return [*self.request, pending.w]

    def close(self) -> None:
        for peer in self._peers:  # they do not listen to a farewell
            peer.leave()
        self.server.close(Farewell("the run is over"))

        async def end() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
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
    method: str = "frugal", compress: Kind = "none", batch: int | None = None, **options: Any
) -> Iterator[Network]:
    shortener = BroadcastCompressor(compress)
    server = AggregatorServer("127.0.0.1:0", run=RUN, shortener=shortener, **{"tokens": Tokens(), **options})
    server.open()
    ours = Network(server, shortener, method, compress, batch)
    try:
        with patch.object(node_module, "_QUICK", 0.0):  # one loop serves all nodes: none may work in it
            yield ours
    finally:
        ours.close()


class RawPeer:
    """A peer that says what it is told to, byte for byte, and counts what passes."""

    def __init__(
        self, net: Network, name: str, *, token: str | None = None, credentials: Any = None, node: int = 2
    ) -> None:
        self.sent = self.received = 0
        self._net = net
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

        self._net.call(write())

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

        return self._net.call(read())

    def ended(self) -> tuple[Any, str]:
        """How the aggregator ended it; what it said before is not looked at."""

        async def end() -> tuple[Any, str]:
            try:
                while await self._call.read() is not grpc.aio.EOF:
                    pass
            except grpc.RpcError:
                pass
            return await self._call.code(), await self._call.details() or ""

        return self._net.call(end())

    def leave(self) -> None:
        self._net.call(self._channel.close())

    def hello(self, **other: Any) -> bytes:
        known = {"instance": "one", "samples": node_data(self._node).samples(), **other}
        return pack_hello(Hello(**known))[0]

    def become_ready(self, **other: Any) -> None:
        """Says hello, hears the welcome, and is ready."""
        self.say(self.hello(**other))
        self.hear()
        self.say(*pack_ready(COSTS))
