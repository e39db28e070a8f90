"""Gradients and Hessians of the convex built-in models, over whole shards, in float64.

**Coordinates.** Softmax regression does not change if the same vector is added to the
weights of all classes, so its Hessian is singular. Newton steps are computed in
coordinates u without these directions: W = C U, with K - 1 orthonormal columns of C that
are orthogonal to (1, ..., 1). For models with one score, u is w.

**Same bits.** A shard is summed in small blocks of rows. BLAS computes these in one thread,
so the result does not depend on the number of threads.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedbudget.arrays import Float32, Float64
from fedbudget.data.shards import Table
from fedbudget.models.base import Model, Rows
from fedbudget.models.builtin import LinearRegression, ScoreModel, Softmax
from fedbudget.models.per_sample import features

_BLOCK = 150_000
"""Multiplications in a product of matrices, at most; OpenBLAS uses more threads from
262,144 on."""


@dataclass(frozen=True)
class Directions:
    """Coordinates u of the parameters w of a linear model.

    Args:
      outputs: number of scores of a sample.
      inputs: parameters of each score.
      bias: whether the last parameter of each score is a bias.
    """

    outputs: int
    inputs: int
    bias: bool

    @property
    def size(self) -> int:
        """Length of u."""
        return max(1, self.outputs - 1) * self.inputs

    @cached_property
    def contrasts(self) -> Float64:
        """C, [outputs, max(1, outputs - 1)].

        >>> Directions(2, 3, True).contrasts.round(2)
        array([[ 0.71],
               [-0.71]])
        """
        if self.outputs == 1:
            return np.ones((1, 1))
        columns = np.zeros((self.outputs, self.outputs - 1))
        for column in range(self.outputs - 1):
            columns[: column + 1, column] = 1.0
            columns[column + 1, column] = -(column + 1.0)
        return np.asarray(columns / np.linalg.norm(columns, axis=0))

    def of(self, w: Float32) -> Float64:
        """Return u of w, [size]."""
        return (self.contrasts.T @ self._rows(w)).ravel()

    def parameters(self, u: Float64) -> Float64:
        """Return w of u, [parameters]."""
        return (self.contrasts @ u.reshape(-1, self.inputs)).ravel()

    @property
    def biases(self) -> Any:
        """Whether each coordinate is of a bias, [size]."""
        of_score = np.zeros(self.inputs, bool)
        of_score[-1] = self.bias
        return np.tile(of_score, max(1, self.outputs - 1))

    def _rows(self, w: Float32) -> Float64:
        return w.astype(np.float64).reshape(self.outputs, self.inputs)


@dataclass(frozen=True)
class Curvature:
    """First and second derivatives of a mean loss, in coordinates u.

    Args:
      gradient: [size].
      hessian: [size, size].
    """

    gradient: Float64
    hessian: Float64


def directions_of(model: Model) -> Directions | None:
    """Return the coordinates of a model; None if it has no convex loss of linear scores."""
    if isinstance(model, Softmax):
        return Directions(model.classes, model.features + 1, bias=True)
    if isinstance(model, ScoreModel):
        return Directions(1, model.features, bias=False)
    return None


def is_quadratic(model: Model) -> bool:
    """Whether the Hessian is the same everywhere."""
    return isinstance(model, LinearRegression)


def curvature(model: Model, w: Float32, table: Table, rows: Rows) -> Curvature:
    """Return the derivatives of the mean loss over rows, with regularization.

    Args:
      model: a model with `directions_of`.
      w: [parameters].
      table: the samples.
      rows: numbers of the rows.
    """
    directions = directions_of(model)
    assert directions is not None
    assert isinstance(model, ScoreModel | Softmax)
    size = directions.size
    gradient = np.zeros(size)
    hessian = np.zeros((size, size))
    count = max(1, _BLOCK // directions.inputs**2)
    for first in range(0, len(rows), count):
        block = rows[first : first + count]
        x = features(table, block)
        if directions.bias:
            x = np.column_stack([x, np.ones(len(block))])
        slopes, seconds = model.score_derivatives(w, x, table.y[block])
        gradient += (directions.contrasts.T @ (slopes.T @ x)).ravel()
        hessian += _weighted_products(x, _in_contrasts(seconds, directions.contrasts))
    regularization = model.regularization
    return Curvature(
        gradient / len(rows) + regularization * directions.of(w),
        hessian / len(rows) + regularization * np.eye(size),
    )


def _in_contrasts(seconds: Float64, contrasts: Float64) -> Float64:
    """Return Cᵀ S_j C of each row, [rows, scores, scores] to fewer scores."""
    if contrasts.shape == (1, 1):
        return seconds
    return np.asarray(contrasts.T @ seconds @ contrasts)


def _weighted_products(x: Float64, seconds: Float64) -> Float64:
    """Return Σ S_j ⊗ x_j x_jᵀ over rows, [size, size]."""
    scores = seconds.shape[1]
    inputs = x.shape[1]
    products = np.empty((scores, inputs, scores, inputs))
    for one in range(scores):
        for two in range(one + 1):
            block = x.T @ (seconds[:, one, two, None] * x)
            products[one, :, two] = block
            products[two, :, one] = block
    return products.reshape(scores * inputs, scores * inputs)


def packed(symmetric: Float64) -> Float64:
    """Return the lower triangle of a symmetric matrix, [size (size + 1) / 2]."""
    return symmetric[np.tril_indices(len(symmetric))]


def unpacked(triangle: Float64, size: int) -> Float64:
    """Undo `packed`, [size, size]."""
    matrix = np.zeros((size, size))
    matrix[np.tril_indices(size)] = triangle
    return matrix + np.tril(matrix, -1).T
