"""Squared-SVM, Table I: f_j(w) = λ/2 ‖w‖² + ½ max{0, 1 - y_j wᵀx_j}², labels ±1, no bias, w(0) = 0."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedbudget.arrays import Float32, Float64
from fedbudget.models.base import Target
from fedbudget.models.score_model import ScoreModel
from fedbudget.models.terms import SquaredSvmTerms


@dataclass(frozen=True)
class SquaredSvm(ScoreModel):
    """A linear classifier of two classes."""

    name: ClassVar[str] = "svm"
    target: ClassVar[Target] = "binary"
    terms: ClassVar[SquaredSvmTerms] = SquaredSvmTerms()
    regularization: float = 0.1

    def sums(self, w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
        slack = np.maximum(np.float32(1) - y * (x @ w), np.float32(0))
        return 0.5 * float(np.square(slack, dtype=np.float64).sum()), -(y * slack) @ x

    def slopes(self, scores: Float64, y: Float32) -> Float64:
        return np.asarray(-y * np.maximum(1 - y * scores, 0))
