"""Real numbers as whole ones of 64 bits that are added modulo 2^64: masks hide these perfectly, and no float.

A vector's numbers are in steps of 2^-36 (1.5e-11), and no sum may be beyond ±2^26 (7e7), half of what there is room
for. Single figures, of which there are few and which may be squares, are in three parts of 40 bits with
room for carries: in steps of 2^-60, up to ±2^58.
"""

import math
from collections.abc import Sequence

import numpy as np

from fedbudget.arrays import Float32, Float64
from fedbudget.secure.masks import UInt64

STEP = 2.0**-36
LARGEST = 2.0**26
"""Of a number in a vector."""
PARTS = 3
"""Whole numbers that a figure takes."""
LARGEST_FIGURE = 2.0**58

_PART = 40  # bits
_FIGURE_STEP = 60  # so many binary places
_AT_ONCE = 2**16


def encode(values: Float32 | Float64, weight: float = 1.0) -> UInt64:
    """Weight times each number of a vector, rounded to a step."""
    whole = np.empty(len(values), np.int64)
    for first in range(0, len(values), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        scaled = np.multiply(values[part], weight / STEP, dtype=np.float64)
        np.rint(scaled, out=scaled)
        whole[part] = scaled
    return whole.view(np.uint64)


def decode(total: UInt64) -> Float64:
    """What was encoded, added up."""
    return np.multiply(total.view(np.int64), STEP, dtype=np.float64)


def encode_figures(figures: Sequence[float]) -> UInt64:
    """Each as so many whole numbers as `PARTS`; one that is not finite, or too large, must not come here.

    >>> decode_figures(encode_figures([1.5, -2e-9]) + encode_figures([2.25, 1e-9])).round(9)
    array([ 3.75e+00, -1.00e-09])
    """
    found = np.empty((len(figures), PARTS), np.int64)
    for at, figure in enumerate(figures):
        if not abs(figure) <= LARGEST_FIGURE:
            raise ValueError(f"{figure} cannot be added up")
        mantissa, exponent = math.frexp(figure)
        whole, shift = int(mantissa * 2**53), exponent - 53 + _FIGURE_STEP
        whole = whole << shift if shift >= 0 else whole >> -shift
        for part in range(PARTS - 1):
            found[at, part], whole = whole & (2**_PART - 1), whole >> _PART
        found[at, PARTS - 1] = whole
    return found.reshape(-1).view(np.uint64)


def decode_figures(total: UInt64) -> Float64:
    """What was encoded, added up."""
    found = []
    for row in total.view(np.int64).reshape(-1, PARTS).tolist():
        whole = sum(part << (_PART * place) for place, part in enumerate(row))
        found.append(whole / 2**_FIGURE_STEP)
    return np.array(found, np.float64)
