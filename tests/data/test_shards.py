"""Tables and shards: rows are indexed, not copied, and equal shards are stored once."""

from typing import Any

import numpy as np
import pytest

from fedbudget.data.shards import Shards, Table
from fedbudget.errors import UserError


def table(samples: int = 6) -> Table:
    return Table(
        np.arange(2 * samples, dtype=np.uint8).reshape(samples, 2),
        np.zeros(samples, np.float32),
        0.5,
    )


class TestTable:
    def test_scaled_rows(self) -> None:
        scaled = table().scaled(np.array([2, 0]))
        assert scaled.dtype == np.float32
        assert scaled.tolist() == [[2.0, 2.5], [0.0, 0.5]]

    def test_features_are_not_copied(self) -> None:
        x = np.ones((3, 2), np.uint8)
        assert Table(x, np.zeros(3, np.float32), 1 / 255).x is x

    @pytest.mark.parametrize(
        ("x", "samples", "message"),
        [
            (np.ones((3, 2), np.float32), 4, r"not \(3, 2\) and \(4,\)"),
            (np.ones(3, np.float32), 3, r"must be \[samples, features\]"),
            (np.ones((3, 2), np.int64), 3, "must be uint8, float32 or float64, not"),
            (np.ones((3, 2), np.float16), 3, "must be uint8, float32 or float64, not"),
            (np.ones((3, 2), np.complex64), 3, "must be uint8, float32 or float64, not"),
        ],
    )
    def test_invalid_arrays_are_rejected(self, x: Any, samples: int, message: str) -> None:
        with pytest.raises(UserError, match=message):
            Table(x, np.zeros(samples, np.float32))


class TestShards:
    def test_rows_of_each_node(self) -> None:
        shards = Shards.of(table(), [np.array([4, 1]), np.array([0]), np.array([5, 2, 3])])
        expected = [[4, 1], [0], [5, 2, 3]]
        assert [shards.rows_of(node).tolist() for node in range(3)] == expected
        assert shards.size.tolist() == [2, 1, 3]
        assert len(shards) == 3

    def test_shared_rows_are_stored_once(self) -> None:
        everything, other = np.arange(6), np.array([3])
        shards = Shards.of(table(), [everything, other, everything, everything])
        assert len(shards.rows) == 7
        assert shards.start.tolist() == [0, 6, 0, 0]
        assert shards.rows_of(3).tolist() == [0, 1, 2, 3, 4, 5]

    def test_empty_node_is_named(self) -> None:
        with pytest.raises(UserError, match="node 1 has no samples"):
            Shards.of(table(), [np.array([1]), np.array([], dtype=np.int64)])

    def test_whole_table_as_one_shard(self) -> None:
        shards = Shards.whole(table(4))
        assert [shards.rows_of(node).tolist() for node in range(len(shards))] == [
            [0, 1, 2, 3]
        ]

    def test_subset_of_nodes_shares_rows(self) -> None:
        shards = Shards.of(table(), [np.array([4, 1]), np.array([0]), np.array([5, 2, 3])])
        some = shards.only([2, 0])
        assert [some.rows_of(node).tolist() for node in range(2)] == [[5, 2, 3], [4, 1]]
        assert some.rows is shards.rows
