"""Partitions: the paper's Cases for more, equal and fewer labels than nodes; Dirichlet;
labels per node.
"""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from fedbudget.data.partition import Partition, Rows, by_file, labels_by_clustering, split
from fedbudget.data.shards import Shards, Table
from fedbudget.errors import UserError

NODES_AND_LABELS = [(3, 10), (4, 4), (7, 3), (2, 2), (5, 2)]
"""More labels than nodes, equal numbers, fewer labels."""

Labels = NDArray[np.int64]


def some_labels(samples: int, labels: int, seed: int = 0) -> Labels:
    """Random labels, each at least 20 times."""
    rng = np.random.default_rng(seed)
    every = np.concatenate(
        [np.repeat(np.arange(labels), 20), rng.integers(0, labels, samples - 20 * labels)]
    )
    return rng.permutation(every) * 3 + 1


def case(number: int, labels: Labels, nodes: int, seed: int = 0) -> Rows:
    return split(Partition(case=number), labels, nodes, np.random.default_rng(seed))


def assert_disjoint_and_complete(rows: Rows, samples: int) -> None:
    assert sorted(np.concatenate(rows).tolist()) == list(range(samples))


def sizes(rows: Rows) -> list[int]:
    return [len(part) for part in rows]


def labels_at(labels: Labels, part: NDArray[np.int64]) -> set[int]:
    return set(labels[part].tolist())


@pytest.mark.parametrize(("nodes", "kinds"), NODES_AND_LABELS)
class TestCases:
    @pytest.mark.parametrize("number", [1, 2, 4])
    def test_every_sample_on_one_node(self, number: int, nodes: int, kinds: int) -> None:
        labels = some_labels(307, kinds)
        rows = case(number, labels, nodes)
        assert len(rows) == nodes
        assert_disjoint_and_complete(rows, 307)

    @pytest.mark.parametrize("number", [1, 2, 4])
    def test_partition_is_seeded(self, number: int, nodes: int, kinds: int) -> None:
        labels = some_labels(307, kinds)
        once, again = (case(number, labels, nodes, seed=5) for _ in range(2))
        assert [part.tolist() for part in once] == [part.tolist() for part in again]

    def test_case_1_is_uniform(self, nodes: int, kinds: int) -> None:
        """Shards have equal sizes, and every node has every label."""
        labels = some_labels(3001, kinds)
        rows = case(1, labels, nodes)
        assert max(sizes(rows)) - min(sizes(rows)) <= 1
        assert all(labels_at(labels, part) == set(labels.tolist()) for part in rows)

    def test_case_2_separates_labels(self, nodes: int, kinds: int) -> None:
        """A node has at most its share of the labels. A label is split evenly."""
        labels = some_labels(307, kinds)
        rows = case(2, labels, nodes)
        most = -(-kinds // nodes)
        assert all(1 <= len(labels_at(labels, part)) <= most for part in rows)
        for label in np.unique(labels):
            shares = [own for part in rows if (own := int((labels[part] == label).sum()))]
            assert max(shares) - min(shares) <= 1

    def test_case_3_shares_all_samples(self, nodes: int, kinds: int) -> None:
        """The rows are stored once."""
        rows = case(3, some_labels(307, kinds), nodes)
        assert all(part is rows[0] for part in rows)
        assert rows[0].tolist() == list(range(307))
        shards = Shards.of(
            Table(np.zeros((307, 1), np.uint8), np.zeros(307, np.float32)), rows
        )
        assert len(shards.rows) == 307
        assert shards.size.tolist() == [307] * nodes

    def test_case_4_combines_cases(self, nodes: int, kinds: int) -> None:
        """Case 1 in the first half of labels and nodes, Case 2 in the second."""
        labels = some_labels(3000, kinds)
        rows = case(4, labels, nodes)
        present = np.unique(labels).tolist()
        half_labels, half_nodes = (kinds + 1) // 2, (nodes + 1) // 2
        first, second = rows[:half_nodes], rows[half_nodes:]
        assert all(labels_at(labels, part) == set(present[:half_labels]) for part in first)
        assert max(sizes(first)) - min(sizes(first)) <= 1
        most = -(-(kinds - half_labels) // len(second))
        assert all(labels_at(labels, part) <= set(present[half_labels:]) for part in second)
        assert all(1 <= len(labels_at(labels, part)) <= most for part in second)


@settings(deadline=None, max_examples=60)
@given(
    alpha=st.floats(-5, 5).map(lambda exponent: 10**exponent),
    samples=st.integers(1, 80),
    nodes=st.integers(1, 80),
    kinds=st.integers(1, 6),
    seed=st.integers(0, 10**6),
)
def test_dirichlet_is_disjoint_and_complete(
    alpha: float, samples: int, nodes: int, kinds: int, seed: int
) -> None:
    """No node is empty."""
    rng = np.random.default_rng(seed)
    nodes = min(nodes, samples)
    rows = split(Partition(alpha=alpha), rng.integers(0, kinds, samples), nodes, rng)
    assert len(rows) == nodes
    assert min(sizes(rows)) >= 1
    assert_disjoint_and_complete(rows, samples)


def test_alpha_controls_evenness() -> None:
    labels = some_labels(4000, 4)
    even = split(Partition(alpha=1e5), labels, 8, np.random.default_rng(1))
    uneven = split(Partition(alpha=0.05), labels, 8, np.random.default_rng(1))
    assert min(sizes(even)) > 450
    assert max(sizes(even)) < 550
    largest = [
        max(float((labels[part] == label).mean()) for label in np.unique(labels))
        for part in uneven
    ]
    assert np.mean(largest) > 0.7


class TestLabelsPerNode:
    @given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
    def test_label_count_and_even_shares(
        self, nodes: int, count: int, kinds: int, seed: int
    ) -> None:
        labels = some_labels(200, kinds, seed)
        if count > kinds or nodes < kinds:
            return
        rows = split(Partition(labels=count), labels, nodes, np.random.default_rng(seed))
        assert [len(labels_at(labels, part)) for part in rows] == [count] * nodes
        for label in np.unique(labels):
            shares = [
                share for part in rows if (share := int((labels[part] == label).sum()))
            ]
            assert max(shares) - min(shares) <= 1
        assert_disjoint_and_complete(rows, len(labels))

    def test_one_label_equals_case_2(self) -> None:
        labels = some_labels(300, 5)
        result = split(Partition(labels=1), labels, 5, np.random.default_rng(0))
        assert [part.tolist() for part in result] == [
            part.tolist() for part in case(2, labels, 5)
        ]


class TestRejected:
    @pytest.mark.parametrize(
        ("texts", "message"),
        [
            (["case:5"], "case 5 does not exist; the paper has cases 1, 2, 3 and 4"),
            (
                ["dirichlet:0", "dirichlet:-1", "dirichlet:nan", "dirichlet:inf"],
                "{}: alpha must be a positive number",
            ),
            (
                ["case", "case:two", "dirichlet", "dirichlet:", "files:3", "iid", ""],
                "partition '{}' is not understood; use case:1 to case:4, dirichlet",
            ),
        ],
    )
    def test_invalid_text(self, texts: list[str], message: str) -> None:
        for text in texts:
            with pytest.raises(UserError, match=message.format(text)):
                Partition.parse(text)

    @pytest.mark.parametrize(
        ("partition", "labels", "nodes", "message"),
        [
            *(
                (f"case:{n}", [0, 1] * 2, 5, "5 nodes are more than the 4 samples")
                for n in (1, 2, 3, 4)
            ),
            ("case:1", [0, 1], 0, "nodes must be at least 1, not 0"),
            (
                "case:2",
                [0] * 5 + [1],
                4,
                "case:2 leaves node 3 of 4 without samples; use few",
            ),
            ("case:4", range(4), 1, "at least 2 nodes and 2 labels, not 1 and 4"),
            ("case:4", [0] * 9, 4, "at least 2 nodes and 2 labels, not 4 and 1"),
            ("labels:4", range(3), 3, "labels:4: there are 3 labels in all"),
            ("labels:1", range(3), 2, "needs at least 3 nodes, one per label, not 2"),
        ],
    )
    def test_impossible_split(
        self, partition: str, labels: Sequence[int], nodes: int, message: str
    ) -> None:
        with pytest.raises(UserError, match=message):
            split(
                Partition.parse(partition),
                np.array(labels),
                nodes,
                np.random.default_rng(0),
            )


@pytest.mark.parametrize(
    "text", ["case:1", "case:4", "dirichlet:0.5", "labels:2", "draw:30", "files"]
)
def test_text_round_trip(text: str) -> None:
    assert str(Partition.parse(text)) == text


def test_one_file_per_node() -> None:
    assert [part.tolist() for part in by_file([2, 1, 3])] == [[0, 1], [2], [3, 4, 5]]


def test_clustering_separates_distant_groups() -> None:
    rng = np.random.default_rng(0)
    group = rng.integers(0, 10, 200)
    features = np.eye(10, dtype=np.float32)[group] * 50 + rng.normal(size=(200, 10)).astype(
        np.float32
    )
    labels = labels_by_clustering(features, seed=0)
    assert len(set(zip(group.tolist(), labels.tolist(), strict=True))) <= 12
    assert labels.tolist() == labels_by_clustering(features, seed=0).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_clustering_independent_of_threads(seed: int) -> None:
    """In one cloud many samples lie between two clusters, and rounding of sums could
    decide.
    """
    features = np.random.default_rng(seed).normal(size=(20_000, 10)).astype(np.float32)
    result = []
    for threads in (1, 2):
        with threadpool_limits(threads):
            result.append(labels_by_clustering(features, seed))
    np.testing.assert_array_equal(result[0], result[1])
