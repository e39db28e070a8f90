"""Reads files of images: IDX, the format of MNIST, and the binary batches of CIFAR-10.

IDX is a magic number, the size of each dimension as big-endian 32 bits, then bytes. A batch has records of a label byte
and 3,072 bytes of an image, red, then green, then blue.
"""

import math
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedbudget.data.contents import at_most
from fedbudget.errors import UserError

SHAPE = (3, 32, 32)
"""Of an image of CIFAR-10."""

_RECORD = 1 + math.prod(SHAPE)
_MOST = 10_000  # records in a batch
_BYTES = 0x08  # the only type of element that the published IDX files use


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
    size = math.prod(shape)
    contents = at_most(stream, size, path)
    if len(contents) < size:
        raise UserError(f"{path} is truncated: {size - len(contents)} of its last {size} bytes are missing")
    return contents.reshape(shape)


def read_shape(stream: BinaryIO, path: Path, *, dimensions: int) -> list[int]:
    """What a header says: how many samples, and their height and width."""
    header = stream.read(4 + 4 * dimensions)
    if len(header) < 4 + 4 * dimensions:
        raise UserError(f"{path} is not an IDX file: it ends within its header")
    zero, kind, rank, *shape = struct.unpack(f">HBB{dimensions}I", header)
    if (zero, kind, rank) != (0, _BYTES, dimensions):
        raise UserError(f"{path} is not the IDX file expected: its magic number should be {_BYTES << 8 | dimensions}")
    return shape


def read_cifar(stream: BinaryIO, path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images, [samples, 3072], and labels, [samples]."""
    contents = at_most(stream, _MOST * _RECORD, path)
    if not len(contents) or len(contents) % _RECORD:
        raise UserError(f"{path} is truncated or not a CIFAR-10 batch: {len(contents)} bytes are not whole records")
    records = contents.reshape(-1, _RECORD)
    return np.ascontiguousarray(records[:, 1:]), records[:, 0].copy()
