"""Row functions of the built-in models, see builtin.py for the formulas."""

import numpy as np
from numba.extending import register_jitable

from fedbudget.models.builtin import KMeansTerms, LinearTerms, SoftmaxTerms, SquaredSvmTerms
from fedbudget.models.compiled.kernels import (
    FAST,
    by_row,
    by_score,
    dot,
    implements,
    row_correct,
    row_gradient,
    row_loss,
    score_correct,
    score_loss,
)


@register_jitable(fastmath=FAST, forceinline=True)
def _nearest(clusters, w, x, scale):
    """Return the nearest centre and its squared distance; the first one on ties."""
    features = x.size
    best = 0
    smallest = np.float32(np.inf)
    for cluster in range(clusters):
        distance = np.float32(0)
        for j in range(features):
            difference = w[cluster * features + j] - np.float32(x[j]) * scale
            distance += difference * difference
        if distance < smallest:
            best = cluster
            smallest = distance
    return best, smallest


@implements(row_loss, KMeansTerms)
def kmeans_loss(terms, w, x, y, scale, scratch):
    _, distance = _nearest(terms.clusters, w, x, scale)
    return 0.5 * np.float64(distance)


@implements(row_gradient, KMeansTerms)
def kmeans_add_gradient(terms, w, x, y, scale, scratch, gradient):
    cluster, distance = _nearest(terms.clusters, w, x, scale)
    offset = cluster * x.size
    for j in range(x.size):
        gradient[offset + j] += w[offset + j] - np.float32(x[j]) * scale
    return 0.5 * np.float64(distance)


by_row(KMeansTerms)


@implements(score_loss, LinearTerms)
def linear_loss(terms, score, y):
    error = score - y
    return 0.5 * np.float64(error) * np.float64(error), error


by_score(LinearTerms)


@register_jitable(fastmath=FAST, forceinline=True)
def _logits(classes, w, x, scale, logits):
    """Write W x + bias to `logits`, and return the first of the largest."""
    width = x.size + 1
    best = 0
    for label in range(classes):
        logits[label] = dot(w[label * width :], x) * scale + w[label * width + x.size]
        if logits[label] > logits[best]:
            best = label
    return best


@register_jitable(fastmath=FAST, forceinline=True)
def _log_sum(classes, logits, best):
    """Return log Σ exp(logit), without overflow."""
    total = 0.0
    for label in range(classes):
        total += np.exp(np.float64(logits[label] - logits[best]))
    return np.log(total) + np.float64(logits[best])


@implements(row_loss, SoftmaxTerms)
def softmax_loss(terms, w, x, y, scale, scratch):
    best = _logits(terms.classes, w, x, scale, scratch)
    return _log_sum(terms.classes, scratch, best) - np.float64(scratch[int(y)])


@implements(row_gradient, SoftmaxTerms)
def softmax_add_gradient(terms, w, x, y, scale, scratch, gradient):
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
def softmax_is_correct(terms, w, x, y, scale, scratch):
    return 1 if _logits(terms.classes, w, x, scale, scratch) == int(y) else 0


by_row(SoftmaxTerms)


@implements(score_loss, SquaredSvmTerms)
def svm_loss(terms, score, y):
    slack = np.float32(1) - y * score
    if slack <= 0:
        return 0.0, np.float32(0)
    return 0.5 * np.float64(slack) * np.float64(slack), -y * slack


@implements(score_correct, SquaredSvmTerms)
def svm_is_correct(terms, score, y):
    return 1 if (score >= 0) == (y > 0) else 0


by_score(SquaredSvmTerms)
