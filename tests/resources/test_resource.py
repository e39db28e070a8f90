"""Costs from counters: what is not known is an error, never zero."""

import math

import pytest

from fedbudget.resources.resource import CombinedReading, Cost, CounterMeter, MeterError
from support.usage import usage

CLOCK = CounterMeter("time", "the time")


def test_round_is_split_into_updates_and_the_rest() -> None:
    assert CLOCK.read(usage()) == CLOCK.expect(usage()) == Cost(0.5, 2.0)


def test_round_shorter_than_its_updates_costs_nothing_else() -> None:
    assert CLOCK.read(usage(CombinedReading(0.5, 0.9, 4), updates=2)) == Cost(0.5, 0.0)


def test_rounding_that_turns_a_clock_back_is_no_error() -> None:
    assert CLOCK.read(usage(CombinedReading(0.0, -1e-16, 4))) == Cost(0.0, 0.0)


@pytest.mark.parametrize("unknown", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("part", ["step", "whole"])
def test_unknown_readings_are_errors(part: str, unknown: float) -> None:
    values = {"step": 0.5, "whole": 7.0, part: unknown}
    with pytest.raises(MeterError, match=f"the time of a round is unknown.*{unknown}"):
        CLOCK.read(usage(CombinedReading(**values, nodes=4)))  # type: ignore[arg-type]


def test_missing_reading_is_an_error() -> None:
    with pytest.raises(MeterError, match="the time of a round is unknown: no counter"):
        CLOCK.read(usage(time=None))
