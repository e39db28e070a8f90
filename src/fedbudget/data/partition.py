"""Who holds which samples: the paper's Cases 1-4, Dirichlet(α), some labels each, and draws for fleets larger than the
data.

Every function gives the row numbers of each node. No node is ever empty; where that cannot be, a clear error says so.
Random choices come from the generator that is given, and from nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Int64
from fedbudget.errors import UserError, needing

Rows = list[Int64]
"""Row numbers, one array per node; nodes with the same shard share the same array."""

CASES = (1, 2, 3, 4)
_CLUSTERS = 10


@dataclass(frozen=True)
class Partition:
    """How samples are given to nodes: a Case of the paper, Dirichlet(alpha), some labels each, draws, or, with none of
    them, by file.

    >>> Partition.parse("dirichlet:0.5").alpha
    0.5
    >>> Partition.parse("draw:30").draws
    30
    """

    case: int | None = None
    alpha: float | None = None
    draws: int | None = None
    labels: int | None = None

    def __post_init__(self) -> None:
        if self.case is not None and self.case not in CASES:
            raise UserError(
                f"case {self.case} does not exist; the paper has cases 1, 2, 3 and 4"
            )
        if self.alpha is not None and not (np.isfinite(self.alpha) and self.alpha > 0):
            raise UserError(f"dirichlet:{self.alpha:g}: alpha must be a positive number")
        if self.draws is not None and self.draws < 1:
            raise UserError(f"draw:{self.draws}: a node draws at least one sample")
        if self.labels is not None and self.labels < 1:
            raise UserError(
                f"labels:{self.labels}: a node has samples of at least one label"
            )

    @classmethod
    def parse(cls, text: str) -> "Partition":
        """Reads `case:2`, `dirichlet:0.5`, `labels:2`, `draw:30` or `files`."""
        if text == "files":
            return cls()
        kind, _, value = text.partition(":")
        try:
            number = float(value) if kind == "dirichlet" else int(value)
            field = {
                "case": "case",
                "dirichlet": "alpha",
                "labels": "labels",
                "draw": "draws",
            }[kind]
        except (KeyError, ValueError):
            use = "use case:1 to case:4, dirichlet:ALPHA, labels:K, draw:SAMPLES or files"
            raise UserError(f"partition {text!r} is not understood; {use}") from None
        return cls(**{field: number})  # type: ignore[arg-type]

    def __str__(self) -> str:
        if self.case is not None:
            return f"case:{self.case}"
        if self.draws is not None:
            return f"draw:{self.draws}"
        if self.labels is not None:
            return f"labels:{self.labels}"
        return "files" if self.alpha is None else f"dirichlet:{self.alpha:g}"


def split(
    partition: Partition, labels: NDArray[np.int64], nodes: int, rng: np.random.Generator
) -> Rows:
    """The rows of each node.

    Args:
      labels: one per sample; all but draws distribute samples by them. Draws do not look at them: each node
        takes its own at random, and may take one twice, so that there can be any number of nodes.
    """
    if nodes < 1:
        raise UserError(f"nodes must be at least 1, not {nodes}")
    if partition.draws is not None:
        return list(rng.integers(len(labels), size=(nodes, partition.draws)))
    if nodes > len(labels):
        raise UserError(
            f"{nodes} nodes are more than the {len(labels)} samples; a node needs at least one"
        )
    samples = np.arange(len(labels))
    if partition.alpha is not None:
        rows = _dirichlet(labels, nodes, partition.alpha, rng)
    elif partition.labels is not None:
        rows = _some_labels(labels, nodes, partition.labels, rng)
    elif partition.case == 1:
        rows = _uniform(samples, nodes, rng)
    elif partition.case == 2:
        rows = _by_label(samples, labels, nodes, rng)
    elif partition.case == 3:
        rows = [samples] * nodes
    elif partition.case == 4:
        rows = _mixed(samples, labels, nodes, rng)
    else:
        raise ValueError(f"{partition} is not a way to split one dataset")
    for node, part in enumerate(rows):
        if not len(part):
            raise UserError(
                f"partition {partition} leaves node {node} of {nodes} without samples; use fewer nodes"
            )
    return rows


def labels_by_clustering(features: NDArray[np.float32], seed: int) -> NDArray[np.int64]:
    """Labels for data that has none, from K-means, so that the Cases have something to distribute by."""
    with needing("spreading data that has no labels"):
        from sklearn.cluster import KMeans  # slow to import, and seldom needed
        from threadpoolctl import threadpool_limits

    clusters = min(_CLUSTERS, len(np.unique(features, axis=0)))
    with threadpool_limits(
        1
    ):  # threads add up in another order, and a sample between two clusters changes sides
        clustering = KMeans(clusters, n_init=1, random_state=seed).fit(features)
    return np.asarray(clustering.labels_, dtype=np.int64)


def _uniform(samples: Int64, nodes: int, rng: np.random.Generator) -> Rows:
    """Case 1: every sample to a random node, all nodes as even as possible."""
    return [np.sort(part) for part in np.array_split(rng.permutation(samples), nodes)]


def _by_label(
    samples: Int64, labels: NDArray[np.int64], nodes: int, rng: np.random.Generator
) -> Rows:
    """Case 2: with fewer labels than nodes a node has one label, otherwise at most ⌈labels / nodes⌉ of them.

    Labels go round the nodes in turn; a label with several nodes is split evenly among them.
    """
    present = np.unique(labels[samples])
    rows: list[list[Int64]] = [[] for _ in range(nodes)]
    for turn, label in enumerate(present):
        own = samples[labels[samples] == label]
        takers = (
            range(turn, nodes, len(present)) if nodes > len(present) else [turn % nodes]
        )
        for node, part in zip(takers, _uniform(own, len(takers), rng), strict=True):
            rows[node].append(part)
    return [
        np.sort(np.concatenate(parts)) if parts else np.empty(0, np.int64) for parts in rows
    ]


def _mixed(
    samples: Int64, labels: NDArray[np.int64], nodes: int, rng: np.random.Generator
) -> Rows:
    """Case 4: the first half of the labels to the first half of the nodes as in Case 1, the rest as in Case 2."""
    present = np.unique(labels)
    if nodes < 2 or len(present) < 2:
        raise UserError(
            f"case 4 needs at least 2 nodes and 2 labels, not {nodes} and {len(present)}"
        )
    first_labels = present[: (len(present) + 1) // 2]
    first_nodes = (nodes + 1) // 2
    first = np.isin(labels, first_labels)
    uniform = _uniform(samples[first], first_nodes, rng)
    return uniform + _by_label(samples[~first], labels, nodes - first_nodes, rng)


def _dirichlet(
    labels: NDArray[np.int64], nodes: int, alpha: float, rng: np.random.Generator
) -> Rows:
    """Each label's samples in random shares ~ Dirichlet(α) over nodes; small α gives nodes of few labels.

    A node that came out empty takes one sample from the largest.
    """
    owners = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        own = rng.permutation(np.flatnonzero(labels == label))
        ends = np.round(np.cumsum(rng.dirichlet(np.full(nodes, alpha))) * len(own)).astype(
            np.int64
        )
        owners[own] = np.searchsorted(ends, np.arange(len(own)), side="right").clip(
            max=nodes - 1
        )
    counts = np.bincount(owners, minlength=nodes)
    for node in np.flatnonzero(counts == 0):
        largest = int(counts.argmax())
        owners[np.flatnonzero(owners == largest)[0]] = node
        counts[largest] -= 1
        counts[node] += 1
    return [np.flatnonzero(owners == node) for node in range(nodes)]


def _some_labels(
    labels: NDArray[np.int64], nodes: int, count: int, rng: np.random.Generator
) -> Rows:
    """Every node has samples of so many labels, and a label's samples are split evenly among the nodes that have it.

    A node's first label is its turn's, so that every label has a node; the others are drawn.
    (Quantity-based label imbalance, Li et al., ICDE 2022.)
    """
    present = np.unique(labels)
    if count > len(present):
        raise UserError(f"labels:{count}: there are {len(present)} labels in all")
    if nodes < len(present):  # else a label may be nobody's, and would not be trained on
        raise UserError(
            f"labels:{count} needs a node for each of the {len(present)} labels, not {nodes} in all"
        )
    holders: dict[int, list[int]] = {label: [] for label in range(len(present))}
    for node in range(nodes):
        first = node % len(present)
        others = rng.permutation(np.delete(np.arange(len(present)), first))[: count - 1]
        for label in (first, *others.tolist()):
            holders[label].append(node)
    rows: list[list[Int64]] = [[] for _ in range(nodes)]
    for label, takers in holders.items():
        own = np.flatnonzero(labels == present[label])
        for node, part in zip(takers, _uniform(own, len(takers), rng), strict=True):
            rows[node].append(part)
    return [np.sort(np.concatenate(parts)) for parts in rows]


def by_file(sizes: Sequence[int]) -> Rows:
    """One file per node: consecutive rows."""
    return [
        np.arange(end - size, end)
        for size, end in zip(sizes, np.cumsum(sizes), strict=True)
    ]
