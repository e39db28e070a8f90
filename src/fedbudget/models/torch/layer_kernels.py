"""Compiled loops over images for faster_layers.py.

They use one thread and release Python's lock: a second set of threads would compete with
the waiting threads of PyTorch. Each image is computed separately, so the bits do not
depend on the number of images.
"""

import numba
import numpy as np
from numpy.typing import NDArray

from fedbudget.models import compiling

compiling.watch()

Array = NDArray[np.float32]
"""[images, channels, pixels], or [planes, height, width] if pixels have neighbours."""

_ONE = np.float32(1)
_DECAY = np.float32(1.5)


@numba.njit(nogil=True, cache=True)
def to_largest(x: Array, gradient: Array, out: Array) -> None:
    """Add the gradient of each 2x2 square to its first largest pixel. `out` starts at 0."""
    for plane in range(gradient.shape[0]):
        for i in range(gradient.shape[1]):
            for j in range(gradient.shape[2]):
                a = x[plane, 2 * i, 2 * j]
                b = x[plane, 2 * i, 2 * j + 1]
                c = x[plane, 2 * i + 1, 2 * j]
                d = x[plane, 2 * i + 1, 2 * j + 1]
                largest = max(max(a, b), max(c, d))
                first = 3
                # The compiler avoids branches here. They would be unpredictable.
                if c == largest:
                    first = 2
                if b == largest:
                    first = 1
                if a == largest:
                    first = 0
                out[plane, 2 * i + (first >> 1), 2 * j + (first & 1)] = gradient[
                    plane, i, j
                ]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def normalize(
    x: Array, before: int, after: int, share: np.float32, k: np.float32, out: Array
) -> None:
    """Compute y_i = x_i s_i^-¾ with s_i = k + share Σ_j x_j².

    The sum is over channels j from i - before to i + after.
    """
    total = np.empty(x.shape[2], x.dtype)
    for image in range(x.shape[0]):
        for channel in range(x.shape[1]):
            _sum_of_squares(x[image], channel, before, after, share, k, total)
            for p in range(x.shape[2]):
                out[image, channel, p] = x[image, channel, p] * (
                    _ONE / np.sqrt(total[p] * np.sqrt(total[p]))
                )


@numba.njit(nogil=True, cache=True, error_model="numpy")
def normalize_backward(
    x: Array,
    gradient: Array,
    before: int,
    after: int,
    share: np.float32,
    k: np.float32,
    out: Array,
) -> None:
    """Compute dL/dx_j = g_j s_j^-¾ - 1.5 share x_j Σ_i g_i x_i s_i^-7/4.

    The sum is over the channels i whose window contains j.
    """
    total = np.empty(x.shape[2], x.dtype)
    term = np.empty(x.shape[1:], x.dtype)
    for image in range(x.shape[0]):
        for channel in range(x.shape[1]):
            _sum_of_squares(x[image], channel, before, after, share, k, total)
            for p in range(x.shape[2]):
                scaled = gradient[image, channel, p] / np.sqrt(total[p] * np.sqrt(total[p]))
                out[image, channel, p] = scaled
                term[channel, p] = x[image, channel, p] * scaled / total[p]
        for channel in range(x.shape[1]):
            total[:] = 0
            for near in range(
                max(0, channel - after), min(x.shape[1], channel + before + 1)
            ):
                for p in range(x.shape[2]):
                    total[p] += term[near, p]
            for p in range(x.shape[2]):
                out[image, channel, p] -= _DECAY * share * x[image, channel, p] * total[p]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _sum_of_squares(
    x: Array,
    channel: int,
    before: int,
    after: int,
    share: np.float32,
    k: np.float32,
    total: Array,
) -> None:
    total[:] = 0
    for near in range(max(0, channel - before), min(x.shape[0], channel + after + 1)):
        for p in range(x.shape[1]):
            total[p] += x[near, p] * x[near, p]
    for p in range(x.shape[1]):
        total[p] = k + share * total[p]
