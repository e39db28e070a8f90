"""Linear regression, Table I: f_j(w) = ½ ‖y_j - wᵀx_j‖², w(0) = 0."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedbudget.arrays import Float32, Float64
from fedbudget.models.base import Target
from fedbudget.models.score_model import ScoreModel
from fedbudget.models.terms import LinearTerms


@dataclass(frozen=True)
class LinearRegression(ScoreModel):
    """A linear prediction of a real number; features and target should be centred, as there is no intercept."""

    name: ClassVar[str] = "linear"
    target: ClassVar[Target] = "real"
    terms: ClassVar[LinearTerms] = LinearTerms()

    def sums(self, w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
        errors = np.asarray(x @ w - y, np.float32)
        return 0.5 * float(np.square(errors, dtype=np.float64).sum()), errors @ x

    def slopes(self, scores: Float64, y: Float32) -> Float64:
        return np.asarray(scores - y)
