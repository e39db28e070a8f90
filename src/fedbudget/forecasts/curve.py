"""Extrapolation of a falling curve, such as a loss or an error rate.

A curve is y = l + d ψ(x). The shape ψ is one of many: powers (1 + x/x₀)^-p and
exponentials exp(-x/x₀), along every axis that measures progress. The right shape is
unknown, so all of them count:

- For a given shape, weighted least squares determine l and d with their uncertainty
  (Student's t, because the noise is unknown). A shape is weighted by its marginal
  likelihood, and draws come from all shapes. d ≥ 0, because the best parameters never
  become worse, and the value at infinity is at least `floor`.
- Points are weighted by x/x_now. No shape holds from start to end, and the near future
  resembles the recent past. Two noise models are tried: constant, and proportional to the
  value.
- Correlated residuals are no independent evidence. If consecutive residuals have
  correlation r, n points count as n (1-r)/(1+r).

The draws alone are overconfident, because no shape is exact. `misfit` measures the error
on the curve itself: it forecasts later points from earlier ones over the same ratio of x.
The errors beyond the spread of the draws are compared with the forecast change. A curve
whose forecasts missed a change by a tenth will miss the next one by a tenth. No constant in
this file was fitted to runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from fedbudget.arrays import Float64
from fedbudget.randomness import Stream, generator

LEVEL = 0.8
"""Probability that the future value is within an interval."""

MIN_POINTS = 4
"""Points that a forecast needs. A run needs 8, so that a forecast can be tested."""

# Half of an interval with probability LEVEL, in standard deviations: of a Gaussian, and of
# Student's t with 1, 2, ... degrees of freedom.
_GAUSSIAN = NormalDist().inv_cdf((1 + LEVEL) / 2)
_STUDENT = (
    3.0776835372,
    1.8856180832,
    1.6377443537,
    1.5332062741,
    1.4758840488,
    1.4397557473,
)

_MAX_POINTS = 48  # longer curves are thinned
_DRAWS = 24  # of each shape
_POWERS = (0.5, 1.0, 2.0)
_SCALES = np.geomspace(0.003, 3, 7)  # x₀ of powers, in units of x_now
_RATES = np.geomspace(0.03, 3, 7)  # x₀ of exponentials, in units of x_now
_TESTS = 0.85 ** np.arange(len(_STUDENT))  # points to test at, in units of x_now
_MIN_FREEDOM = 4.0  # of Student's t; with fewer, a few draws dominate
_TINY = 1e-300


@dataclass(frozen=True)
class Curve:
    """The observed part of a curve.

    Args:
      axes: x along each axis, increasing from 0, [axes, points].
      values: y, [points].
      ends: current position along each axis, slightly beyond the last point, [axes].
      floor: lower bound of y, if any.
    """

    axes: Float64
    values: Float64
    ends: Float64
    floor: float | None = 0.0

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def logarithmic(self) -> bool:
        """Whether changes are factors: if all values are positive, as losses are."""
        return self.floor == 0 and bool((self.values > 0).all())

    def scaled(self, values: Float64) -> Float64:
        """Return values on the scale of changes: their logarithms, or unchanged."""
        return np.log(np.maximum(values, _TINY)) if self.logarithmic else values

    def before(self, points: int) -> "Curve":
        """Return the curve as it was after its first `points` points."""
        return Curve(
            self.axes[:, :points], self.values[:points], self.axes[:, points], self.floor
        )

    def ahead(self, x: Float64) -> Float64:
        """Return the future positions on all axes for x on the last one, [axes, x].

        The axes advance in the proportion of the last third of the curve.
        """
        back = len(self) - max(2, len(self) // 3)
        pace = (self.ends - self.axes[:, back]) / (self.ends[-1] - self.axes[-1, back])
        ahead: Float64 = self.ends[:, None] + pace[:, None] * (x - self.ends[-1])
        return ahead

    def recent(self) -> Float64:
        """Return the last tenth of the values."""
        return self.values[-max(3, len(self) // 10) :]


@dataclass(frozen=True)
class Draws:
    """Possible future values, [draws, x], and their weights, [draws], which sum to 1."""

    values: Float64
    weights: Float64

    def quantiles(self, levels: Sequence[float]) -> Float64:
        """Return the weighted quantiles, [levels, x]."""
        order = np.argsort(self.values, axis=0)
        sorted_values = np.take_along_axis(self.values, order, 0)
        weights = self.weights[order]
        below = np.cumsum(weights, axis=0) - weights / 2
        columns = [
            np.interp(levels, below[:, x], sorted_values[:, x])
            for x in range(self.values.shape[1])
        ]
        return np.array(columns).T

    def interval(self) -> Float64:
        """Return the low end, the median and the high end, [3, x]."""
        return self.quantiles(((1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2))


def forecast_interval(
    curve: Curve, x: Float64, known: float | None = None, scatter: float = 0.0
) -> Float64 | None:
    """Return the low end, the median and the high end at each x, [3, x].

    The result is None if no shape fits or no forecast could be tested.

    Args:
      curve: the observed curve.
      x: positions along the last axis, beyond the end of the curve, increasing.
      known: value at the end if it is known without noise; then only the change is
        forecast.
      scatter: standard deviation of the final value around the curve.
    """
    draws = extrapolate(curve, np.append(x, curve.ends[-1]))
    error = misfit(curve, float(x[len(x) // 2] / curve.ends[-1]))
    if draws is None or error is None:
        return None
    values = draws.values[:, :-1]
    now = draws.values[:, -1:]
    recent = curve.recent()
    if known is None:
        start = recent.mean()
        highest = start + _GAUSSIAN * recent.std(ddof=1) / math.sqrt(len(recent))
    else:
        start = highest = known
        if curve.logarithmic:
            values = known * values / np.maximum(now, _TINY)
        else:
            values = known + values - now

    low, median, high = curve.scaled(Draws(values, draws.weights).interval())
    missed = _GAUSSIAN * error * (curve.scaled(np.array([start])) - median)
    low = median - np.hypot(median - low, missed)
    high = median + np.hypot(high - median, missed)
    if curve.logarithmic:
        low = np.exp(low)
        median = np.exp(median)
        high = np.exp(np.minimum(high, 700.0))
    # The run keeps its best parameters, so the result never becomes worse.
    high = np.maximum(median, np.minimum(high, highest))
    ends = np.stack([low - _GAUSSIAN * scatter, median, high + _GAUSSIAN * scatter])
    return ends if curve.floor is None else np.maximum(ends, curve.floor)


def extrapolate(curve: Curve, x: Float64) -> Draws | None:
    """Return draws of the curve at each x of the last axis; None if no shape fits."""
    rows, counts = _thinned(np.vstack([curve.axes, curve.values]))
    axes = rows[:-1]
    shapes = [
        _shapes(axis, beyond)
        for axis, beyond in zip(axes, curve.ahead(x), strict=True)
        if axis[-1] > axis[-2] >= 0
    ]
    if not shapes:
        return None
    psi, later, bottom, recency = (
        np.concatenate(parts) for parts in zip(*shapes, strict=True)
    )
    # Without this scale, shapes with different freedom would depend on the unit of y.
    unit = float(_smooth(rows[-1])[-1])
    y = rows[-1] / unit
    level = _smooth(y)
    rng = generator(0, Stream.FORECASTS)
    values = []
    weights = []
    for noise in (level**0.0, level):  # constant, or proportional to the value
        fit = _fit(y, psi, counts * recency, noise)
        heights, drops = fit.draw(rng)
        possible = drops >= 0
        if curve.floor is not None:
            possible &= heights + drops * bottom >= curve.floor / unit
        future = heights[..., None] + drops[..., None] * later[:, None]
        values.append(future.reshape(-1, len(x)))
        weights.append(np.where(possible, fit.evidence[:, None], -np.inf).ravel())
    evidence = np.concatenate(weights)
    if not np.isfinite(evidence).any():
        return None
    weight = np.exp(evidence - evidence.max())
    return Draws(unit * np.concatenate(values), weight / weight.sum())


def misfit(curve: Curve, ratio: float) -> float | None:
    """Return the error of past forecasts over this ratio of x, relative to their change.

    Errors that noise and the draws explain do not count. The result is multiplied by the
    ratio of Student's t to a Gaussian, because tests are few. It is None if the curve is
    too short for a test.
    """
    tests = [_test(curve, ratio, curve.ends[-1] * share) for share in _TESTS]
    results = [test for test in tests if test is not None]
    if not results:
        return None
    errors, changes = np.sum(results, axis=0)
    few = _STUDENT[len(results) - 1] / _GAUSSIAN
    return few * math.sqrt(errors / max(changes, _TINY))


def furthest_ratio(curve: Curve) -> float:
    """Return the largest ratio of x for which a forecast can be tested on the curve."""
    if len(curve) <= MIN_POINTS:
        return 1.0
    return float(curve.ends[-1] / curve.axes[-1, MIN_POINTS])


def _test(curve: Curve, ratio: float, tested: float) -> tuple[float, float] | None:
    """Forecast the observed value at `tested` from the points before tested/ratio.

    Returns the unexplained squared error and the squared change; None if not possible.
    """
    x = curve.axes[-1]
    width = max(1, len(curve) // 20)
    # The value of a point is known at the next one.
    points = int(np.searchsorted(x, tested / ratio, side="right")) - 1
    at = int(np.searchsorted(x, tested))
    near = slice(max(points, at - width), at + width + 1)
    observed = curve.values[near]
    if points < MIN_POINTS or not len(observed):
        return None
    earlier = curve.before(points)
    draws = extrapolate(earlier, np.array([x[near].mean()]))
    if draws is None:
        return None
    low, median, high = curve.scaled(draws.interval())[:, 0]
    last = earlier.values[-max(2, width) :].mean()
    mean, last = curve.scaled(np.array([observed.mean(), last]))
    error = float(mean - median)
    expected = (high - median if error > 0 else median - low) / _GAUSSIAN
    noise = 0.0
    if len(observed) > 2:
        noise = curve.scaled(observed).std() / math.sqrt(len(observed))
    return max(0.0, error**2 - expected**2 - noise**2), (last - median) ** 2


def _thinned(rows: Float64) -> tuple[Float64, Float64]:
    """Average long curves over stretches of growing length; return means and lengths."""
    points = rows.shape[1]
    if points <= _MAX_POINTS:
        return rows, np.ones(points)
    edges = np.unique(
        np.append(0, np.geomspace(1, points, _MAX_POINTS).round().astype(np.int64))
    )
    counts = np.diff(edges).astype(np.float64)
    return np.add.reduceat(rows, edges[:-1], axis=1) / counts, counts


def _smooth(y: Float64) -> Float64:
    """Return the magnitude of a running mean of y; never 0."""
    width = min(3, len(y) // 4)
    window = np.full(2 * width + 1, 1 / (2 * width + 1))
    mean = np.convolve(np.pad(y, width, mode="edge"), window, mode="valid")
    size: Float64 = np.maximum(np.abs(mean), 1e-3 * np.abs(y).max() + _TINY)
    return size


def _shapes(x: Float64, beyond: Float64) -> tuple[Float64, Float64, Float64, Float64]:
    """Return the shapes along one axis: ψ at x, beyond x and at infinity, and the weights
    of points by recency; each [shapes, ...].

    ψ is 0 at the last x, and 1 at an eighth of it or at the first x.
    """
    both = np.append(x, beyond) / x[-1]
    powers = [
        (1 + both / (scale * power)) ** -power for power in _POWERS for scale in _SCALES
    ]
    shapes = np.array([*powers, *(np.exp(-both / rate) for rate in _RATES)])
    now = shapes[:, len(x) - 1, None]
    first = min(int(np.searchsorted(x, x[-1] / 8)), len(x) - 2)
    scale = shapes[:, first, None] - now
    useful = scale[:, 0] > 1e-12
    psi = ((shapes - now) / scale)[useful]
    recency = np.broadcast_to(x / x[-1], (len(psi), len(x)))
    return psi[:, : len(x)], psi[:, len(x) :], (-now / scale)[useful], recency


@dataclass(frozen=True)
class _Fit:
    """Least squares of l + d ψ for every shape; each field is [shapes].

    Args:
      level, drop: l and d.
      squares: weighted sum of squared residuals.
      freedom: degrees of freedom.
      weight, slope, spread: of the normal equations with weights p: Σp, Σpψ/Σp, and the
        determinant over Σp.
      evidence: logarithm of the marginal likelihood.
    """

    level: Float64
    drop: Float64
    squares: Float64
    freedom: Float64
    weight: Float64
    slope: Float64
    spread: Float64
    evidence: Float64

    def draw(self, rng: np.random.Generator) -> tuple[Float64, Float64]:
        """Draw l and d, [shapes, draws] each."""
        size = (len(self.level), _DRAWS)
        freedom = np.broadcast_to(self.freedom[:, None], size)
        noise = np.sqrt(self.squares[:, None] / rng.chisquare(freedom))
        first, second = rng.standard_normal((2, *size))
        change = noise * second / np.sqrt(self.spread)[:, None]
        height = (
            self.level[:, None]
            - self.slope[:, None] * change
            + noise * first / np.sqrt(self.weight)[:, None]
        )
        return height, self.drop[:, None] + change


def _fit(y: Float64, psi: Float64, counts: Float64, noise: Float64) -> _Fit:
    """Fit every shape to y.

    Args:
      y: [points].
      psi: [shapes, points].
      counts: weights of the points, [shapes, points].
      noise: relative standard deviations of the points, [points].
    """
    p = counts / noise**2
    total = counts.sum(axis=1)
    weight = p.sum(axis=1)
    mean = (p @ y) / weight
    slope = (p * psi).sum(axis=1) / weight
    centred = psi - slope[:, None]
    spread = np.maximum((p * centred**2).sum(axis=1), _TINY)
    drop = (p * centred) @ y / spread
    level = mean - slope * drop

    residuals = y - level[:, None] - drop[:, None] * psi
    squares = (p * residuals**2).sum(axis=1) + 1e-24 * float(np.abs(y).max()) ** 2 + _TINY
    best = int(np.argmin(squares / total))
    errors = residuals[best] * np.sqrt(p[best])
    correlation = float(errors[1:] @ errors[:-1]) / max(float(errors @ errors), _TINY)
    correlation = min(max(correlation, 0.0), 0.95)
    independent = (1 - correlation) / (1 + correlation)

    freedom = np.maximum(_MIN_FREEDOM, total * independent - 2)
    likelihood = -0.5 * freedom * np.log(squares / total)
    volume = -0.5 * np.log(weight * spread / total**2)
    evidence = likelihood + volume - independent * counts @ np.log(noise)
    return _Fit(level, drop, squares, freedom, weight, slope, spread, evidence)
