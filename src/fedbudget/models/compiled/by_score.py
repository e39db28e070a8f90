"""Models whose loss depends on one score wᵀx per sample: four rows at a time.

Taking four rows together reads w and the gradient once for all of them, and lets the machine fetch four rows at once,
which is what such models wait for: their rows lie all over memory. A row is turned into float32 once, and kept for the
gradient in a buffer that stays in the core's own cache. Together this is about twice as fast as one row at a time.

A model gives `score_loss(terms, score, y)`: its loss and the slope of that loss, and `score_correct` if it classifies.
"""

import numpy as np
from numba.extending import register_jitable

from fedbudget.models.compiled.kernels import FAST, dot, implements, row_at, rows_correct, rows_gradient, rows_loss


def score_loss(terms, score, y):
    """The loss of a sample with this score, in float64, and its derivative by the score, in float32."""


def score_correct(terms, score, y):
    """1 where a score predicts y, otherwise 0."""


def by_score(kind: type) -> None:
    """Has models with terms of this kind computed by their scores."""
    implements(rows_loss, kind)(_loss)
    implements(rows_gradient, kind)(_gradient)
    implements(rows_correct, kind)(_correct)


@register_jitable(fastmath=FAST, forceinline=True)
def _four_scores(w, x, r0, r1, r2, r3, scale, kept):
    """The scores of four rows, whose features are left in `kept`, [4, features]."""
    x0, x1, x2, x3 = x[r0], x[r1], x[r2], x[r3]
    k0, k1, k2, k3 = kept[0], kept[1], kept[2], kept[3]
    s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for j in range(w.size):
        v0, v1, v2, v3 = np.float32(x0[j]), np.float32(x1[j]), np.float32(x2[j]), np.float32(x3[j])
        k0[j], k1[j], k2[j], k3[j] = v0, v1, v2, v3
        s0 += w[j] * v0
        s1 += w[j] * v1
        s2 += w[j] * v2
        s3 += w[j] * v3
    return s0 * scale, s1 * scale, s2 * scale, s3 * scale


def _loss(terms, w, x, y, scale, rows, start, picked, first, last):
    loss = 0.0
    kept = np.empty((4, w.size), np.float32)
    position = first
    while position + 4 <= last:
        r0, r1 = row_at(rows, start, picked, position), row_at(rows, start, picked, position + 1)
        r2, r3 = row_at(rows, start, picked, position + 2), row_at(rows, start, picked, position + 3)
        s0, s1, s2, s3 = _four_scores(w, x, r0, r1, r2, r3, scale, kept)
        l0, _ = score_loss(terms, s0, y[r0])
        l1, _ = score_loss(terms, s1, y[r1])
        l2, _ = score_loss(terms, s2, y[r2])
        l3, _ = score_loss(terms, s3, y[r3])
        loss += l0 + l1 + l2 + l3
        position += 4
    while position < last:
        row = row_at(rows, start, picked, position)
        one, _ = score_loss(terms, dot(w, x[row]) * scale, y[row])
        loss += one
        position += 1
    return loss


def _gradient(terms, w, x, y, scale, rows, start, picked, first, last, gradient):
    loss = 0.0
    kept = np.empty((4, w.size), np.float32)
    k0, k1, k2, k3 = kept[0], kept[1], kept[2], kept[3]
    position = first
    while position + 4 <= last:
        r0, r1 = row_at(rows, start, picked, position), row_at(rows, start, picked, position + 1)
        r2, r3 = row_at(rows, start, picked, position + 2), row_at(rows, start, picked, position + 3)
        s0, s1, s2, s3 = _four_scores(w, x, r0, r1, r2, r3, scale, kept)
        l0, d0 = score_loss(terms, s0, y[r0])
        l1, d1 = score_loss(terms, s1, y[r1])
        l2, d2 = score_loss(terms, s2, y[r2])
        l3, d3 = score_loss(terms, s3, y[r3])
        loss += l0 + l1 + l2 + l3
        d0, d1, d2, d3 = d0 * scale, d1 * scale, d2 * scale, d3 * scale
        for j in range(w.size):
            gradient[j] += d0 * k0[j] + d1 * k1[j] + d2 * k2[j] + d3 * k3[j]
        position += 4
    while position < last:
        row = row_at(rows, start, picked, position)
        one, slope = score_loss(terms, dot(w, x[row]) * scale, y[row])
        loss += one
        slope *= scale
        for j in range(w.size):
            gradient[j] += slope * np.float32(x[row, j])
        position += 1
    return loss


def _correct(terms, w, x, y, scale, first, last):
    right = 0
    for row in range(first, last):
        right += score_correct(terms, dot(w, x[row]) * scale, y[row])
    return right
