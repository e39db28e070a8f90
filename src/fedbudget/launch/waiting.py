"""What a person sees of an aggregator until there are enough nodes."""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fedbudget.engines.grpc.server import AggregatorServer


class Waiting:
    """Tells how many nodes there are, until there are enough: until it is `over`."""

    def __init__(self, nodes: int, *, quiet: bool, any_port: bool) -> None:
        self.over = False
        self._nodes, self._quiet, self._any_port = nodes, quiet, any_port
        self._last = -1
        self._server: AggregatorServer | None = None
        self._lock = threading.Lock()

    def opened(self, server: AggregatorServer) -> None:
        self._server = server
        if not self._quiet or self._any_port:
            print(f"listening on port {server.port}; waiting for {self._nodes} nodes", file=sys.stderr, flush=True)

    def changed(self, connected: int) -> None:
        with self._lock:
            if self.over or connected == self._last or self._server is None:
                return
            self._last = connected
        if connected and not self._quiet:
            print(f"{connected} of {self._nodes} nodes are here", file=sys.stderr, flush=True)

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
