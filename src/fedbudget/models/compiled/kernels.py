"""Local updates of a whole fleet as compiled loops: gather rows, dot, axpy, no copies.

A model defines functions over some rows of a table: `rows_loss`, `rows_gradient` and, for
classifiers, `rows_correct`. It implements them for the type of its `terms`, a NamedTuple.
`by_row` and `by_score` derive them from simpler functions, see rows.py. The drivers are
the same for all models. numba compiles them for each model at first use and caches them on
disk.

Rules:

- Rows are summed in blocks of `BLOCK` in float32, and blocks in float64, in order. Large
  shards keep their precision, and the bits do not depend on the number of threads.
- The memory of a gradient does not grow with the number of samples.
- Everything that a driver calls is inlined into it (`forceinline`). Otherwise a function
  would exist twice, compiled alone and within the driver, with sums in another order. The
  driver would call one of them when it was just compiled and the other one when it came
  from the disk, and the first run would differ from the next in its last digits.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config, get_num_threads, njit, prange, types
from numba.extending import overload, register_jitable

from fedbudget.models import compiling

# Waiting threads must sleep, not spin: on machines with shared cores, as in most clouds,
# spinning made a round ten times slower. OpenMP reads this when numba loads it, at the
# first use.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__all__ = [
    "MOST_THREADS",
    "correct",
    "descend",
    "descend_few",
    "get_num_threads",
    "losses",
]

MOST_THREADS: int = config.NUMBA_NUM_THREADS
"""Upper limit of `get_num_threads`, which is slow to call in every round."""

compiling.watch()

BLOCK = 128
"""Rows that are summed in float32."""

FAST = {"reassoc", "contract", "nsz", "arcp"}
"""The compiler may reorder sums, but must keep NaN and infinity."""


def rows_loss(terms, w, x, y, scale, rows, start, picked, first, last):
    """Return Σ f_j(w), without regularization, at positions first..last-1 of a mini-batch.

    The row at a position is `rows[start + picked[position]]`, or `rows[start + position]`
    if `picked` is empty.
    """


def rows_gradient(terms, w, x, y, scale, rows, start, picked, first, last, gradient):
    """Return the same as `rows_loss`, and add Σ ∇f_j(w) to `gradient`."""


def rows_correct(terms, w, x, y, scale, first, last):
    """Return the number of correct predictions among the rows first..last-1 of a table."""


@njit(cache=True, parallel=True)
def losses(terms, regularization, w, x, y, scale, rows, start, size, positions, group, out):
    """Write F_i at w[i] to `out`, or at w[0] if w has one row.

    Threads share the blocks of all nodes.
    """
    nodes = len(start)
    batch = positions.shape[2]
    largest = batch if batch else size.max()
    blocks = (largest + BLOCK - 1) // BLOCK
    partial = np.zeros((nodes, blocks))
    for job in prange(nodes * blocks):
        i = job // blocks
        block = job % blocks
        count = batch if batch else size[i]
        if block * BLOCK < count:
            partial[i, block] = _block_loss(
                terms, w[i % len(w)], x, y, scale, rows, start[i], positions[group[i], 0],
                block * BLOCK, min((block + 1) * BLOCK, count),
            )  # fmt: skip
    for i in range(nodes):
        loss = 0.0
        for block in range(blocks):
            loss += partial[i, block]
        out[i] = loss / (batch if batch else size[i]) + _penalty(
            regularization, w[i % len(w)]
        )


def _driver(over_nodes: Any, over_lanes: Any, most_lanes: int) -> Any:
    """Compile a driver of local updates; all drivers compute the same bits.

    Args:
      over_nodes, over_lanes: `prange` for the loop that threads share, `range` for the
        other one.
      most_lanes: blocks of a node that are computed at once. The bound keeps memory
        independent of the shard.
    """

    @njit(cache=True, parallel=True)
    def driver(
        terms, regularization, w, best, shift, x, y, scale, rows, start, size, positions,
        group, updates, eta, out, losses, gradients, best_losses,
    ):  # fmt: skip
        """Make updates[i] updates with step size eta[i]; out[i] becomes w_i(t).

        `losses` and `gradients` receive F_i and ∇F_i before the first update. If `best`
        has a row, `best_losses` receives the loss there, on the rows of the first update
        while they are in the cache. If `shift` has rows, shift[i] is added to each
        gradient of node i before the step.
        """
        batch = positions.shape[2]
        parameters = out.shape[1]
        for i in over_nodes(len(start)):
            count = batch if batch else size[i]
            blocks = (count + BLOCK - 1) // BLOCK
            lanes = min(blocks, most_lanes)
            partial = np.empty((lanes, parameters), np.float32)
            block_losses = np.empty(lanes)
            best_block_losses = np.zeros(lanes)
            total = np.empty(parameters, np.float64)
            gradient = np.empty(parameters, np.float32)
            out[i] = w[i % len(w)]
            for update in range(updates[i]):
                picked = positions[group[i], update]
                judges = update == 0 and len(best) > 0
                loss = 0.0
                best_loss = 0.0
                total[:] = 0
                for base in range(0, blocks, lanes):
                    active = min(lanes, blocks - base)
                    for lane in over_lanes(active):
                        first = (base + lane) * BLOCK
                        last = min(first + BLOCK, count)
                        block_losses[lane] = _block_gradient(
                            terms, out[i], x, y, scale, rows, start[i], picked, first, last,
                            partial[lane],
                        )  # fmt: skip
                        if judges:
                            best_block_losses[lane] = _block_loss(
                                terms, best[0], x, y, scale, rows, start[i], picked, first,
                                last,
                            )  # fmt: skip
                    for lane in range(active):
                        loss += block_losses[lane]
                        best_loss += best_block_losses[lane]
                        for j in range(parameters):
                            total[j] += partial[lane, j]
                if update == 0:
                    losses[i] = loss / count + _penalty(regularization, out[i])
                if judges:
                    best_losses[i] = best_loss / count + _penalty(regularization, best[0])
                _step(
                    regularization, eta[i], out[i], total, count,
                    gradients[i] if update == 0 else gradient, shift[i : i + 1],
                )  # fmt: skip

    return driver


descend = _driver(prange, range, 1)
"""One thread computes all updates of a node: threads never wait for each other."""

descend_few = _driver(range, prange, 16)
"""Threads share the blocks of a node's batch, for fewer nodes than threads."""


@njit(cache=True, parallel=True)
def correct(terms, w, x, y, scale):
    """Return the number of correct predictions over a table."""
    blocks = (len(x) + BLOCK - 1) // BLOCK
    total = 0
    for block in prange(blocks):
        total += rows_correct(
            terms, w, x, y, scale, block * BLOCK, min((block + 1) * BLOCK, len(x))
        )
    return total


@njit(fastmath=FAST, forceinline=True)
def _block_loss(terms, w, x, y, scale, rows, start, picked, first, last):
    return rows_loss(terms, w, x, y, scale, rows, start, picked, first, last)


@njit(fastmath=FAST, forceinline=True)
def _block_gradient(terms, w, x, y, scale, rows, start, picked, first, last, gradient):
    gradient[:] = 0
    return rows_gradient(terms, w, x, y, scale, rows, start, picked, first, last, gradient)


@njit(forceinline=True)
def _penalty(regularization, w):
    """Return λ/2 ‖w‖²."""
    if regularization == 0:
        return 0.0
    total = 0.0
    for j in range(w.size):
        total += np.float64(w[j]) * np.float64(w[j])
    return 0.5 * np.float64(regularization) * total


@njit(forceinline=True)
def _step(regularization, eta, w, total, count, gradient, shift):
    """Write ∇F_i(w), from the sum over rows, to `gradient`, and make the step.

    If `shift` has a row, the step goes along the gradient plus this row. `gradient` is
    without it.
    """
    share = 1.0 / count
    if len(shift):
        for j in range(w.size):
            gradient[j] = np.float32(total[j] * share) + regularization * w[j]
            w[j] -= eta * (gradient[j] + shift[0, j])
    else:
        for j in range(w.size):
            gradient[j] = np.float32(total[j] * share) + regularization * w[j]
            w[j] -= eta * gradient[j]


@register_jitable(forceinline=True)
def row_at(rows, start, picked, position):
    return rows[start + (picked[position] if picked.size else position)]


@register_jitable(fastmath=FAST, forceinline=True)
def dot(w, x):
    """Return wᵀx over the length of x, in float32."""
    product = np.float32(0)
    for j in range(x.size):
        product += w[j] * np.float32(x[j])
    return product


def implements(
    stub: Callable[..., Any], kind: type
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the implementation of a stub for one type of terms."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @overload(stub, jit_options={"fastmath": FAST, "forceinline": True}, strict=False)
        def choose(terms, *_):
            matches = (
                isinstance(terms, types.BaseNamedTuple) and terms.instance_class is kind
            )
            return function if matches else None

        return function

    return register


def row_loss(terms, w, x, y, scale, scratch):
    """Return f_j(w) of one row. `scratch` has space for one number per class or cluster."""


def row_gradient(terms, w, x, y, scale, scratch, gradient):
    """Return f_j(w) of one row, and add ∇f_j(w) to `gradient`."""


def row_correct(terms, w, x, y, scale, scratch):
    """Return 1 if the model predicts y, otherwise 0."""


def by_row(kind: type) -> None:
    """Compute models with terms of this type one row at a time.

    The model implements `row_loss`, `row_gradient` and, if it classifies, `row_correct`.
    """
    implements(rows_loss, kind)(_row_loss)
    implements(rows_gradient, kind)(_row_gradient)
    implements(rows_correct, kind)(_row_correct)


def _row_loss(terms, w, x, y, scale, rows, start, picked, first, last):
    scratch = np.empty(w.size // x.shape[1], np.float32)
    loss = 0.0
    for position in range(first, last):
        row = row_at(rows, start, picked, position)
        loss += row_loss(terms, w, x[row], y[row], scale, scratch)
    return loss


def _row_gradient(terms, w, x, y, scale, rows, start, picked, first, last, gradient):
    scratch = np.empty(w.size // x.shape[1], np.float32)
    loss = 0.0
    for position in range(first, last):
        row = row_at(rows, start, picked, position)
        loss += row_gradient(terms, w, x[row], y[row], scale, scratch, gradient)
    return loss


def _row_correct(terms, w, x, y, scale, first, last):
    scratch = np.empty(w.size // x.shape[1], np.float32)
    right = 0
    for row in range(first, last):
        right += row_correct(terms, w, x[row], y[row], scale, scratch)
    return right


def score_loss(terms, score, y):
    """Return the loss of a sample (float64) and its derivative by the score (float32)."""


def score_correct(terms, score, y):
    """Return 1 if the score predicts y, otherwise 0."""


def by_score(kind: type) -> None:
    """Compute models with terms of this type, and one score wᵀx per sample, four rows at a
    time.

    The model implements `score_loss` and, if it classifies, `score_correct`. Four rows
    together read w and the gradient once, and let the processor fetch four rows at once.
    Such models wait for memory: their rows are scattered. Each row is converted to float32
    once, and kept for the gradient in a buffer that stays in the cache of the core. This
    is about twice as fast as one row at a time.
    """
    implements(rows_loss, kind)(_score_loss)
    implements(rows_gradient, kind)(_score_gradient)
    implements(rows_correct, kind)(_score_correct)


@register_jitable(fastmath=FAST, forceinline=True)
def _four_scores(w, x, r0, r1, r2, r3, scale, kept):
    """Return the scores of four rows, and write their features to `kept`, [4, features]."""
    x0 = x[r0]
    x1 = x[r1]
    x2 = x[r2]
    x3 = x[r3]
    k0 = kept[0]
    k1 = kept[1]
    k2 = kept[2]
    k3 = kept[3]
    s0 = np.float32(0)
    s1 = np.float32(0)
    s2 = np.float32(0)
    s3 = np.float32(0)
    for j in range(w.size):
        v0 = np.float32(x0[j])
        v1 = np.float32(x1[j])
        v2 = np.float32(x2[j])
        v3 = np.float32(x3[j])
        k0[j] = v0
        k1[j] = v1
        k2[j] = v2
        k3[j] = v3
        s0 += w[j] * v0
        s1 += w[j] * v1
        s2 += w[j] * v2
        s3 += w[j] * v3
    return s0 * scale, s1 * scale, s2 * scale, s3 * scale


def _score_loss(terms, w, x, y, scale, rows, start, picked, first, last):
    loss = 0.0
    kept = np.empty((4, w.size), np.float32)
    position = first
    while position + 4 <= last:
        r0 = row_at(rows, start, picked, position)
        r1 = row_at(rows, start, picked, position + 1)
        r2 = row_at(rows, start, picked, position + 2)
        r3 = row_at(rows, start, picked, position + 3)
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


def _score_gradient(terms, w, x, y, scale, rows, start, picked, first, last, gradient):
    loss = 0.0
    kept = np.empty((4, w.size), np.float32)
    k0 = kept[0]
    k1 = kept[1]
    k2 = kept[2]
    k3 = kept[3]
    position = first
    while position + 4 <= last:
        r0 = row_at(rows, start, picked, position)
        r1 = row_at(rows, start, picked, position + 1)
        r2 = row_at(rows, start, picked, position + 2)
        r3 = row_at(rows, start, picked, position + 3)
        s0, s1, s2, s3 = _four_scores(w, x, r0, r1, r2, r3, scale, kept)
        l0, d0 = score_loss(terms, s0, y[r0])
        l1, d1 = score_loss(terms, s1, y[r1])
        l2, d2 = score_loss(terms, s2, y[r2])
        l3, d3 = score_loss(terms, s3, y[r3])
        loss += l0 + l1 + l2 + l3
        d0 *= scale
        d1 *= scale
        d2 *= scale
        d3 *= scale
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


def _score_correct(terms, w, x, y, scale, first, last):
    right = 0
    for row in range(first, last):
        right += score_correct(terms, dot(w, x[row]) * scale, y[row])
    return right
