"""Metrics over HTTP, in the format of Prometheus."""

import math
import threading
import urllib.request
from collections.abc import Mapping
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fedbudget.errors import UserError
from fedbudget.launch.monitoring import Metrics, serving
from fedbudget.runs.record import RoundRecord

RECORD = RoundRecord(
    round=3,
    t=30,
    tau=7,
    reason="minimum",
    eta=0.01,
    loss=0.5,
    best_loss=0.25,
    accuracy=0.75,
    rho=1.5,
    beta=2.5,
    delta=3.5,
    kept=(),
    c={"time": 0.125, "bytes": 0.0},
    b={"time": 0.5, "bytes": 3136.0},
    spent={"time": 4.0, "bytes": 9408.0},
    nodes=5,
    left_out=(),
    wall=4.5,
)

Labels = tuple[tuple[str, str], ...]


def fetch(url: str) -> dict[tuple[str, Labels], float]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.status == 200
        text = answer.read().decode()
    return {
        (
            sample.name.removeprefix("fedbudget_"),
            tuple(sorted(sample.labels.items())),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def scrape(metrics: Metrics) -> dict[tuple[str, Labels], float]:
    with serving(metrics, "0") as url:
        return fetch(url)


def labelled(
    name: str, values: Mapping[str, float], label: str = "resource"
) -> dict[tuple[str, Labels], float]:
    return {(name, ((label, of),)): value for of, value in values.items()}


COUNTERS: dict[tuple[str, Labels], float] = {
    ("connected_nodes", ()): 0.0,
    ("late_reports_total", ()): 0.0,
    ("dropped_peers_total", ()): 0.0,
    ("refused_peers_total", ()): 0.0,
    ("sent_bytes_total", ()): 0.0,
    ("received_bytes_total", ()): 0.0,
    ("saved_bytes_total", ()): 0.0,
}


def test_metrics_before_first_round() -> None:
    metrics = Metrics({"time": 15.0, "bytes": 2e7})
    assert scrape(metrics) == COUNTERS | labelled("budget", {"time": 15.0, "bytes": 2e7})


def test_metrics_after_a_round() -> None:
    metrics = Metrics({"time": 15.0})
    metrics.observe(RECORD)
    assert scrape(metrics) == {
        **COUNTERS,
        **labelled("budget", {"time": 15.0}),
        **labelled("spent", {"time": 4.0, "bytes": 9408.0}),
        **labelled("estimate", {"rho": 1.5, "beta": 2.5, "delta": 3.5}, "name"),
        ("round", ()): 3.0,
        ("tau", ()): 7.0,
        ("step_size", ()): 0.01,
        ("loss", ()): 0.5,
        ("best_loss", ()): 0.25,
        ("accuracy", ()): 0.75,
        ("nodes", ()): 5.0,
        ("round_cost", (("part", "step"), ("resource", "time"))): 0.125,
        ("round_cost", (("part", "step"), ("resource", "bytes"))): 0.0,
        ("round_cost", (("part", "aggregation"), ("resource", "time"))): 0.5,
        ("round_cost", (("part", "aggregation"), ("resource", "bytes"))): 3136.0,
    }


def test_unknown_values_are_absent() -> None:
    metrics = Metrics({"time": math.inf, "bytes": 100.0})
    metrics.observe(RECORD)
    unknown = {"loss": math.nan, "best_loss": math.inf, "rho": None, "beta": math.nan}
    costs = {"c": {"time": math.nan}, "b": {}, "spent": {"time": math.nan, "bytes": 0.0}}
    metrics.observe(replace(RECORD, round=4, **unknown, **costs))  # type: ignore[arg-type]
    metrics_by_name = scrape(metrics)
    assert metrics_by_name[("round", ())] == 4.0
    assert {
        key for key in metrics_by_name if key[0] in ("loss", "best_loss", "round_cost")
    } == set()
    for name, left in (("budget", {"bytes": 100.0}), ("spent", {"bytes": 0.0})):
        assert {
            key: value for key, value in metrics_by_name.items() if key[0] == name
        } == labelled(name, left)
    assert {key for key in metrics_by_name if key[0] == "estimate"} == {
        ("estimate", (("name", "delta"),))
    }


def test_accuracy_stays_until_next_evaluation() -> None:
    """The metric is absent before the first evaluation, and after one that is NaN."""
    metrics = Metrics({})
    accuracies = []
    with serving(metrics, "0") as url:
        for accuracy in (None, 0.5, None, None, 0.75, math.nan):
            metrics.observe(replace(RECORD, accuracy=accuracy))
            accuracies.append(fetch(url).get(("accuracy", ())))
    assert accuracies == [None, 0.5, 0.5, 0.5, 0.75, None]


def test_metrics_and_spread_stay() -> None:
    metrics = Metrics({})
    nothing = replace(RECORD, accuracy=None)
    metrics.observe(
        replace(
            nothing, metrics={"rmse": 3.5, "r2": 0.5}, spread={"worst": 9.0, "median": 3.0}
        )
    )
    metrics.observe(nothing)
    metrics_by_name = scrape(metrics)
    expected = labelled("metric", {"rmse": 3.5, "r2": 0.5}, "name")
    expected |= labelled("metric_over_nodes", {"worst": 9.0, "median": 3.0}, "of")
    assert expected.items() <= metrics_by_name.items()
    assert ("accuracy", ()) not in metrics_by_name


def test_engine_counters_are_totals() -> None:
    metrics = Metrics({})
    metrics.connected.set(5)
    metrics.connected.dec()
    metrics.count(late=1, dropped=1, sent=1000, saved=0)
    metrics.count(late=2, dropped=1, refused=3, sent=1024, received=2**40, saved=7)
    assert scrape(metrics) == {
        ("connected_nodes", ()): 4.0,
        ("late_reports_total", ()): 2.0,
        ("dropped_peers_total", ()): 1.0,
        ("refused_peers_total", ()): 3.0,
        ("sent_bytes_total", ()): 1024.0,
        ("received_bytes_total", ()): float(2**40),
        ("saved_bytes_total", ()): 7.0,
    }


def test_runs_have_separate_metrics() -> None:
    one, other = Metrics({}), Metrics({})
    one.count(late=1)
    one.observe(RECORD)
    assert scrape(other) == COUNTERS


class TestServing:
    def test_loopback_is_the_default(self) -> None:
        with serving(Metrics({}), "0") as url:
            assert url.startswith("http://127.0.0.1:")
            assert url.endswith("/metrics")
        with serving(Metrics({}), "127.0.0.2:0") as url:
            assert url.startswith("http://127.0.0.2:")
            assert fetch(url) == COUNTERS

    def test_busy_port(self) -> None:
        with serving(Metrics({}), "0") as url:
            port = url.removesuffix("/metrics").rpartition(":")[2]
            with (
                pytest.raises(
                    UserError,
                    match=rf"cannot serve metrics at 127\.0\.0\.1:{port}: Address already",
                ),
                serving(Metrics({}), port),
            ):
                pass
            assert fetch(url) == COUNTERS
        with serving(Metrics({"time": 1.0}), port) as again:
            assert again == url
            assert fetch(url) == COUNTERS | labelled("budget", {"time": 1.0})

    def test_no_thread_left_after_error(self) -> None:
        before = set(threading.enumerate())
        during: set[threading.Thread] = set()

        def fail() -> None:
            with serving(Metrics({}), "0"):
                during.update(threading.enumerate())
                raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            fail()
        assert during > before
        assert set(threading.enumerate()) == before

    @pytest.mark.parametrize(
        ("address", "message"),
        [
            ("70000", "must be a whole number from 0 to 65535"),
            ("localhost", "has no port"),
            ("192.0.2.1:0", "annot assign"),
        ],
    )
    def test_invalid_addresses(self, address: str, message: str) -> None:
        with pytest.raises(UserError, match=message), serving(Metrics({}), address):
            pass
