"""K-means, row by row."""

import numpy as np
from numba.extending import register_jitable

from fedbudget.models.compiled.by_row import by_row, row_gradient, row_loss
from fedbudget.models.compiled.kernels import FAST, implements
from fedbudget.models.terms import KMeansTerms


@register_jitable(fastmath=FAST, forceinline=True)
def _nearest(clusters, w, x, scale):
    """The nearest centre and the square of its distance; the first one on ties."""
    features = x.size
    best, smallest = 0, np.float32(np.inf)
    for cluster in range(clusters):
        distance = np.float32(0)
        for j in range(features):
            difference = w[cluster * features + j] - np.float32(x[j]) * scale
            distance += difference * difference
        if distance < smallest:
            best, smallest = cluster, distance
    return best, smallest


@implements(row_loss, KMeansTerms)
def loss(terms, w, x, y, scale, scratch):
    _, distance = _nearest(terms.clusters, w, x, scale)
    return 0.5 * np.float64(distance)


@implements(row_gradient, KMeansTerms)
def add(terms, w, x, y, scale, scratch, gradient):
    cluster, distance = _nearest(terms.clusters, w, x, scale)
    offset = cluster * x.size
    for j in range(x.size):
        gradient[offset + j] += w[offset + j] - np.float32(x[j]) * scale
    return 0.5 * np.float64(distance)


by_row(KMeansTerms)
