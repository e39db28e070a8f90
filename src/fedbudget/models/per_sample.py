"""Gradients of single samples, each cut to a length: what a sum of them can change by one sample is then bounded.

    Σ_j g_j min(1, C/‖g_j‖)

For models that are linear in their features, g_j = e_j ⊗ x_j, with e_j the slope of the loss by each score. Its length
is ‖e_j‖‖x_j‖, so that no gradient is ever written out: a sample gets a weight, and the sum is one product of matrices
(`OuterGradients`). Other models write gradients out, some samples at a time (`GradientRows`): PyTorch's modules by
torch.func (torch_per_sample.py), and whatever else there is by asking for the gradient of shards of one sample each.

A gradient that is not finite counts as 0. Sums are in float64: rounding would let a sample change them by more.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float32, Float64
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards, Table
from fedbudget.errors import UserError
from fedbudget.models.base import Model

Rows = NDArray[np.int32]

_NUMBERS = 2**23
"""Of gradients that are written out at once."""
_MOST_ROWS = 128
"""Which the caches of a core hold, of rows of a thousand features."""
_SHRINK = 1 - 1e-6
"""A clipped gradient is by so much shorter than C, or rounding to 32 bits could make it longer."""


class SampleGradients(Protocol):
    """Of some samples, without regularization."""

    @property
    def lengths(self) -> Float64:
        """[samples]; infinite or NaN where a gradient is not finite."""

    def total(self, weights: Float64) -> Float64:
        """Their sum with weights, [parameters]; what has the weight 0 is not looked at."""


@dataclass(frozen=True)
class OuterGradients:
    """e_j ⊗ x_j.

    Args:
      slopes: e_j, [samples, scores].
      x: x_j, [samples, features].
      bias: whether a 1 follows in each x_j.
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
        return (
            np.column_stack([total, slopes.sum(axis=1)]) if self.bias else total
        ).ravel()


@dataclass(frozen=True)
class GradientRows:
    """As they are, [samples, parameters]."""

    rows: Float32

    @property
    def lengths(self) -> Float64:
        return np.asarray(np.sqrt(np.square(self.rows, dtype=np.float64).sum(axis=1)))

    def total(self, weights: Float64) -> Float64:
        used = weights > 0
        return np.asarray(weights[used] @ self.rows[used].astype(np.float64))


def clipped_sum(model: Model, w: Float32, table: Table, rows: Rows, clip: float) -> Float64:
    """Σ of the gradients of these rows at w, none of them longer than C, [parameters]."""
    total = np.zeros(model.parameters)
    with np.errstate(
        all="ignore"
    ):  # of samples that give no number, which count for nothing
        for some in _blocks(model, rows):
            gradients = sample_gradients(model, w, table, some)
            total += gradients.total(weights(gradients.lengths, clip))
    return total


def lengths(model: Model, w: Float32, table: Table, rows: Rows) -> Float64:
    """Of the gradients of these rows at w, [rows]."""
    with np.errstate(all="ignore"):
        return np.concatenate(
            [
                sample_gradients(model, w, table, some).lengths
                for some in _blocks(model, rows)
            ]
        )


def weights(lengths: Float64, clip: float) -> Float64:
    """What a gradient of each length is multiplied with, [samples]: 0 where it is not finite."""
    cut = np.minimum(1.0, _SHRINK * clip / np.where(lengths > 0, lengths, 1.0))
    return np.where(np.isfinite(lengths), cut, 0.0)


def sample_gradients(model: Model, w: Float32, table: Table, rows: Rows) -> SampleGradients:
    """Of these rows at w, by the model's own way where it has one."""
    own: Any = getattr(model, "sample_gradients", None)
    return gradients_in_turn(model, w, table, rows) if own is None else own(w, table, rows)


def gradients_in_turn(model: Model, w: Float32, table: Table, rows: Rows) -> GradientRows:
    """Of any model: a sample is a shard by itself, whose gradient is that of one update that goes nowhere."""
    ones = Shards(table, rows, np.arange(len(rows)), np.ones(len(rows), np.int64))
    indices = BatchIndices(np.zeros((1, 1, 1), np.int32), np.zeros(len(rows), np.int64))
    return GradientRows(model.descend(w[None], ones, indices, 0.0).gradients)


def features(table: Table, rows: Rows) -> Float64:
    """Of some rows, as numbers, [rows, features]."""
    table.require_arrays()
    return np.multiply(table.x[rows], table.scale, dtype=np.float64)


def require_per_sample(model: Model) -> None:
    """Refuses models in which a sample has no gradient of its own."""
    if model.name == "kmeans":
        raise UserError(
            "`privacy_unit` sample clips gradients, and centres of K-means that follow clipped distances are no means "
            "any more: use `privacy_unit` node"
        )
    if model.statistics or getattr(model, "local_statistics", False):
        raise UserError(
            f"{model.name} normalizes by mini-batches, in which samples are mixed, and `privacy_unit` sample bounds "
            "what each adds: use group normalization"
        )


def _blocks(model: Model, rows: Rows) -> list[Rows]:
    size = max(1, min(_MOST_ROWS, _NUMBERS // model.parameters))
    return [rows[first : first + size] for first in range(0, len(rows), size)]
