"""Metrics of a run in the format of Prometheus.

Rules:
- An unknown value is absent, never 0: a loss before the first round, an estimate that the
  method does not compute.
- A scrape sees one round: it reads the last record, which is replaced as a whole.
- Each run has its own registry, so that runs in one process do not mix.
- The server has few connections at a time and closes silent ones, so that a run keeps its
  file descriptors. A request must name this machine (DNS rebinding).
"""

import math
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from fedbudget.engines.grpc.credentials import join_address, split_address
from fedbudget.errors import UserError, requires_package
from fedbudget.runs.record import RoundRecord

with requires_package("an aggregator", "network"):
    from prometheus_client import (
        CONTENT_TYPE_LATEST,
        CollectorRegistry,
        Counter,
        Gauge,
        generate_latest,
    )
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector

_HOST = "127.0.0.1"
_MOST_CONNECTIONS = 8
_PATIENCE = 5.0  # seconds for a request

_COUNTERS = {
    "late": ("late_reports", "Reports that came after their round and were discarded"),
    "dropped": ("dropped_peers", "Peers dropped because they violated the protocol"),
    "refused": ("refused_peers", "Peers refused for a wrong token, name, model or version"),
    "sent": ("sent_bytes", "Bytes sent to nodes"),
    "received": ("received_bytes", "Bytes received from nodes"),
    "saved": ("saved_bytes", "Bytes saved by compression"),
}
"""Counters of the engine: metric and help text."""

_GAUGES = {
    "round": ("round", "The last round"),
    "tau": ("tau", "Local updates in the last round"),
    "step_size": ("eta", "Step size of the last round"),
    "loss": ("loss", "Loss of the parameters that the last round started from"),
    "best_loss": (
        "best_loss",
        "Loss of the best parameters so far, on the samples of the last round",
    ),
    "accuracy": ("accuracy", "Latest accuracy on the test samples"),
    "nodes": ("nodes", "Nodes in the average of the last round"),
}
"""Gauges of the last round: field of its record and help text."""


class Metrics(Collector):
    """Metrics of a run: its budget, its last round, and traffic with nodes.

    The engine updates gauges and totals: `metrics.connected.set(5)`,
    `metrics.count(late=2, sent=1000)`.
    """

    def __init__(self, budget: Mapping[str, float]) -> None:
        self.registry = CollectorRegistry()
        self._budget = dict(budget)
        self._last: RoundRecord | None = None
        self._counted: dict[str, int] = {}
        self.registry.register(self)
        self.connected = Gauge(
            "fedbudget_connected_nodes", "Nodes connected now", registry=self.registry
        )
        self._counters = {
            name: Counter(f"fedbudget_{metric}", text, registry=self.registry)
            for name, (metric, text) in _COUNTERS.items()
        }

    def observe(self, record: RoundRecord) -> None:
        """Replace the last record; figures that it lacks keep their last value."""
        last = self._last
        if record.accuracy is None and not record.metrics and last is not None:
            record = replace(
                record, accuracy=last.accuracy, metrics=last.metrics, spread=last.spread
            )
        self._last = record

    def count(self, **totals: int) -> None:
        """Set counters by name to their current totals."""
        for name, total in totals.items():
            self._counters[name].inc(total - self._counted.get(name, 0))
            self._counted[name] = total

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges of the budget and of the last round."""
        yield _by_resource("budget", "Budget", self._budget)
        last = self._last
        if last is None:
            return
        for name, (field, text) in _GAUGES.items():
            yield _family(name, text, [], [((), getattr(last, field))])
        yield _family(
            "metric",
            "Latest further metrics on the test samples",
            ["name"],
            _rows(last.metrics or {}),
        )
        yield _family(
            "metric_over_nodes",
            "Latest accuracy or RMSE over nodes: worst, tenth percentile, median",
            ["of"],
            _rows(last.spread or {}),
        )
        yield _by_resource("spent", "Amount spent so far", last.spent)
        estimates = {"rho": last.rho, "beta": last.beta, "delta": last.delta}
        yield _family(
            "estimate", "Estimates of rho, beta and delta", ["name"], _rows(estimates)
        )
        costs = [*_rows(last.c, "step"), *_rows(last.b, "aggregation")]
        yield _family(
            "round_cost",
            "Cost of a local update and of an aggregation",
            ["resource", "part"],
            costs,
        )


@contextmanager
def serving(metrics: Metrics, address: str) -> Iterator[str]:
    """Serve metrics over HTTP at HOST:PORT, or a port of this machine, and yield their URL.

    Port 0 selects a free port.
    """
    host, port = split_address(
        f"{_HOST}:{address}" if address.isdecimal() else address, port=None
    )
    try:
        server = _Server(host, port, metrics.registry)
    except OSError as error:
        raise UserError(
            f"cannot serve metrics at {join_address(host, port)}: {error.strerror}"
        ) from None
    thread = threading.Thread(
        target=server.serve_forever, name="fedbudget-metrics", daemon=True
    )
    thread.start()
    try:
        yield f"http://{join_address(host, server.server_port)}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    """Answers GET /metrics, with a bound on connections and on their time."""

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.hosts = {host.lower(), "localhost", socket.gethostname().lower()}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.Semaphore(_MOST_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that broke."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _PATIENCE
    server: _Server

    def do_GET(self) -> None:
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        if host not in self.server.hosts and not _is_address(host):
            self.send_error(403)
            return
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self.send_error(404)
            return
        content = generate_latest(self.server.registry)
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE_LATEST)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: anyone who reaches the port could fill the log."""


def _is_address(host: str) -> bool:
    """Whether this is an IP address; only a name can be pointed at another machine."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


_Row = tuple[tuple[str, ...], float | None]
"""Values of the labels, and the value itself if known."""


def _by_resource(name: str, what: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    return _family(name, what, ["resource"], _rows(values))


def _rows(
    values: Mapping[str, float] | Mapping[str, float | None], *more: str
) -> list[_Row]:
    return [((name, *more), value) for name, value in values.items()]


def _family(
    name: str, what: str, labels: Sequence[str], rows: Sequence[_Row]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"fedbudget_{name}", what, labels=labels)
    for of, value in rows:
        if value is not None and math.isfinite(value):
            family.add_metric(of, value)
    return family
