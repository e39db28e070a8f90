"""Sums over nodes: the same bits in any grouping, and the sums of a round's reports.

**Order of sums.** Floating-point sums depend on their order. Here the order is that of a
binary tree over node numbers, the same in every run. Nodes 2k and 2k+1 are added first,
then pairs 4k and 4k+2, and so on; absent nodes are skipped.

                 ┌───────┴───────┐
             ┌───┴───┐       ┌───┴───┐
            0 1     2 3     4 5     6 7

A process that has all nodes of a branch can sum that branch alone. Adding branches then
returns the bits of one sum over all nodes. A range of nodes consists of few branches:
`branches(3, 8)` are 3 and 4-7. The first node of a branch is its position in the tree, so
that the same function adds nodes and branches. Tree sums are also more exact than sums in
sequence: their error grows with the logarithm of the number of nodes.

**Reports.** Algorithm 2 needs only sums over nodes: Σ D_i w_i, Σ D_i F_i and so on, and for
δ̂ Σ D_i ‖v_i - v‖ once the mean is known. So each process sums its own nodes, and the work
and memory of the aggregator do not grow with them. `Sums` has a row for each branch; the
rows of several processes add up. `ReportAdder` adds reports as they arrive and drops their
vectors; distances from the mean are then not available.

**Norms** are computed in float64, a part at a time, without copies of whole vectors. The
parts follow numpy's own pairwise summation (halves of halves, multiples of eight numbers),
so that the sum equals numpy's to the bit for any size of the parts.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from fedbudget.arrays import Flags, Float32, Float64, Int64
from fedbudget.models.compiling import import_kernels
from fedbudget.protocol.messages import (
    Broadcast,
    LocalError,
    LossReport,
    Report,
    ReportLayout,
)

SAME = 1e-10
"""Up to this distance w_i(t) and w(t) count as equal, and ρ̂_i and β̂_i as 0."""

ABSURD = 1e12
"""Estimates from here on are artefacts of rounding or divergence."""

LARGEST = 1e15
"""Larger parameters, losses and divergences come from a node that diverges or attacks."""

_PART = 2**16  # numbers of a part of a norm
_MANY = 2**16  # columns from which numpy is as fast as the compiled loop
_COLUMNS = 2**15  # columns at a time, to stay in the cache
_DEPTH = 65  # levels of a tree over 64-bit numbers


@dataclass(frozen=True)
class Sums:
    """Sums over the nodes of a round, with a row for each branch.

    Nodes whose w_i is not finite do not contribute to vectors and optional numbers.

    Args:
      round: number of the round.
      nodes: number of nodes that reported.
      left_out: numbers of the nodes whose w_i is not finite or exceeds LARGEST.
      begins: first node of each branch, rising, [branches].
      names: names of the columns of `numbers`; see `columns_of`.
      numbers: sums of numbers times D_i, [branches, names].
      vectors: sums of vectors times D_i by name, [branches, parameters] each.
      largest_beta: the largest plausible positive β̂_i, if there is one.
      all_data: D of all nodes that ever took part, if known.
      report: numbers of all nodes, if known; with vectors if they are in this process.
      distances: computes `distance_sums`, if the vectors are in other processes.
    """

    round: int
    nodes: int
    left_out: tuple[int, ...]
    begins: Int64
    names: tuple[str, ...]
    numbers: Float64
    vectors: Mapping[str, Float64]
    largest_beta: float | None = None
    all_data: float | None = None
    report: Report | None = None
    distances: "Callable[[str, Float32], Float64] | None" = None

    @classmethod
    def of(
        cls,
        report: Report,
        layout: ReportLayout,
        begins: Int64 | None = None,
        left_out: Collection[int] = (),
    ) -> "Sums":
        """Sum the reports of nodes in this process.

        Args:
          report: the merged reports.
          layout: what they have.
          begins: first node of each branch to sum; one branch by default.
          left_out: numbers of nodes that sums of vectors exclude.
        """
        rows = _Rows(report, report.nodes[:1] if begins is None else begins, left_out)
        vectors = {}
        for name, values in report.vectors.items():
            total = rows.of_usable(values)
            if name == "w" and not within(total, LARGEST * max(1.0, rows.weights.sum())):
                rows.use(np.array([within(each) for each in values]))
                total = rows.of_usable(values)
            vectors[name] = total
        names, columns = columns_of(report, layout, rows.usable)
        return cls(
            round=report.round,
            nodes=len(report.nodes),
            left_out=rows.left_out,
            begins=rows.begins,
            names=names,
            numbers=rows.of(report.nodes, rows.weights, columns),
            vectors=vectors,
            largest_beta=_largest(report.numbers.get("beta")),
            report=report,
        )

    @classmethod
    def merge(cls, parts: "Sequence[Sums]") -> "Sums":
        """Join the sums of several groups of nodes, given in node order."""
        first = parts[0]
        if len(parts) == 1:
            return first
        betas = [part.largest_beta for part in parts if part.largest_beta is not None]
        all_data = [part.all_data for part in parts if part.all_data is not None]
        return replace(
            first,
            nodes=sum(part.nodes for part in parts),
            left_out=tuple(node for part in parts for node in part.left_out),
            begins=np.concatenate([part.begins for part in parts]),
            numbers=np.concatenate([part.numbers for part in parts]),
            vectors={
                name: np.concatenate([part.vectors[name] for part in parts])
                for name in first.vectors
            },
            largest_beta=max(betas, default=None),
            all_data=sum(all_data) if all_data else None,
            report=None,
        )

    def with_report(self, report: Report, layout: ReportLayout) -> "Sums":
        """Return the sums with other numbers of the same nodes."""
        numbers = Sums.of(report.without_vectors, layout, left_out=self.left_out)
        return replace(numbers, vectors=self.vectors)

    def distance_sums(self, name: str, mean: Float32) -> Float64:
        """Return Σ D_i ‖v_i - mean‖ for each branch, [branches, 1], without left-out nodes.

        Args:
          name: of the vectors.
          mean: mean of the vectors; may be shorter, then only their first numbers count.
        """
        if self.distances is not None:
            return self.distances(name, mean)
        if self.report is None or name not in self.report.vectors:
            raise LocalError(
                "distances from the mean need every report, and only sums are known here"
            )
        values = self.report.vectors[name][:, : mean.size]
        rows = _Rows(self.report, self.begins, self.left_out)
        return rows.of_usable(norms(values, mean)[:, None])

    def total(self, rows: Float64) -> Float64:
        """Add up all branches, [branches, any] to [any]."""
        return rows[0] if len(rows) == 1 else add_up(self.begins, np.ones(len(rows)), rows)

    @cached_property
    def totals(self) -> Mapping[str, float]:
        """Sums over all nodes by name."""
        return dict(zip(self.names, self.total(self.numbers).tolist(), strict=True))

    def weighted_mean(self, name: str) -> float:
        """Mean of a number over the nodes that have it; NaN if no node does."""
        totals = self.totals
        count = totals.get(f"{name}_of", totals["data"])
        return totals[name] / count if count else math.nan

    @property
    def mean_beta(self) -> float | None:
        """Mean of the β̂_i, if it is plausible and positive."""
        if not self.totals.get("beta_of"):
            return None
        mean = self.weighted_mean("beta")
        return mean if 0 < mean < ABSURD else None

    @cached_property
    def loss_gap(self) -> float:
        """F(w(t₀)) - F(w^f) on the same samples; positive if w(t₀) is worse."""
        totals = self.totals
        return (totals["losses"] - totals["best_losses"]) / totals["data"]

    @cached_property
    def loss_gap_error(self) -> float:
        """Standard error of `loss_gap`, with nodes as random draws; 0 for one node."""
        mean_square = self.totals["squared_loss_gap"] / self.totals["data"]
        return math.sqrt(max(0.0, mean_square - self.loss_gap**2) / max(1, self.nodes - 1))

    def mean(self, name: str) -> Float32:
        """Return Σ D_i v_i / Σ D_i of vectors; some node must not be left out."""
        total = self.total(self.vectors[name])
        return np.asarray(total / self.totals["used"], np.float32)


@dataclass(frozen=True)
class NoisySums:
    """Sums of a private round that already contain noise (features/node_privacy.py).

    Args:
      round: number of the round.
      nodes: number of nodes.
      counts: Σ (b_i - ½), for C or for each octave; if samples are protected, the sum of
        their octaves or nothing.
      updates: Σ clip(Δ_i), or the sum of the clipped gradients of samples, [parameters];
        None if the round only measured norms.
      samples: number of samples of these nodes; 0 if nodes are protected.
    """

    round: int
    nodes: int
    counts: Float64
    updates: Float64 | None
    samples: int = 0


def columns_of(
    report: Report, layout: ReportLayout, usable: Flags
) -> tuple[tuple[str, ...], Float64]:
    """Return the numbers to sum: their names, and the values of each node, [nodes, names].

        data               1; the sum is D
        used               1 for nodes whose w_i is finite
        squared_loss_gap   (F_i(w(t₀)) - F_i(w^f))², if losses are reported
        NAME               every reported number
        NAME_of            1 for nodes that have NAME, if NAME is optional

    Args:
      report: the reports.
      layout: what they have.
      usable: whether w_i is finite, [nodes].
    """
    names = column_names(layout)
    columns = np.empty((len(report.nodes), len(names)))
    columns[:, 0] = 1
    columns[:, 1] = usable
    at = 2
    for name in layout.numbers:
        values = report.numbers[name]
        if name in layout.optional:
            known = usable & (values >= 0) & (values < ABSURD)
            columns[:, at] = np.where(known, values, 0.0)
            columns[:, at + 1] = known
            at += 2
        else:
            columns[:, at] = values
            at += 1
    if isinstance(report, LossReport):
        with np.errstate(over="ignore", invalid="ignore"):  # in a run that diverges
            columns[:, at] = np.square(report.losses - report.best_losses)
    return names, columns


@cache
def column_names(layout: ReportLayout) -> tuple[str, ...]:
    """Return the names of the numbers to sum; see `columns_of`."""
    names = ["data", "used"]
    for name in layout.numbers:
        names += [name, f"{name}_of"] if name in layout.optional else [name]
    if "losses" in layout.numbers:
        names.append("squared_loss_gap")
    return tuple(names)


class _Rows:
    """Adds up values of nodes, with a row for each branch."""

    def __init__(self, report: Report, begins: Int64, left_out: Collection[int]) -> None:
        self.nodes = report.nodes
        self.weights = report.sizes.astype(np.float64)
        self.begins = begins
        self.usable = np.ones(len(report.nodes), dtype=bool)
        self._all = True  # whether all nodes are usable
        if left_out:
            self.use(~np.isin(report.nodes, list(left_out)))

    def use(self, usable: Flags) -> None:
        """Leave out all other nodes."""
        self.usable = usable
        self._all = bool(usable.all())

    @property
    def left_out(self) -> tuple[int, ...]:
        """Numbers of the left-out nodes."""
        return () if self._all else tuple(self.nodes[~self.usable].tolist())

    def of_usable(self, values: Float32 | Float64) -> Float64:
        """Sum without left-out nodes, [nodes, any] to [branches, any]."""
        if self._all:
            return self.of(self.nodes, self.weights, values)
        usable = self.usable
        return self.of(self.nodes[usable], self.weights[usable], values[usable])

    def of(self, nodes: Int64, weights: Float64, values: Float32 | Float64) -> Float64:
        """Return the sum of each branch, [branches, any]."""
        if len(self.begins) == 1:
            return add_up(nodes, weights, values)[None]
        cuts = [0, *np.searchsorted(nodes, self.begins[1:]).tolist(), len(nodes)]
        parts = [slice(first, end) for first, end in pairwise(cuts)]
        return np.array(
            [add_up(nodes[part], weights[part], values[part]) for part in parts]
        )


class ReportAdder:
    """Adds reports as they arrive, in any order, and drops their vectors.

    Args:
      broadcast: the broadcast that they answer.
    """

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast
        self._w = GrowingSum()
        self._reports: list[Report] = []
        self._left_out: list[int] = []

    @property
    def vectors(self) -> int:
        """Number of vectors in memory."""
        return len(self._w)

    def add(self, report: Report) -> Report:
        """Add a report and return it without its vectors."""
        report.require_answers(self._broadcast)
        w = report.vectors.get("w")
        if w is not None:
            self._add_vectors(report.nodes, report.sizes.astype(np.float64), w)
        kept = report.without_vectors
        self._reports.append(kept)
        return kept

    def sums(self) -> Sums:
        """Return the sums of all reports; no report can be added afterwards."""
        report = Report.merge(self._reports)
        numbers = Sums.of(report, self._broadcast.report, left_out=self._left_out)
        vectors = {"w": self._w.total()[None]} if len(self._w) else {}
        return replace(numbers, vectors=vectors)

    def _add_vectors(self, nodes: Int64, weights: Float64, w: Float32) -> None:
        if len(nodes) == 1 and within(w):
            self._w.add_node(int(nodes[0]), float(weights[0]), w[0])
            return
        usable = np.array([within(each) for each in w])
        self._left_out += nodes[~usable].tolist()
        for first, end in pairwise(branches(int(nodes[0]), int(nodes[-1]) + 1).tolist()):
            part = usable & (first <= nodes) & (nodes < end)
            if part.any():
                total = add_up(nodes[part], weights[part], w[part])
                self._w.add_branch(first, end - first, total)


def ratio(amount: float, of: float) -> float:
    """Return amount / of; NaN if there is nothing to divide by."""
    return amount / of if of else math.nan


def within(values: Float32 | Float64, largest: float = LARGEST) -> bool:
    """Whether all values are finite and at most `largest` in size."""
    if values.size == 1:  # the common case, and slow in numpy
        return -largest <= float(values.item()) <= largest
    return not values.size or bool(-largest <= values.min() and values.max() <= largest)


def _largest(values: Float64 | None) -> float | None:
    """Return the largest plausible positive value, if there is one."""
    if values is None:
        return None
    plausible = values[(values > 0) & (values < ABSURD)]
    return float(plausible.max()) if len(plausible) else None


def add_up(numbers: Int64, weights: Float64, values: Float32 | Float64) -> Float64:
    """Return Σ weight_i value_i over nodes or branches, [n, columns] to [columns].

    Args:
      numbers: number of each node, or of the first node of each branch, rising, [n].
      weights: weight of each row, [n].
      values: rows to add, [n, columns].

    The order is fixed, so that this sum is 0 and not 1:

    >>> add_up(np.array([0, 1, 2]), np.ones(3), np.array([[1e16], [1.0], [-1e16]]))
    array([0.])
    """
    kernel = None if values.shape[1] >= _MANY else _kernel()
    if kernel is None:
        return add_up_in_numpy(numbers, weights, values)
    total = np.zeros(values.shape[1])
    kernel.add_up(numbers, weights, np.require(values, requirements=("C", "A")), total)
    return total


def add_up_in_numpy(numbers: Int64, weights: Float64, values: Float32 | Float64) -> Float64:
    """Compute `add_up` without numba, to the same bits.

    Partial sums wait on a stack until the other half of their branch is summed.
    """
    total = np.zeros(values.shape[1])
    own = numbers.tolist()
    for first in range(0, values.shape[1], _COLUMNS):
        columns = slice(first, first + _COLUMNS)
        partial: list[tuple[int, Float64]] = []  # level of the join to the left, and sum
        for node, number in enumerate(own):
            level = (number ^ own[node - 1]).bit_length() if node else 0
            _join(partial, level)
            row = np.multiply(weights[node], values[node, columns], dtype=np.float64)
            partial.append((level, row))
        _join(partial, _DEPTH)
        if partial:
            total[columns] += partial[0][1]  # never -0, so that empty branches add nothing
    return total


def _join(partial: list[tuple[int, Float64]], level: int) -> None:
    """Add up the partial sums that join below a level of the tree."""
    while len(partial) > 1 and partial[-1][0] < level:
        _, last = partial.pop()
        np.add(partial[-1][1], last, out=partial[-1][1])


def prepare() -> None:
    """Load or compile the loop of `add_up`, so that no round waits for it."""
    _kernel()


def _kernel() -> Any | None:
    return import_kernels("fedbudget.models.compiled.tree_sum")


class GrowingSum:
    """The result of `add_up` for vectors that arrive one by one, in any order.

    A branch whose nodes have all arrived takes one vector. So few are in memory: two for
    each level of the tree if nodes arrive in order, and at most 0.4 for each node if they
    arrive at random.
    """

    def __init__(self) -> None:
        self._branches: dict[tuple[int, int], _Branch] = {}  # by first node and size

    def __len__(self) -> int:
        """Number of vectors in memory."""
        return len(self._branches)

    def add_node(self, number: int, weight: float, values: Float32) -> None:
        """Add the vector of a node, [parameters]."""
        self._add(number, 1, _Branch(values, weight))

    def add_branch(self, first: int, size: int, values: Float64) -> None:
        """Add the sum over all nodes of a branch; the array is overwritten later."""
        self._add(first, size, _Branch(values, 1.0))

    def _add(self, first: int, size: int, branch: "_Branch") -> None:
        while (other := self._branches.pop((first ^ size, size), None)) is not None:
            branch = other.add(branch) if first & size else branch.add(other)
            first &= ~size
            size *= 2
        self._branches[first, size] = branch

    def total(self) -> Float64:
        """Return the sum of at least one vector, and empty the memory."""
        partial: list[tuple[int, Float64]] = []
        before = 0
        for first, size in sorted(self._branches):
            level = (first ^ before).bit_length() if partial else 0
            _join(partial, level)
            partial.append((level, self._branches.pop((first, size)).summed()))
            before = first
        _join(partial, _DEPTH)
        total = partial[0][1]
        return np.add(total, 0.0, out=total)  # never -0, as in `add_up`


@dataclass
class _Branch:
    """Vector of a node with its weight, or the sum over a branch."""

    values: Float32 | Float64
    weight: float

    def summed(self) -> Float64:
        if self.values.dtype == np.float64:
            return np.asarray(self.values, np.float64)
        return np.multiply(self.weight, self.values, dtype=np.float64)

    def add(self, other: "_Branch") -> "_Branch":
        """Add the next branch; do not use either of them afterwards."""
        total = self.summed()
        for first in range(0, total.size, _COLUMNS):
            columns = slice(first, first + _COLUMNS)
            part = other.values[columns]
            total[columns] += np.multiply(other.weight, part, dtype=np.float64)
        return _Branch(total, 1.0)


def branches(first: int, end: int) -> Int64:
    """Return the first node of each branch of nodes first..end-1, followed by `end`.

    >>> branches(3, 8), branches(0, 6)
    (array([3, 4, 8]), array([0, 4, 6]))
    """
    begins = [first]
    while begins[-1] < end:
        at = begins[-1]
        size = (at & -at) or 1 << end.bit_length()  # the largest branch that begins here
        while at + size > end:
            size >>= 1
        begins.append(at + size)
    return np.array(begins, np.int64)


def norms(vectors: Float32, others: Float32 | None = None) -> Float64:
    """Return ‖v_i - o_i‖ of each node, [nodes]; not finite for a node that diverged.

    Args:
      vectors: [nodes, parameters].
      others: [nodes, parameters], or [parameters] for all nodes; 0 by default.
    """
    if vectors.size > _PART:
        return np.asarray(np.sqrt(squared_norms(vectors, others)))
    with np.errstate(over="ignore", invalid="ignore"):
        difference = vectors if others is None else vectors - others
        squares = np.square(difference, dtype=np.float64)
        return np.asarray(np.sqrt(np.add.reduce(squares, axis=1)))


def squared_norms(vectors: Float32, others: Float32 | None = None) -> Float64:
    """Return the squares of `norms`, [nodes]."""
    nodes, parameters = vectors.shape
    rows = max(1, _PART // max(1, parameters))

    def part(of: tuple[slice, ...]) -> Float64:
        return squared_norms(vectors[of], None if others is None else others[of])

    if nodes > rows:
        others = None if others is None else np.broadcast_to(others, vectors.shape)
        firsts = range(0, nodes, rows)
        return np.concatenate([part((slice(first, first + rows),)) for first in firsts])
    if parameters > _PART:
        half = parameters // 2
        half -= half % 8
        others = None if others is None else np.broadcast_to(others, vectors.shape)
        return part((slice(None), slice(half))) + part((slice(None), slice(half, None)))
    with np.errstate(over="ignore", invalid="ignore"):
        difference = vectors if others is None else vectors - others
        squares = np.square(difference, dtype=np.float64)
        return np.asarray(np.add.reduce(squares, axis=1))


def slope(change: Float64, distance: Float64) -> Float64:
    """Return change / distance, [..., nodes]; 0 if the distance is at most SAME."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(distance <= SAME, 0.0, change / distance)
