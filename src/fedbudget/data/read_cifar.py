"""Reads CIFAR-10's binary batches: records of a label byte and 3,072 bytes of an image, red, then green, then blue."""

from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedbudget.data.contents import at_most
from fedbudget.errors import UserError

SHAPE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32
_MOST = 10_000  # records in a batch


def read_cifar(stream: BinaryIO, path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images, [samples, 3072], and labels, [samples]."""
    contents = at_most(stream, _MOST * _RECORD, path)
    if not len(contents) or len(contents) % _RECORD:
        raise UserError(f"{path} is truncated or not a CIFAR-10 batch: {len(contents)} bytes are not whole records")
    records = contents.reshape(-1, _RECORD)
    return np.ascontiguousarray(records[:, 1:]), records[:, 0].copy()
