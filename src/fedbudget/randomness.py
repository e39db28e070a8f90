"""Streams of random numbers: each thing that a run draws has one of its own, by name.

- No two streams share a number. Numbers never change: with the same seed, a run draws the same as it always did.
- numpy pads what it is seeded with by zeros, so that stream 0 of a seed is also what the seed alone gives.
- PyTorch and scikit-learn have generators of their own, which models and the clustering seed with the run's seed.

PyTorch's random numbers are one sequence for all threads: who seeds it and draws from it does so alone.

Several nodes may be threads of one program, and modules that they make at the same time would get each other's numbers.
"""

from enum import IntEnum, unique
from threading import RLock

import numpy as np
from numpy.typing import NDArray


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


def generator(seed: int, stream: Stream, *part: int) -> np.random.Generator:
    """A new generator of a stream.

    Args:
      seed: of the run.
      stream: what will be drawn from it.
      part: of the stream: of a round, say, so that a run that goes on need not know where it had come to.
    """
    return np.random.default_rng([seed, stream, *part])


def random_bytes(size: int) -> int:
    """How many `gaussian` makes so many numbers of."""
    return 16 * ((size + 1) // 2)


def gaussian(random: bytes, size: int) -> NDArray[np.float64]:
    """Standard Gaussian numbers, [size], of random bytes, by the method of Box and Muller."""
    bits = np.frombuffer(random, np.uint64).reshape(2, (size + 1) // 2) >> np.uint64(11)
    radius = np.sqrt(-2 * np.log((bits[0] + 1) * 2.0**-53))
    angle = 2 * np.pi * (bits[1] * 2.0**-53)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]


ALONE = RLock()
"""Of all models; a module may be made of others that are made by whoever has it already."""
