"""Models of one score wᵀx per sample, such as the paper's SVM and linear regression."""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from fedbudget.arrays import Float32, Float64
from fedbudget.data.shards import Table
from fedbudget.models.base import KernelModel
from fedbudget.models.description import TensorDescription
from fedbudget.models.per_sample import OuterGradients, Rows, features


@dataclass(frozen=True)
class ScoreModel(KernelModel):
    """A model of one score wᵀx per sample, with a parameter for each feature; see by_score.py."""

    features: int
    regularization: float = 0.0

    @property
    def parameters(self) -> int:
        return self.features

    @property
    def tensors(self) -> tuple[TensorDescription, ...]:
        return (TensorDescription("weight", (self.features,)),)

    def scores(self, w: Float32, x: Float32) -> Float32:
        return np.asarray(x @ w, np.float32)[:, None]

    @abstractmethod
    def slopes(self, scores: Float64, y: Float32) -> Float64:
        """Of the loss by the score, [rows]."""

    def sample_gradients(self, w: Float32, table: Table, rows: Rows) -> OuterGradients:
        """Of single samples, without regularization."""
        x = features(table, rows)
        return OuterGradients(self.slopes(x @ w.astype(np.float64), table.y[rows])[:, None], x)
