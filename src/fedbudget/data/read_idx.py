"""Reads IDX, the format of MNIST: a magic number, the size of each dimension as big-endian 32 bits, then bytes."""

import math
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedbudget.data.contents import exactly
from fedbudget.errors import UserError

_BYTES = 0x08  # the only type of element that the published files use


def read_idx(stream: BinaryIO, path: Path, *, most: int, sides: tuple[int, ...] = ()) -> NDArray[np.uint8]:
    """The array in a stream, [samples, *sides].

    Args:
      path: what to call it in errors.
      most: the most samples that it may hold, so that a header cannot ask for all the memory there is.
      sides: the height and width of an image; nothing for labels.
    """
    shape = read_shape(stream, path, dimensions=1 + len(sides))
    if not 0 < shape[0] <= most or tuple(shape[1:]) != sides:
        says, expected = (" x ".join(map(str, each)) for each in (shape, (most, *sides)))
        raise UserError(f"{path} says that it holds {says} bytes; expected are at most {expected}")
    return exactly(stream, math.prod(shape), path).reshape(shape)


def read_shape(stream: BinaryIO, path: Path, *, dimensions: int) -> list[int]:
    """What a header says: how many samples, and their height and width."""
    header = stream.read(4 + 4 * dimensions)
    if len(header) < 4 + 4 * dimensions:
        raise UserError(f"{path} is not an IDX file: it ends within its header")
    zero, kind, rank, *shape = struct.unpack(f">HBB{dimensions}I", header)
    if (zero, kind, rank) != (0, _BYTES, dimensions):
        raise UserError(f"{path} is not the IDX file expected: its magic number should be {_BYTES << 8 | dimensions}")
    return shape
