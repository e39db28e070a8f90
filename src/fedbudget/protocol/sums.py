"""Norms of vectors without copies of them: squares and sums are made in float64, a part at a time.

The parts are those that numpy's own sum is made of (halves of halves, of a multiple of eight numbers), and so the sum
is numpy's to the bit, whatever the parts' size.

Sums over nodes that are the same bits however nodes are grouped.

Floating-point sums depend on their order. Here the order is that of a binary tree over node numbers, the same for every
run: nodes 2k and 2k+1 are added first, then pairs 4k and 4k+2, and so on; who is absent is passed over.

                 ┌───────┴───────┐
             ┌───┴───┐       ┌───┴───┐
            0 1     2 3     4 5     6 7

So whoever has all nodes of a branch can sum it, and whoever puts branches together gets what one sum over all nodes
would have been. A range of nodes is made up of few branches: `branches(3, 8)` are 3 and 4-7. A branch is known by its
first node, which is where it hangs in the tree, and so sums of branches add up by the same function as nodes do.

Sums along a tree are also more exact than one after the other: errors grow with the logarithm of the number of nodes.

Vectors that come one by one, in any order, are added as soon as both halves of a branch are there (`GrowingSum`).

A round's reports as the aggregator sees them: sums over nodes, wherever the nodes' own numbers are.

Algorithm 2 needs nothing of single nodes, only sums: Σ D_i w_i, Σ D_i F_i and so on and, once the mean is known,
Σ D_i ‖v_i - v‖ for δ̂. So whoever has many nodes can sum by itself, and the aggregator's work and memory do not grow
with them. Sums come as rows over branches of the tree of nodes (tree.py), and so are the same bits whoever made them;
the rows of several add up. Reports that come one by one are added up as they come (`SummedReports`), and their vectors
let go; then there are no distances from the mean.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from fedbudget.arrays import Flags, Float32, Float64, Int64
from fedbudget.models.compiling import import_kernels
from fedbudget.protocol.messages import Broadcast, LocalError, Report

SAME = 1e-10
"""Below this distance w_i(t) and w(t) count as equal, and ρ̂_i and β̂_i as 0."""

_PART = 2**16  # numbers


def norms(vectors: Float32, others: Float32 | None = None) -> Float64:
    """‖v_i - o_i‖ of each node, [nodes]; what diverged gives no number, and so no estimate.

    Args:
      vectors: [nodes, parameters].
      others: the same, or one for all; 0 when not given.
    """
    return np.asarray(np.sqrt(squared_norms(vectors, others)))


def squared_norms(vectors: Float32, others: Float32 | None = None) -> Float64:
    """The squares of `norms`."""
    nodes, parameters = vectors.shape
    rows = max(1, _PART // max(1, parameters))
    if nodes <= rows and parameters <= _PART:
        return _squared_norms(vectors, others)
    others = None if others is None else np.broadcast_to(others, vectors.shape)
    parts = [slice(first, first + rows) for first in range(0, nodes, rows)]
    return np.concatenate(
        [
            _squared_norms(vectors[part], None if others is None else others[part])
            for part in parts
        ]
    )


def slope(change: Float64, distance: Float64) -> Float64:
    """change / distance, [nodes], 0 where the distance counts as none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(distance <= SAME, 0.0, change / distance)


def _squared_norms(vectors: Float32, others: Float32 | None) -> Float64:
    parameters = vectors.shape[1]
    if parameters > _PART:
        half = parameters // 2
        half -= half % 8
        first = (slice(None), slice(half))
        second = (slice(None), slice(half, None))
        return _squared_norms(
            vectors[first], None if others is None else others[first]
        ) + _squared_norms(vectors[second], None if others is None else others[second])
    with np.errstate(over="ignore", invalid="ignore"):
        apart = vectors if others is None else vectors - others
        return np.asarray(np.square(apart, dtype=np.float64).sum(axis=1))


_MANY = 2**16  # columns: numpy is as quick from there on
_COLUMNS = 2**15  # at a time, so that what is added stays in the cache
_DEPTH = 65  # levels of a tree over numbers of 64 bits


def add_up(numbers: Int64, weights: Float64, values: Float32 | Float64) -> Float64:
    """Σ weight_i value_i over nodes, or over branches of them, [n, columns] to [columns].

    Args:
      numbers: of the nodes, or of the first in each branch, rising, [n].

    >>> add_up(np.array([0, 1, 2]), np.ones(3), np.array([[1e16], [1.0], [-1e16]]))  # not 1: the order is fixed
    array([0.])
    """
    kernel = None if values.shape[1] >= _MANY else _kernel()
    if kernel is None:
        return add_up_in_numpy(numbers, weights, values)
    total = np.zeros(values.shape[1])
    kernel.add_up(numbers, weights, np.require(values, requirements=("C", "A")), total)
    return total


def add_up_in_numpy(numbers: Int64, weights: Float64, values: Float32 | Float64) -> Float64:
    """The same bits, without numba. Partial sums wait on a stack until their other half is there."""
    total = np.zeros(values.shape[1])
    own = numbers.tolist()
    for first in range(0, values.shape[1], _COLUMNS):
        columns = slice(first, first + _COLUMNS)
        partial: list[
            tuple[int, Float64]
        ] = []  # each with where it is joined to the one before it
        for node, number in enumerate(own):
            joined = (number ^ own[node - 1]).bit_length() if node else 0
            _join(partial, joined)
            partial.append(
                (
                    joined,
                    np.multiply(weights[node], values[node, columns], dtype=np.float64),
                )
            )
        _join(partial, _DEPTH)
        if partial:
            total[columns] += partial[0][
                1
            ]  # never -0, which a branch without nodes would change
    return total


def _join(partial: list[tuple[int, Float64]], level: int) -> None:
    """Adds up what is joined below a level of the tree."""
    while len(partial) > 1 and partial[-1][0] < level:
        _, last = partial.pop()
        np.add(partial[-1][1], last, out=partial[-1][1])


@dataclass
class _Branch:
    """A node's vector with its weight, or the sum over a branch."""

    values: Float32 | Float64
    weight: float

    def summed(self) -> Float64:
        if self.values.dtype == np.float64:
            return np.asarray(self.values, np.float64)
        return np.multiply(self.weight, self.values, dtype=np.float64)

    def add(self, other: "_Branch") -> "_Branch":
        """With the branch after it; both are used up."""
        total = self.summed()
        for first in range(0, total.size, _COLUMNS):
            columns = slice(first, first + _COLUMNS)
            total[columns] += np.multiply(
                other.weight, other.values[columns], dtype=np.float64
            )
        return _Branch(total, 1.0)


class GrowingSum:
    """What `add_up` gives, of vectors that come one by one, in any order.

    Of a branch whose nodes have all come one vector is held. So there are few: two for each level of the tree where
    nodes come in order, and 0.4 for each node, at most, where they come at random.
    """

    def __init__(self) -> None:
        self._branches: dict[tuple[int, int], _Branch] = {}  # by first node and size

    def __len__(self) -> int:
        """How many vectors are held."""
        return len(self._branches)

    def add_node(self, number: int, weight: float, values: Float32) -> None:
        self._add(number, 1, _Branch(values, weight))

    def add_branch(self, first: int, size: int, values: Float64) -> None:
        """The sum over all nodes of a branch, which is taken over."""
        self._add(first, size, _Branch(values, 1.0))

    def _add(self, first: int, size: int, branch: _Branch) -> None:
        while (other := self._branches.pop((first ^ size, size), None)) is not None:
            branch = other.add(branch) if first & size else branch.add(other)
            first, size = first & ~size, 2 * size
        self._branches[first, size] = branch

    def total(self) -> Float64:
        """Of all that came, at least one; nothing is held any more."""
        partial: list[tuple[int, Float64]] = []
        before = 0
        for first, size in sorted(self._branches):
            joined = (first ^ before).bit_length() if partial else 0
            _join(partial, joined)
            partial.append((joined, self._branches.pop((first, size)).summed()))
            before = first
        _join(partial, _DEPTH)
        total = partial[0][1]
        return np.add(total, 0.0, out=total)  # never -0, as above


def prepare() -> None:
    """Loads or compiles what `add_up` needs, so that no round waits for it."""
    _kernel()


def _kernel() -> Any | None:
    """The compiled loop, where numba is installed."""
    return import_kernels("fedbudget.models.compiled.tree_sum")


def branches(first: int, end: int) -> Int64:
    """The branches that nodes first..end-1 are made up of, by where each begins, and `end` after the last.

    >>> branches(3, 8), branches(0, 6)
    (array([3, 4, 8]), array([0, 4, 6]))
    """
    begins = [first]
    while begins[-1] < end:
        at = begins[-1]
        size = (at & -at) or 1 << (end.bit_length())  # the largest branch that begins here
        while at + size > end:
            size >>= 1
        begins.append(at + size)
    return np.array(begins, np.int64)


ABSURD = 1e12
"""An estimate beyond this is taken for an accident of rounding or divergence."""
LARGEST = 1e15
"""A parameter, a loss or a divergence beyond this is of a node that diverges, or lies."""

SLOPES = {"rho": 1e4, "beta": 100.0}
"""Estimates that a node may have or not; and how many times the median over peers one may be (belief.py). They are
quotients of small differences, and honest nodes' vary by tens.
"""
DIVERGENCES = ("plain", "corrected", "lasting", "shifted")
"""What nodes say of drift."""

Vectors = Literal["w", "gradients"]


class Numbers(NamedTuple):
    """What is summed over nodes, besides vectors, each times D_i.

    Nodes whose w_i is not finite have no part in the estimates. Sums named *_of are of those that have the estimate.
    """

    data: float
    """1, so that the sum is D."""
    used: float
    """1 for nodes whose w_i is finite."""
    loss: float
    """F_i(w(t₀))."""
    best_loss: float
    """F_i(w^f)."""
    squared_loss_gap: float
    """(F_i(w(t₀)) - F_i(w^f))²."""
    rho: float
    rho_of: float
    beta: float
    beta_of: float
    plain: float
    """By how much gradients were apart without drift correction, see drift.py."""
    corrected: float
    """And with it."""
    lasting: float
    """-<c_i, s_i>."""
    shifted: float
    """‖s_i‖²."""

    @classmethod
    def of(cls, report: Report, usable: Flags) -> Float64:
        """Of each node, [nodes, numbers]."""
        numbers = np.zeros((len(report.nodes), len(cls._fields)))
        by_name = dict(zip(cls._fields, numbers.T, strict=True))
        by_name["data"][:] = 1
        by_name["used"][:] = usable
        by_name["loss"][:] = report.losses
        by_name["best_loss"][:] = report.best_losses
        with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverges
            by_name["squared_loss_gap"][:] = np.square(report.losses - report.best_losses)
        for name in SLOPES:
            if (values := getattr(report, name)) is not None:
                known = usable & (values >= 0) & (values < ABSURD)
                by_name[name][known] = values[known]
                by_name[f"{name}_of"][:] = known
        for name in DIVERGENCES:
            if (values := getattr(report, name)) is not None:
                by_name[name][:] = values
        return numbers


@dataclass(frozen=True)
class Sums:
    """Sums over the nodes of a round, a row for each branch.

    Args:
      round: the broadcast's.
      nodes: how many reported.
      left_out: the numbers of those whose w_i is not finite, or beyond LARGEST; they have no part in sums of vectors.
      begins: the first node of each branch, rising, [branches].
      numbers: [branches, numbers], see `Numbers`.
      w, gradients: Σ D_i w_i(t) and Σ D_i ∇F_i(w(t₀)), [branches, parameters], where they were reported.
      slopes: whether ρ̂_i and β̂_i were reported.
      largest_beta: the largest β̂_i that is a sane, positive number, if any is.
      all_data: D of all nodes that ever took part, where whoever summed knows it.
      report: of all nodes, without vectors, where the numbers of each are here.
    """

    round: int
    nodes: int
    left_out: tuple[int, ...]
    begins: Int64
    numbers: Float64
    w: Float64 | None
    gradients: Float64 | None
    slopes: bool
    largest_beta: float | None
    all_data: float | None = None
    report: Report | None = None

    @classmethod
    def merge(cls, parts: "Sequence[Sums]") -> "Sums":
        """Of several groups, each with nodes of its own, in node order."""
        if len(parts) == 1:
            return parts[0]

        def join(name: str) -> Float64 | None:
            rows = [getattr(part, name) for part in parts]
            return None if rows[0] is None else np.concatenate(rows)

        all_data = [part.all_data for part in parts if part.all_data is not None]
        return replace(
            parts[0],
            nodes=sum(part.nodes for part in parts),
            left_out=tuple(node for part in parts for node in part.left_out),
            begins=np.concatenate([part.begins for part in parts]),
            numbers=np.concatenate([part.numbers for part in parts]),
            w=join("w"),
            gradients=join("gradients"),
            largest_beta=max(
                (part.largest_beta for part in parts if part.largest_beta is not None),
                default=None,
            ),
            all_data=sum(all_data) if all_data else None,
        )

    def total(self, rows: Float64) -> Float64:
        """Of all branches, [branches, any] to [any]."""
        return rows[0] if len(rows) == 1 else add_up(self.begins, np.ones(len(rows)), rows)

    @cached_property
    def totals(self) -> Numbers:
        return Numbers(*self.total(self.numbers).tolist())

    @property
    def mean_beta(self) -> float | None:
        """The mean of the β̂_i, if it is a sane, positive number."""
        mean = (
            self.totals.beta / self.totals.beta_of
            if self.slopes and self.totals.beta_of
            else 0.0
        )
        return mean if 0 < mean < ABSURD else None

    @property
    def lasting(self) -> float:
        """α, the share of shifts that stayed (drift.py); NaN where there were none."""
        shifted = self.totals.shifted
        return self.totals.lasting / shifted if 0 < shifted < math.inf else math.nan

    @property
    def loss_gap(self) -> float:
        """F(w(t₀)) - F(w^f), on the same samples; above 0 where w(t₀) is worse."""
        return (self.totals.loss - self.totals.best_loss) / self.totals.data

    @property
    def loss_gap_error(self) -> float:
        """The standard error of F(w(t₀)) - F(w^f), were nodes drawn by chance; 0 where there is one node."""
        mean_square = self.totals.squared_loss_gap / self.totals.data
        return math.sqrt(max(0.0, mean_square - self.loss_gap**2) / max(1, self.nodes - 1))

    def mean(self, rows: Float64) -> Float32:
        """Σ D_i v_i / Σ D_i of vectors; there must be a node that is not left out."""
        return np.asarray(self.total(rows) / self.totals.used, np.float32)


class Reports(Protocol):
    """The reports of a round, wherever they are."""

    @property
    def sums(self) -> Sums: ...

    def distance_sums(self, vectors: Vectors, mean: Float32) -> Float64:
        """Σ D_i ‖v_i - mean‖ over each branch's nodes but for those left out, [branches, 1].

        Args:
          mean: of as many of the vectors' first numbers as count.
        """


class ReportsHere:
    """Reports that are at hand.

    Args:
      begins: of the branches to sum by; one for all when not given.
      left_out: the numbers of nodes that are known to have no part in sums of vectors.
    """

    def __init__(
        self, report: Report, begins: Int64 | None = None, left_out: Collection[int] = ()
    ) -> None:
        self._report = report
        self._weights = report.sizes.astype(np.float64)
        self._begins = report.nodes[:1] if begins is None else begins
        self._usable = np.ones(len(report.nodes), dtype=bool)
        if left_out:
            self._usable &= ~np.isin(report.nodes, list(left_out))
        w = self._vectors(report.w)  # where it is beyond what can be, some w_i is
        if (
            report.w is not None
            and w is not None
            and not within(w, LARGEST * max(1.0, self._weights.sum()))
        ):
            self._usable = np.array([within(each) for each in report.w])
            w = self._vectors(report.w)
        self.sums = Sums(
            round=report.round,
            nodes=len(report.nodes),
            left_out=tuple(report.nodes[~self._usable].tolist()),
            begins=self._begins,
            numbers=self._rows(
                report.nodes, self._weights, Numbers.of(report, self._usable)
            ),
            w=w,
            gradients=self._vectors(report.gradients),
            slopes=report.rho is not None and report.beta is not None,
            largest_beta=_largest(report.beta),
        )

    def distance_sums(self, vectors: Vectors, mean: Float32) -> Float64:
        return self._rows_of_usable(
            norms(getattr(self._report, vectors)[:, : mean.size], mean)[:, None]
        )

    def _vectors(self, vectors: Float32 | None) -> Float64 | None:
        return None if vectors is None else self._rows_of_usable(vectors)

    def _rows_of_usable(self, values: Float32 | Float64) -> Float64:
        usable = self._usable
        if usable.all():
            return self._rows(self._report.nodes, self._weights, values)
        return self._rows(self._report.nodes[usable], self._weights[usable], values[usable])

    def _rows(self, nodes: Int64, weights: Float64, values: Float32 | Float64) -> Float64:
        """A sum for each branch, [branches, any]."""
        if len(self._begins) == 1:
            return add_up(nodes, weights, values)[None]
        cuts = [0, *np.searchsorted(nodes, self._begins[1:]).tolist(), len(nodes)]
        parts = [slice(first, end) for first, end in pairwise(cuts)]
        return np.array(
            [add_up(nodes[part], weights[part], values[part]) for part in parts]
        )


class SummedReports:
    """Reports that are added up as they come, in any order.

    Args:
      broadcast: that they answer.
    """

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast
        self._w = GrowingSum()
        self._reports: list[Report] = []
        self._left_out: list[int] = []

    @property
    def vectors(self) -> int:
        """How many are held."""
        return len(self._w)

    def add(self, report: Report) -> Report:
        """Gives what is kept of it: all but its vectors."""
        report.require_answers(self._broadcast)
        if report.w is not None:
            self._add_vectors(report.nodes, report.sizes.astype(np.float64), report.w)
        self._reports.append(replace(report, w=None, gradients=None))
        return self._reports[-1]

    def believe(self, reports: Sequence[Report]) -> None:
        """In place of what `add` gave, one for one: the numbers that count (belief.py)."""
        self._reports = list(reports)

    @cached_property
    def sums(self) -> Sums:
        """Of all that came; nothing can be added any more."""
        report = Report.merge(self._reports)
        numbers = ReportsHere(report, left_out=self._left_out).sums
        return replace(
            numbers, w=self._w.total()[None] if len(self._w) else None, report=report
        )

    def distance_sums(self, vectors: Vectors, mean: Float32) -> Float64:
        raise LocalError(
            "distances from the mean need every report, and these were added up as they came"
        )

    def _add_vectors(self, nodes: Int64, weights: Float64, w: Float32) -> None:
        if len(nodes) == 1 and within(w):
            self._w.add_node(int(nodes[0]), float(weights[0]), w[0])
            return
        usable = np.array([within(each) for each in w])
        self._left_out += nodes[~usable].tolist()
        for first, end in pairwise(branches(int(nodes[0]), int(nodes[-1]) + 1).tolist()):
            part = usable & (first <= nodes) & (nodes < end)
            if part.any():
                self._w.add_branch(
                    first, end - first, add_up(nodes[part], weights[part], w[part])
                )


def within(values: Float32 | Float64, largest: float = LARGEST) -> bool:
    """Whether all are finite, and not beyond what can be."""
    if values.size == 1:  # as most are, and numpy would take its time
        return -largest <= float(values.item()) <= largest
    return not values.size or bool(-largest <= values.min() and values.max() <= largest)


def _largest(values: Float64 | None) -> float | None:
    """The largest of what is a sane, positive number, if any is."""
    if values is None:
        return None
    sane = values[(values > 0) & (values < ABSURD)]
    return float(sane.max()) if len(sane) else None
