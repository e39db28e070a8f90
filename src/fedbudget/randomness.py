"""Streams of random numbers. Everything that a run draws has its own named stream.

- No two streams share a number, and numbers never change: the same seed always draws the
  same.
- numpy pads seeds with zeros, so stream 0 of a seed equals the seed alone.
- PyTorch and scikit-learn have their own generators; models and the clustering seed them
  with the run's seed.
"""

from enum import IntEnum, unique
from threading import RLock

import numpy as np
from numpy.typing import NDArray

TORCH_RANDOM_LOCK = RLock()
"""Hold this lock while seeding PyTorch's generator and drawing from it.

The generator is one sequence for all threads. Several nodes may be threads of one process,
and modules that they create at the same time would draw each other's numbers. The lock is
reentrant because creating a module may create others.
"""


@unique
class Stream(IntEnum):
    """What is drawn."""

    MINI_BATCHES = 0
    PARTITION = 1
    COSTS = 2
    SAMPLES = 3
    ABSENCE = 4
    FORECASTS = 5
    SPEEDS = 6
    ATTACK = 7
    PRIVACY = 8
    SAMPLE_PRIVACY = 9
    VALIDATION = 10
    PERSONAL = 11
    NOISE_SHARES = 12


def generator(seed: int, stream: Stream, *part: int) -> np.random.Generator:
    """Return a new generator of a stream.

    Args:
      seed: seed of the run.
      stream: what will be drawn.
      part: part of the stream, such as a round; a resumed run then needs no position.
    """
    return np.random.default_rng([seed, stream, *part])


def random_bytes(size: int) -> int:
    """Return the number of bytes that `gaussian` needs for `size` numbers."""
    return 16 * ((size + 1) // 2)


def gaussian(random: bytes, size: int) -> NDArray[np.float64]:
    """Return standard Gaussian numbers, [size], from random bytes (Box-Muller method)."""
    bits = np.frombuffer(random, np.uint64).reshape(2, (size + 1) // 2) >> np.uint64(11)
    radius = np.sqrt(-2 * np.log((bits[0] + 1) * 2.0**-53))
    angle = 2 * np.pi * (bits[1] * 2.0**-53)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]
