"""Squared-SVM, by its scores."""

import numpy as np

from fedbudget.models.compiled.by_score import by_score, score_correct, score_loss
from fedbudget.models.compiled.kernels import implements
from fedbudget.models.terms import SquaredSvmTerms


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
