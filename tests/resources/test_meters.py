"""Meters of a budget: costs, their sources, expected costs, and saved state."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from fedbudget.budget.budget import Budget
from fedbudget.resources.kinds import SGD, SimulatedTime
from fedbudget.resources.meters import Meters
from fedbudget.resources.resource import MeterError, Metering, Reading
from support.usage import CPU, TIME, usage

EVERYTHING = Budget.parse(["money=9", "bytes=1GB", "time=1h", "energy=1MJ", "cpu=1h"])
DECLARED = {
    "watts": 3.0,
    "joules_per_byte": 1e-6,
    "price_per_hour": 9.0,
    "price_per_gigabyte": 5.0,
}
MEASURED = [Metering(declared=DECLARED), Metering(network=True, declared=DECLARED)]


def simulated(seed: int = 4, network: bool = False) -> Metering:
    return Metering(SimulatedTime(SGD, np.random.default_rng(seed)), network, DECLARED)


def test_costs_follow_the_budget_order() -> None:
    costs = Meters.of(EVERYTHING, MEASURED[0]).read(usage())
    assert costs.step.tolist() == pytest.approx([0.005, 0, 0.5, 6.0, 0.75])
    assert costs.aggregation.tolist() == pytest.approx([0.03, 2_000_000, 2.0, 26.0, 1.0])


@pytest.mark.parametrize("network", [False, True])
def test_simulated_time_determines_other_costs(network: bool) -> None:
    time = SimulatedTime(SGD, np.random.default_rng(4)).read(usage())
    c, b = time.step, time.aggregation
    costs = Meters.of(EVERYTHING, simulated(network=network)).read(usage())
    assert costs.step.tolist() == pytest.approx([0.01 * c, 0, c, 12 * c, 4 * c])
    assert costs.aggregation.tolist() == pytest.approx(
        [0.01 * b + 0.01, 2_000_000, b, 12 * b + 2, 0]
    )


def test_expected_costs_use_mean_time() -> None:
    expected = Meters.of(Budget.parse(["cpu=1s", "time=1s"]), simulated()).expect(usage())
    assert expected.step.tolist() == [4 * 0.013015156, 0.013015156]
    assert expected.aggregation.tolist() == [0, 0.131604348]


def test_sources() -> None:
    declared = {"money": "declared", "bytes": "declared", "energy": "declared"}
    measured, network = (Meters.of(EVERYTHING, how) for how in MEASURED)
    assert measured.sources == {**declared, "time": "measured", "cpu": "measured"}
    assert list(measured.sources) == list(EVERYTHING.limits)
    assert network.sources == {
        **declared,
        "time": "measured",
        "cpu": "measured",
        "bytes": "measured",
    }
    assert Meters.of(EVERYTHING, simulated()).sources == {
        **declared,
        "time": "simulated",
        "cpu": "simulated",
    }


@pytest.mark.parametrize("metering", MEASURED)
def test_unknown_reading_of_unbudgeted_resource(metering: Metering) -> None:
    unknown = usage(cpu=Reading(math.nan, 1.0, nodes=4))
    with pytest.raises(MeterError, match=r"the CPU time of a round is unknown.*nan"):
        Meters.of(Budget({"cpu": 1.0}), metering).read(unknown)
    assert Meters.of(Budget({"time": 1.0}), metering).read(unknown).step.tolist() == [0.5]


@pytest.mark.parametrize(
    ("budget", "names"),
    [
        ("bytes=1MB", ["time"]),
        ("cpu=1s", ["time", "cpu"]),
        ("energy=1J", ["time"]),
        ("time=1s", ["time"]),
    ],
)
def test_only_needed_counters_are_read(budget: str, names: list[str]) -> None:
    """The energy counter of this machine is not read for simulated nodes."""
    assert list(Meters.of(Budget.parse([budget]), Metering()).counters().names) == names


class TestState:
    METERED = Reading(4.0, 55.0, nodes=4)

    def test_restored_meters_continue(self) -> None:
        metering = Metering(network=True, declared={"watts": 3.0, "joules_per_byte": 0.0})
        first, second = (Meters.of(EVERYTHING, metering) for _ in range(2))
        for seconds in (0.1, 0.3):
            first.read(usage(replace(TIME, step=seconds), CPU, self.METERED))
        second.restore(json.loads(json.dumps(first.state())))
        assert second.sources == first.sources
        assert second.sources["energy"] == "measured"
        again = usage(replace(TIME, step=0.2), CPU, self.METERED)
        assert second.read(again).step.tolist() == first.read(again).step.tolist()

    def test_restored_simulated_meters_continue(self) -> None:
        first, second = (
            Meters.of(Budget({"time": 1e6}), simulated(seed)) for seed in (1, 2)
        )
        first.read(usage())
        second.restore(json.loads(json.dumps(first.state())))
        assert second.read(usage()).step.tolist() == first.read(usage()).step.tolist()
