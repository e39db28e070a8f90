"""Clipping, sensitivity and noise of private rounds."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedbudget.arrays import Float32, Float64
from fedbudget.protocol.messages import Private, Report
from fedbudget.protocol.features.node_privacy import (
    ALL_OCTAVES,
    MEASURED,
    clipped,
    first_clip,
    multipliers,
    next_clip,
    no_longer,
    noise_size,
    release,
    reported_norms,
)

ANY = st.floats(width=32, allow_nan=True, allow_infinity=True)
UPDATES = arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 40)), elements=ANY)
CLIPS = st.floats(2.0**-8, 2.0**8)


def sent(updates: Float32, lengths: Float64 | None = None) -> Report:
    """A report with these updates; a hostile node may send any values."""
    n = len(updates)
    reported = reported_norms(updates) if lengths is None else lengths
    return Report(
        1,
        np.arange(n),
        np.ones(n, np.int64),
        np.zeros(n),
        np.zeros(n),
        w=updates,
        length=reported,
    )


@settings(deadline=None)
@given(UPDATES, CLIPS)
def test_clipped_updates_are_at_most_c(updates: Float32, clip: float) -> None:
    cut = clipped(updates, clip)
    assert cut.dtype == np.float32
    assert np.isfinite(cut).all()
    assert (np.sqrt(np.square(cut.astype(np.float64)).sum(axis=1)) <= clip).all()


@given(arrays(np.float32, (3, 8), elements=st.floats(-1, 1, width=32)))
def test_short_updates_stay(updates: Float32) -> None:
    assert np.array_equal(clipped(updates, 4.0), updates)


@settings(deadline=None)
@given(UPDATES, CLIPS, st.data())
def test_sensitivity_of_the_sum(updates: Float32, clip: float, data: st.DataObject) -> None:
    """Any values and lengths of one node, compared with zeros in its place; no noise."""
    node = data.draw(st.integers(0, len(updates) - 1))
    lengths = data.draw(
        arrays(
            np.float64,
            len(updates),
            elements=st.floats(allow_nan=True, allow_infinity=True),
        )
    )
    without, nodes = updates.copy(), len(updates)
    without[node] = 0
    private, nothing = Private(clip, 0.1), np.zeros(updates.shape[1] + 1)
    one, other = (
        release(sent(updates, lengths), private, nothing),
        release(sent(without, lengths), private, nothing),
    )
    assert one.update is not None
    assert other.update is not None
    assert nodes * np.linalg.norm(one.update - other.update) <= clip * (1 + 1e-12)


@given(arrays(np.float64, 5, elements=st.floats(allow_nan=True, allow_infinity=True)))
def test_sensitivity_of_a_length(lengths: Float64) -> None:
    one, many = (
        no_longer(lengths, np.array([1.5])),
        no_longer(lengths, np.arange(-8.0, 9.0)),
    )
    assert (np.linalg.norm(one, axis=1) == 0.5).all()
    assert (np.linalg.norm(many, axis=1) <= ALL_OCTAVES * (1 + 1e-12)).all()


def test_noise_matches_the_payment() -> None:
    """Σ clip(Δ) has deviation σC, with ρ = 1/2σ² for both parts together."""
    private, nodes = Private(2.0, 0.05), 10
    sigma = multipliers(private)
    assert sigma.rho == pytest.approx(0.05)
    assert 1 / (2 * sigma.updates**2) + 1 / (2 * sigma.counts**2) == pytest.approx(0.05)
    rng = np.random.default_rng(1)
    still = sent(np.zeros((nodes, 50), np.float32))
    moved = [release(still, private, rng.standard_normal(51)).update for _ in range(400)]
    deviation = np.std(np.array(moved, np.float64)) * nodes
    assert deviation == pytest.approx(sigma.updates * 2.0, rel=0.02)


def test_first_c_is_lower_quartile() -> None:
    rng = np.random.default_rng(3)
    updates = rng.standard_normal((4000, 4)).astype(np.float32)
    updates *= (rng.uniform(1, 16, 4000) / np.linalg.norm(updates, axis=1)).astype(
        np.float32
    )[:, None]
    private = Private(0.0, 10.0)
    released = release(
        replace(sent(updates), w=None), private, rng.standard_normal(noise_size(private, 4))
    )
    assert released.update is None
    assert released.clip == pytest.approx(
        np.quantile(np.linalg.norm(updates, axis=1), 0.25), rel=0.15
    )


def test_first_c_from_noisy_counts() -> None:
    """Noisy counts need not increase."""
    assert 2.0**-8 <= first_clip(np.array([0.9, 0.1] * 8 + [0.2])) <= 2.0**8
    assert first_clip(np.linspace(-3, -1, 17)) == 2.0**8


def test_c_follows_lengths() -> None:
    assert next_clip(1.0, 0.25) == 1.0
    assert next_clip(1.0, 1.0) == pytest.approx(math.exp(-0.375))
    assert next_clip(1.0, 7.0) == next_clip(1.0, 1.0)
    assert next_clip(2.0**8, -1.0) == 2.0**8
    assert 0 < MEASURED < 1
