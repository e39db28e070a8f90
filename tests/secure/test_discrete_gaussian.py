"""Discrete Gaussian noise: its distribution, and its privacy cost."""

import math

import numpy as np
import pytest

from fedbudget.resources.privacy import delta_of
from fedbudget.secure.discrete_gaussian import discrete_gaussian


@pytest.mark.parametrize("bits", [0, 1, 3])
def test_probabilities_follow_the_formula(bits: int) -> None:
    """Chi-square test over all numbers with an expected count above 20, with a fixed
    seed.
    """
    draws = discrete_gaussian(300_000, bits, np.random.default_rng(bits).bytes)
    scale, numbers = 2**bits, np.arange(-12 * 2**bits, 12 * 2**bits + 1)
    probabilities = np.exp(-np.square(numbers / scale) / 2)
    expected = len(draws) * probabilities / probabilities.sum()
    frequent = expected > 20
    counts = np.array([(draws == number).sum() for number in numbers[frequent]])
    freedom = int(frequent.sum())
    distance = float((np.square(counts - expected[frequent]) / expected[frequent]).sum())
    assert freedom > 6
    assert abs(distance - freedom) < 4 * math.sqrt(2 * freedom)
    assert len(draws) - counts.sum() < 300


def test_moments_at_large_scale() -> None:
    draws = discrete_gaussian(200_000, 20) / 2.0**20
    assert draws.std() == pytest.approx(1.0, abs=0.015)  # nine standard errors
    assert abs(draws.mean()) < 0.02
    assert np.mean(np.abs(draws) > 2) == pytest.approx(0.0455, abs=0.004)
    assert len(np.unique(draws)) > 150_000


def test_two_draws_differ() -> None:
    one, two = (discrete_gaussian(1000, 20) for _ in range(2))
    assert (one != two).mean() > 0.99


@pytest.mark.parametrize(("rho", "epsilon"), [(0.005, 0.3), (0.428, 4.0), (2.0, 4.0)])
def test_discrete_noise_costs_as_gaussian(rho: float, epsilon: float) -> None:
    """δ of one mechanism, summed over all integers, equals that of the Gaussian. The scale
    is 2^14 here and 2^20 in the code.
    """
    scale = 2**14
    shift = int(math.sqrt(2 * rho) * scale)
    numbers = np.arange(-12 * scale, 12 * scale + shift, dtype=np.float64)
    without, with_node = (
        np.exp(-np.square((numbers - at) / scale) / 2) for at in (0, shift)
    )
    delta = np.maximum(with_node - math.exp(epsilon) * without, 0).sum() / without.sum()
    assert delta == pytest.approx(delta_of(epsilon, shift**2 / (2 * scale**2)), rel=1e-7)
