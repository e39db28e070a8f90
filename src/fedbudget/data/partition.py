"""How samples are distributed over nodes.

The paper's Cases 1-4, Dirichlet(α), a number of labels per node, and random draws for
fleets larger than the data. Natural partitions have one node per site: per file, or per
value of a column, by which files.py splits tables. Every function returns the row numbers
of each node. No node is empty; if that is impossible, an error explains it. All random
choices use the given generator.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedbudget.arrays import Float32, Int64
from fedbudget.errors import UserError, requires_package

Rows = list[Int64]
"""Row numbers, one array per node; nodes with the same shard share one array."""

CASES = (1, 2, 3, 4)
_FIELDS = {
    "case": "case",
    "dirichlet": "alpha",
    "labels": "labels",
    "draw": "draws",
    "by": "by",
}
_TYPES: Mapping[str, Callable[[str], float | str]] = {"dirichlet": float, "by": str.strip}
_CLUSTERS = 10


@dataclass(frozen=True)
class Partition:
    """A way to distribute samples; without any argument, one file per node.

    Args:
      case: a Case of the paper.
      alpha: each label is split by Dirichlet(alpha) over the nodes.
      draws: samples that each node draws at random, with replacement.
      labels: labels per node.
      by: column of tables whose values are the nodes.

    >>> Partition.parse("dirichlet:0.5").alpha
    0.5
    >>> Partition.parse("by:hospital").by
    'hospital'
    """

    case: int | None = None
    alpha: float | None = None
    draws: int | None = None
    labels: int | None = None
    by: str | None = None

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
        if self.by == "":
            raise UserError("partition by: needs the name of a column, such as by:hospital")

    @classmethod
    def parse(cls, text: str) -> "Partition":
        """Parse `case:2`, `dirichlet:0.5`, `labels:2`, `draw:30`, `by:site` or `files`."""
        if text == "files":
            return cls()
        kind, _, value = text.partition(":")
        try:
            number = _TYPES.get(kind, int)(value)
            field = _FIELDS[kind]
        except (KeyError, ValueError):
            use = (
                "use case:1 to case:4, dirichlet:ALPHA, labels:K, draw:SAMPLES, by:COLUMN "
                "or files"
            )
            raise UserError(f"partition {text!r} is not understood; {use}") from None
        return cls(**{field: number})  # type: ignore[arg-type]

    def __str__(self) -> str:
        for kind, field in _FIELDS.items():
            value = getattr(self, field)
            if value is not None:
                return f"{kind}:{value:g}" if kind == "dirichlet" else f"{kind}:{value}"
        return "files"

    @property
    def natural(self) -> bool:
        """Whether the nodes are the sites of the data: its files, or values of a column."""
        return str(self) == "files" or self.by is not None


def split(
    partition: Partition, labels: Int64, nodes: int, rng: np.random.Generator
) -> Rows:
    """Return the row numbers of each node.

    Args:
      labels: one per sample. Random draws ignore them and may draw a sample twice, so they
        allow any number of nodes.
    """
    if nodes < 1:
        raise UserError(f"nodes must be at least 1, not {nodes}")
    if partition.draws is not None:
        return list(rng.integers(len(labels), size=(nodes, partition.draws)))
    if nodes > len(labels):
        raise UserError(
            f"{nodes} nodes are more than the {len(labels)} samples; "
            "a node needs at least one"
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
                f"partition {partition} leaves node {node} of {nodes} without samples; "
                "use fewer nodes"
            )
    return rows


def by_file(sizes: Sequence[int]) -> Rows:
    """Return consecutive rows for each node, given the size of each file or site."""
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def labels_by_clustering(features: Float32, seed: int) -> Int64:
    """Return K-means clusters as labels for data without any."""
    with requires_package("distributing data without labels"):
        from sklearn.cluster import KMeans  # slow to import, and seldom needed
        from threadpoolctl import threadpool_limits

    clusters = min(_CLUSTERS, len(np.unique(features, axis=0)))
    # Several threads sum in another order, which can move a sample to another cluster.
    with threadpool_limits(1):
        clustering = KMeans(clusters, n_init=1, random_state=seed).fit(features)
    return np.asarray(clustering.labels_, dtype=np.int64)


def _uniform(samples: Int64, nodes: int, rng: np.random.Generator) -> Rows:
    """Case 1: every sample to a random node, with shards as even as possible."""
    return [np.sort(part) for part in np.array_split(rng.permutation(samples), nodes)]


def _by_label(samples: Int64, labels: Int64, nodes: int, rng: np.random.Generator) -> Rows:
    """Case 2: one label per node, or up to ⌈labels / nodes⌉ if there are fewer nodes.

    Labels are assigned to nodes in turn. A label of several nodes is split evenly.
    """
    present = np.unique(labels[samples])
    owners: list[Sequence[int]] = [[turn % nodes] for turn in range(len(present))]
    if nodes > len(present):
        owners = [range(turn, nodes, len(present)) for turn in range(len(present))]
    own = [samples[labels[samples] == label] for label in present]
    return _to_owners(own, owners, nodes, rng)


def _mixed(samples: Int64, labels: Int64, nodes: int, rng: np.random.Generator) -> Rows:
    """Case 4: half of the labels and nodes as in Case 1, the other half as in Case 2."""
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


def _dirichlet(labels: Int64, nodes: int, alpha: float, rng: np.random.Generator) -> Rows:
    """Split each label's samples by random shares ~ Dirichlet(α) over the nodes.

    With a small α, nodes have few labels. An empty node takes one sample from the largest.
    """
    owners = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        own = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(nodes, alpha))
        ends = np.round(np.cumsum(shares) * len(own)).astype(np.int64)
        owner = np.searchsorted(ends, np.arange(len(own)), side="right")
        owners[own] = owner.clip(max=nodes - 1)
    counts = np.bincount(owners, minlength=nodes)
    for node in np.flatnonzero(counts == 0):
        largest = int(counts.argmax())
        owners[np.flatnonzero(owners == largest)[0]] = node
        counts[largest] -= 1
        counts[node] += 1
    return [np.flatnonzero(owners == node) for node in range(nodes)]


def _some_labels(labels: Int64, nodes: int, count: int, rng: np.random.Generator) -> Rows:
    """Give every node samples of `count` labels; a label is split evenly over its nodes.

    A node's first label is assigned in turn, so every label has a node. The others are
    drawn. (Quantity-based label imbalance, Li et al., ICDE 2022.)
    """
    present = np.unique(labels)
    if count > len(present):
        raise UserError(f"labels:{count}: there are {len(present)} labels in all")
    if nodes < len(present):  # otherwise a label could have no node
        raise UserError(
            f"labels:{count} needs at least {len(present)} nodes, one per label, "
            f"not {nodes}"
        )
    owners: list[list[int]] = [[] for _ in present]
    for node in range(nodes):
        first = node % len(present)
        others = rng.permutation(np.delete(np.arange(len(present)), first))[: count - 1]
        for label in (first, *others.tolist()):
            owners[label].append(node)
    own = [np.flatnonzero(labels == label) for label in present]
    return _to_owners(own, owners, nodes, rng)


def _to_owners(
    samples: Rows, owners: Sequence[Sequence[int]], nodes: int, rng: np.random.Generator
) -> Rows:
    """Split the samples of each label evenly over the nodes that own it."""
    rows = [[np.empty(0, np.int64)] for _ in range(nodes)]
    for own, own_nodes in zip(samples, owners, strict=True):
        for node, part in zip(own_nodes, _uniform(own, len(own_nodes), rng), strict=True):
            rows[node].append(part)
    return [np.sort(np.concatenate(parts)) for parts in rows]
