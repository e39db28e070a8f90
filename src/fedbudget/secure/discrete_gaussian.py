"""Exact discrete Gaussian noise: P(y) proportional to exp(-y²/2s²), with s a power of two.

Masked sums contain integers, and so does their noise. Rounded floats are close to this
distribution, but the set of floats that can occur reveals the value below the noise
(Mironov, 2012). Nothing is rounded here. Bernoulli variables with probability exp(-a/2^b)
are drawn with integers alone (Canonne, Kamath and Steinke, 2020), vectorised over many
samples.
"""

import os
from collections.abc import Callable

import numpy as np

from fedbudget.arrays import Flags, Int64, UInt64

_BATCH = 2**16
_PROPOSALS = 2.4  # for each accepted sample, with a small reserve

Randomness = Callable[[int], bytes]
"""Returns the requested number of random bytes."""


def discrete_gaussian(size: int, bits: int, random: Randomness = os.urandom) -> Int64:
    """Draw independent samples, [size].

    Args:
      bits: s is 2 to this power; at most 20.
      random: source of random bytes.
    """
    samples = np.empty(size, np.int64)
    have = 0
    while have < size:
        proposed = _laplace(min(_BATCH, int(_PROPOSALS * (size - have)) + 16), bits, random)
        distance = np.abs(proposed) - (1 << bits)
        accepted = _exp_coins(distance * distance, 2 * bits + 1, random)
        taken = proposed[accepted][: size - have]
        samples[have : have + len(taken)] = taken
        have += len(taken)
    return samples


def _laplace(size: int, bits: int, random: Randomness) -> Int64:
    """Draw at most `size` samples with P(y) proportional to exp(-|y|/s).

    |y| is a remainder below s, plus s for each success in a row at probability 1/e.
    """
    rest = _low_bits(_words(size, random), bits)
    rest = rest[_exp_coins(rest, bits, random)]
    times = np.zeros(len(rest), np.int64)
    active = np.arange(len(rest))
    while len(active):
        active = active[_exp_coins(np.full(len(active), 1 << bits), bits, random)]
        times[active] += 1
    magnitudes = rest + (times << bits)
    negative = (_words(len(rest), random) & np.uint64(1)).astype(bool)
    # Without this filter 0 would occur twice as often.
    kept = ~negative | (magnitudes > 0)
    return np.where(negative, -magnitudes, magnitudes)[kept]


def _exp_coins(numerators: Int64, bits: int, random: Randomness) -> Flags:
    """True with probability exp(-a/2^bits) for each a ≥ 0, [n]."""
    whole = numerators >> bits
    rest = numerators & ((1 << bits) - 1)
    result = _small_exp_coins(rest, bits, random)
    active = np.flatnonzero(result & (whole > 0))
    while len(active):
        success = _small_exp_coins(np.full(len(active), 1 << bits), bits, random)
        result[active[~success]] = False
        whole[active] -= 1
        active = active[success & (whole[active] > 0)]
    return result


def _small_exp_coins(numerators: Int64, bits: int, random: Randomness) -> Flags:
    """The same for a/2^bits ≤ 1.

    Draw with probability a/2^bits, then a/2^bits/2, a/2^bits/3, ... until a draw fails. The
    number of successes follows the series of exp; the result is True if it is even.
    """
    result = np.ones(len(numerators), bool)
    active = np.arange(len(numerators))
    divisor = 1
    while len(active):
        success = _low_bits(_words(len(active), random), bits) < numerators[active]
        if divisor > 1:
            success &= _one_of(divisor, len(active), random)
        active = active[success]
        result[active] ^= True
        divisor += 1
    return result


def _one_of(divisor: int, size: int, random: Randomness) -> Flags:
    """True with probability 1/divisor, [size]."""
    words = _words(size, random)
    # Words above this limit are drawn again: they would make small remainders more likely.
    limit = np.uint64(2**64 // divisor * divisor - 1)
    while (rejected := words > limit).any():
        words[rejected] = _words(int(rejected.sum()), random)
    return np.asarray(words % np.uint64(divisor) == 0)


def _words(size: int, random: Randomness) -> UInt64:
    return np.frombuffer(random(8 * size), np.uint64).copy()


def _low_bits(words: UInt64, bits: int) -> Int64:
    return (words & np.uint64((1 << bits) - 1)).astype(np.int64)
