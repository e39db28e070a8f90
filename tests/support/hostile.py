"""A real aggregator on loopback with honest nodes and one malicious node, the liar.

Nodes run in this process and communicate over gRPC. The liar is a normal node whose
messages are changed before they are sent."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

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
from fedbudget.resources.resource import Usage
from fedbudget.result import Result
from fedbudget.settings.network import ListenOptions
from fedbudget.settings.settings import Settings

SETTINGS = Settings(model="softmax", dataset="digits", seed=1, validation=0.0)


@dataclass(frozen=True)
class Lies:
    """Changes to the messages of the liar.

    Args:
      hello: changes the Hello of an honest node.
      ready: changes its costs.
      answer: changes its answer to a request.
    """

    hello: Callable[[Hello], Hello] = lambda hello: hello
    ready: Callable[[Usage], Usage] = lambda costs: costs
    answer: Callable[[Answer, RoundRequest], Answer] = lambda answer, request: answer


class LyingWorker(Worker):
    """A node that changes its messages by `lies`."""

    def __init__(self, own: NodeData, lies: Lies) -> None:
        super().__init__(own)
        self._lies = lies

    def hello(self, instance: str, *, private: bool = False) -> Hello:
        return self._lies.hello(super().hello(instance, private=private))

    def start(self, welcome: Welcome) -> Usage:
        return self._lies.ready(super().start(welcome))

    def answer(self, request: RoundRequest) -> Answer:
        return self._lies.answer(super().answer(request), request)


def node_share(node: int, of: int = 3) -> NodeData:
    """The samples of one of `of` nodes; the first node is 1."""
    return from_dataset(SETTINGS, f"{node}/{of}")


def with_test_samples(node: int) -> NodeData:
    """The samples of a node; every fifth is a test sample."""
    own = node_share(node)
    (rows,) = own.rows
    tested = replace(own.dataset, train=own.dataset.train.rows(rows[::5]), test=None)
    return replace(own, rows=[np.delete(rows, np.s_[::5])], test=tested)


def test_samples() -> Dataset:
    return dataset_to_test_on("digits", SETTINGS)


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in a thread; cancel its tasks at the end."""
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


def train_with_liar(
    lies: Lies | None,
    *,
    out: Path | None = None,
    honest: int = 2,
    wait_for: int | None = None,
    first: bool = False,
    liar_nodes: int = 1,
    tested: bool = False,
    **settings: Any,
) -> Result:
    """Train with honest nodes, and with a liar unless `lies` is None.

    Args:
      honest: number of honest nodes.
      wait_for: number of nodes before the first round; all by default.
      first: whether the liar joins first.
      liar_nodes: number of nodes that the liar's process simulates.
      tested: whether the nodes hold the test samples, a part of theirs each.
      settings: settings of the run.
    """
    known: dict[str, Any] = {
        "costs": "simulated",
        "budget": ("time=1000s",),
        "rounds": 45,
        "tau_max": 10,
        "seed": 1,
        "validation": 0.0,
    }
    nodes: list[Future[Any]] = []
    share = with_test_samples if tested else node_share
    workers = {f"n{each}": Worker(share(each)) for each in range(1, honest + 1)}
    if lies is not None:
        own = share(3)
        own = replace(own, rows=np.array_split(own.rows[0], liar_nodes))
        liar = {"liar": LyingWorker(own, lies)}
        workers = liar | workers if first else workers | liar
    # All nodes share one loop, so none may compute in it.
    with event_loop() as loop, patch.object(node_module, "_QUICK", 0.0):

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
            test=None if tested else test_samples(),
            opened=connect,
        )
        with run as prepared:
            return execute(prepared, out=out, plot=False)
