"""Forecasts of hand-made curves with a known continuation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float64
from fedbudget.forecasts.curve import (
    _STUDENT,
    LEVEL,
    Curve,
    Draws,
    forecast_interval,
    furthest_ratio,
    misfit,
)

END = 1.0


def curve_of(values: Float64, floor: float | None = 0.0) -> Curve:
    """Values at equal distances from 0 to `END`."""
    x = np.arange(len(values)) / len(values)
    return Curve(x[None], values, np.array([END]), floor)


def half_seen(
    points: int, shape: str, noise: float = 0.0, seed: int = 0
) -> tuple[Curve, float]:
    """The first half of a curve, with noise, and its value at the end, without noise."""
    x = np.append(np.arange(points) / points, 2.0)
    y = {
        "power": 0.2 + 0.8 / (1 + 12 * x),
        "root": 0.1 + 0.9 / np.sqrt(1 + 30 * x),
        "exponential": 0.3 + 0.7 * np.exp(-1.5 * x),
        "two exponentials": 0.1 + 0.5 * np.exp(-8 * x) + 0.4 * np.exp(-0.8 * x),
        "plateau": 0.25 + 0.75 * np.exp(-20 * x),
    }[shape]
    rng = np.random.default_rng(seed)
    return curve_of(y[:-1] * np.exp(noise * rng.standard_normal(points))), float(y[-1])


SHAPES = ("power", "root", "exponential", "two exponentials", "plateau")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("points", [12, 3000])
def test_median_without_noise(shape: str, points: int) -> None:
    """The error of the median is less than half of the remaining change."""
    curve, end = half_seen(points, shape)
    ends = forecast_interval(curve, np.array([2.0]))
    assert ends is not None
    assert abs(ends[1, 0] - end) < 0.4 * (curve.values[-1] - end) + 0.002


def test_interval_coverage() -> None:
    """The interval contains the true value about as often as it should, but not always."""
    inside = []
    for seed in range(60):
        curve, end = half_seen(
            30 + 2 * seed, SHAPES[seed % len(SHAPES)], noise=0.05, seed=seed
        )
        ends = forecast_interval(curve, np.array([2.0]))
        assert ends is not None
        inside.append(ends[0, 0] <= end <= ends[2, 0])
    assert 0.65 <= np.mean(inside) <= 0.97


def test_known_value_narrows_interval() -> None:
    """Noise in the observations is not noise in the current value. If that value is known,
    the interval is narrower.
    """
    curve, end = half_seen(60, "plateau", noise=0.1)
    blind, anchored = (
        forecast_interval(curve, np.array([2.0])),
        forecast_interval(curve, np.array([2.0]), known=0.25),
    )
    assert blind is not None
    assert anchored is not None
    assert anchored[2, 0] - anchored[0, 0] < 0.7 * (blind[2, 0] - blind[0, 0])
    assert anchored[2, 0] == pytest.approx(end)


@settings(deadline=None, max_examples=25)
@given(
    values=st.lists(st.floats(1e-9, 1e9), min_size=9, max_size=40),
    ratio=st.floats(1.01, 2.0),
)
def test_quantiles_are_ordered(values: list[float], ratio: float) -> None:
    """Low end, median and high end are in order and not below the floor."""
    ends = forecast_interval(curve_of(np.array(values)), np.array([ratio]))
    if ends is not None:
        assert 0 <= ends[0, 0] <= ends[1, 0] <= ends[2, 0] < np.inf


def test_units_do_not_matter() -> None:
    """Neither the unit of the axis nor that of the values matters. Equal curves return the
    same bits.
    """
    curve, _ = half_seen(40, "power", noise=0.05)
    ends = forecast_interval(curve, np.array([2.0]))
    other = forecast_interval(
        Curve(60 * curve.axes, 7 * curve.values, 60 * curve.ends), np.array([120.0])
    )
    assert ends is not None
    assert other is not None
    np.testing.assert_allclose(other, 7 * ends, rtol=1e-6)
    np.testing.assert_array_equal(forecast_interval(curve, np.array([2.0])), ends)


def test_losses_below_zero() -> None:
    """Changes are then differences, and there is no floor."""
    curve, end = half_seen(60, "exponential")
    ends = forecast_interval(curve_of(curve.values - 5, floor=None), np.array([2.0]))
    assert ends is not None
    assert ends[1, 0] == pytest.approx(end - 5, abs=0.06)


def test_largest_ratio() -> None:
    """No forecast over a larger ratio than from the fourth round to now."""
    curve, _ = half_seen(40, "power")
    assert furthest_ratio(curve) == pytest.approx(10)
    assert misfit(curve, 9.0) is not None
    assert misfit(curve, 11.0) is None
    assert forecast_interval(curve, np.array([11.0])) is None


def test_failed_backtests_widen_interval() -> None:
    """An irregular curve has a wider interval than a smooth one."""
    x = np.arange(60) / 60
    smooth, stairs = 1 / (1 + 10 * x), 1 / (1 + 10 * np.floor(5 * x) / 5)
    widths = []
    for values in (smooth, stairs):
        ends = forecast_interval(curve_of(values), np.array([1.5]))
        assert ends is not None
        widths.append(np.log(ends[2, 0] / ends[0, 0]))
    assert widths[1] > 3 * widths[0]


def test_student_quantiles() -> None:
    """The table of Student's t agrees with samples of numpy."""
    rng = np.random.default_rng(0)
    for freedom, quantile in enumerate(_STUDENT, start=1):
        draws = np.abs(rng.standard_t(freedom, 200_000))
        assert np.mean(draws <= quantile) == pytest.approx(LEVEL, abs=0.004)


def test_weighted_quantiles_by_hand() -> None:
    """Half of the weight is on 3, so the median is 3."""
    draws = Draws(np.array([[3.0], [1.0], [5.0]]), np.array([0.5, 0.25, 0.25]))
    assert draws.quantiles([0.5])[0, 0] == 3.0
    assert draws.quantiles([0.125])[0, 0] == 1.0
