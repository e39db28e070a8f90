"""What the commands serve, join and local have in common."""

import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fedbudget.cli import options as o
from fedbudget.errors import UserError

if TYPE_CHECKING:
    from fedbudget.engines.grpc.server import AggregatorServer
    from fedbudget.engines.remote.node_data import NodeData


def require_network() -> None:
    """Says which extra to install where gRPC is missing; and gRPC itself speaks only of errors."""
    if find_spec("grpc") is None or find_spec("google.protobuf") is None:
        raise UserError("this needs gRPC; install it with: pip install 'fedbudget[network]', or [node] for join alone")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


class Waiting:
    """Tells how many nodes there are, until there are enough: until it is `over`."""

    def __init__(self, nodes: int, *, quiet: bool, any_port: bool) -> None:
        self.over = False
        self._nodes, self._quiet, self._any_port = nodes, quiet, any_port
        self._last = (0, 0)  # how many were connected, and ready
        self._server: AggregatorServer | None = None
        self._lock = threading.Lock()

    def opened(self, server: "AggregatorServer") -> None:
        self._server = server
        if not self._quiet or self._any_port:
            print(f"listening on port {server.port}; waiting for {self._nodes} nodes", file=sys.stderr, flush=True)

    def changed(self, connected: int, ready: int) -> None:
        with self._lock:
            (before, were_ready), self._last = self._last, (connected, ready)
            if self.over or self._quiet or self._server is None:
                return
        if connected not in (0, before):
            preparing = "; each prepares itself by a trial round" if before < self._nodes <= connected else ""
            print(f"{connected} of {self._nodes} nodes are here{preparing}", file=sys.stderr, flush=True)
        if ready not in (0, were_ready):
            print(f"{ready} of {self._nodes} nodes are ready", file=sys.stderr, flush=True)

    def wake(self) -> None:
        if self._server is not None:
            self._server.wake()


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


def node_data(given: Mapping[str, Any], seed: int) -> "NodeData | None":
    """What this machine holds itself, if anything."""
    if given["data"] is None and given["shard"] is None:
        return None
    from fedbudget.launch.node_data import from_dataset, from_file

    if given["data"] is not None:
        if given["shard"] is not None or given["dataset"] is not None:
            raise UserError("give --data, or --dataset with --shard, not both")
        return from_file(given["data"], labels=given["labels"], target=given["target"])
    chosen = ("dataset", "case", "partition", "data_dir", "target", "test_share", "train_samples")
    settings = o.settings_from({name: given[name] for name in chosen})
    return from_dataset(replace(settings, seed=seed), given["shard"])
