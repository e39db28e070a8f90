"""Combination rules and outlier capping: how the nodes' reports become one w.

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

The aggregator also cannot verify a reported loss or smoothness. `cap_figures` compares
each figure with those of the other peers. With three or more peers, a figure beyond a
multiple of their median counts as unknown, or as the median. A false figure therefore has
a limited effect, and reports of honest nodes, which lie within that multiple, stay as they
are to the bit. Peers are compared, not nodes: a peer with a hundred nodes counts once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, TypeGuard

import numpy as np

from fedbudget.arrays import Flags, Float32, Float64, Int64
from fedbudget.protocol.features.feature import Reported
from fedbudget.protocol.messages import LossReport, Report
from fedbudget.protocol.sums import add_up

FEWEST = 3
"""Fewest peers, or nodes, among which an outlier can be identified."""

MOST_SAMPLES = 10_000
"""A peer cannot claim more than this multiple of the median number of samples."""

_MAX_LOSS = 1e3  # limit of a loss, times the median
_MAX_GAP = 100.0  # limit of F_i(w(t₀)) - F_i(w^f), times the median
_NOISE = 0.02  # a gap within this share of the loss is always accepted


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

        Δ_i = w_i - w(t₀),  r_i = ‖Δ_i‖ / median_j ‖Δ_j‖
        Δ_i ← Δ_i / r_i² if r_i > 6
        w = w(t₀) + Σ D_i Δ_i / Σ D_i

    An update that is r times as long as the median receives the median length divided by
    r: the more it deviates, the less it counts, as in redescending estimators. At the
    median length itself, one opposing node of three would undo half of the others'
    progress in every round. If no update is too long, the result is the weighted mean to
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
            scale = self._scale(_distances(vectors[:, :counted], origin[:counted]))
            if scale is None:
                continue
            # A vector that is not finite stays so, and is left out later.
            with np.errstate(over="ignore", invalid="ignore"):
                short = origin + scale[:, None] * (vectors - origin)
            changed[name] = np.where(scale[:, None] < 1, short, vectors)
        if not changed:
            return report
        return replace(report, vectors={**report.vectors, **changed})

    def _scale(self, lengths: Float64) -> Float32 | None:
        """Factor for each vector, [n]; None if all stay as they are."""
        known = [length for length in lengths.tolist() if math.isfinite(length)]
        usual = median(known) if known else 0.0
        beyond = lengths > self.most * usual
        if usual == 0 or not beyond.any():
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
    gap = report.losses - report.best_losses
    best = _winsorize(report.best_losses, count)
    losses = best + _winsorize(gap, count)
    numbers = {**report.numbers, "losses": losses, "best_losses": best}
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


def cap_figures(
    report: Report, peers: Int64, groups: Sequence[Reported]
) -> tuple[Report, dict[int, tuple[str, ...]]]:
    """Limit implausible numbers in the reports of nodes on other machines.

    Args:
      report: the merged reports.
      peers: index of each node's peer, [n].
      groups: numbers of features.

    Returns:
      the report with plausible numbers, and the names of outliers by node number.
    """
    distinct = sorted(set(peers.tolist()))
    if not isinstance(report, LossReport) or len(distinct) < FEWEST:
        return report, {}
    figures = _Figures(dict(report.numbers), peers, distinct)
    _cap_losses(figures)
    for group in groups:
        names = [name for name in group.numbers if name in figures.numbers]
        middles = {name: figures.medians(name) for name in names}
        usual = {name: median(values) for name, values in middles.items()}
        for name in names:
            limit = group.numbers[name] * reference(middles[name])
            unknown = {name: math.nan} if group.optional else usual
            figures.replace_beyond(name, limit, unknown)
    if not figures.outliers:
        return report, {}
    named = {
        int(report.nodes[node]): tuple(sorted(names))
        for node, names in sorted(figures.outliers.items())
    }
    return replace(report, numbers=figures.numbers), named


@dataclass
class _Figures:
    """Numbers of a round's reports, while outliers are replaced.

    Args:
      numbers: by name, [n].
      peers: index of each node's peer, [n].
      distinct: indices of all peers.
      outliers: names of replaced numbers by the index of a node.
    """

    numbers: dict[str, Float64]
    peers: Int64
    distinct: Sequence[int]
    outliers: dict[int, set[str]] = field(default_factory=dict)

    def medians(self, name: str) -> list[float]:
        """Median of each peer's finite numbers; NaN if a peer has none."""
        return self.medians_of(self.numbers[name])

    def medians_of(self, values: Float64) -> list[float]:
        if len(self.distinct) == len(self.peers):  # every peer is one node
            return list(values.tolist())
        parts = [values[self.peers == peer] for peer in self.distinct]
        known = [part[np.isfinite(part)] for part in parts]
        return [float(np.median(part)) if len(part) else math.nan for part in known]

    def replace_beyond(
        self, name: str, limit: float, replacements: Mapping[str, float]
    ) -> None:
        """Replace numbers of nodes whose number `name` exceeds the limit."""
        beyond = np.abs(self.numbers[name]) > limit
        if not beyond.any():
            return
        for other, value in replacements.items():
            self.numbers[other] = np.where(beyond, value, self.numbers[other])
        self.note(name, beyond)

    def note(self, name: str, beyond: Flags) -> None:
        for node in np.flatnonzero(beyond).tolist():
            self.outliers.setdefault(node, set()).add(name)


def _cap_losses(figures: _Figures) -> None:
    """An implausible loss counts as the median, and an implausible gap as the median
    gap."""
    for name in ("losses", "best_losses"):
        usual = reference(figures.medians(name))
        figures.replace_beyond(name, _MAX_LOSS * usual, {name: usual})

    best = figures.numbers["best_losses"]
    gaps = figures.numbers["losses"] - best
    middles = figures.medians_of(gaps)
    limit = max(
        _MAX_GAP * reference(middles), _NOISE * reference(figures.medians("best_losses"))
    )
    beyond = ~(np.abs(gaps) <= limit)
    if beyond.any():
        losses = figures.numbers["losses"]
        figures.numbers["losses"] = np.where(beyond, best + median(middles), losses)
        figures.note("losses", beyond)


def reference(figures: Sequence[float]) -> float:
    """Typical magnitude: the median of magnitudes, or the second largest if that is 0.

    >>> reference([1.0, 3.0, 1e30]), reference([0.0, 0.0, 1e30])
    (3.0, 0.0)
    """
    known = [abs(figure) for figure in figures if math.isfinite(figure)]
    if not known:
        return 0.0
    return median(known) or sorted(known)[max(0, len(known) - 2)]


def median(figures: Sequence[float]) -> float:
    """Return numpy's median, in a tenth of its time for a few figures."""
    if any(map(math.isnan, figures)):
        return math.nan
    ordered = sorted(figures)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return float(ordered[half])
    return float((ordered[half - 1] + ordered[half]) / 2)


def _winsorize(values: Float64, count: int) -> Float64:
    """Limit values to the range that remains without `count` finite values at either
    end."""
    known = np.sort(values[np.isfinite(values)])
    if len(known) <= 2 * count:
        return values
    return np.clip(values, known[count], known[-1 - count])


def _distances(vectors: Float32, start: Float32) -> Float64:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.sqrt(np.square(vectors - start, dtype=np.float64).sum(axis=1)))
