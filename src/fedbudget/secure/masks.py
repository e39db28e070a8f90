"""Masks: random numbers of 64 bits from a seed, added to a vector or taken away from it, modulo 2^64.

A seed is the key of AES-128 in counter mode, which processors have instructions for. It is used for one mask and never
again, so that the counter may begin with 0.
"""

import sys

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedbudget.arrays import UInt64

SEED = 16
"""Bytes."""
_AT_ONCE = 2**15  # numbers, so that what is added stays in the processor's cache
_ZEROS = bytes(8 * _AT_ONCE)


def add_mask(vector: UInt64, seed: bytes, sign: int = 1) -> None:
    """Adds the mask of a seed in place, or takes it away.

    >>> vector = np.arange(3, dtype=np.uint64)
    >>> add_mask(vector, bytes(16)), add_mask(vector, bytes(16), -1), vector
    (None, None, array([0, 1, 2], dtype=uint64))
    """
    if len(seed) != SEED or sign not in (1, -1):
        raise ValueError(f"a mask is added or taken away by a seed of {SEED} bytes")
    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    room = bytearray(len(_ZEROS) + 15)
    for first in range(0, len(vector), _AT_ONCE):
        part = vector[first : first + _AT_ONCE]
        stream.update_into(memoryview(_ZEROS)[: part.nbytes], room)
        mask = np.frombuffer(room, np.uint64, len(part))
        if sys.byteorder == "big":
            mask = mask.byteswap()
        (np.add if sign > 0 else np.subtract)(part, mask, out=part)
