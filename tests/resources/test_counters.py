"""Counters of a process: counts, readings and failures."""

import math

import numpy as np

from fedbudget.resources import RESOURCES
from fedbudget.resources.counters import FunctionReader, ResourceCounters
from fedbudget.resources.resource import MeterError, Reading


def test_both_clocks_run() -> None:
    counters = ResourceCounters.of([RESOURCES["time"], RESOURCES["cpu"]])
    before = counters.read()
    sum(number * number for number in range(100_000))
    passed = counters.label(counters.read() - before)
    assert passed.keys() == {"time", "cpu"}
    assert all(count > 0 for count in passed.values())


def test_resources_without_counter_are_skipped() -> None:
    counters = ResourceCounters.of(
        [RESOURCES["bytes"], RESOURCES["cpu"], RESOURCES["money"]]
    )
    assert counters.names == ("cpu",)


def test_given_readers_replace_those_of_resources() -> None:
    resources = [RESOURCES["time"], RESOURCES["cpu"]]
    counters = ResourceCounters.of(
        resources, {"time": FunctionReader(lambda: 5.0), "cpu": None}
    )
    assert counters.label(counters.read()) == {"time": 5.0}


def test_readings_per_update_and_round() -> None:
    counters = ResourceCounters({"x": FunctionReader(lambda: 0.0, host="a")})
    assert counters.readings(np.array([6.0]), np.array([7.0]), 3) == {
        "x": Reading(2.0, 7.0, "a")
    }


def test_failing_counter_has_no_reading() -> None:
    def fail() -> float:
        raise MeterError("no such file")

    counters = ResourceCounters(
        {"x": FunctionReader(fail), "y": FunctionReader(lambda: 1.0)}
    )
    before = counters.read()
    assert math.isnan(before[0])
    passed = counters.read() - before
    assert counters.readings(passed, passed, 1) == {"y": Reading(0.0, 0.0)}
