"""Sums along the tree of nodes: as written out by hand, and the same bits whoever sums
which nodes.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float64, Int64
from fedbudget.protocol.sums import GrowingSum, add_up, add_up_in_numpy, branches


def level_by_level(numbers: Int64, values: Float64) -> Float64:
    """The tree as it is drawn: all pairs of one level, then all pairs of the next."""
    held: dict[int, Float64] = dict(zip(numbers.tolist(), values, strict=True))
    while set(held) != {0}:
        above: dict[int, Float64] = {}
        for number in sorted(held):
            above[number // 2] = (
                above[number // 2] + held[number] if number // 2 in above else held[number]
            )
        held = above
    return held[0]


def some_nodes(seed: int, count: int) -> tuple[Int64, Float64, Float64]:
    """Numbers with gaps, weights, and values of very different sizes, so that every other
    order shows.
    """
    rng = np.random.default_rng(seed)
    numbers = np.sort(rng.choice(3 * count, count, replace=False))
    values = rng.normal(size=(count, 4)) * 10.0 ** rng.integers(-8, 9, (count, 4))
    return numbers, rng.integers(1, 100, count).astype(np.float64), values


def test_three_nodes_by_hand() -> None:
    # (1e16 + 1) is 1e16 in float64, and so the 1 is lost; -1e16 + 1 would come first if
    # nodes 1 and 2 were a pair.
    column = np.array([[1e16], [1.0], [-1e16]])
    assert add_up(np.array([0, 1, 2]), np.ones(3), column) == 0
    assert add_up(np.array([1, 2, 3]), np.ones(3), column) == 0
    assert add_up(np.array([1, 4, 5]), np.ones(3), column) == 1e16 + (1 - 1e16)
    assert add_up(np.array([7]), np.array([3.0]), np.array([[0.5]])) == 1.5
    assert add_up(np.array([], np.int64), np.array([]), np.empty((0, 2))).tolist() == [0, 0]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 200))
def test_the_order_is_that_of_the_tree(seed: int, count: int) -> None:
    numbers, weights, values = some_nodes(seed, count)
    expected = level_by_level(numbers, weights[:, None] * values)
    np.testing.assert_array_equal(add_up(numbers, weights, values), expected)
    np.testing.assert_array_equal(add_up_in_numpy(numbers, weights, values), expected)


def test_many_columns_are_added_in_parts() -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(size=(3, 70_000))
    total = add_up(np.array([0, 1, 2]), np.array([1.0, 2.0, 3.0]), values)
    np.testing.assert_array_equal(total, (values[0] + 2 * values[1]) + 3 * values[2])


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 200),
    cuts=st.lists(st.integers(0, 600), max_size=5),
)
def test_whoever_sums_which_range_of_nodes_the_bits_are_the_same(
    seed: int, count: int, cuts: list[int]
) -> None:
    numbers, weights, values = some_nodes(seed, count)
    begins: list[int] = []
    sums: list[Float64] = []
    for first, end in pairwise(
        sorted({0, *(cut for cut in cuts if cut < 3 * count), 3 * count})
    ):
        for begin, after in pairwise(branches(first, end).tolist()):
            own = (numbers >= begin) & (numbers < after)
            begins.append(begin)
            sums.append(add_up(numbers[own], weights[own], values[own]))
    together = add_up(np.array(begins), np.ones(len(begins)), np.array(sums))
    assert together.tobytes() == add_up(numbers, weights, values).tobytes()


@given(first=st.integers(0, 2000), count=st.integers(0, 2000))
def test_branches_fill_the_range_and_each_hangs_on_one_point_of_the_tree(
    first: int, count: int
) -> None:
    found = branches(first, first + count).tolist()
    assert found[0] == first
    assert found[-1] == first + count
    for begin, end in pairwise(found):
        size = end - begin
        assert size > 0
        assert size & (size - 1) == 0
        assert begin % size == 0
    assert len(found) <= 2 * max(1, count).bit_length() + 1


@pytest.mark.parametrize("columns", [1, 1023, 1024, 1025, 5000])
def test_any_number_of_columns(columns: int) -> None:
    values = np.random.default_rng(columns).normal(size=(5, columns)).astype(np.float32)
    weights = np.arange(1.0, 6.0)
    np.testing.assert_allclose(
        add_up(np.arange(5), weights, values),
        weights @ values.astype(np.float64),
        rtol=1e-12,
    )


@given(st.sets(st.integers(0, 40), min_size=1), st.randoms(use_true_random=False))
def test_a_growing_sum_is_the_same_bits_in_any_order(
    numbers: set[int], random: Any
) -> None:
    nodes = np.array(sorted(numbers))
    values = (
        np.random.default_rng(len(nodes)).normal(size=(len(nodes), 3)).astype(np.float32)
    )
    weights = 1.0 + nodes
    growing, order = GrowingSum(), list(range(len(nodes)))
    random.shuffle(order)
    for row in order:
        growing.add_node(int(nodes[row]), weights[row], values[row])
    assert growing.total().tobytes() == add_up(nodes, weights, values).tobytes()


def test_a_growing_sum_in_order_holds_few_vectors() -> None:
    growing = GrowingSum()
    for node in range(1000):
        growing.add_node(node, 1.0, np.ones(1, np.float32))
        assert len(growing) == (node + 1).bit_count()
    assert growing.total() == 1000
