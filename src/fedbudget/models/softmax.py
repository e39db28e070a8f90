"""Softmax regression: f_j(w) = -log softmax(W x_j + bias)[y_j]; each class has its weights, then its bias; w(0) = 0."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.data.shards import Table
from fedbudget.models.base import KernelModel, Target
from fedbudget.models.description import TensorDescription
from fedbudget.models.per_sample import OuterGradients, Rows, features
from fedbudget.models.terms import SoftmaxTerms


@dataclass(frozen=True)
class Softmax(KernelModel):
    """A linear classifier of any number of classes."""

    name: ClassVar[str] = "softmax"
    target: ClassVar[Target] = "classes"
    features: int
    classes: int
    regularization: float = 0.0

    @property
    def parameters(self) -> int:
        return (self.features + 1) * self.classes

    @property
    def tensors(self) -> tuple[TensorDescription, ...]:
        return TensorDescription("weight", (self.classes, self.features)), TensorDescription("bias", (self.classes,))

    @property
    def rows(self) -> int:
        return self.classes

    @property
    def terms(self) -> SoftmaxTerms:
        return SoftmaxTerms(self.classes)

    def sums(self, w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
        row, own = np.arange(len(y)), y.astype(np.int64)
        logits = self.scores(w, x).astype(np.float64)
        highest = logits.max(axis=1, keepdims=True)
        log_sums = np.log(np.exp(logits - highest).sum(axis=1, keepdims=True)) + highest
        errors = np.exp(logits - log_sums).astype(np.float32)
        errors[row, own] -= 1
        gradient = np.column_stack([errors.T @ x, errors.sum(axis=0)])
        return float((log_sums[:, 0] - logits[row, own]).sum()), gradient.ravel()

    def scores(self, w: Float32, x: Float32) -> Float32:
        weights = w.reshape(self.classes, -1)
        return x @ weights[:, :-1].T + weights[:, -1]

    def sample_gradients(self, w: Float32, table: Table, rows: Rows) -> OuterGradients:
        """Of single samples, without regularization."""
        x, weights = features(table, rows), w.reshape(self.classes, -1).astype(np.float64)
        scores = x @ weights[:, :-1].T + weights[:, -1]
        slopes = np.exp(scores - scores.max(axis=1, keepdims=True))
        slopes /= slopes.sum(axis=1, keepdims=True)
        slopes[np.arange(len(rows)), table.y[rows].astype(np.int64)] -= 1
        return OuterGradients(slopes, x, bias=True)
