"""Resources of this package: simulated time, CPU seconds, bytes and money."""

import json
import math

import numpy as np
import pytest

from fedbudget.errors import UserError
from fedbudget.resources import RESOURCES
from fedbudget.resources.kinds import (
    CENTRALIZED_SGD,
    DGD,
    SGD,
    Gaussian,
    Prices,
    Profile,
    SimulatedTime,
)
from fedbudget.resources.resource import Cost, Metering, Reading, Source, Usage
from support.usage import usage

DRAWS = 20_000
TIME = Cost(0.5, 2.0)
SIMULATED = SimulatedTime(SGD, np.random.default_rng(0))


def time_usage(updates: int, step: float = 9.0, whole: float = 99.0) -> Usage:
    return Usage({"time": Reading(step, whole, nodes=5)}, 5, updates=updates)


@pytest.mark.parametrize(
    (
        "profile",
        "update_mean",
        "update_deviation",
        "aggregation_mean",
        "aggregation_deviation",
    ),
    [
        pytest.param(
            DGD[1], 0.020613052, 0.008154439, 0.137093837, 0.05548447, id="DGD case 1"
        ),
        pytest.param(
            DGD[2], 0.021810727, 0.008042984, 0.12322071, 0.048079171, id="DGD case 2"
        ),
        pytest.param(
            DGD[3], 0.095353094, 0.016688657, 0.157255906, 0.066722225, id="DGD case 3"
        ),
        pytest.param(
            DGD[4], 0.022075891, 0.008528005, 0.108598094, 0.044627335, id="DGD case 4"
        ),
        pytest.param(SGD, 0.013015156, 0.006946299, 0.131604348, 0.053873234, id="SGD"),
        pytest.param(
            CENTRALIZED_SGD, 0.009974248, 0.011922926, 0.0, 0.0, id="centralized SGD"
        ),
    ],
)
def test_profiles_equal_the_papers_appendix(
    profile: Profile,
    update_mean: float,
    update_deviation: float,
    aggregation_mean: float,
    aggregation_deviation: float,
) -> None:
    assert profile.step == Gaussian(update_mean, update_deviation)
    assert profile.aggregation == Gaussian(aggregation_mean, aggregation_deviation)


def clipped(gaussian: Gaussian) -> tuple[float, float]:
    """Mean and deviation of max(X, 0), X ~ N(μ, σ²), from textbook formulas."""
    mu, sigma = gaussian.mean, gaussian.deviation
    below = 0.5 * (1 - math.erf(mu / sigma / math.sqrt(2)))
    density = math.exp(-0.5 * (mu / sigma) ** 2) / math.sqrt(2 * math.pi)
    mean = mu * (1 - below) + sigma * density
    square = (mu * mu + sigma * sigma) * (1 - below) + mu * sigma * density
    return mean, math.sqrt(square - mean * mean)


@pytest.mark.parametrize(
    "gaussian", [SGD.step, SGD.aggregation, DGD[3].step, CENTRALIZED_SGD.step]
)
@pytest.mark.parametrize("count", [1, 16])
def test_draws_average_clipped_gaussians(gaussian: Gaussian, count: int) -> None:
    rng = np.random.default_rng(3)
    draws = np.array([gaussian.draw(rng, count) for _ in range(DRAWS)])
    mean, single = clipped(gaussian)
    deviation = single / math.sqrt(count)
    assert draws.mean() == pytest.approx(mean, abs=5 * deviation / math.sqrt(DRAWS))
    assert draws.std() == pytest.approx(deviation, rel=0.03)


def test_draws_are_positive() -> None:
    assert Gaussian(-1.0, 0.01).draw(np.random.default_rng(0), 7) == pytest.approx(1e-10)


def test_deviation_falls_with_tau() -> None:
    """A round costs the mean of τ draws for updates (deviation σ/√τ) and one draw for the
    aggregation (deviation σ).
    """
    meter = SimulatedTime(DGD[3], np.random.default_rng(5))
    costs = [meter.read(time_usage(updates=25)) for _ in range(DRAWS)]
    steps = np.array([cost.step for cost in costs])
    aggregations = np.array([cost.aggregation for cost in costs])
    assert steps.std() == pytest.approx(DGD[3].step.deviation / 5, rel=0.03)
    assert aggregations.std() == pytest.approx(clipped(DGD[3].aggregation)[1], rel=0.03)
    assert abs(np.corrcoef(steps, aggregations)[0, 1]) < 5 / math.sqrt(DRAWS)


def test_expected_time_takes_no_draw() -> None:
    queried, other = (SimulatedTime(SGD, np.random.default_rng(1)) for _ in range(2))
    expected = queried.expect(time_usage(updates=1))
    assert (expected.step, expected.aggregation) == (0.013015156, 0.131604348)
    assert queried.read(time_usage(updates=3)) == other.read(time_usage(updates=3))


def test_simulated_time_ignores_clocks() -> None:
    slow = time_usage(3, step=1e6, whole=1e9)
    one, other = (SimulatedTime(SGD, np.random.default_rng(1)) for _ in range(2))
    assert one.read(slow) == other.read(time_usage(updates=3))


def test_state_survives_json() -> None:
    time = SimulatedTime(SGD, np.random.default_rng(3))
    for updates in (1, 4, 2):
        time.read(time_usage(updates))
    state = json.dumps(time.state())
    expected = [time.read(time_usage(updates)) for updates in (3, 1, 5)]
    again = SimulatedTime(SGD, np.random.default_rng(0))
    again.restore(json.loads(state))
    assert [again.read(time_usage(updates)) for updates in (3, 1, 5)] == expected


@pytest.mark.parametrize(
    "state",
    [{}, {"bit_generator": "MT19937"}, {"bit_generator": "PCG64", "state": {"state": "x"}}],
)
def test_invalid_state_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(UserError, match="the state of the simulated time is invalid"):
        SimulatedTime(SGD, np.random.default_rng(3)).restore(state)


def test_measured_cpu() -> None:
    meter = RESOURCES["cpu"].meter(Metering())
    assert meter.source == "measured"
    assert meter.read(usage(), TIME) == Cost(0.75, 1.0)


def test_simulated_cpu() -> None:
    meter = RESOURCES["cpu"].meter(Metering(SimulatedTime(SGD, np.random.default_rng(0))))
    assert meter.source == "simulated"
    assert meter.read(usage(), TIME) == Cost(4 * 0.5, 0.0)


@pytest.mark.parametrize(
    ("metering", "source"),
    [
        (Metering(), "declared"),
        (Metering(network=True), "measured"),
        (Metering(SIMULATED), "declared"),
        (Metering(SIMULATED, network=True), "declared"),
    ],
)
def test_bytes_of_aggregation(metering: Metering, source: Source) -> None:
    meter = RESOURCES["bytes"].meter(metering)
    assert meter.read(usage(), Cost(0.5, 2.0)) == Cost(0.0, 2_000_000)
    assert meter.source == source


def test_rent_and_price_of_bytes() -> None:
    # 4 nodes at 9 an hour are 0.01 a second; 2 MB at 5 a gigabyte are 0.01.
    meter = RESOURCES["money"].meter(
        Metering(declared={"price_per_hour": 9.0, "price_per_gigabyte": 5.0})
    )
    cost = meter.read(usage(), Cost(0.5, 2.0))
    assert (cost.step, cost.aggregation) == pytest.approx((0.005, 0.03))


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_negative_prices_are_refused(value: float) -> None:
    for name in ("price_per_hour", "price_per_gigabyte"):
        with pytest.raises(
            UserError,
            match=f"{name.replace('_', '-')} must be a non-negative number",
        ):
            Prices(**{name: value})
