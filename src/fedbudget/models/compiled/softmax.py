"""Softmax regression, row by row."""

import numpy as np
from numba.extending import register_jitable

from fedbudget.models.compiled.by_row import by_row, row_correct, row_gradient, row_loss
from fedbudget.models.compiled.kernels import FAST, dot, implements
from fedbudget.models.terms import SoftmaxTerms


@register_jitable(fastmath=FAST, forceinline=True)
def _logits(classes, w, x, scale, logits):
    """W x + bias into `logits`; returns the first of the largest."""
    width = x.size + 1
    best = 0
    for label in range(classes):
        logits[label] = dot(w[label * width :], x) * scale + w[label * width + x.size]
        if logits[label] > logits[best]:
            best = label
    return best


@register_jitable(fastmath=FAST, forceinline=True)
def _log_sum(classes, logits, best):
    """log Σ exp(logit), without overflow."""
    total = 0.0
    for label in range(classes):
        total += np.exp(np.float64(logits[label] - logits[best]))
    return np.log(total) + np.float64(logits[best])


@implements(row_loss, SoftmaxTerms)
def loss(terms, w, x, y, scale, scratch):
    best = _logits(terms.classes, w, x, scale, scratch)
    return _log_sum(terms.classes, scratch, best) - np.float64(scratch[int(y)])


@implements(row_gradient, SoftmaxTerms)
def add(terms, w, x, y, scale, scratch, gradient):
    width = x.size + 1
    best = _logits(terms.classes, w, x, scale, scratch)
    log_sum = _log_sum(terms.classes, scratch, best)
    loss = log_sum - np.float64(scratch[int(y)])
    for label in range(terms.classes):
        error = np.float32(np.exp(np.float64(scratch[label]) - log_sum))
        if label == int(y):
            error -= np.float32(1)
        factor = error * scale
        for j in range(x.size):
            gradient[label * width + j] += factor * np.float32(x[j])
        gradient[label * width + x.size] += error
    return loss


@implements(row_correct, SoftmaxTerms)
def right(terms, w, x, y, scale, scratch):
    return 1 if _logits(terms.classes, w, x, scale, scratch) == int(y) else 0


by_row(SoftmaxTerms)
