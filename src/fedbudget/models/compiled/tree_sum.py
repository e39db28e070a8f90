"""The compiled loop of `protocol.sums.add_up`.

Partial sums wait on a stack until the other half of their branch is summed.
"""

import numpy as np
from numba import njit
from numba.types import Array, float32, float64, int64, void

from fedbudget.models import compiling

compiling.watch()

_COLUMNS = 1024  # columns at a time, to stay in the cache
_DEPTH = 65  # levels of a tree over 64-bit numbers


def _signature(values):
    """Signature for read-only arrays; it also accepts writable ones without recompiling."""
    numbers = Array(int64, 1, "C", readonly=True)
    weights = Array(float64, 1, "C", readonly=True)
    return void(numbers, weights, Array(values, 2, "C", readonly=True), float64[::1])


@njit([_signature(float32), _signature(float64)], cache=True, nogil=True)
def add_up(numbers, weights, values, total):
    partial = np.empty((_DEPTH, _COLUMNS))
    level = np.empty(_DEPTH, np.int64)  # level of the join to the partial sum on the left
    for first in range(0, values.shape[1], _COLUMNS):
        columns = min(_COLUMNS, values.shape[1] - first)
        held = 0
        for node in range(len(numbers)):
            joined = 0
            if node > 0:
                differing = numbers[node] ^ numbers[node - 1]
                while differing > 0:
                    joined += 1
                    differing >>= 1
            while held > 1 and level[held - 1] < joined:
                held -= 1
                for column in range(columns):
                    partial[held - 1, column] += partial[held, column]
            level[held] = joined
            for column in range(columns):
                partial[held, column] = weights[node] * values[node, first + column]
            held += 1
        while held > 1:
            held -= 1
            for column in range(columns):
                partial[held - 1, column] += partial[held, column]
        if held:
            # The total is never -0, so that branches without nodes add nothing.
            for column in range(columns):
                total[first + column] += partial[0, column]
