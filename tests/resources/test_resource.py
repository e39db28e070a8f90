"""Readings of nodes combined into the usage of a round, and costs from it."""

import math

import pytest

from fedbudget.resources import within
from fedbudget.resources.resource import (
    Cost,
    CounterMeter,
    MeterError,
    Reading,
    Usage,
    estimated,
    once_per_host,
    slowest,
    total,
)
from support.usage import usage

CLOCK = CounterMeter("time", "the time")


def test_round_splits_into_two_costs() -> None:
    assert CLOCK.read(usage()) == CLOCK.expect(usage()) == Cost(0.5, 2.0)


def test_round_shorter_than_its_updates() -> None:
    assert CLOCK.read(usage(Reading(0.5, 0.9, nodes=4), updates=2)) == Cost(0.5, 0.0)


def test_tiny_negative_time_is_zero() -> None:
    assert CLOCK.read(usage(Reading(0.0, -1e-16, nodes=4))) == Cost(0.0, 0.0)


@pytest.mark.parametrize("unknown", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("part", ["step", "whole"])
def test_unknown_readings_are_errors(part: str, unknown: float) -> None:
    values = {"step": 0.5, "whole": 7.0, part: unknown}
    with pytest.raises(MeterError, match=f"the time of a round is unknown.*{unknown}"):
        CLOCK.read(usage(Reading(**values, nodes=4)))  # type: ignore[arg-type]


def test_missing_reading_is_an_error() -> None:
    with pytest.raises(MeterError, match="the time of a round is unknown: no counter"):
        CLOCK.read(usage(time=None))


def nodes(
    *readings: Reading | None, here: int | None = None, count: int = 2
) -> list[Usage]:
    """Groups of nodes with a reading of "x" each, or none."""
    return [
        Usage({} if reading is None else {"x": reading}, nodes=count, here=number == here)
        for number, reading in enumerate(readings)
    ]


PAIR = (Reading(1.0, 8.0), Reading(3.0, 5.0))


def test_slowest_takes_the_largest_of_each() -> None:
    assert slowest("x", nodes(*PAIR), None) == Reading(3.0, 8.0, nodes=4)


def test_slowest_uses_the_aggregators_clock() -> None:
    """Its clock includes waiting and messages, which nodes do not see."""
    assert slowest("x", nodes(*PAIR), 9.5) == Reading(3.0, 9.5, nodes=4)


def test_total_adds_the_aggregators_own() -> None:
    assert total("x", nodes(*PAIR), None) == Reading(4.0, 13.0, nodes=4)
    assert total("x", nodes(*PAIR), 2.0) == Reading(4.0, 15.0, nodes=4)


def test_total_counts_the_aggregators_process_once() -> None:
    """The aggregator's reading already includes the round of a node in its process."""
    assert total("x", nodes(*PAIR, here=0), 10.0) == Reading(4.0, 15.0, nodes=4)


def test_missing_time_is_unknown() -> None:
    assert math.isnan(slowest("x", nodes(PAIR[0], None), 1.0).step)


def test_missing_reading_counts_as_mean() -> None:
    one = total("x", nodes(PAIR[0]), None)
    two = total("x", nodes(PAIR[0], None), None)
    assert one is not None
    assert two is not None
    assert (two.step, two.whole) == (2 * one.step, 2 * one.whole)


def test_no_readings_are_none() -> None:
    for combine in (total, once_per_host):
        assert combine("x", nodes(None, None), None) is None


def test_no_nodes() -> None:
    """The round costs the elapsed time and the usage of the aggregator's process."""
    assert slowest("x", [], 2.5) == total("x", [], 2.5) == Reading(0.0, 2.5, nodes=0)


def test_nodes_on_one_machine_count_once() -> None:
    readings = (Reading(1.0, 8.0, "a"), Reading(3.0, 5.0, "a"), Reading(0.5, 2.0, "b"))
    assert once_per_host("x", nodes(*readings), 99.0) == Reading(3.5, 10.0, nodes=6)


def test_unmetered_machines_are_left_out() -> None:
    readings = (Reading(1.0, 8.0, "a"), None)
    assert once_per_host("x", nodes(*readings), None) == Reading(1.0, 8.0, nodes=2)


def test_estimated_machine_counts_once() -> None:
    readings = (Reading(1.0, 10.0, "a"), Reading(3.0, 12.0, estimated("a")))
    assert once_per_host("x", nodes(*readings), None) == Reading(
        3.0, 12.0, estimated(""), nodes=4
    )


def test_trial_scaled_to_fewer_nodes() -> None:
    result = usage().as_round_of(3, 500)
    assert (result.nodes, result.wire_bytes, result.readings["cpu"].nodes) == (3, 500, 3)
    assert (result.step_seconds, result.seconds) == (0.5, 7.0)


def test_delay_adds_to_the_whole_alone() -> None:
    result = usage().delayed(2.0)
    assert (result.step_seconds, result.seconds) == (0.5, 9.0)
    assert result.readings["cpu"] == usage().readings["cpu"]


def test_reported_time_is_limited() -> None:
    """A node that reports 1e9 seconds is charged the time of the aggregator's clock."""
    costs = Usage({"time": Reading(1e9, 2e9), "cpu": Reading(3.0, 4.0)})
    limited = within(costs, 6.0, 3)
    assert (limited.step_seconds, limited.seconds, limited.readings["cpu"]) == (
        2.0,
        6.0,
        Reading(3.0, 4.0),
    )
    assert within(limited, 7.0, 3) == limited
