"""Clocks, bytes, CPU seconds, energy and money, by hand; and how they make up the costs of a budget."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedbudget.budget import Budget, Costs
from fedbudget.errors import UserError
from fedbudget.meters import measured_meters, network_meters, simulated_meters
from fedbudget.meters.declared import BusyCpu, Energy, Money, WireBytes
from fedbudget.meters.measured import CpuClock, Instant, MeasuredBytes, MeasuredEnergy, WallClock
from fedbudget.meters.meter import Cost, MeterError, Meters, RoundTrip
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

    network = network_meters(EVERYTHING, Energy(), Money())
    assert network.sources == {**declared, "time": "measured", "cpu": "measured", "bytes": "measured"}


@pytest.mark.parametrize("unknown", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("reading", ["step_seconds", "seconds", "step_cpu", "cpu"])
def test_a_clock_that_was_not_read_is_an_error_where_it_counts(reading: str, unknown: float) -> None:
    changed: dict[str, Any] = {reading: unknown}
    trip = replace(TRIP, **changed)
    concerned = "cpu" if reading.endswith("cpu") else "time"
    for meters in (measured_meters, network_meters):
        with pytest.raises(MeterError, match=f"not known.*{unknown}"):
            meters(Budget({concerned: 1.0}), Energy(), Money()).read(trip)
    if concerned == "cpu":
        assert network_meters(Budget({"time": 1.0}), Energy(), Money()).read(trip).step.tolist() == [0.5]


def test_a_clock_that_rounding_turns_back_is_no_error() -> None:
    trip = replace(TRIP, step_cpu=0.0, cpu=-1e-16)
    assert CpuClock().read(trip, TIME) == Cost(0.0, 0.0)


class TestMeasuredEnergy:
    # 10 updates of 4 J are 40 of the 55 J that the machines measured.
    ALL = replace(TRIP, metered=4, step_joules=4.0, joules=55.0)
    ONE_NOT = replace(ALL, metered=3)
    DECLARED = Energy(watts=3.0, joules_per_byte=1e-6)
    NO_BYTES = Energy(watts=3.0, joules_per_byte=0.0)

    def test_where_all_nodes_are_metered_watts_have_no_say(self) -> None:
        assert MeasuredEnergy(self.NO_BYTES).read(self.ALL, TIME) == Cost(4.0, 15.0)

    def test_bytes_cost_what_is_declared_because_no_meter_sees_them(self) -> None:
        cost = MeasuredEnergy(self.DECLARED).read(self.ALL, TIME)
        assert (cost.step, cost.aggregation) == pytest.approx((4.0, 15.0 + 2.0))

    def test_a_node_without_a_meter_takes_the_declared_watts(self) -> None:
        # 3 W for half a second are 1.5 J, and for two seconds 6 J.
        cost = MeasuredEnergy(self.DECLARED).read(self.ONE_NOT, TIME)
        assert (cost.step, cost.aggregation) == pytest.approx((4.0 + 1.5, 15.0 + 6.0 + 2.0))

    def test_without_any_meter_it_is_the_declared_energy(self) -> None:
        assert MeasuredEnergy(self.DECLARED).read(TRIP, TIME) == self.DECLARED.read(TRIP, TIME)

    @pytest.mark.parametrize(
        ("declared", "trips", "source"),
        [
            (NO_BYTES, [], "declared"),
            (NO_BYTES, [TRIP, TRIP], "declared"),
            (NO_BYTES, [ALL, ALL], "measured"),
            (NO_BYTES, [ALL, TRIP], "estimated"),
            (NO_BYTES, [TRIP, ALL], "estimated"),
            (NO_BYTES, [ONE_NOT, ALL], "estimated"),
            (DECLARED, [ALL, ALL], "estimated"),
            (DECLARED, [TRIP], "declared"),
        ],
    )
    def test_it_says_how_it_knows_what_it_read_so_far(
        self, declared: Energy, trips: list[RoundTrip], source: str
    ) -> None:
        meters = network_meters(Budget({"energy": 1e6}), declared, Money())
        for trip in trips:
            meters.read(trip)
        assert meters.sources == {"energy": source}

    def test_a_trial_is_not_part_of_what_was_read(self) -> None:
        meters = network_meters(Budget({"energy": 1e6}), self.NO_BYTES, Money())
        assert meters.expect(TRIP).step.tolist() == [6.0]
        meters.read(self.ALL)
        assert meters.sources == {"energy": "measured"}

    @pytest.mark.parametrize("unknown", [None, math.nan, math.inf, -1.0])
    @pytest.mark.parametrize("reading", ["step_joules", "joules"])
    def test_a_meter_that_was_not_read_is_an_error_and_leaves_no_trace(
        self, reading: str, unknown: float | None
    ) -> None:
        meter = MeasuredEnergy(self.NO_BYTES)
        changed: dict[str, Any] = {reading: unknown}
        with pytest.raises(MeterError, match="energy of a round is not known"):
            meter.read(replace(self.ONE_NOT, **changed), TIME)
        meter.read(self.ALL, TIME)
        assert meter.source == "measured"

    @pytest.mark.parametrize("metered", [-1, 5])
    def test_no_more_nodes_are_metered_than_there_are(self, metered: int) -> None:
        with pytest.raises(ValueError, match="of 4 nodes cannot be metered"):
            replace(TRIP, metered=metered)


def test_bytes_that_were_counted_belong_to_the_aggregation_alone() -> None:
    assert MeasuredBytes().read(TRIP, TIME) == Cost(0.0, 2_000_000)


class TestExpected:
    BUDGET = Budget({"time": 1e6, "bytes": 1e9})

    @staticmethod
    def costs(seconds: float) -> Costs:
        return Costs(np.array([seconds, 0.0]), np.array([2 * seconds, 100.0]))

    @pytest.mark.parametrize("make", [measured_meters, network_meters])
    def test_one_slow_round_is_not_expected_again(self, make: Callable[[Budget, Energy, Money], Meters]) -> None:
        meters = make(self.BUDGET, Energy(), Money())
        for seconds in (1.0, 1.0, 50.0):
            expected = meters.expected(self.costs(seconds))
        assert expected.step.tolist() == [1.0, 0.0]
        assert expected.aggregation.tolist() == [2.0, 100.0]

    def test_simulated_costs_are_taken_as_they_are(self) -> None:
        meters = simulated_meters(self.BUDGET, Energy(), Money(), SGD, np.random.default_rng(0))
        for seconds in (1.0, 1.0, 50.0):
            costs = self.costs(seconds)
            assert meters.expected(costs) is costs
        assert meters.expectation.state() == []

    def test_meters_that_are_restored_go_on_as_the_first_would(self) -> None:
        first, second = (network_meters(EVERYTHING, Energy(3.0, 0.0), Money()) for _ in range(2))
        metered = replace(TRIP, metered=4, step_joules=4.0, joules=55.0)
        for seconds in (0.1, 0.3):
            first.expected(first.read(replace(metered, step_seconds=seconds)))
        second.restore(json.loads(json.dumps(first.state())))
        assert second.sources == first.sources
        assert second.sources["energy"] == "measured"
        costs = first.read(replace(metered, step_seconds=0.2))
        assert second.expected(costs).step.tolist() == first.expected(costs).step.tolist()

    def test_simulated_meters_that_are_restored_draw_what_the_first_would(self) -> None:
        first, second = (
            simulated_meters(self.BUDGET, Energy(), Money(), SGD, np.random.default_rng(seed)) for seed in (1, 2)
        )
        first.read(TRIP)
        second.restore(json.loads(json.dumps(first.state())))
        assert second.read(TRIP).step.tolist() == first.read(TRIP).step.tolist()


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
