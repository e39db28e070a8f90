"""Reading files of a known layout without trusting them: never more than was asked for, never less without an error."""

from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedbudget.errors import UserError

_CHUNK = 1 << 20


def exactly(stream: BinaryIO, size: int, path: Path) -> NDArray[np.uint8]:
    """All that is left of a stream, which must be so many bytes, as an array of its own."""
    found = at_most(stream, size, path)
    if len(found) < size:
        raise UserError(f"{path} is truncated: {size - len(found)} of its last {size} bytes are missing")
    return found


def at_most(stream: BinaryIO, size: int, path: Path) -> NDArray[np.uint8]:
    """All that is left of a stream, which must be no more than so many bytes.

    Memory grows with what is really there, whatever a header or the name of a file promised.
    """
    found = bytearray()
    while chunk := stream.read(min(_CHUNK, size + 1 - len(found))):
        found += chunk
        if len(found) > size:
            raise UserError(f"{path} is larger than it should be: it goes on after {size} bytes")
    return np.frombuffer(found, np.uint8)  # writable, because a bytearray is
