"""Gaussian noise in whole numbers, exactly: P(y) in proportion to exp(-y²/2s²), with s a power of two.

Sums that are masked are of whole numbers, and so is the noise in them. Rounded floats would be nearly this, and which
of them there can be tells of what they were added to (Mironov 2012). Here nothing is rounded: coins with chances like
exp(-a/2^b) are tossed with whole numbers alone (Canonne, Kamath and Steinke 2020), for many numbers at once.
"""

import os
from collections.abc import Callable

import numpy as np

from fedbudget.arrays import Flags, Int64, UInt64

_AT_ONCE = 2**16
_MORE = 2.4  # proposals for each number that is taken, and some to spare

Randomness = Callable[[int], bytes]


def discrete_gaussian(size: int, bits: int, random: Randomness = os.urandom) -> Int64:
    """Independent numbers, [size].

    Args:
      bits: of s, which is 2 to this; up to 20.
      random: gives so many random bytes.
    """
    found = np.empty(size, np.int64)
    have = 0
    while have < size:
        proposed = _laplace(min(_AT_ONCE, int(_MORE * (size - have)) + 16), bits, random)
        off = np.abs(proposed) - (1 << bits)
        taken = proposed[_exp_coins(off * off, 2 * bits + 1, random)][: size - have]
        found[have : have + len(taken)] = taken
        have += len(taken)
    return found


def _laplace(size: int, bits: int, random: Randomness) -> Int64:
    """At most so many, P(y) in proportion to exp(-|y|/s): a part below s, and s as often as a coin of 1/e falls."""
    part = _low_bits(_words(size, random), bits)
    part = part[_exp_coins(part, bits, random)]
    times = np.zeros(len(part), np.int64)
    falling = np.arange(len(part))
    while len(falling):
        falling = falling[_exp_coins(np.full(len(falling), 1 << bits), bits, random)]
        times[falling] += 1
    lengths = part + (times << bits)
    negative = (_words(len(part), random) & np.uint64(1)).astype(bool)
    return np.where(negative, -lengths, lengths)[
        ~negative | (lengths > 0)
    ]  # or 0 would come twice as often


def _exp_coins(numerators: Int64, bits: int, random: Randomness) -> Flags:
    """True with the chance exp(-a/2^bits) for each a ≥ 0, [n]."""
    whole = numerators >> bits
    part = numerators & ((1 << bits) - 1)
    true = _small_exp_coins(part, bits, random)
    going = np.flatnonzero(true & (whole > 0))
    while len(going):
        fell = _small_exp_coins(np.full(len(going), 1 << bits), bits, random)
        true[going[~fell]] = False
        whole[going] -= 1
        going = going[fell & (whole[going] > 0)]
    return true


def _small_exp_coins(numerators: Int64, bits: int, random: Randomness) -> Flags:
    """The same for a/2^bits up to 1: coins of a/2^bits, of half that, of a third ..., until one does not fall.

    That many fall has the chances of the series of exp; it is true where their number is even.
    """
    true = np.ones(len(numerators), bool)
    going = np.arange(len(numerators))
    among = 1
    while len(going):
        fell = _low_bits(_words(len(going), random), bits) < numerators[going]
        if among > 1:
            fell &= _one_of(among, len(going), random)
        going = going[fell]
        true[going] ^= True
        among += 1
    return true


def _one_of(among: int, size: int, random: Randomness) -> Flags:
    """True with the chance 1/among, [size]."""
    words = _words(size, random)
    most = np.uint64(
        2**64 // among * among - 1
    )  # beyond which a remainder would be seldomer than others
    while (beyond := words > most).any():
        words[beyond] = _words(int(beyond.sum()), random)
    return np.asarray(words % np.uint64(among) == 0)


def _words(size: int, random: Randomness) -> UInt64:
    return np.frombuffer(random(8 * size), np.uint64).copy()


def _low_bits(words: UInt64, bits: int) -> Int64:
    return (words & np.uint64((1 << bits) - 1)).astype(np.int64)
