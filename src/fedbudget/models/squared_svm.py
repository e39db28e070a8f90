"""Squared-SVM, Table I: f_j(w) = λ/2 ‖w‖² + ½ max{0, 1 - y_j wᵀx_j}², labels ±1, no bias, w(0) = 0."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from fedbudget.models.base import ScoreModel, Target
from fedbudget.models.by_score import by_score, score_correct, score_loss
from fedbudget.models.kernels import implements


class SquaredSvmTerms(NamedTuple):
    """Nothing: the loss has no constants but λ."""


@dataclass(frozen=True)
class SquaredSvm(ScoreModel):
    """A linear classifier of two classes."""

    name: ClassVar[str] = "svm"
    target: ClassVar[Target] = "binary"
    terms: ClassVar[SquaredSvmTerms] = SquaredSvmTerms()
    regularization: float = 0.1


@implements(score_loss, SquaredSvmTerms)
def loss(terms, score, y):
    slack = np.float32(1) - y * score
    if slack <= 0:
        return 0.0, np.float32(0)
    return 0.5 * np.float64(slack) * np.float64(slack), -y * slack


@implements(score_correct, SquaredSvmTerms)
def right(terms, score, y):
    return 1 if (score >= 0) == (y > 0) else 0


by_score(SquaredSvmTerms)
