"""How what happens on a network is logged: for people, or as lines of JSON for other programs.

Texts may come from peers: none has a control character when it is written.

A run's metrics in Prometheus format, for those who watch many machines.

Rules here:
- What is unknown is absent, never 0: a loss before the first round, an estimate that the method does not make.
- A scrape sees one round, never half of two: it reads the last record, which is replaced as a whole.
- All are in a registry of their own, so that many runs in one process do not mix.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fedbudget.engines.grpc.credentials import join_address, split_address
from fedbudget.errors import UserError, needing, printable
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.network import LogOptions

_FIELDS = ("event", "node", "address")


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{self.formatTime(record, '%H:%M:%S')} {printable(record.getMessage())}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        known: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
        }
        more = {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        return json.dumps({**known, **more, "message": printable(record.getMessage())})


def log_handler(options: LogOptions) -> logging.Handler:
    """Writes to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if options.log_format == "json" else _Text())
    handler.setLevel(options.log_level.upper())
    return handler


def teller(options: LogOptions) -> Callable[[str, str], None]:
    """Says what happens at a node, by its name; what ends it is told in any case."""

    def tell(name: str, text: str) -> None:
        if options.log_level == "error":
            return
        line = f"{name}: {printable(text)}"
        if options.log_format == "json":
            line = json.dumps(
                {"time": round(time.time(), 3), "node": name, "message": printable(text)}
            )
        print(line, file=sys.stderr, flush=True)

    return tell


with needing(
    "an aggregator", "network"
):  # fedbudget[node] has all that a node needs, and no more
    from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector

_HOST = "127.0.0.1"


class Metrics(Collector):
    """What is known of a run: its budget, its last round, and what passes between aggregator and nodes.

    The engine sets `connected`, and tells the totals of what it counts: `metrics.connected.set(5)`,
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
        self.late = self._counter(
            "late_reports", "Reports that came after their round and were discarded"
        )
        self.dropped = self._counter(
            "dropped_peers", "Peers dropped because they broke the rules"
        )
        self.refused = self._counter(
            "refused_peers", "Peers not let in: a wrong token, name, model or version"
        )
        self.sent = self._counter("sent_bytes", "Bytes sent to nodes")
        self.received = self._counter("received_bytes", "Bytes received from nodes")
        self.saved = self._counter("saved_bytes", "Bytes that compression has saved")

    def observe(self, record: RoundRecord) -> None:
        """The record of the last round. What few rounds evaluate stays until it is evaluated again."""
        last = self._last
        if record.accuracy is None and not record.metrics and last is not None:
            record = replace(
                record, accuracy=last.accuracy, metrics=last.metrics, spread=last.spread
            )
        self._last = record

    def count(self, **totals: int) -> None:
        """Counters by name, as they stand now."""
        for name, total in totals.items():
            counter = getattr(self, name)
            counter.inc(total - self._counted.get(name, 0))
            self._counted[name] = total

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The gauges of the budget and of the last round, made from its record when they are asked for."""
        yield _by_resource("budget", "What may be spent", self._budget)
        last = self._last
        if last is None:
            return
        yield _gauge("round", "The last round", last.round)
        yield _gauge("tau", "Local updates in the last round", last.tau)
        yield _gauge("step_size", "Step size of the last round", last.eta)
        yield _gauge(
            "loss", "Loss of the parameters that the last round started from", last.loss
        )
        yield _gauge(
            "best_loss",
            "The loss of the best parameters so far, on the last round's samples",
            last.best_loss,
        )
        yield _gauge(
            "accuracy",
            "Accuracy on the test samples, when it was last evaluated",
            last.accuracy,
        )
        metric = _rows(last.metrics or {})
        yield _family(
            "metric",
            "Further metrics on the test samples, when they were last evaluated",
            ["name"],
            metric,
        )
        apart = "Accuracy or RMSE over nodes, when it was last evaluated: the worst, the tenth percentile, the median"
        yield _family("metric_over_nodes", apart, ["of"], _rows(last.spread or {}))
        yield _gauge("nodes", "Nodes in the average of the last round", last.nodes)
        yield _by_resource("spent", "What was spent so far", last.spent)
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

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"fedbudget_{name}", what, registry=self.registry)


@contextmanager
def serving(metrics: Metrics, address: str) -> Iterator[str]:
    """Serves metrics over HTTP at HOST:PORT, or at a port of this machine's loopback, and gives their URL.

    Port 0 is any that is free.
    """
    host, port = split_address(
        f"{_HOST}:{address}" if address.isdecimal() else address, port=None
    )
    try:
        server, thread = start_http_server(port, host, metrics.registry)
    except OSError as error:
        raise UserError(
            f"cannot serve metrics at {join_address(host, port)}: {error.strerror}"
        ) from None
    try:
        yield f"http://{join_address(host, server.server_port)}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# Values of the labels, and the value itself where it is known.
_Row = tuple[tuple[str, ...], float | None]


def _gauge(name: str, what: str, value: float | None) -> GaugeMetricFamily:
    return _family(name, what, [], [((), value)])


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
