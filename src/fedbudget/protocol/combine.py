"""What one of many may say of itself: figures out of all proportion to the others' are not believed.

An aggregator cannot check a loss or a smoothness that a peer reports, but it can compare it with what the others
report. With three peers or more, a figure beyond a multiple of their median counts as unknown, or as the median. So a
lie has either no effect or one within that multiple, whoever tells it; and reports of honest nodes, which are within
it, stay as they are to the bit. Peers are compared, not nodes: who speaks for a hundred nodes has one voice here.

How the nodes' reports become one: the w that the update rule (update.py) gets as their mean.

A combination rule is a value with one pure function. The weighted mean needs only sums over nodes, which whoever has
many nodes can make by itself (sums.py); any other rule is given every node's w_i, so that these must be here.

Rules for who does not trust all nodes bound what one of them, or a few, can do to w: `ClippedMean` how far it takes w,
`TrimmedMean` and `CoordinateMedian` (Yin et al., ICML 2018) which way in any coordinate, too. The latter two trim means
of neighbours, not the w_i: where honest nodes' data differ, what is rare is in many of these means, and an attacker,
far from all, in none (nearest-neighbour mixing, Allouah et al., AISTATS 2023). docs/guide/robustness.md has
what each of them survives, and what it costs where all are honest.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeGuard

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.protocol.messages import VECTORS, Report
from fedbudget.protocol.sums import DIVERGENCES, SLOPES, add_up

FEWEST = 3
"""Peers of which two agree against the third."""

MOST_SAMPLES = 10_000
"""Times as many as most have, beyond which nobody is believed to have so many."""

_LOSS = 1e3  # times the median
_GAP = 100.0  # of how far F_i(w(t₀)) and F_i(w^f) are apart
_NOISE = 0.02  # and of a loss, within which any gap is believed
_SPREAD = 1e3  # of divergences


def believable(reports: Sequence[Report]) -> tuple[list[Report], list[tuple[str, ...]]]:
    """The reports with what can be believed of them; and of each, what was not.

    Args:
      reports: one of each peer, all of one round.
    """
    believed = list(reports)
    doubts = [set[str]() for _ in reports]
    if len(reports) >= FEWEST:
        for bound in (_bound_slopes, _bound_losses, _bound_divergences):
            bound(believed, doubts)
    return believed, [tuple(sorted(names)) for names in doubts]


def reference(figures: Sequence[float]) -> float:
    """What others are compared with: the median of sizes or, where that is 0, the second largest.

    >>> reference([1.0, 3.0, 1e30]), reference([0.0, 0.0, 1e30])
    (3.0, 0.0)
    """
    known = [abs(figure) for figure in figures if math.isfinite(figure)]
    if not known:
        return 0.0
    return middle(known) or sorted(known)[max(0, len(known) - 2)]


def middle(figures: Sequence[float]) -> float:
    """What numpy's median gives, which takes ten times as long for a few."""
    if any(map(math.isnan, figures)):
        return math.nan
    ordered = sorted(figures)
    half = len(figures) // 2
    return float(
        ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    )


def _bound_slopes(reports: list[Report], doubts: list[set[str]]) -> None:
    for name, times in SLOPES.items():
        if any(getattr(report, name) is None for report in reports):
            continue
        most = times * reference(_medians(reports, name))

        def unknown(report: Report, beyond: Any, name: str = name) -> Report:
            return _with(report, {name: np.where(beyond, np.nan, getattr(report, name))})

        _replace_beyond(reports, doubts, name, most, unknown)


def _bound_losses(reports: list[Report], doubts: list[set[str]]) -> None:
    """A loss that is not believed is the median; a gap, the gap that most have."""
    for name in ("losses", "best_losses"):
        usual = reference(_medians(reports, name))

        def median(
            report: Report, beyond: Any, name: str = name, usual: float = usual
        ) -> Report:
            return _with(report, {name: np.where(beyond, usual, getattr(report, name))})

        _replace_beyond(reports, doubts, name, _LOSS * usual, median)
    gaps = [report.losses - report.best_losses for report in reports]
    middles = _each_median(gaps)
    usual = middle(middles)
    of_loss = reference(_medians(reports, "best_losses"))
    most = max(_GAP * reference(middles), _NOISE * of_loss)
    if (np.abs(np.concatenate(gaps)) <= most).all():
        return
    for index, (report, gap) in enumerate(zip(reports, gaps, strict=True)):
        beyond = ~(np.abs(gap) <= most)
        if beyond.any():
            reports[index] = replace(
                report, losses=np.where(beyond, report.best_losses + usual, report.losses)
            )
            doubts[index].add("losses")


def _bound_divergences(reports: list[Report], doubts: list[set[str]]) -> None:
    names = [name for name in DIVERGENCES if getattr(reports[0], name) is not None]
    middles = {name: _medians(reports, name) for name in names}
    usual = {name: middle(values) for name, values in middles.items()}

    def as_usual(report: Report, beyond: Any) -> Report:
        return _with(
            report,
            {name: np.where(beyond, usual[name], getattr(report, name)) for name in names},
        )

    for name in names:
        _replace_beyond(reports, doubts, name, _SPREAD * reference(middles[name]), as_usual)


def _with(report: Report, numbers: dict[str, Any]) -> Report:
    return replace(report, **numbers)


def _medians(reports: Sequence[Report], name: str) -> list[float]:
    """Of each peer's nodes, as far as they have a number; nan of a peer where none has."""
    values = [getattr(report, name) for report in reports]
    if any(each is None for each in values):
        return [_median(each) for each in values]
    return _each_median(values)


def _each_median(values: Sequence[Float64]) -> list[float]:
    if all(len(each) == 1 for each in values):
        return [float(value) for value in np.concatenate(values)]
    return [_median(each) for each in values]


def _median(values: Float64 | None) -> float:
    known = np.empty(0) if values is None else values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")


def _replace_beyond(
    reports: list[Report],
    doubts: list[set[str]],
    name: str,
    most: float,
    replacement: Callable[[Report, Any], Report],
) -> None:
    values = [getattr(report, name) for report in reports]
    if (
        any(each is None for each in values)
        or not (np.abs(np.concatenate(values)) > most).any()
    ):
        return
    for index, each in enumerate(values):
        beyond = np.abs(each) > most
        if beyond.any():
            reports[index] = replacement(reports[index], beyond)
            doubts[index].add(name)


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
        return np.asarray(
            add_up(nodes, sizes.astype(np.float64), w) / float(sizes.sum()), np.float32
        )


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
                with np.errstate(
                    over="ignore", invalid="ignore"
                ):  # what is not finite stays so, and is left out
                    cut = origin + scale[:, None] * (vectors - origin)
                report = replace(
                    report, **{name: np.where(scale[:, None] < 1, cut, vectors)}
                )
        return report

    def _scale(self, lengths: Float64) -> Float32 | None:
        """What each is to be multiplied with, [n]; None where all stay as they are."""
        known = [length for length in lengths.tolist() if math.isfinite(length)]
        usual = middle(known) if known else 0.0
        beyond = lengths > self.most * usual
        if usual == 0 or not beyond.any():
            return None
        return np.where(
            beyond, np.square(usual / np.where(beyond, lengths, 1.0)), 1.0
        ).astype(np.float32)


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
    gap = report.losses - report.best_losses
    best = _within_order(report.best_losses, count)
    return replace(report, losses=best + _within_order(gap, count), best_losses=best)


def _within_order(values: Float64, count: int) -> Float64:
    known = np.sort(values[np.isfinite(values)])
    return (
        values
        if len(known) <= 2 * count
        else np.clip(values, known[count], known[-1 - count])
    )


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
