"""What the commands serve, join and local have in common."""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbudget.cli import options as o
from fedbudget.errors import UserError, WorkError
from fedbudget.settings import Settings

if TYPE_CHECKING:
    from fedbudget.engines.grpc.server import AggregatorServer
    from fedbudget.engines.remote.node_data import NodeData
    from fedbudget.runs.checkpoint import Checkpoint


def require_network() -> None:
    """Says which extra to install where gRPC is missing; and gRPC itself speaks only of errors."""
    if find_spec("grpc") is None or find_spec("google.protobuf") is None:
        raise UserError("this needs gRPC; install it with: pip install 'fedbudget[network]'")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


# Of the aggregator.


def folder_of(out: Path | None, resume: Path | None, settings: Settings) -> Path:
    from fedbudget.training import default_folder

    return resume or out or default_folder(settings)


def resumed_from(given: Mapping[str, Any]) -> "tuple[Settings, Checkpoint]":
    """The settings and the checkpoint of the run to go on with; other settings than its own are refused."""
    from fedbudget.deployment import same_settings
    from fedbudget.runs.checkpoint import Checkpoint
    from fedbudget.runs.folder import CONFIG, Run

    path = given["resume"]
    if given["out"] is not None or given["config"] is not None:
        raise UserError("--resume goes on in the run's folder, with its settings; give neither --out nor --config")
    run = Run.open(path)
    if run.summary is not None and run.summary.get("status") != "interrupted":
        raise UserError(f"{path}: the run has finished; there is nothing to go on with")
    asked = o.settings_from({**given, "config": path / CONFIG, "dataset": None, "partition": None, "case": None})
    settings = replace(run.settings, nodes=asked.nodes)  # how many to wait for may be another number now
    same_settings(path, settings, asked)
    return settings, Checkpoint.load(path)


def own_node_data(given: Mapping[str, Any], settings: Settings) -> "NodeData | None":
    """What the aggregator holds itself, if anything."""
    if given["data"] is None and given["shard"] is None:
        return None
    return _node_data(given, settings.seed)


class Waiting:
    """Tells how many nodes there are, until there are enough."""

    def __init__(self, nodes: int, *, quiet: bool, any_port: bool) -> None:
        self._nodes = nodes
        self._quiet = quiet
        self._any_port = any_port
        self._last = -1
        self._server_side: AggregatorServer | None = None
        self._over = False
        self._lock = threading.Lock()

    def opened(self, server: "AggregatorServer") -> None:
        self._server_side = server
        if not self._quiet or self._any_port:
            print(f"listening on port {server.port}; waiting for {self._nodes} nodes", file=sys.stderr, flush=True)

    def changed(self, connected: int) -> None:
        with self._lock:
            if self._over or connected == self._last or self._server_side is None:
                return
            self._last = connected
        if connected and not self._quiet:
            print(f"{connected} of {self._nodes} nodes are here", file=sys.stderr, flush=True)

    def over(self) -> None:
        self._over = True

    def wake(self) -> None:
        if self._server_side is not None:
            self._server_side.wake()


@contextmanager
def waiting(nodes: int, *, quiet: bool, any_port: bool) -> Iterator[Waiting]:
    """Shows what happens until there are enough nodes; after that only what is out of the ordinary is logged.

    Args:
      quiet: nothing is shown, but a port that nobody could know otherwise.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    handler.setLevel(logging.WARNING)
    log = logging.getLogger("fedbudget.network")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield Waiting(nodes, quiet=quiet, any_port=any_port)
    finally:
        log.removeHandler(handler)


# Of a node.


def join_node_data(given: Mapping[str, Any]) -> "NodeData":
    if given["data"] is None and given["shard"] is None:
        raise UserError("which data? Give --data FILE, or --dataset NAME --shard I/N for a trial")
    return _node_data(given, given["seed"] or 0)


def _node_data(given: Mapping[str, Any], seed: int) -> "NodeData":
    from fedbudget.shares import from_dataset, from_file

    if given["data"] is not None:
        if given["shard"] is not None or given["dataset"] is not None:
            raise UserError("give --data, or --dataset with --shard, not both")
        return from_file(given["data"], labels=given["labels"], target=given["target"])
    chosen = ("dataset", "case", "partition", "data_dir", "target", "train_samples")
    settings = o.settings_from({name: given[name] for name in chosen})
    return from_dataset(replace(settings, seed=seed), given["shard"])


def node_name(name: str | None, shard: str | None) -> str:
    """A name for a node that has none: of its shard, or of its machine."""
    from fedbudget.engines.grpc.tokens import check_name

    if name is not None:
        return check_name(name)
    if shard is not None:
        return check_name("node-" + shard.partition("/")[0])
    return check_name(socket.gethostname())


def run_node(
    address: str,
    node_data: "NodeData",
    *,
    name: str,
    token_file: Path | None,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    insecure: bool,
    device: str,
    energy_meter: str | None,
    pace: float,
    patience: float | None,
    quiet: bool,
) -> None:
    """Takes part until the end, or until it is told to stop."""
    from fedbudget.engines.grpc.credentials import join_address, node_credentials, require_privacy, split_address
    from fedbudget.engines.grpc.node import Refused
    from fedbudget.engines.grpc.node import run_node as work_for
    from fedbudget.engines.grpc.tokens import node_token
    from fedbudget.engines.remote.worker import Worker
    from fedbudget.resources.energy import energy_reader

    if not 1 <= pace < float("inf"):
        raise UserError(f"pace must be at least 1, not {pace:g}")
    where = join_address(*split_address(address))
    credentials, token = node_credentials(ca, cert, key), node_token(token_file)
    require_privacy(where, encrypted=credentials is not None, insecure=insecure)
    work = Worker(node_data, device=device, pace=pace, readers={"energy": energy_reader(energy_meter)})

    def say(text: str) -> None:
        if not quiet:
            print(f"{name}: {text}", file=sys.stderr, flush=True)

    async def until_the_end() -> None:
        attending = asyncio.ensure_future(
            work_for(where, work, name=name, token=token, credentials=credentials, patience=patience, heard=say)
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, attending.cancel)
        try:
            farewell = await attending
            say(f"{farewell.reason}; took part in {work.made} rounds")
        except asyncio.CancelledError:
            say(f"leaving; took part in {work.made} rounds")

    try:
        asyncio.run(until_the_end())
    except Refused as refused:
        raise WorkError(str(refused)) from None
