"""Coordinates in which a node corrects a model on its own rows.

A frame has a model and a table of its own. `into` returns the parameters of the global
model in the frame, and `out_of` those of a fitted one in the model of the run.

**Linear models.** The frame knows the intercepts. A feature that is constant at a node says
nothing about its own effect there: it would serve as an intercept, and its coefficient
would become wrong for other values of the feature. So a frame has only the features that
vary, and the intercept contains the effect of the others. With fewer rows than varying
features, the frame has an orthonormal basis of the rows instead. The penalty of a
correction is the same in both, so the optimum is the same, with fewer parameters.

Outside of the frame, a model keeps the coefficients of w, as far as it started there: a
model that was trained alone has 0. Linear regression has no intercept in w, so its
correction has a `shift` of the outputs.

**Networks.** The frame is linear too: the last layer over the values that enter it. The
other layers stay as they are. A model without such a layer is its own frame.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedbudget.arrays import Flags, Float32, Float64, Int64
from fedbudget.data.shards import Table
from fedbudget.models.base import BaseModel, LastLayer, Model
from fedbudget.models.builtin import LinearRegression, Softmax


@dataclass(frozen=True)
class SiteFrame:
    """The coordinates of the model itself.

    Args:
      model: the model to fit.
      table: the rows of the node.
    """

    model: Model
    table: Table

    @property
    def intercepts(self) -> Flags | None:
        """Which parameters are intercepts, [parameters]; None if that is unknown."""
        return None

    def into(self, w: Float32) -> Float32:
        """Return parameters of the run's model in these coordinates."""
        return w

    def out_of(self, v: Float32, w: Float32, kept: float) -> tuple[Float32, float]:
        """Return the parameters of the run's model, and the shift of its outputs.

        Args:
          v: parameters in these coordinates.
          w: the global model.
          kept: share of v that started from w.
        """
        return v, 0.0

    def part(self, rows: Int64) -> Table:
        """Return some rows of the node."""
        return replace(self.table, x=self.table.x[rows], y=self.table.y[rows])


@dataclass(frozen=True)
class Scores:
    """Where a model has the parameters of its linear scores.

    Args:
      weights: positions in w of the coefficients, [scores, features].
      biases: positions in w of the intercepts, [scores]; empty if w has none.
      classes: whether the scores are those of classes; otherwise there is one number.
      class_weights: factor of the loss of each class's samples; empty for 1.
    """

    weights: Int64
    biases: Int64
    classes: bool
    class_weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class LinearFrame(SiteFrame):
    """Coefficients of the features that vary, and intercepts.

    Args:
      scores: the parameters of the run's model.
      values: features that are constant at the node, 0 for the others, [features].
      basis: orthonormal directions of the others, [features, directions].
    """

    scores: Scores
    values: Float64
    basis: Float64

    @cached_property
    def intercepts(self) -> Flags:
        last = np.zeros(self.basis.shape[1] + 1, bool)
        last[-1] = True
        return np.tile(last, len(self.scores.weights))

    def into(self, w: Float32) -> Float32:
        weights, biases = self._split(w)
        inside = np.column_stack([weights @ self.basis, biases + weights @ self.values])
        return inside.ravel().astype(np.float32)

    def out_of(self, v: Float32, w: Float32, kept: float) -> tuple[Float32, float]:
        inside = v.astype(np.float64).reshape(len(self.scores.weights), -1)
        before, _ = self._split(w)
        outside = kept * (before - (before @ self.basis) @ self.basis.T)
        weights = outside + inside[:, :-1] @ self.basis.T
        biases = inside[:, -1] - weights @ self.values
        result = w.copy()
        result[self.scores.weights] = weights
        if not len(self.scores.biases):
            return result, float(biases[0])
        result[self.scores.biases] = biases
        return result, 0.0

    def _split(self, w: Float32) -> tuple[Float64, Float64]:
        """Return coefficients [scores, features] and intercepts [scores]."""
        weights = w[self.scores.weights].astype(np.float64)
        if not len(self.scores.biases):
            return weights, np.zeros(len(weights))
        return weights, w[self.scores.biases].astype(np.float64)


def frame_of(model: Model, table: Table, w: Float32) -> SiteFrame:
    """Return the coordinates for corrections of w on the rows of one node."""
    if isinstance(model, Softmax | LinearRegression) and table.store is None:
        return _linear(_scores_of(model), table.scaled(slice(None)), table)
    layer = model.last_layer(w, table) if isinstance(model, BaseModel) else None
    if layer is None:
        return SiteFrame(model, table)
    return _linear(_scores_of_layer(layer), layer.inputs, replace(table, y=layer.targets))


def _scores_of(model: Softmax | LinearRegression) -> Scores:
    positions = np.arange(model.parameters)
    if isinstance(model, LinearRegression):
        return Scores(positions[None], positions[:0], classes=False)
    rows = positions.reshape(model.classes, -1)
    return Scores(rows[:, :-1], rows[:, -1], True, model.weights)


def _scores_of_layer(layer: LastLayer) -> Scores:
    return Scores(layer.weights, layer.biases, layer.classes, layer.class_weights)


def _linear(scores: Scores, x: Float32, table: Table) -> LinearFrame:
    """Return the frame of scores that are linear in x."""
    constant = x.max(axis=0) == x.min(axis=0)
    values = np.where(constant, x[0], 0).astype(np.float64)
    varying = np.flatnonzero(~constant)
    basis = np.zeros((x.shape[1], max(1, min(len(varying), len(x)))))
    if len(varying) > len(x):
        basis[varying] = np.linalg.qr(x[:, varying].T.astype(np.float64))[0]
    else:
        basis[varying, np.arange(len(varying))] = 1.0
    inside = (x - values) @ basis
    model: Model
    if scores.classes:
        count = len(scores.weights)
        model = Softmax(basis.shape[1], count, weights=scores.class_weights)
    else:
        inside = np.column_stack([inside, np.ones(len(x))])
        model = LinearRegression(inside.shape[1])
    own = Table(np.ascontiguousarray(inside, np.float32), table.y, labels=scores.classes)
    return LinearFrame(model, own, scores, values, basis)
