"""Combination rules: how the nodes' reports become one w.

A combination rule is a value with one pure function, `combine`. Its result goes to the
update rule (update.py) as the mean of the nodes. The weighted mean needs only sums over
nodes, which any process with many nodes can compute (sums.py). Every other rule needs
every node's w_i.

The robust rules limit the effect of one or a few malicious nodes. `ClippedMean` limits how
far they move w. `TrimmedMean` and `CoordinateMedian` (Yin et al., ICML 2018) also limit
the direction, in every coordinate. These two trim means of neighbours instead of the w_i
(nearest-neighbour mixing, Allouah et al., AISTATS 2023): if honest nodes' data differ, a
rare honest value is part of many such means, and a distant attacker of none.
docs/guide/robustness.md lists which attacks each rule survives, and its cost without
attackers.

Reported losses and other numbers are limited before (outliers.py).
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeGuard

import numpy as np

from fedbudget.arrays import Flags, Float32, Float64, Int64
from fedbudget.protocol.messages import LossReport, Report
from fedbudget.protocol.outliers import FEWEST, median
from fedbudget.protocol.sums import add_up

_LOSS_PAIRS = (
    ("losses", "best_losses"),
    ("validation", "validation_best"),
    ("validation_mean", "validation_best"),
    ("validation_reference", "validation_best"),
)
"""Losses of a w, and of the best w so far."""


class CombineRule(Protocol):
    """Combines the nodes' w_i into one w."""

    @property
    def needs_reports(self) -> bool:
        """Whether the rule needs every node's w_i; refused if only sums arrive, as on
        Ray."""

    def combine(self, w: Float32, sizes: Int64, nodes: Int64) -> Float32:
        """Combine the w_i of a round.

        Args:
          w: w_i(t) of at least one node; all values are finite, [n, parameters].
          sizes: D_i, [n].
          nodes: numbers of the nodes, ascending, [n].

        Returns:
          the combined w, [parameters].
        """


class CappingRule(CombineRule, Protocol):
    """A combination rule that limits outliers in a report before it is summed."""

    @property
    def averages(self) -> bool:
        """Whether `combine` is the weighted mean.

        If so, sums replace the call of `combine`, and drift can be corrected.
        """

    def capped(self, report: Report, start: Float32, counted: int) -> Report:
        """Limit outliers in the report of a round.

        Args:
          report: the report of all nodes.
          start: w from which local updates started, [parameters].
          counted: number of parameters; the numbers after them in w are running
            statistics.

        Returns:
          the report with outliers limited; the same object if there are none.
        """


@dataclass(frozen=True)
class WeightedMean:
    """Σ D_i w_i / Σ D_i, eq. (5), summed along the tree of nodes (sums.py)."""

    needs_reports: ClassVar[bool] = False

    def combine(self, w: Float32, sizes: Int64, nodes: Int64) -> Float32:
        total = add_up(nodes, sizes.astype(np.float64), w)
        return np.asarray(total / float(sizes.sum()), np.float32)


@dataclass(frozen=True)
class ClippedMean:
    """Weighted mean of updates, with updates far longer than the median shortened: the
    default of `fedbudget.serve`.

        Δ_i = w_i - w(t₀),  m_i = max(1, median_j D_j / D_i)
        r_i = ‖Δ_i‖ / (m_i median_j ‖Δ_j‖)
        Δ_i ← Δ_i / r_i² if r_i > 6
        w = w(t₀) + Σ D_i Δ_i / Σ D_i

    An update that is r times as long as the median receives the median length divided by
    r: the more it deviates, the less it counts, as in redescending estimators. At the
    median length itself, one opposing node of three would undo half of the others'
    progress in every round.

    A node with few samples may have longer updates, by m_i. Its weight is small, so these
    move w no further. It needs them: at the minimum of F the weighted updates cancel, and
    the update of a node with a twelfth of the samples is eleven times as long as the mean
    update of the others. Without m_i, w would leave this minimum for that of the others.

    If no update is too long, the result is the weighted mean to
    the bit, and drift can be corrected. Reported gradients are shortened in the same way.
    With fewer than three nodes nothing is shortened.

    Args:
      most: longest accepted update, as a multiple of the median length.

    >>> w = np.array([[1], [1], [8]], np.float32)
    >>> ones = np.ones(3, np.int64)
    >>> report = Report(round=1, nodes=np.arange(3), sizes=ones, vectors={"w": w})
    >>> short = ClippedMean().capped(report, start=np.zeros(1, np.float32), counted=1)
    >>> short.vectors["w"][2]
    array([0.125], dtype=float32)
    """

    needs_reports: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    most: float = 6.0

    def combine(self, w: Float32, sizes: Int64, nodes: Int64) -> Float32:
        return WeightedMean().combine(w, sizes, nodes)

    def capped(self, report: Report, start: Float32, counted: int) -> Report:
        """Return the report with long updates, and gradients if present, shortened."""
        if len(report.nodes) < FEWEST:
            return report
        changed = {}
        for name, vectors in report.vectors.items():
            origin = start if name == "w" else np.zeros_like(start)
            lengths = _distances(vectors[:, :counted], origin[:counted])
            scale = self._scale(lengths, report.sizes)
            if scale is None:
                continue
            # A vector that is not finite stays so, and is left out later.
            with np.errstate(over="ignore", invalid="ignore"):
                short = origin + scale[:, None] * (vectors - origin)
            changed[name] = np.where(scale[:, None] < 1, short, vectors)
        if not changed:
            return report
        return replace(report, vectors={**report.vectors, **changed})

    def _scale(self, lengths: Float64, sizes: Int64) -> Float32 | None:
        """Factor for each vector, [n]; None if all stay as they are."""
        known = [length for length in lengths.tolist() if math.isfinite(length)]
        middle = median(known) if known else 0.0
        if middle == 0 or not (lengths > self.most * middle).any():
            return None
        usual = middle * np.maximum(1.0, median(sizes.tolist()) / sizes)
        beyond = lengths > self.most * usual
        if not beyond.any():
            return None
        ratio = usual / np.where(beyond, lengths, 1.0)
        return np.where(beyond, np.square(ratio), 1.0).astype(np.float32)


@dataclass(frozen=True)
class TrimmedMean:
    """Weighted mean of neighbours' means, per coordinate, without the extreme values.

    With n nodes and f = ⌈share · n⌉, at most (n - 1) / 2:

        m_i = Σ D_j w_j / Σ D_j over the n - f nodes j nearest to w_i, i included
        w = Σ D_i m_i / Σ D_i, per coordinate, without the f smallest and f largest m_i

    Losses are limited to the range without the f smallest and f largest.

    Args:
      share: share of malicious nodes. This share is left out at either end, and of every
        node's neighbours; never all.

    >>> w = np.array([[1], [2], [3], [4], [100]], np.float32)
    >>> TrimmedMean().combine(w, np.ones(5, np.int64), np.arange(5))
    array([2.5], dtype=float32)
    """

    needs_reports: ClassVar[bool] = True
    averages: ClassVar[bool] = False
    share: float = 0.2

    def outliers(self, nodes: int) -> int:
        """Return the number of malicious nodes tolerated among `nodes`."""
        return min(math.ceil(self.share * nodes), (nodes - 1) // 2)

    def capped(self, report: Report, start: Float32, counted: int) -> Report:
        return without_outliers(report, self.outliers(len(report.nodes)))

    def combine(self, w: Float32, sizes: Int64, nodes: Int64) -> Float32:
        cut = self.outliers(len(w))
        w = mixed(w, sizes, nodes, len(w) - cut)
        order = np.argsort(w, axis=0, kind="stable")[cut : len(w) - cut]
        weights = sizes.astype(np.float64)[order]
        kept = np.take_along_axis(w, order, axis=0)
        return np.asarray((weights * kept).sum(axis=0) / weights.sum(axis=0), np.float32)


@dataclass(frozen=True)
class CoordinateMedian:
    """Median of neighbours' means, per coordinate.

    Every node counts the same, and almost half of them may be malicious. With n nodes and
    f = ⌊(n - 1) / 2⌋:

        m_i = mean of w_j over the n - f nodes j nearest to w_i, i included
        w = median of the m_i, per coordinate

    Losses are limited to the range without the f smallest and f largest.

    >>> w = np.array([[1], [2], [3], [80], [100]], np.float32)
    >>> CoordinateMedian().combine(w, np.ones(5, np.int64), np.arange(5))
    array([2.], dtype=float32)
    """

    needs_reports: ClassVar[bool] = True
    averages: ClassVar[bool] = False

    def outliers(self, nodes: int) -> int:
        """Return the number of malicious nodes tolerated among `nodes`."""
        return (nodes - 1) // 2

    def capped(self, report: Report, start: Float32, counted: int) -> Report:
        return without_outliers(report, self.outliers(len(report.nodes)))

    def combine(self, w: Float32, sizes: Int64, nodes: Int64) -> Float32:
        near = mixed(w, np.ones_like(sizes), nodes, len(w) - self.outliers(len(w)))
        return np.asarray(np.median(near, axis=0), np.float32)


COMBINE_RULES: dict[str, type[CombineRule]] = {
    "mean": WeightedMean,
    "clipped": ClippedMean,
    "trimmed": TrimmedMean,
    "median": CoordinateMedian,
}


def caps_reports(rule: CombineRule) -> TypeGuard[CappingRule]:
    """Whether a rule limits outliers in reports before they are summed."""
    return hasattr(rule, "capped")


def averages(rule: CombineRule) -> bool:
    """Whether a rule is the weighted mean of the capped reports."""
    return not rule.needs_reports or (caps_reports(rule) and rule.averages)


def mixed(w: Float32, sizes: Int64, nodes: Int64, count: int) -> Float32:
    """Weighted mean of the `count` w_i nearest to each node's own, [n, parameters].

    Args:
      w, sizes, nodes: as in `CombineRule.combine`.
      count: number of neighbours, the node itself included.
    """
    means = np.empty_like(w)
    for index, own in enumerate(w):
        near = np.sort(np.argsort(_distances(w, own), kind="stable")[:count])
        means[index] = WeightedMean().combine(w[near], sizes[near], nodes[near])
    return means


def without_outliers(report: Report, count: int) -> Report:
    """Winsorize the losses of a report: limit them to the range without the extreme nodes.

    A rule that trims w must trim the losses too. Otherwise nodes without influence on w
    could still make it look bad.

    Args:
      report: the report of all nodes.
      count: number of possible outliers at either end.
    """
    if not isinstance(report, LossReport):
        return report
    numbers = dict(report.numbers)
    for name, best_name in _LOSS_PAIRS:
        if name in numbers:
            known = numbers.get("validated", np.ones(1)) > 0 if name != "losses" else True
            reported = report.numbers[best_name]
            best = _winsorize(reported, count, known)
            gap = _winsorize(numbers[name] - reported, count, known)
            numbers[name] = best + gap
            numbers[best_name] = best
    return replace(report, numbers=numbers)


def cap_reports(rule: CombineRule, report: Report, start: Float32, counted: int) -> Report:
    """Return the report with outliers limited by the rule; itself if there are none.

    Args:
      rule: the combination rule.
      report: the report of all nodes.
      start: starting point of local updates, [parameters].
      counted: number of parameters, without running statistics.
    """
    return rule.capped(report, start, counted) if caps_reports(rule) else report


def shortened_nodes(report: Report, capped: Report) -> tuple[int, ...]:
    """Return the numbers of the nodes whose finite w_i `cap_reports` changed."""
    if report is capped or "w" not in report.vectors:
        return ()
    before = report.vectors["w"]
    after = capped.vectors["w"]
    if before is after:
        return ()
    same = (before == after).all(axis=1) | ~np.isfinite(before).all(axis=1)
    return tuple(report.nodes[~same].tolist())


def _winsorize(values: Float64, count: int, counted: Flags | bool = True) -> Float64:
    """Limit values to the range that remains without `count` finite values at either
    end.

    Args:
      values: [n].
      count: number of values to leave out at either end.
      counted: which values count, [n]; the others stay as they are.
    """
    known = np.sort(values[np.isfinite(values) & counted])
    if len(known) <= 2 * count:
        return values
    return np.where(counted, np.clip(values, known[count], known[-1 - count]), values)


def _distances(vectors: Float32, start: Float32) -> Float64:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.sqrt(np.square(vectors - start, dtype=np.float64).sum(axis=1)))
