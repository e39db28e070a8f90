"""Models of one score wᵀx per sample, such as the paper's SVM and linear regression."""

from dataclasses import dataclass

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.models.base import KernelModel
from fedbudget.models.description import TensorDescription


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
