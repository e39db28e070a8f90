"""A real aggregator on loopback with two honest nodes, and one beside them that lies.

Nodes are in this process; all that passes goes over gRPC. The liar is a node like others,
whose words are changed before they leave it."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fedbudget.models.compiled.rows  # noqa: F401 (nodes would import it in several threads at once)
from fedbudget.data.dataset import Dataset
from fedbudget.engines.grpc import node as node_module
from fedbudget.engines.grpc.node import run_node
from fedbudget.engines.grpc.server import AggregatorServer
from fedbudget.engines.remote.messages import Answer, Hello, RoundRequest, Welcome
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.worker import Worker
from fedbudget.launch.execute import execute
from fedbudget.launch.inputs import dataset_to_test_on, from_dataset
from fedbudget.launch.serve import serving
from fedbudget.resources.resource import NodeCosts
from fedbudget.result import Result
from fedbudget.settings.network import ListenOptions
from fedbudget.settings.settings import Settings

SETTINGS = Settings(model="softmax", dataset="digits", seed=1)


@dataclass(frozen=True)
class Lies:
    """What a liar makes of its words.

    Args:
      hello, ready, answer: from what an honest node would say to what is said.
    """

    hello: Callable[[Hello], Hello] = lambda hello: hello
    ready: Callable[[NodeCosts], NodeCosts] = lambda costs: costs
    answer: Callable[[Answer, RoundRequest], Answer] = lambda answer, request: answer


class LyingWorker(Worker):
    """A node that lies."""

    def __init__(self, own: NodeData, lies: Lies) -> None:
        super().__init__(own)
        self._lies = lies

    def hello(self, instance: str) -> Hello:
        return self._lies.hello(super().hello(instance))

    def start(self, welcome: Welcome) -> NodeCosts:
        return self._lies.ready(super().start(welcome))

    def answer(self, request: RoundRequest) -> Answer:
        return self._lies.answer(super().answer(request), request)


def share(node: int, of: int = 3) -> NodeData:
    """The samples of one node, counted from 1."""
    return from_dataset(SETTINGS, f"{node}/{of}")


def test_samples() -> Dataset:
    return dataset_to_test_on("digits", SETTINGS)


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """In a thread of its own; all that runs in it is ended."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def end() -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await loop.shutdown_default_executor()

    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def train_beside(
    lies: Lies | None,
    *,
    out: Path | None = None,
    honest: int = 2,
    wait_for: int | None = None,
    first: bool = False,
    **settings: Any,
) -> Result:
    """A run with the honest nodes, and the liar if there is one.

    Args:
      wait_for: so many nodes, before the first round; all when not given.
      first: whether the liar comes before all others.
    """
    known: dict[str, Any] = {
        "costs": "simulated",
        "budget": ("time=1000s",),
        "rounds": 45,
        "tau_max": 10,
        "seed": 1,
    }
    nodes: list[Future[Any]] = []
    workers = {f"n{each}": Worker(share(each)) for each in range(1, honest + 1)}
    if lies is not None:
        liar = {"liar": LyingWorker(share(3), lies)}
        workers = liar | workers if first else workers | liar
    with (
        event_loop() as loop,
        patch.object(node_module, "_QUICK", 0.0),
    ):  # one loop serves all: none may work in it

        def connect(server: AggregatorServer) -> None:
            for name, worker in workers.items():
                node = run_node(f"127.0.0.1:{server.port}", worker, name=name)
                nodes.append(asyncio.run_coroutine_threadsafe(node, loop))
                if first:
                    server.wait_for(len(nodes), lambda: False)

        run = serving(
            Settings(
                model="softmax", nodes=wait_for or len(workers), **{**known, **settings}
            ),
            ListenOptions("127.0.0.1:0"),
            interrupted=lambda: False,
            test=test_samples(),
            opened=connect,
        )
        with run as prepared:
            return execute(prepared, out=out, plot=False)
