"""A round's reports as the aggregator sees them: sums over nodes, wherever the nodes' own numbers are.

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
from typing import Literal, NamedTuple, Protocol

import numpy as np

from fedbudget.arrays import Flags, Float32, Float64, Int64
from fedbudget.protocol.messages import Broadcast, LocalError, Report
from fedbudget.protocol.norms import norms
from fedbudget.protocol.tree import GrowingSum, add_up, branches

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
        by_name["loss"][:], by_name["best_loss"][:] = report.losses, report.best_losses
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
            largest_beta=max((part.largest_beta for part in parts if part.largest_beta is not None), default=None),
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
        mean = self.totals.beta / self.totals.beta_of if self.slopes and self.totals.beta_of else 0.0
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

    def __init__(self, report: Report, begins: Int64 | None = None, left_out: Collection[int] = ()) -> None:
        self._report = report
        self._weights = report.sizes.astype(np.float64)
        self._begins = report.nodes[:1] if begins is None else begins
        self._usable = np.ones(len(report.nodes), dtype=bool)
        if left_out:
            self._usable &= ~np.isin(report.nodes, list(left_out))
        w = self._vectors(report.w)  # where it is beyond what can be, some w_i is
        if report.w is not None and w is not None and not within(w, LARGEST * max(1.0, self._weights.sum())):
            self._usable = np.array([within(each) for each in report.w])
            w = self._vectors(report.w)
        self.sums = Sums(
            round=report.round,
            nodes=len(report.nodes),
            left_out=tuple(report.nodes[~self._usable].tolist()),
            begins=self._begins,
            numbers=self._rows(report.nodes, self._weights, Numbers.of(report, self._usable)),
            w=w,
            gradients=self._vectors(report.gradients),
            slopes=report.rho is not None and report.beta is not None,
            largest_beta=_largest(report.beta),
        )

    def distance_sums(self, vectors: Vectors, mean: Float32) -> Float64:
        return self._rows_of_usable(norms(getattr(self._report, vectors)[:, : mean.size], mean)[:, None])

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
        return np.array([add_up(nodes[part], weights[part], values[part]) for part in parts])


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
        return replace(numbers, w=self._w.total()[None] if len(self._w) else None, report=report)

    def distance_sums(self, vectors: Vectors, mean: Float32) -> Float64:
        raise LocalError("distances from the mean need every report, and these were added up as they came")

    def _add_vectors(self, nodes: Int64, weights: Float64, w: Float32) -> None:
        if len(nodes) == 1 and within(w):
            self._w.add_node(int(nodes[0]), float(weights[0]), w[0])
            return
        usable = np.array([within(each) for each in w])
        self._left_out += nodes[~usable].tolist()
        for first, end in pairwise(branches(int(nodes[0]), int(nodes[-1]) + 1).tolist()):
            part = usable & (first <= nodes) & (nodes < end)
            if part.any():
                self._w.add_branch(first, end - first, add_up(nodes[part], weights[part], w[part]))


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
