"""Linear regression, Table I: f_j(w) = ½ ‖y_j - wᵀx_j‖², w(0) = 0."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from fedbudget.models.base import ScoreModel, Target
from fedbudget.models.by_score import by_score, score_loss
from fedbudget.models.kernels import implements


class LinearTerms(NamedTuple):
    """Nothing: the loss has no constants."""


@dataclass(frozen=True)
class LinearRegression(ScoreModel):
    """A linear prediction of a real number; features and target should be centred, as there is no intercept."""

    name: ClassVar[str] = "linear"
    target: ClassVar[Target] = "real"
    terms: ClassVar[LinearTerms] = LinearTerms()


@implements(score_loss, LinearTerms)
def loss(terms, score, y):
    error = score - y
    return 0.5 * np.float64(error) * np.float64(error), error


by_score(LinearTerms)
