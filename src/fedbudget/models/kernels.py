"""Local updates of a whole fleet as compiled loops: gather a row, dot, axpy, and nothing copied.

What a model is, is said in row functions (`row_loss`, `row_gradient` and, for classifiers, `row_correct`); each model
implements them for its own `terms`, a NamedTuple. The drivers below are the same for all models, compiled for each one
when it is first used, and cached on disk.

Two rules hold. Rows are summed in blocks of `BLOCK` in float32, and blocks in float64, in order: large shards keep
their digits, and the result is the same bits whether one thread does all blocks or many threads do some each. And a
gradient's memory does not grow with the number of samples.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.extending import overload, register_jitable

BLOCK = 128
FAST = {"reassoc", "contract", "nsz", "arcp"}  # sums may be reordered when compiled; NaN and inf stay what they are


def implements(row_function: Callable[..., Any], kind: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as a row function for terms of one kind."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @overload(row_function, jit_options={"fastmath": FAST}, strict=False)
        def choose(terms, *_):
            ours = isinstance(terms, types.BaseNamedTuple) and terms.instance_class is kind
            return function if ours else None

        return function

    return register


def row_loss(terms, w, x, y, scale, scratch):
    """f_j(w) of one row, without regularization."""
    raise NotImplementedError


def row_gradient(terms, w, x, y, scale, scratch, gradient):
    """The same, with ∇f_j(w) added to `gradient`."""
    raise NotImplementedError


def row_correct(terms, w, x, y, scale, scratch):
    """1 where the model predicts y, otherwise 0."""
    raise NotImplementedError


@register_jitable(fastmath=FAST)
def dot(w, x):
    """wᵀx over the length of x, in float32."""
    product = np.float32(0)
    for j in range(x.size):
        product += w[j] * np.float32(x[j])
    return product


@njit(cache=True, fastmath=FAST)
def _block_loss(terms, w, x, y, scale, rows, start, picked, first, last):
    scratch = np.empty(w.size // x.shape[1] + 1, np.float32)
    loss = 0.0
    for position in range(first, last):
        row = rows[start + (picked[position] if picked.size else position)]
        loss += row_loss(terms, w, x[row], y[row], scale, scratch)
    return loss


@njit(cache=True, fastmath=FAST)
def _block_gradient(terms, w, x, y, scale, rows, start, picked, first, last, gradient):
    scratch = np.empty(w.size // x.shape[1] + 1, np.float32)
    gradient[:] = 0
    loss = 0.0
    for position in range(first, last):
        row = rows[start + (picked[position] if picked.size else position)]
        loss += row_gradient(terms, w, x[row], y[row], scale, scratch, gradient)
    return loss


@njit(cache=True)
def _penalty(regularization, w):
    """λ/2 ‖w‖²."""
    if regularization == 0:
        return 0.0
    total = 0.0
    for j in range(w.size):
        total += np.float64(w[j]) * np.float64(w[j])
    return 0.5 * np.float64(regularization) * total


@njit(cache=True)
def _finish_gradient(regularization, w, total, count, gradient):
    """From the sum over rows to ∇F_i(w)."""
    for j in range(w.size):
        gradient[j] = np.float32(total[j] / count) + regularization * w[j]


@njit(cache=True)
def _node_gradient(terms, regularization, w, x, y, scale, rows, start, picked, count, partial, total, gradient):
    total[:] = 0
    loss = 0.0
    for first in range(0, count, BLOCK):
        loss += _block_gradient(terms, w, x, y, scale, rows, start, picked, first, min(first + BLOCK, count), partial)
        for j in range(w.size):
            total[j] += partial[j]
    _finish_gradient(regularization, w, total, count, gradient)
    return loss / count + _penalty(regularization, w)


@njit(cache=True, parallel=True)
def losses(terms, regularization, w, x, y, scale, rows, start, size, positions, group, out):
    """F_i at w[i], or at w[0] for all when w has one row; threads share out the blocks of all nodes."""
    nodes = len(start)
    batch = positions.shape[2]
    largest = batch if batch else size.max()
    blocks = (largest + BLOCK - 1) // BLOCK
    partial = np.zeros((nodes, blocks))
    for job in prange(nodes * blocks):
        i, block = job // blocks, job % blocks
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
        out[i] = loss / (batch if batch else size[i]) + _penalty(regularization, w[i % len(w)])


@njit(cache=True, parallel=True)
def descend(terms, regularization, w, x, y, scale, rows, start, size, positions, group, eta, out, losses, gradients):
    """All updates of a round: out[i] ends as w_i(t); the loss and gradient before the first update are kept.

    A node is a thread's own for the whole round, so threads never wait for each other between updates. With η=0 this
    is just the evaluation of losses and gradients.
    """
    batch = positions.shape[2]
    for i in prange(len(start)):
        partial = np.empty(out.shape[1], np.float32)
        total = np.empty(out.shape[1], np.float64)
        gradient = np.empty(out.shape[1], np.float32)
        out[i] = w[i % len(w)]
        for update in range(positions.shape[1]):
            loss = _node_gradient(
                terms, regularization, out[i], x, y, scale, rows, start[i], positions[group[i], update],
                batch if batch else size[i], partial, total, gradient,
            )  # fmt: skip
            if update == 0:
                losses[i] = loss
                gradients[i] = gradient
            for j in range(gradient.size):
                out[i, j] -= eta * gradient[j]


@njit(cache=True, parallel=True)
def descend_few(
    terms, regularization, w, x, y, scale, rows, start, size, positions, group, eta, out, losses, gradients
):
    """The same to the bit, for fewer nodes than threads: threads share out the blocks of a node's batch."""
    batch = positions.shape[2]
    parameters = out.shape[1]
    for i in range(len(start)):
        count = batch if batch else size[i]
        blocks = (count + BLOCK - 1) // BLOCK
        lanes = min(blocks, 16)  # blocks in flight, so that memory does not grow with the shard
        partial = np.empty((lanes, parameters), np.float32)
        block_losses = np.empty(lanes)
        total = np.empty(parameters, np.float64)
        gradient = np.empty(parameters, np.float32)
        out[i] = w[i % len(w)]
        for update in range(positions.shape[1]):
            picked = positions[group[i], update]
            total[:] = 0
            loss = 0.0
            for base in range(0, blocks, lanes):
                flying = min(lanes, blocks - base)
                for lane in prange(flying):
                    first = (base + lane) * BLOCK
                    block_losses[lane] = _block_gradient(
                        terms, out[i], x, y, scale, rows, start[i], picked,
                        first, min(first + BLOCK, count), partial[lane],
                    )  # fmt: skip
                for lane in range(flying):
                    loss += block_losses[lane]
                    for j in range(parameters):
                        total[j] += partial[lane, j]
            _finish_gradient(regularization, out[i], total, count, gradient)
            if update == 0:
                losses[i] = loss / count + _penalty(regularization, out[i])
                gradients[i] = gradient
            for j in range(parameters):
                out[i, j] -= eta * gradient[j]


@njit(cache=True, parallel=True)
def correct(terms, w, x, y, scale):
    """How many rows of a table the model predicts right."""
    blocks = (len(x) + BLOCK - 1) // BLOCK
    total = 0
    for block in prange(blocks):
        scratch = np.empty(w.size // x.shape[1] + 1, np.float32)
        right = 0
        for row in range(block * BLOCK, min((block + 1) * BLOCK, len(x))):
            right += row_correct(terms, w, x[row], y[row], scale, scratch)
        total += right
    return total
