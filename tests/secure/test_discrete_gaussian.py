"""Gaussian noise in whole numbers: its chances are those of the formula, and its cost that
of the Gaussian.
"""

import math

import numpy as np
import pytest

from fedbudget.resources.privacy import delta_of
from fedbudget.secure.discrete_gaussian import discrete_gaussian


@pytest.mark.parametrize("bits", [0, 1, 3])
def test_chances_are_those_of_the_formula(bits: int) -> None:
    """Chi-square over all numbers that come often enough, of bytes that are the same in
    every test.
    """
    drawn = discrete_gaussian(300_000, bits, np.random.default_rng(bits).bytes)
    scale, numbers = 2**bits, np.arange(-12 * 2**bits, 12 * 2**bits + 1)
    chances = np.exp(-np.square(numbers / scale) / 2)
    expected = len(drawn) * chances / chances.sum()
    often = expected > 20
    found = np.array([(drawn == number).sum() for number in numbers[often]])
    freedom = int(often.sum())
    distance = float((np.square(found - expected[often]) / expected[often]).sum())
    assert freedom > 6
    assert abs(distance - freedom) < 4 * math.sqrt(2 * freedom)
    assert len(drawn) - found.sum() < 300


def test_deviation_of_large_ones() -> None:
    drawn = discrete_gaussian(200_000, 20) / 2.0**20
    assert drawn.std() == pytest.approx(1.0, abs=0.015)  # nine standard errors
    assert abs(drawn.mean()) < 0.02
    assert np.mean(np.abs(drawn) > 2) == pytest.approx(0.0455, abs=0.004)
    assert len(np.unique(drawn)) > 150_000


def test_two_draws_differ() -> None:
    one, two = (discrete_gaussian(1000, 20) for _ in range(2))
    assert (one != two).mean() > 0.99


@pytest.mark.parametrize(("rho", "epsilon"), [(0.005, 0.3), (0.428, 4.0), (2.0, 4.0)])
def test_whole_numbers_cost_what_real_ones_do(rho: float, epsilon: float) -> None:
    """δ of one such mechanism, added up over all whole numbers, against the Gaussian's; s
    is 2^14 here, not 2^20.
    """
    scale = 2**14
    shift = int(math.sqrt(2 * rho) * scale)
    numbers = np.arange(-12 * scale, 12 * scale + shift, dtype=np.float64)
    without, with_node = (
        np.exp(-np.square((numbers - at) / scale) / 2) for at in (0, shift)
    )
    lost = np.maximum(with_node - math.exp(epsilon) * without, 0).sum() / without.sum()
    assert lost == pytest.approx(delta_of(epsilon, shift**2 / (2 * scale**2)), rel=1e-7)
