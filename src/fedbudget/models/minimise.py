"""Minimisation of a model's loss with a proximal term, for many problems at once.

Problem i has its own shard, centre c_i and strength μ_i:

    w_i = argmin F_i(w) + μ_i/2 ‖w - c_i‖²

A strength may also differ between parameters. Where it is infinite, w_i is c_i.

L-BFGS on whole shards (Nocedal, Math. Comp. 35, 1980), from c_i, with a line search that
only halves steps. It needs no step size. All problems advance together, so that one call of
the model computes the gradients of all. Each problem has the same bits in any company.

Running statistics of a module are no parameters: they follow the passes over the shard.
"""

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards
from fedbudget.models.base import Model

ITERATIONS = 40
"""Most iterations. A problem ends sooner if an iteration gains less than `_LEAST_GAIN` of
its loss."""

_LEAST_GAIN = 1e-5
_MEMORY = 6
_HALVINGS = 12
_SUFFICIENT = 1e-4
_MOST_NUMBERS = 2_000_000
"""Parameters of all problems that advance together; limits memory."""


def minimise(
    model: Model,
    shards: Shards,
    centres: Float32,
    strengths: Float64,
    iterations: int = ITERATIONS,
) -> Float32:
    """Solve one problem per shard.

    Args:
      model: defines F_i.
      shards: samples of each problem.
      centres: c_i, [problems, parameters].
      strengths: μ_i, [problems] or [problems, parameters].
      iterations: most iterations.

    Returns:
      w_i, [problems, parameters]; c_i where no step lowers the loss.
    """
    shape = (len(shards), model.parameters)
    each = strengths if strengths.ndim == 2 else strengths[:, None]
    strengths = np.broadcast_to(each, shape)
    together = max(1, _MOST_NUMBERS // model.parameters)
    parts = []
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, len(shards), together):
            chosen = np.arange(first, min(first + together, len(shards)))
            problems = _Problems(model, shards.only(chosen.tolist()), centres[chosen])
            parts.append(_solve(problems, strengths[chosen], iterations))
    return np.concatenate(parts)


class _Problems:
    """Losses and gradients of several problems, without their proximal terms."""

    def __init__(self, model: Model, shards: Shards, centres: Float32) -> None:
        self.model = model
        self.shards = shards
        self.centres = centres.astype(np.float64)
        self.weights = model.parameters - model.statistics

    def evaluate(
        self, w: Float64, chosen: Int64, strengths: Float64
    ) -> tuple[Float64, Float64, Float64]:
        """Return the objective and its gradient, and w with new running statistics.

        Args:
          w: points, [chosen, parameters].
          chosen: indices of the problems.
          strengths: of all problems, [problems, parameters].
        """
        whole = BatchIndices.whole(len(chosen))
        points = np.ascontiguousarray(w, np.float32)
        descent = self.model.descend(points, self.shards.only(chosen.tolist()), whole, 0.0)
        away = w - self.centres[chosen]
        away[:, self.weights :] = 0.0
        fixed = np.isinf(strengths[chosen])
        pull = np.where(fixed, 0.0, strengths[chosen]) * away
        gradient = np.where(fixed, 0.0, descent.gradients.astype(np.float64) + pull)
        gradient[:, self.weights :] = 0.0
        value = descent.losses + 0.5 * _dots(pull, away)
        finite = np.isfinite(value) & np.isfinite(gradient).all(axis=1)
        followed = w.copy()
        followed[:, self.weights :] = descent.w[:, self.weights :]
        return np.where(finite, value, np.inf), gradient, followed


def _solve(problems: _Problems, strengths: Float64, iterations: int) -> Float32:
    everything = np.arange(len(strengths))
    w = problems.centres.copy()
    value, gradient, _ = problems.evaluate(w, everything, strengths)
    active = np.isfinite(value)
    history = _History(len(strengths))
    for _ in range(iterations):
        chosen = np.flatnonzero(active)
        if not len(chosen):
            break
        direction = history.direction(gradient, chosen)
        slope = _dots(direction, gradient[chosen])
        uphill = ~(slope > 0)
        direction[uphill] = gradient[chosen][uphill]
        slope[uphill] = _dots(direction[uphill], direction[uphill])

        before = w, value, gradient
        w = w.copy()
        value = value.copy()
        gradient = gradient.copy()
        step = np.ones(len(chosen))
        searching = np.flatnonzero(slope > 0)
        for _ in range(_HALVINGS):
            if not len(searching):
                break
            numbers = chosen[searching]
            length = step[searching, None]
            tried = before[0][numbers] - length * direction[searching]
            found = problems.evaluate(tried, numbers, strengths)
            wanted = _SUFFICIENT * step[searching] * slope[searching]
            lower = found[0] <= before[1][numbers] - wanted
            value[numbers[lower]] = found[0][lower]
            gradient[numbers[lower]] = found[1][lower]
            w[numbers[lower]] = found[2][lower]
            searching = searching[~lower]
            step[searching] *= 0.5
        history.add(w - before[0], gradient - before[2], problems.weights)
        active &= before[1] - value > _LEAST_GAIN * np.abs(before[1])
    return w.astype(np.float32)


class _History:
    """The last steps and changes of the gradient of each problem."""

    def __init__(self, problems: int) -> None:
        self._pairs: list[tuple[Float64, Float64, Float64]] = []
        self._scale = np.zeros(problems)

    def add(self, steps: Float64, changes: Float64, weights: int) -> None:
        """Add a step of each problem, [problems, parameters]; 0 if it made none."""
        steps[:, weights:] = 0.0
        curvature = _dots(steps, changes)
        squares = _dots(changes, changes)
        usable = curvature > 1e-12 * squares
        inverse = np.divide(1.0, curvature, where=usable, out=np.zeros_like(curvature))
        scale = np.divide(curvature, squares, where=usable, out=self._scale.copy())
        self._scale = scale
        self._pairs = [*self._pairs[1 - _MEMORY :], (steps, changes, inverse)]

    def direction(self, gradient: Float64, chosen: Int64) -> Float64:
        """Return the direction in which the chosen problems descend."""
        result = gradient[chosen]
        factors = []
        for steps, changes, inverse in reversed(self._pairs):
            factor = inverse[chosen] * _dots(steps[chosen], result)
            result = result - factor[:, None] * changes[chosen]
            factors.append(factor)
        scale = self._scale[chosen]
        first = 1 / np.maximum(1.0, np.sqrt(_dots(result, result)))
        result = np.where(scale > 0, scale, first)[:, None] * result
        for (steps, changes, inverse), factor in zip(
            self._pairs, reversed(factors), strict=True
        ):
            back = inverse[chosen] * _dots(changes[chosen], result)
            result = result + (factor - back)[:, None] * steps[chosen]
        return result


def _dots(a: Float64, b: Float64) -> Float64:
    """Return the dot product of each row, [rows]."""
    return np.asarray(np.einsum("ij,ij->i", a, b), np.float64)
