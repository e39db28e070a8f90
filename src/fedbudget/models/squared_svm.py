"""Squared-SVM, Table I: f_j(w) = λ/2 ‖w‖² + ½ max{0, 1 - y_j wᵀx_j}², labels ±1, no bias, w(0) = 0."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from fedbudget.models.base import KernelModel, Target
from fedbudget.models.kernels import dot, implements, row_correct, row_gradient, row_loss


class SquaredSvmTerms(NamedTuple):
    """Nothing: the loss has no constants but λ."""


@dataclass(frozen=True)
class SquaredSvm(KernelModel):
    """A linear classifier of two classes."""

    name: ClassVar[str] = "svm"
    target: ClassVar[Target] = "binary"
    features: int
    regularization: float = 0.1

    @property
    def parameters(self) -> int:
        return self.features

    @property
    def terms(self) -> SquaredSvmTerms:
        return SquaredSvmTerms()


@implements(row_loss, SquaredSvmTerms)
def loss(terms, w, x, y, scale, scratch):
    slack = np.float32(1) - y * dot(w, x) * scale
    return 0.5 * np.float64(slack) * np.float64(slack) if slack > 0 else 0.0


@implements(row_gradient, SquaredSvmTerms)
def add(terms, w, x, y, scale, scratch, gradient):
    slack = np.float32(1) - y * dot(w, x) * scale
    if slack <= 0:
        return 0.0
    factor = -y * slack * scale
    for j in range(w.size):
        gradient[j] += factor * np.float32(x[j])
    return 0.5 * np.float64(slack) * np.float64(slack)


@implements(row_correct, SquaredSvmTerms)
def right(terms, w, x, y, scale, scratch):
    return 1 if (dot(w, x) >= 0) == (y > 0) else 0
