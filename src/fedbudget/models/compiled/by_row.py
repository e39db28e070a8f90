"""Models that are computed one row at a time.

A model gives `row_loss`, `row_gradient` and, if it classifies, `row_correct`; `scratch` has room for a number per class
or cluster.
"""

import numpy as np

from fedbudget.models.compiled.kernels import implements, row_at, rows_correct, rows_gradient, rows_loss


def row_loss(terms, w, x, y, scale, scratch):
    """f_j(w) of one row."""


def row_gradient(terms, w, x, y, scale, scratch, gradient):
    """The same, with ∇f_j(w) added to `gradient`."""


def row_correct(terms, w, x, y, scale, scratch):
    """1 where the model predicts y, otherwise 0."""


def by_row(kind: type) -> None:
    """Has models with terms of this kind computed row by row."""
    implements(rows_loss, kind)(_loss)
    implements(rows_gradient, kind)(_gradient)
    implements(rows_correct, kind)(_correct)


def _loss(terms, w, x, y, scale, rows, start, picked, first, last):
    scratch = np.empty(w.size // x.shape[1], np.float32)
    loss = 0.0
    for position in range(first, last):
        row = row_at(rows, start, picked, position)
        loss += row_loss(terms, w, x[row], y[row], scale, scratch)
    return loss


def _gradient(terms, w, x, y, scale, rows, start, picked, first, last, gradient):
    scratch = np.empty(w.size // x.shape[1], np.float32)
    loss = 0.0
    for position in range(first, last):
        row = row_at(rows, start, picked, position)
        loss += row_gradient(terms, w, x[row], y[row], scale, scratch, gradient)
    return loss


def _correct(terms, w, x, y, scale, first, last):
    scratch = np.empty(w.size // x.shape[1], np.float32)
    right = 0
    for row in range(first, last):
        right += row_correct(terms, w, x[row], y[row], scale, scratch)
    return right
