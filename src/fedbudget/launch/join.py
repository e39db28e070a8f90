"""A node that takes part in the run of an aggregator elsewhere, until the end or until it is stopped."""

import asyncio
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedbudget.engines.grpc.credentials import join_address, node_credentials, require_privacy, split_address
from fedbudget.engines.grpc.node import RefusedByAggregator, run_node
from fedbudget.engines.grpc.tokens import check_name, node_token
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError, WorkError
from fedbudget.resources.energy import energy_reader


@dataclass(frozen=True)
class NodeConnection:
    """How a node finds its aggregator, and how it works.

    Args:
      name: the node's.
      token_file: with the node's token.
      ca: who signed the aggregator's certificate, for TLS.
      cert, key: the node's own, for mutual TLS.
      insecure: plain text is meant, also beyond this machine.
      device: where PyTorch computes.
      energy_meter: see `resources.energy`.
      pace: how many times as long as it could a local update takes.
      patience: seconds until an aggregator that is not there is given up; None for never.
    """

    name: str
    token_file: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    insecure: bool = False
    device: str = "auto"
    energy_meter: str | None = None
    pace: float = 1.0
    patience: float | None = None


def join(address: str, data: NodeData, options: NodeConnection, report: Callable[[str], None]) -> None:
    """Takes part until the end, or until it is told to stop.

    Args:
      address: HOST:PORT of the aggregator.
      report: called with what happens, in words.
    """
    if not 1 <= options.pace < float("inf"):
        raise UserError(f"pace must be at least 1, not {options.pace:g}")
    where = join_address(*split_address(address))
    credentials = node_credentials(options.ca, options.cert, options.key)
    token = node_token(options.token_file)
    require_privacy(where, encrypted=credentials is not None, insecure=options.insecure)
    readers = {"energy": energy_reader(options.energy_meter)}
    worker = Worker(data, device=options.device, pace=options.pace, readers=readers)

    async def until_the_end() -> None:
        node = asyncio.ensure_future(
            run_node(
                where,
                worker,
                name=options.name,
                token=token,
                credentials=credentials,
                patience=options.patience,
                heard=report,
            )
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, node.cancel)
        try:
            farewell = await node
            report(f"{farewell.reason}; took part in {worker.made} rounds")
        except asyncio.CancelledError:
            report(f"leaving; took part in {worker.made} rounds")

    try:
        asyncio.run(until_the_end())
    except RefusedByAggregator as refused:
        raise WorkError(str(refused)) from None


def node_name(name: str | None, shard: str | None) -> str:
    """A name for a node that has none: of its shard, or of its machine."""
    if name is not None:
        return check_name(name)
    if shard is not None:
        return check_name("node-" + shard.partition("/")[0])
    return check_name(socket.gethostname())
