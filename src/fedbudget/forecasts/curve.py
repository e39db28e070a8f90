"""How a curve that falls goes on, judged by what was seen of it; pure, and the same for losses and for error rates.

A curve is y = l + d ψ(x), where ψ is one of many shapes: powers (1 + x/x₀)^-p and exponentials exp(-x/x₀), each over
every axis that progress can be measured along. Nobody knows the right one, so none is chosen:

- Given a shape, l and d follow from weighted least squares, with their uncertainty (Student's t, for noise that is not
  known). A shape counts by how well it explains what was seen, its marginal likelihood, and draws are made from all of
  them. d ≥ 0, because the best parameters so far never become worse, and the value at infinity is not below `floor`.
- What is recent counts more, by x/x_now: no shape is right from beginning to end, and what comes next is like what was
  last. Noise may be the same everywhere or go with the value; both are tried.
- Residuals that follow one another are no independent evidence. Their correlation r says how many there are, as if
  n (1-r)/(1+r) had been seen.

Draws alone are too sure of themselves, because no shape is the truth. How far the curve strays from all of them is
found on the curve itself (`misfit`): from earlier points, what is known by now is forecast over the same ratio of x,
and the errors beyond what the draws allow for are compared with the change that was forecast. A curve whose forecasts
missed a change by a tenth will miss the next one by as much. No constant in here was fitted to runs.
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
"""The chance that what comes is within an interval."""

FEWEST = 4
"""Points that a forecast needs; half of what a run must have, so that there is one to test it by."""

_DEVIATIONS = NormalDist().inv_cdf(
    (1 + LEVEL) / 2
)  # that half an interval of a Gaussian has
_POINTS = 48  # that a curve is thinned to
_DRAWS = 24  # of each shape
_POWERS = (0.5, 1.0, 2.0)
_SCALES = np.geomspace(0.003, 3, 7)  # x₀ of powers, in units of x_now
_RATES = np.geomspace(0.03, 3, 7)  # the same of exponentials
_TESTS = 0.85 ** np.arange(6)  # where on the curve forecasts are tested, in units of x_now
_LEAST_FREEDOM = 4.0  # of Student's t: with fewer, a few draws decide


@dataclass(frozen=True)
class Curve:
    """What was seen.

    Args:
      axes: x, growing from 0, [axes, points].
      values: y, [points].
      ends: where the curve has come to along each axis, a little beyond the last point, [axes].
      floor: what y cannot be below, if anything.
    """

    axes: Float64
    values: Float64
    ends: Float64
    floor: float | None = 0.0

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def logarithmic(self) -> bool:
        """Whether changes are by factors: where all values are above 0, as losses are."""
        return self.floor == 0 and bool((self.values > 0).all())

    def scaled(self, values: Float64) -> Float64:
        """Values as changes are measured: their logarithms, or themselves."""
        return np.log(np.maximum(values, 1e-300)) if self.logarithmic else values

    def before(self, points: int) -> "Curve":
        """The curve as it was when it had so many points."""
        return Curve(
            self.axes[:, :points], self.values[:points], self.axes[:, points], self.floor
        )

    def ahead(self, x: Float64) -> Float64:
        """Where on every axis it will be when it is at x on the last, at the pace of its last third, [axes, x]."""
        back = len(self) - max(2, len(self) // 3)
        pace = (self.ends - self.axes[:, back]) / (self.ends[-1] - self.axes[-1, back])
        ahead: Float64 = self.ends[:, None] + pace[:, None] * (x - self.ends[-1])
        return ahead

    def recent(self) -> Float64:
        """The last tenth of the values."""
        return self.values[-max(3, len(self) // 10) :]


@dataclass(frozen=True)
class Draws:
    """What a curve may come to: values [draws, x], and what each draw counts, [draws]; 1 in sum."""

    values: Float64
    weights: Float64

    def quantiles(self, levels: Sequence[float]) -> Float64:
        """[levels, x]"""
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
        """Low end, median and high end, [3, x]."""
        return self.quantiles(((1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2))


def extrapolate(curve: Curve, x: Float64) -> Draws | None:
    """What the curve may be at each x of the last axis, beyond its end; None where no shape fits."""
    ahead = curve.ahead(x)
    rows, counts = _thinned(np.vstack([curve.axes, curve.values]))
    axes = rows[:-1]
    y = rows[-1]
    unit = float(
        _smooth(y)[-1]
    )  # or evidence would depend on the unit, where shapes differ in freedom
    y = y / unit
    shapes = [
        _shapes(axis, beyond)
        for axis, beyond in zip(axes, ahead, strict=True)
        if axis[-1] > axis[-2] >= 0
    ]
    if not shapes:
        return None
    psi, later, bottom, recency = (
        np.concatenate(parts) for parts in zip(*shapes, strict=True)
    )
    rng, counts = generator(0, Stream.FORECASTS), counts * recency
    level = _smooth(y)
    values = []
    weights = []
    for power in (0.0, 1.0):  # of the level, that noise goes with
        fit = _fit(y, psi, counts, level**power)
        heights, drops = fit.draw(rng)
        possible = drops >= 0
        if curve.floor is not None:
            possible &= heights + drops * bottom >= curve.floor / unit
        values.append(
            (heights[..., None] + drops[..., None] * later[:, None]).reshape(-1, len(x))
        )
        weights.append(np.where(possible, fit.evidence[:, None], -np.inf).ravel())
    logarithms = np.concatenate(weights)
    if not np.isfinite(logarithms).any():
        return None
    weight = np.exp(logarithms - logarithms.max())
    return Draws(unit * np.concatenate(values), weight / weight.sum())


def misfit(curve: Curve, ratio: float) -> float | None:
    """How wrong forecasts over this ratio of x were so far, as a share of the change that they forecast.

    Only what noise and the draws do not explain counts; times what Student's t has above a Gaussian, for so few tests.
    None where nothing can be tested: the curve is too short for so far a forecast.
    """
    wrong = []
    change = []
    x = curve.axes[-1]
    width = max(1, len(curve) // 20)
    for share in _TESTS:
        tested = curve.ends[-1] * share
        points = (
            int(np.searchsorted(x, tested / ratio, side="right")) - 1
        )  # a point's value is known at the next
        at = int(np.searchsorted(x, tested))
        near = slice(max(points, at - width), at + width + 1)
        if points < FEWEST or not len(known := curve.scaled(curve.values[near])):
            continue
        earlier = curve.before(points)
        if (draws := extrapolate(earlier, np.array([x[near].mean()]))) is None:
            continue
        low, median, high = curve.scaled(draws.interval())[:, 0]
        error = float(curve.scaled(curve.values[near].mean()[None])[0] - median)
        expected = (high - median if error > 0 else median - low) / _DEVIATIONS
        noise = known.std() / math.sqrt(len(known)) if len(known) > 2 else 0.0
        last = curve.scaled(earlier.values[-max(2, width) :].mean()[None])[0]
        wrong.append(max(0.0, error**2 - expected**2 - noise**2))
        change.append((last - median) ** 2)
    if not wrong:
        return None
    few = student_deviations(len(wrong)) / _DEVIATIONS
    return few * math.sqrt(sum(wrong) / max(sum(change), 1e-300))


def student_deviations(freedom: int) -> float:
    """What half an interval of Student's t has, with so many degrees of freedom.

    By bisection of the chance to be within, which for whole numbers of them is a finite sum over powers of the cosine.
    """
    # of arctan(t / √freedom)
    low = 0.0
    high = math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        cosine = math.cos(angle)
        odd = freedom % 2
        term = total = cosine if odd else 1.0
        for power in range(2 + odd, freedom - 1, 2):
            term *= cosine * cosine * (power - 1) / power
            total += term
        within = math.sin(angle) * (total if freedom > 1 else 0.0)
        within = 2 / math.pi * (angle + within) if odd else within
        low, high = (angle, high) if within < LEVEL else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def furthest_ratio(curve: Curve) -> float:
    """The largest ratio of x that a forecast over it can be tested on the curve."""
    return float(curve.ends[-1] / curve.axes[-1, FEWEST]) if len(curve) > FEWEST else 1.0


def forecast_interval(
    curve: Curve, x: Float64, known: float | None = None, scatter: float = 0.0
) -> Float64 | None:
    """Low end, median and high end at each x, [3, x]; None where no shape fits, or none could be tested.

    Args:
      x: along the last axis, beyond the curve's end, growing.
      known: the value at the end, where it is known without noise: then the change alone is forecast.
      scatter: the deviation of what will be returned from the curve.
    """
    draws = extrapolate(curve, np.append(x, curve.ends[-1]))
    wrong = misfit(curve, float(x[len(x) // 2] / curve.ends[-1]))
    if draws is None or wrong is None:
        return None
    recent = curve.recent()
    highest = recent.mean() + _DEVIATIONS * recent.std(ddof=1) / math.sqrt(len(recent))
    values = draws.values[:, :-1]
    now = draws.values[:, -1:]
    if known is not None:
        highest = known
        values = (
            known * values / np.maximum(now, 1e-300)
            if curve.logarithmic
            else known + values - now
        )
    low, median, high = (
        curve.scaled(row) for row in Draws(values, draws.weights).interval()
    )
    change = curve.scaled(np.array([recent.mean() if known is None else known])) - median
    low = median - np.hypot(median - low, _DEVIATIONS * wrong * change)
    high = median + np.hypot(high - median, _DEVIATIONS * wrong * change)
    if curve.logarithmic:
        low, median, high = np.exp(low), np.exp(median), np.exp(np.minimum(high, 700.0))
    high = np.maximum(
        median, np.minimum(high, highest)
    )  # the best parameters known are kept, whatever comes
    ends = np.stack([low - _DEVIATIONS * scatter, median, high + _DEVIATIONS * scatter])
    return ends if curve.floor is None else np.maximum(ends, curve.floor)


def _thinned(rows: Float64) -> tuple[Float64, Float64]:
    """Means of stretches of points that grow with their number, and how many are in each; all of few points."""
    points = rows.shape[1]
    if points <= _POINTS:
        return rows, np.ones(points)
    edges = np.unique(
        np.append(0, np.geomspace(1, points, _POINTS).round().astype(np.int64))
    )
    counts = np.diff(edges).astype(np.float64)
    return np.add.reduceat(rows, edges[:-1], axis=1) / counts, counts


def _smooth(y: Float64) -> Float64:
    """The size of y, by a running mean; never 0."""
    width = min(3, len(y) // 4)
    mean = np.convolve(
        np.pad(y, width, mode="edge"),
        np.full(2 * width + 1, 1 / (2 * width + 1)),
        mode="valid",
    )
    size: Float64 = np.maximum(np.abs(mean), 1e-3 * np.abs(y).max() + 1e-300)
    return size


def _shapes(x: Float64, beyond: Float64) -> tuple[Float64, Float64, Float64, Float64]:
    """Shapes along one axis: ψ at x, beyond it and at infinity, and how recent points are, [shapes, ...] each.

    ψ is 0 at the last x, and 1 where x was an eighth of that, or at the first.
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
    """Least squares of l + d ψ for every shape: [shapes] each.

    Args:
      squares: weighted squares of what is left.
      freedom: degrees of it.
      weight, slope, spread: of the normal equations: Σp, Σpψ/Σp, and the determinant over Σp.
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
        """l and d, [shapes, draws] each."""
        size = (len(self.level), _DRAWS)
        noise = np.sqrt(
            self.squares[:, None]
            / rng.chisquare(np.broadcast_to(self.freedom[:, None], size))
        )
        first, second = rng.standard_normal((2, *size))
        change = noise * second / np.sqrt(self.spread)[:, None]
        height = (
            self.level[:, None]
            - self.slope[:, None] * change
            + noise * first / np.sqrt(self.weight)[:, None]
        )
        return height, self.drop[:, None] + change


def _fit(y: Float64, psi: Float64, counts: Float64, noise: Float64) -> _Fit:
    """
    Args:
      psi: [shapes, points].
      counts: what points count, [shapes, points].
      noise: their deviations, but for a factor, [points].
    """
    p = counts / noise**2
    total = counts.sum(axis=1)
    weight = p.sum(axis=1)
    mean = (p @ y) / p.sum(axis=1)
    slope = (p * psi).sum(axis=1) / weight
    centred = psi - slope[:, None]
    spread = np.maximum((p * centred**2).sum(axis=1), 1e-300)
    drop = (p * centred) @ y / spread
    level = mean - slope * drop
    left = y - level[:, None] - drop[:, None] * psi
    squares = (p * left**2).sum(axis=1) + 1e-24 * float(np.abs(y).max()) ** 2 + 1e-300
    best = int(np.argmin(squares / total))
    errors = left[best] * np.sqrt(p[best])
    correlation = float(errors[1:] @ errors[:-1]) / max(float(errors @ errors), 1e-300)
    correlation = min(max(correlation, 0.0), 0.95)
    independent = (1 - correlation) / (1 + correlation)
    freedom = np.maximum(_LEAST_FREEDOM, total * independent - 2)
    evidence = -0.5 * freedom * np.log(squares / total) - 0.5 * np.log(
        weight * spread / total**2
    )
    evidence = evidence - independent * counts @ np.log(noise)
    return _Fit(level, drop, squares, freedom, weight, slope, spread, evidence)
