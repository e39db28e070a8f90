"""How the nodes' reports become one: the w that the update rule (update.py) gets as their mean.

A combination rule is a value with one pure function. The weighted mean needs only sums over nodes, which whoever has
many nodes can make by itself (sums.py); any other rule is given every node's w_i, so that these must be here.

Rules for who does not trust all nodes bound what one of them, or a few, can do to w: `ClippedMean` how far it takes w,
`TrimmedMean` and `CoordinateMedian` (Yin et al., ICML 2018) which way in any coordinate, too. The latter two trim means
of neighbours, not the w_i: where honest nodes' data differ, what is rare is in many of these means, and an attacker,
far from all, in none (nearest-neighbour mixing, Allouah et al., AISTATS 2023). docs/robustness.md has what each of them
survives, and what it costs where all are honest.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeGuard

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.protocol.belief import middle
from fedbudget.protocol.messages import VECTORS, Report
from fedbudget.protocol.tree import add_up


class CombineRule(Protocol):
    """Makes one w of many."""

    @property
    def needs_reports(self) -> bool:
        """Whether it must see every node's w_i; where only sums arrive, as on Ray, such a rule is refused."""

    def combine(self, w: Float32, sizes: Int64, nodes: Int64) -> Float32:
        """What all are combined to, [parameters].

        Args:
          w: w_i(t) of the nodes whose numbers are all finite, at least one, [n, parameters].
          sizes: D_i, [n].
          nodes: their numbers, rising, [n].
        """


class DoubtingRule(CombineRule, Protocol):
    """A rule that looks at reports before anything is summed, and need not believe all of them."""

    @property
    def averages(self) -> bool:
        """Whether it is the weighted mean of what it believes: then sums are enough, and drift can be corrected."""

    def believed(self, report: Report, start: Float32, counted: int) -> Report:
        """A report with what is believed of it; itself where that is all.

        Args:
          start: where updates start from, [parameters].
          counted: how many of the first numbers of w are parameters, and not running statistics.
        """


@dataclass(frozen=True)
class WeightedMean:
    """Σ D_i w_i / Σ D_i, eq. (5), along the tree of nodes (tree.py)."""

    needs_reports: ClassVar[bool] = False

    def combine(self, w: Float32, sizes: Int64, nodes: Int64) -> Float32:
        return np.asarray(add_up(nodes, sizes.astype(np.float64), w) / float(sizes.sum()), np.float32)


@dataclass(frozen=True)
class ClippedMean:
    """The weighted mean of updates of which none is much longer than most: one that is, is cut.

    It gets the median length, divided by how many times as long it was: the further from what most do, the less it is
    believed, as with estimators that redescend. At the median length itself, one of three that goes the other way would
    take half of the two others' way back, round by round. Where none is too long, it is the weighted mean to the bit,
    and drift can be corrected.

    Args:
      most: times the median length that an update may have.
    """

    needs_reports: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    most: float = 6.0

    def combine(self, w: Float32, sizes: Int64, nodes: Int64) -> Float32:
        return WeightedMean().combine(w, sizes, nodes)

    def believed(self, report: Report, start: Float32, counted: int) -> Report:
        """With updates, and gradients where there are any, of believable lengths."""
        if len(report.nodes) < _FEWEST:
            return report
        for name in VECTORS:
            vectors = getattr(report, name)
            if vectors is None:
                continue
            origin = start if name == "w" else np.zeros_like(start)
            scale = self._scale(_lengths(vectors[:, :counted], origin[:counted]))
            if scale is not None:
                with np.errstate(over="ignore", invalid="ignore"):  # what is not finite stays so, and is left out
                    cut = origin + scale[:, None] * (vectors - origin)
                report = replace(report, **{name: np.where(scale[:, None] < 1, cut, vectors)})
        return report

    def _scale(self, lengths: Float64) -> Float32 | None:
        """What each is to be multiplied with, [n]; None where all stay as they are."""
        known = [length for length in lengths.tolist() if math.isfinite(length)]
        usual = middle(known) if known else 0.0
        beyond = lengths > self.most * usual
        if usual == 0 or not beyond.any():
            return None
        return np.where(beyond, np.square(usual / np.where(beyond, lengths, 1.0)), 1.0).astype(np.float32)


@dataclass(frozen=True)
class TrimmedMean:
    """In every coordinate the weighted mean without the largest and the smallest values, of means of neighbours.

    Args:
      share: of the nodes, that may lie: so many are left out at either end, and of every node's neighbours; never all.
    """

    needs_reports: ClassVar[bool] = True
    averages: ClassVar[bool] = False
    share: float = 0.2

    def outliers(self, nodes: int) -> int:
        """Of so many nodes, how many may lie."""
        return min(math.ceil(self.share * nodes), (nodes - 1) // 2)

    def believed(self, report: Report, start: Float32, counted: int) -> Report:
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
    """In every coordinate the median, of means of neighbours; each node counts the same, and nearly half may lie."""

    needs_reports: ClassVar[bool] = True
    averages: ClassVar[bool] = False

    def outliers(self, nodes: int) -> int:
        """Of so many nodes, how many may lie."""
        return (nodes - 1) // 2

    def believed(self, report: Report, start: Float32, counted: int) -> Report:
        return without_outliers(report, self.outliers(len(report.nodes)))

    def combine(self, w: Float32, sizes: Int64, nodes: Int64) -> Float32:
        near = mixed(w, np.ones_like(sizes), nodes, len(w) - self.outliers(len(w)))
        return np.asarray(np.median(near, axis=0), np.float32)


def doubts(rule: CombineRule) -> TypeGuard[DoubtingRule]:
    """Whether a rule looks at reports before anything is summed."""
    return hasattr(rule, "believed")


def averages(rule: CombineRule) -> bool:
    """Whether a rule is the weighted mean of what it believes."""
    return not rule.needs_reports or (doubts(rule) and rule.averages)


def mixed(w: Float32, sizes: Int64, nodes: Int64, count: int) -> Float32:
    """Of every node the weighted mean of so many w_i nearest to its own, which is one of them; [n, parameters].

    Args:
      w, sizes, nodes: as of `CombineRule.combine`.
    """
    found = np.empty_like(w)
    for index, own in enumerate(w):
        near = np.sort(np.argsort(_lengths(w, own), kind="stable")[:count])
        found[index] = WeightedMean().combine(w[near], sizes[near], nodes[near])
    return found


def without_outliers(report: Report, count: int) -> Report:
    """A report whose losses are no larger and no smaller than those of the nodes beside so many at either end.

    A rule that trims w trims what w is judged by, or nodes without a part in it could still say that it is bad.

    Args:
      count: of nodes that may be outliers, at either end.
    """
    gap, best = report.losses - report.best_losses, _within_order(report.best_losses, count)
    return replace(report, losses=best + _within_order(gap, count), best_losses=best)


def _within_order(values: Float64, count: int) -> Float64:
    known = np.sort(values[np.isfinite(values)])
    return values if len(known) <= 2 * count else np.clip(values, known[count], known[-1 - count])


COMBINE_RULES: dict[str, type[CombineRule]] = {
    "mean": WeightedMean,
    "clipped": ClippedMean,
    "trimmed": TrimmedMean,
    "median": CoordinateMedian,
}

_FEWEST = 3  # of two, nobody knows which one is too long


def _lengths(vectors: Float32, start: Float32) -> Float64:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.sqrt(np.square(vectors - start, dtype=np.float64).sum(axis=1)))
