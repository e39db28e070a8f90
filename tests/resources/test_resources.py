"""The list of resources: a custom resource works from budget to record and over a network
without changes of other files.
"""

import ast
import asyncio
import inspect
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

import fedbudget
from fedbudget.budget.budget import Budget
from fedbudget.engines.grpc.node import run_node
from fedbudget.engines.grpc.server import AggregatorServer
from fedbudget.engines.remote.worker import Worker
from fedbudget.launch.execute import execute
from fedbudget.launch.inputs import from_dataset
from fedbudget.launch.serve import serving
from fedbudget.launch.simulate import simulate
from fedbudget.resources import RESOURCES, register, round_usage
from fedbudget.resources.counters import FunctionReader
from fedbudget.resources.resource import (
    CounterMeter,
    Meter,
    Metering,
    Reader,
    Reading,
    Resource,
    Usage,
)
from fedbudget.result import Result
from fedbudget.runs.folder import Run
from fedbudget.settings.network import ListenOptions
from fedbudget.settings.settings import Settings
from support.networked import LONG

SOURCES = Path(fedbudget.__file__).parent


class NodeTime(Resource):
    """Milliseconds of work, summed over all nodes and the aggregator."""

    name = "nodetime"
    unit = "ms"
    units: ClassVar[Mapping[str, float]] = {"ms": 1.0, "s": 1000.0}

    def reader(self) -> Reader:
        return FunctionReader(lambda: 1000 * time.perf_counter())

    def meter(self, metering: Metering) -> Meter:
        return CounterMeter(self.name, "the node time")


@pytest.fixture
def custom() -> Iterator[Resource]:
    resource = NodeTime()
    register(resource)
    yield resource
    del RESOURCES[resource.name]


def test_custom_resource_in_a_budget(custom: Resource) -> None:
    budget = Budget.parse(["nodetime=2s", "bytes=1kB"])
    assert (budget.limits["nodetime"], budget.resources[0]) == (2000.0, custom)
    assert str(budget) == "nodetime=2000ms, bytes=1kB"


def node_time_ratio(result: Result) -> float:
    """Node time divided by the time of the run."""
    assert result.sources == {"time": "measured", "nodetime": "measured"}
    assert result.run is not None
    assert [record.spent["nodetime"] for record in Run.open(result.run).rounds][
        -1
    ] == result.spent["nodetime"]
    return result.spent["nodetime"] / result.spent["time"] / 1000


def settings(limit: str, rounds: int | None = 6) -> Settings:
    budget = ("time=1000s", f"nodetime={limit}")
    return Settings(
        model="svm",
        tau=5,
        nodes=2,
        rounds=rounds,
        costs="measured",
        budget=budget,
        partition="case:1",
        spend_all=True,
    )


@pytest.mark.usefixtures("custom")
def test_custom_resource_in_one_process(tmp_path: Path) -> None:
    """All nodes share a clock, so the sum equals the time."""
    result = execute(simulate(settings("2000s")), out=tmp_path / "run", plot=False)
    assert node_time_ratio(result) == pytest.approx(1.0, rel=0.05)


@pytest.mark.usefixtures("custom")
def test_custom_resource_over_a_network(tmp_path: Path) -> None:
    threads: list[threading.Thread] = []
    options = settings("2000s")

    def start_nodes(server: AggregatorServer) -> None:
        for number in (1, 2):
            work = Worker(from_dataset(options, f"{number}/2"))
            node = run_node(f"127.0.0.1:{server.port}", work, name=f"node-{number}")
            threads.append(threading.Thread(target=asyncio.run, args=(node,), daemon=True))
            threads[-1].start()

    listen = ListenOptions("127.0.0.1:0")
    with serving(options, listen, interrupted=lambda: False, opened=start_nodes) as plan:
        result = execute(plan, out=tmp_path / "run", plot=False)
    for thread in threads:
        thread.join(LONG)
    # The aggregator works all the time, and two nodes part of it.
    assert 1.0 < node_time_ratio(result) < 3.0


@pytest.mark.usefixtures("custom")
def test_custom_resource_ends_a_run() -> None:
    result = execute(simulate(settings("300ms", rounds=None)))
    assert result.stopped_by == "nodetime"
    assert result.spent["nodetime"] > 0  # the overshoot depends on the machine


@pytest.mark.parametrize(
    ("name", "message"), [("time", "already"), ("two words", "letters")]
)
def test_names_are_unique_words(name: str, message: str) -> None:
    resource_class = type("Named", (NodeTime,), {"name": name})
    with pytest.raises(ValueError, match=message):
        register(resource_class())
    assert RESOURCES.keys() == {"time", "energy", "bytes", "cpu", "money", "privacy"}


@pytest.mark.parametrize("name", sorted(RESOURCES.keys() - {"time"}))
def test_one_file_names_each_resource(name: str) -> None:
    """Other files use the list of resources."""
    parts = ["budget", "engines", "protocol", "runs", "dashboard", "trackers", "api.py"]
    files = [
        file
        for part in parts
        for file in (SOURCES / part, *(SOURCES / part).rglob("*.py"))
        if file.is_file()
    ]
    assert len(files) > 50
    resources = SOURCES / "resources"
    # A saved model has a field with the guarantee of a private run.
    saved = SOURCES / "runs" / "saved_model.py"
    custom = (
        saved,
        Path(inspect.getfile(type(RESOURCES[name]))),
        resources / "__init__.py",
    )
    for file in {*files, *resources.glob("*.py")}.difference(custom):
        strings = {
            node.value
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Constant)
        }
        assert name not in strings, file


class TestCombinedUsage:
    TWO = (
        Usage(
            {"time": Reading(0.1, 1.0), "cpu": Reading(0.2, 2.0)}, nodes=3, wire_bytes=10
        ),
        Usage(
            {"time": Reading(0.3, 0.5), "cpu": Reading(0.4, 3.0)},
            nodes=2,
            wire_bytes=20,
            here=True,
        ),
    )

    def test_resources_combine_in_different_ways(self) -> None:
        used = round_usage(self.TWO, updates=4, own={"time": 9.0, "cpu": 0.5})
        assert (used.updates, used.nodes, used.wire_bytes) == (4, 5, 30)
        assert used.readings["time"] == Reading(0.3, 9.0, nodes=5)
        assert used.readings["cpu"].step == pytest.approx(0.6)
        assert used.readings["cpu"].whole == 2.5

    def test_trial_uses_node_readings(self) -> None:
        used = round_usage(self.TWO)
        assert used.readings["time"] == Reading(0.3, 1.0, nodes=5)
        assert used.readings["cpu"].whole == 5.0

    def test_counted_bytes_add_to_those_of_nodes(self) -> None:
        assert round_usage(self.TWO, wire_bytes=123).wire_bytes == 123 + 30

    @pytest.mark.parametrize("metered", [-1, 6])
    def test_too_many_metered_nodes(
        self, metered: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wrong = Reading(1.0, 2.0, nodes=metered)
        monkeypatch.setattr(RESOURCES["cpu"], "combine", lambda nodes, own: wrong)
        with pytest.raises(ValueError, match="nodes of a round with 5"):
            round_usage(self.TWO)

    def test_groups_without_nodes_do_not_count(self) -> None:
        assert round_usage([*self.TWO, Usage({}, nodes=0)]) == round_usage(self.TWO)

    def test_unknown_resources_are_ignored(self) -> None:
        """A node may report resources that the aggregator does not have."""
        unknown = Usage({"time": Reading(0.1, 1.0), "water": Reading(1.0, 2.0)})
        assert round_usage([unknown]).readings.keys() == {"time"}

    def test_round_without_nodes_costs_time(self) -> None:
        assert round_usage([], own={"time": 2.5}).readings == {
            "time": Reading(0.0, 2.5, nodes=0)
        }
