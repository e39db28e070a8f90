"""Clocks, bytes, CPU seconds, energy and money, by hand; and how they make up the costs of a budget."""

import math

import numpy as np
import pytest

from fedbudget.budget import Budget
from fedbudget.errors import UserError
from fedbudget.meters import measured_meters, simulated_meters
from fedbudget.meters.declared import BusyCpu, Energy, Money, WireBytes
from fedbudget.meters.measured import CpuClock, Instant, WallClock
from fedbudget.meters.meter import Cost, RoundTrip
from fedbudget.meters.simulated import SGD, SimulatedTime

TRIP = RoundTrip(
    updates=10, nodes=4, wire_bytes=2_000_000, step_seconds=0.5, seconds=7.0, step_cpu=0.75, cpu=8.5
)  # 5 of the 7 seconds, and 7.5 of the 8.5 CPU seconds, are local updates
TIME = Cost(0.5, 2.0)
EVERYTHING = Budget.parse(["money=9", "bytes=1GB", "time=1h", "energy=1MJ", "cpu=1h"])


def test_wall_clock_splits_a_round_into_updates_and_the_rest() -> None:
    assert WallClock().read(TRIP) == WallClock().expect(TRIP) == Cost(0.5, 2.0)


def test_cpu_clock_does_the_same_with_cpu_seconds() -> None:
    assert CpuClock().read(TRIP, TIME) == Cost(0.75, 1.0)


def test_a_round_that_seems_shorter_than_its_updates_costs_nothing_besides_them() -> None:
    trip = RoundTrip(updates=2, nodes=1, wire_bytes=0, step_seconds=0.5, seconds=0.9, step_cpu=0.5, cpu=0.9)
    assert WallClock().read(trip) == CpuClock().read(trip, TIME) == Cost(0.5, 0.0)


def test_bytes_belong_to_the_aggregation_alone() -> None:
    assert WireBytes().read(TRIP, TIME) == Cost(0.0, 2_000_000)


def test_simulated_cpu_is_every_node_busy_while_it_updates() -> None:
    assert BusyCpu().read(TRIP, TIME) == Cost(4 * 0.5, 0.0)


def test_energy_is_power_of_all_nodes_over_time_and_joules_for_every_byte() -> None:
    # 4 nodes of 3 W are 12 W: 6 J for an update of half a second, 24 J for two seconds, and 2 MB at 1 µJ are 2 J.
    cost = Energy(watts=3.0, joules_per_byte=1e-6).read(TRIP, TIME)
    assert (cost.step, cost.aggregation) == pytest.approx((6.0, 26.0))


def test_money_is_rent_of_all_nodes_and_a_price_for_every_gigabyte() -> None:
    # 4 nodes at 9 an hour are 0.01 a second; 2 MB at 5 a gigabyte are 0.01.
    cost = Money(price_per_hour=9.0, price_per_gigabyte=5.0).read(TRIP, TIME)
    assert (cost.step, cost.aggregation) == pytest.approx((0.005, 0.03))


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_declared_figures_must_be_numbers_that_are_not_negative(value: float) -> None:
    for declare, option in (
        (lambda: Energy(watts=value), "watts"),
        (lambda: Energy(joules_per_byte=value), "joules-per-byte"),
        (lambda: Money(price_per_hour=value), "price-per-hour"),
        (lambda: Money(price_per_gigabyte=value), "price-per-gigabyte"),
    ):
        with pytest.raises(UserError, match=f"{option} must be a number that is not negative"):
            declare()


def test_costs_come_in_the_order_of_the_budget() -> None:
    costs = measured_meters(EVERYTHING, Energy(3.0, 1e-6), Money(9.0, 5.0)).read(TRIP)
    assert costs.step.tolist() == pytest.approx([0.005, 0, 0.5, 6.0, 0.75])
    assert costs.aggregation.tolist() == pytest.approx([0.03, 2_000_000, 2.0, 26.0, 1.0])


def test_in_a_simulated_run_all_resources_follow_from_the_simulated_time() -> None:
    meters = simulated_meters(EVERYTHING, Energy(3.0, 1e-6), Money(9.0, 5.0), SGD, np.random.default_rng(4))
    time = SimulatedTime(SGD, np.random.default_rng(4)).read(TRIP)
    c, b = time.step, time.aggregation
    costs = meters.read(TRIP)
    assert costs.step.tolist() == pytest.approx([0.01 * c, 0, c, 12 * c, 4 * c])
    assert costs.aggregation.tolist() == pytest.approx([0.01 * b + 0.01, 2_000_000, b, 12 * b + 2, 0])


def test_what_is_expected_follows_from_the_mean_time() -> None:
    meters = simulated_meters(Budget.parse(["cpu=1s", "time=1s"]), Energy(), Money(), SGD, np.random.default_rng(4))
    expected = meters.expect(TRIP)
    assert expected.step.tolist() == [4 * 0.013015156, 0.013015156]
    assert expected.aggregation.tolist() == [0, 0.131604348]


def test_every_resource_says_how_it_is_known() -> None:
    declared = {"money": "declared", "bytes": "declared", "energy": "declared"}
    measured = measured_meters(EVERYTHING, Energy(), Money())
    simulated = simulated_meters(EVERYTHING, Energy(), Money(), SGD, np.random.default_rng(0))
    assert measured.sources == {**declared, "time": "measured", "cpu": "measured"}
    assert simulated.sources == {**declared, "time": "simulated", "cpu": "simulated"}
    assert list(measured.sources) == list(EVERYTHING.limits)


def test_instants_add_and_subtract_on_both_clocks() -> None:
    early, late = Instant(10.0, 1.0), Instant(15.0, 4.0)
    assert late - early == Instant(5.0, 3.0)
    assert early + (late - early) == late


def test_both_clocks_run() -> None:
    before = Instant.now()
    sum(number * number for number in range(100_000))
    passed = Instant.now() - before
    assert passed.seconds > 0
    assert passed.cpu > 0
