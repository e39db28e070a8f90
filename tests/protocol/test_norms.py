"""Norms that are made in parts are those that numpy makes at once, to the bit."""

import tracemalloc

import numpy as np
import pytest

from fedbudget.protocol.sums import norms, slope, squared_norms


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize(
    "parameters", [1, 7, 129, 784, 2**16, 2**16 + 1, 99_999, 1_000_003]
)
def test_the_same_bits_as_all_at_once(nodes: int, parameters: int) -> None:
    rng = np.random.default_rng(parameters)
    vectors, others = rng.normal(size=(2, nodes, parameters)).astype(np.float32)
    assert np.array_equal(
        squared_norms(vectors), np.square(vectors, dtype=np.float64).sum(axis=1)
    )
    apart = np.sqrt(np.square(vectors - others, dtype=np.float64).sum(axis=1))
    assert np.array_equal(norms(vectors, others), apart)
    from_one = np.sqrt(np.square(vectors - others[0], dtype=np.float64).sum(axis=1))
    assert np.array_equal(norms(vectors, others[0]), from_one)


def test_rows_of_a_part_of_a_matrix() -> None:
    """As where running statistics are left out: the rows do not follow each other in
    memory.
    """
    whole = np.random.default_rng(0).normal(size=(5, 100_000)).astype(np.float32)
    some = whole[:, :70_000]
    assert np.array_equal(
        squared_norms(some), np.square(some, dtype=np.float64).sum(axis=1)
    )


def test_no_copy_of_a_large_vector_is_made() -> None:
    vectors, others = np.ones((2, 1, 2_000_000), np.float32)
    tracemalloc.start()
    norms(vectors, others)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < vectors.nbytes / 4


def test_what_diverged_gives_no_number_and_no_warning() -> None:
    vectors = np.array([[np.inf, 1.0], [3.0, 4.0]], np.float32)
    assert norms(vectors).tolist() == [np.inf, 5.0]
    assert np.isnan(norms(vectors, vectors)[0])


def test_no_slope_where_points_are_the_same() -> None:
    assert slope(np.array([2.0, 2.0]), np.array([0.5, 1e-11])).tolist() == [4.0, 0.0]
