"""Whole runs over gRPC, with nodes in threads of this process."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from fedbudget.engines.grpc.node import run_node
from fedbudget.engines.grpc.server import AggregatorServer
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.worker import Worker
from fedbudget.launch.execute import execute
from fedbudget.launch.inputs import from_dataset
from fedbudget.launch.serve import serving
from fedbudget.result import Result
from fedbudget.settings.network import ListenOptions
from fedbudget.settings.settings import Settings
from support.networked import LONG


def run_over_grpc(
    settings: Settings,
    worker: Callable[[NodeData], Worker] = Worker,
    workers: list[Any] | None = None,
    **how: Any,
) -> Result:
    """Run these settings with a node for each share of the data.

    Args:
      worker: creates the worker of a node.
      workers: receives all workers.
      how: options of `execute`.
    """
    threads, made = [], [] if workers is None else workers

    def opened(server: AggregatorServer) -> None:
        for number in range(1, (settings.nodes or 1) + 1):
            made.append(worker(from_dataset(settings, f"{number}/{settings.nodes}")))
            joining = run_node(f"127.0.0.1:{server.port}", made[-1], name=f"node-{number}")
            threads.append(
                threading.Thread(target=asyncio.run, args=(joining,), daemon=True)
            )
            threads[-1].start()

    with serving(
        settings, ListenOptions("127.0.0.1:0"), interrupted=lambda: False, opened=opened
    ) as prepared:
        result = execute(prepared, **how)
    for thread in threads:
        thread.join(LONG)
    return result
