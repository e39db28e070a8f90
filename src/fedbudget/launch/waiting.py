"""What a person sees of an aggregator until there are enough nodes."""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from fedbudget.engines.grpc.server import AggregatorServer
from fedbudget.launch.log_format import log_handler
from fedbudget.launch.options import LogOptions
from fedbudget.models.compiling import COMPILING, on_compiling


class Waiting:
    """Tells how many nodes there are, until there are enough: until it is `over`."""

    def __init__(self, nodes: int, *, quiet: bool, any_port: bool) -> None:
        self.over = False
        self._nodes, self._quiet, self._any_port = nodes, quiet, any_port
        self._last = (0, 0)  # how many were connected, and ready
        self._server: AggregatorServer | None = None
        self._lock = threading.Lock()

    def opened(self, server: AggregatorServer) -> None:
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
def waiting(nodes: int, *, quiet: bool, any_port: bool, logs: LogOptions | None = None) -> Iterator[Waiting]:
    """Shows what happens until there are enough nodes; after that only what is out of the ordinary is logged.

    Args:
      quiet: nothing is shown, but a port that nobody could know otherwise.
      logs: how the network's log is written.
    """
    handler = log_handler(logs or LogOptions())
    log = logging.getLogger("fedbudget.network")
    log.addHandler(handler)
    log.setLevel(min(logging.INFO, handler.level))
    compiling = nullcontext() if quiet else on_compiling(lambda: print(COMPILING, file=sys.stderr, flush=True))
    try:
        with compiling:
            yield Waiting(nodes, quiet=quiet, any_port=any_port)
    finally:
        log.removeHandler(handler)
