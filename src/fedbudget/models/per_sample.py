"""Gradients of single samples, each clipped to the norm C.

Bounds the influence of a sample.

    Σ_j g_j min(1, C/‖g_j‖)

For models that are linear in their features, g_j = e_j ⊗ x_j, where e_j is the derivative
of the loss by each score. Its norm is ‖e_j‖‖x_j‖. `OuterGradients` therefore needs no
single gradient: every sample has a weight, and the sum is one matrix product. Other models
compute the gradients themselves, a block of samples at a time (`GradientRows`): PyTorch
modules with torch.func (torch/model.py), other models with one shard per sample.

A gradient that is not finite counts as 0. Sums are float64: with float32, rounding would
let a sample change the sum by more than C.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbudget.arrays import Float32, Float64
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards, Table
from fedbudget.errors import UserError
from fedbudget.models.base import Model, Rows

_NUMBERS = 2**23
"""Numbers in a block of gradients, at most."""
_MOST_ROWS = 128
"""Rows in a block, at most. With 1000 features they fit into the cache of a core."""
_SHRINK = 1 - 1e-6
"""Factor of a clipped gradient, so that rounding to 32 bits cannot make it longer than
C."""


@dataclass(frozen=True)
class OuterGradients:
    """Gradients e_j ⊗ x_j, without regularization.

    `lengths` are their norms, [samples], and `total` is a weighted sum, [parameters].

    Args:
      slopes: e_j, [samples, scores].
      x: x_j, [samples, features].
      bias: append a 1 to each x_j.
    """

    slopes: Float64
    x: Float64
    bias: bool = False

    @property
    def lengths(self) -> Float64:
        squares = np.einsum("ij,ij->i", self.x, self.x) + self.bias
        return np.asarray(np.sqrt(np.square(self.slopes).sum(axis=1)) * np.sqrt(squares))

    def total(self, weights: Float64) -> Float64:
        used = weights > 0
        x = self.x if used.all() else self.x[used]
        slopes = (self.slopes[used] * weights[used, None]).T
        total = slopes @ x
        if self.bias:
            total = np.column_stack([total, slopes.sum(axis=1)])
        return total.ravel()


@dataclass(frozen=True)
class GradientRows:
    """Gradients as rows of an array, [samples, parameters]."""

    rows: Float32

    @property
    def lengths(self) -> Float64:
        return np.asarray(np.sqrt(np.square(self.rows, dtype=np.float64).sum(axis=1)))

    def total(self, weights: Float64) -> Float64:
        used = weights > 0
        return np.asarray(weights[used] @ self.rows[used].astype(np.float64))


SampleGradients = OuterGradients | GradientRows
"""Gradients of some samples; a norm of infinity or NaN means that one is not finite."""


def clipped_sum(model: Model, w: Float32, table: Table, rows: Rows, clip: float) -> Float64:
    """Return Σ of the gradients of some rows at w, each clipped to `clip`, [parameters]."""
    total = np.zeros(model.parameters)
    with np.errstate(all="ignore"):  # gradients that are not finite count as 0
        for block in _blocks(model, rows):
            gradients = sample_gradients(model, w, table, block)
            total += gradients.total(weights(gradients.lengths, clip))
    return total


def lengths(model: Model, w: Float32, table: Table, rows: Rows) -> Float64:
    """Return the norms of the gradients of some rows at w, [rows]."""
    blocks = _blocks(model, rows)
    with np.errstate(all="ignore"):
        return np.concatenate(
            [sample_gradients(model, w, table, block).lengths for block in blocks]
        )


def weights(lengths: Float64, clip: float) -> Float64:
    """Return the factor that clips each gradient, [samples]; 0 if it is not finite."""
    cut = np.minimum(1.0, _SHRINK * clip / np.where(lengths > 0, lengths, 1.0))
    return np.where(np.isfinite(lengths), cut, 0.0)


def sample_gradients(model: Model, w: Float32, table: Table, rows: Rows) -> SampleGradients:
    """Return the gradients of some rows at w, by the model's own method if it has one."""
    own: Any = getattr(model, "sample_gradients", None)
    return gradients_in_turn(model, w, table, rows) if own is None else own(w, table, rows)


def gradients_in_turn(model: Model, w: Float32, table: Table, rows: Rows) -> GradientRows:
    """Return the gradients of some rows, for any model.

    Each row becomes a shard of its own. One update with η = 0 returns its gradient.
    """
    count = len(rows)
    shards = Shards(table, rows, np.arange(count), np.ones(count, np.int64))
    indices = BatchIndices(np.zeros((1, 1, 1), np.int32), np.zeros(count, np.int64))
    return GradientRows(model.descend(w[None], shards, indices, 0.0).gradients)


def features(table: Table, rows: Rows) -> Float64:
    """Return the scaled features of some rows, [rows, features]."""
    table.require_arrays()
    return np.multiply(table.x[rows], table.scale, dtype=np.float64)


def require_per_sample(model: Model) -> None:
    """Raise a `UserError` for models without a separate gradient per sample."""
    if model.name == "kmeans":
        raise UserError(
            "`privacy_unit` sample clips gradients; with clipped gradients the centres of "
            "K-means are no longer means: use `privacy_unit` node"
        )
    if model.statistics or getattr(model, "local_statistics", False):
        raise UserError(
            f"{model.name} normalizes by mini-batches and thus mixes samples, but "
            "`privacy_unit` sample bounds the influence of each sample: use group "
            "normalization"
        )


def _blocks(model: Model, rows: Rows) -> list[Rows]:
    size = max(1, min(_MOST_ROWS, _NUMBERS // model.parameters))
    return [rows[first : first + size] for first in range(0, len(rows), size)]
