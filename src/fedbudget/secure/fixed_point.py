"""Real numbers as whole ones of 64 bits that are added modulo 2^64: masks hide these perfectly, and no float.

How far a vector's numbers may go follows from the w that all nodes were sent: to 2^8 times its largest number, or 2^8
where that is below 1, and further where that was too little. Steps are the 2^61st part of that (1e-16), far finer than
those of float32, and there is twice as much room as is used. Single figures, of which there are few and which may be
squares, are in three parts of 40 bits with room for carries: in steps of 2^-60, up to ±2^58.
"""

import math
from collections.abc import Sequence

import numpy as np

from fedbudget.arrays import Float32, Float64, UInt64

PARTS = 3
"""Whole numbers that a figure takes."""
LARGEST_FIGURE = 2.0**58

_STEPS = 2.0**61  # from 0 to the largest
_PART = 40  # bits
_FIGURE_STEP = 60  # so many binary places
_AT_ONCE = 2**16


def largest_beside(w: Float32, room: int) -> float:
    """Of a number in a sum of vectors that come from this one.

    Args:
      room: how often a number may have doubled.

    >>> largest_beside(np.array([0.5, -3.0], np.float32), 8)
    1024.0
    """
    most = float(np.abs(w).max(initial=1.0))
    return 2.0 ** (math.ceil(math.log2(most)) + room)


def encode(values: Float32 | Float64, largest: float) -> UInt64:
    """A vector, rounded to steps."""
    whole = np.empty(len(values), np.int64)
    for first in range(0, len(values), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        scaled = np.multiply(values[part], _STEPS / largest, dtype=np.float64)
        np.rint(scaled, out=scaled)
        whole[part] = scaled
    return whole.view(np.uint64)


def decode(total: UInt64, largest: float) -> Float64:
    """What was encoded, added up."""
    return np.multiply(total.view(np.int64), largest / _STEPS, dtype=np.float64)


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
