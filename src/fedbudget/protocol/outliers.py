"""Limits on the numbers that nodes on other machines report.

The aggregator cannot verify a reported smoothness or divergence. `cap_figures` compares
each number with those of the other peers. With three or more peers, a number beyond a
multiple of their median counts as unknown, or as the median. A false number therefore has a
limited effect, and reports of honest nodes, which lie within that multiple, stay as they
are to the bit. Peers are compared, not nodes: a peer with a hundred nodes counts once.

Near convergence the numbers of most nodes may be tiny, and those of a node with other data
are not. A limit therefore never refers to less than the typical number in the first round
that has one.

Losses have rules of their own, because the median would silence a node that a new w harms
(objections.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from fedbudget.arrays import Flags, Float64, Int64
from fedbudget.protocol.features.feature import Reported
from fedbudget.protocol.messages import LossReport, Report

FEWEST = 3
"""Fewest peers, or nodes, among which an outlier can be identified."""

MOST_SAMPLES = 10_000
"""A peer cannot claim more than this multiple of the median number of samples."""


@dataclass(frozen=True)
class Outlier:
    """A reported number beyond its limit.

    Args:
      name: name of the number; `loss change` is F_i(w(t₀)) - F_i(w^f), and `loss` is
        F_i(w^f).
      reported: the reported number.
      limit: the limit that it exceeds.
      counted: the number that counts instead; NaN if the number counts as unknown.
    """

    name: str
    reported: float
    limit: float
    counted: float

    def __str__(self) -> str:
        done = "it is ignored"
        if math.isfinite(self.counted):
            done = f"it counts as {self.counted:.3g}"
        return (
            f"{self.name} {self.reported:.3g}; the numbers of the other nodes allow "
            f"{self.limit:.3g}, so {done}"
        )


@dataclass(frozen=True)
class PeerGroups:
    """The peers of a round's nodes.

    Args:
      index: index of each node's peer, [n].
    """

    index: Int64

    @cached_property
    def distinct(self) -> Sequence[int]:
        """Indices of all peers, rising."""
        return sorted(set(self.index.tolist()))

    def medians(self, values: Float64) -> list[float]:
        """Median of each peer's finite values; NaN if a peer has none."""
        if len(self.distinct) == len(self.index):  # every peer is one node
            return list(values.tolist())
        parts = [values[self.index == peer] for peer in self.distinct]
        known = [part[np.isfinite(part)] for part in parts]
        return [float(np.median(part)) if len(part) else math.nan for part in known]

    def totals(self, values: Int64) -> Int64:
        """Sum of the values of each node's peer, [n]."""
        if len(self.distinct) == len(self.index):
            return values
        _, peer = np.unique(self.index, return_inverse=True)
        return np.bincount(peer, values)[peer].astype(np.int64)

    def minority(self, nodes: Flags) -> bool:
        """Whether these nodes belong to fewer than half of the peers."""
        return 2 * len(set(self.index[nodes].tolist())) < len(self.distinct)


@dataclass(frozen=True)
class CappedFigures:
    """Numbers of features within their limits.

    Args:
      report: the report; the same object if no number was changed.
      scales: typical number in the first round that has one, by name.
      outliers: outliers by node number.
    """

    report: Report
    scales: Mapping[str, float]
    outliers: dict[int, tuple[Outlier, ...]]


def cap_figures(
    report: Report,
    peers: PeerGroups,
    groups: Sequence[Reported],
    scales: Mapping[str, float],
) -> CappedFigures:
    """Limit implausible numbers of features in the reports of nodes on other machines.

    Args:
      report: the merged reports.
      peers: their peers.
      groups: numbers of features.
      scales: typical numbers of earlier rounds, as in `CappedFigures`.
    """
    if not isinstance(report, LossReport) or len(peers.distinct) < FEWEST:
        return CappedFigures(report, scales, {})
    figures = _Figures(dict(report.numbers))
    first: dict[str, float] = {}
    for group in groups:
        names = [name for name in group.numbers if name in figures.numbers]
        middles = {name: peers.medians(figures.numbers[name]) for name in names}
        typical = {name: reference(values) for name, values in middles.items()}
        for name in names:
            if not scales.get(name):
                first[name] = typical[name]
            floor = group.floors.get(name, name)
            scale = max(typical[name], typical.get(floor, 0.0), scales.get(floor, 0.0))
            limit = group.numbers[name] * scale
            if not (np.abs(figures.numbers[name]) > limit).any():
                continue
            usual = {name: math.nan}
            if not group.optional:
                usual = {each: median(values) for each, values in middles.items()}
            figures.replace_beyond(name, limit, usual)
    if first:
        scales = {**scales, **first}
    if not figures.changed:
        return CappedFigures(report, scales, {})
    named = {
        int(report.nodes[node]): tuple(outliers)
        for node, outliers in sorted(figures.outliers.items())
    }
    return CappedFigures(replace(report, numbers=figures.numbers), scales, named)


@dataclass
class _Figures:
    """Numbers of a round's reports, while outliers are replaced.

    Args:
      numbers: by name, [n].
      outliers: outliers by the index of a node.
      changed: whether a number was replaced.
    """

    numbers: dict[str, Float64]
    outliers: dict[int, list[Outlier]] = field(default_factory=dict)
    changed: bool = False

    def replace_beyond(
        self, name: str, limit: float, replacements: Mapping[str, float]
    ) -> None:
        """Replace numbers of nodes whose number `name` exceeds the limit.

        A limit of 0 names no outlier: the other nodes have nothing to compare with, such
        as nodes without a memory of earlier rounds.
        """
        reported = self.numbers[name]
        beyond = np.abs(reported) > limit
        self.changed = True
        for other, value in replacements.items():
            self.numbers[other] = np.where(beyond, value, self.numbers[other])
        for node in np.flatnonzero(beyond).tolist() if limit > 0 else ():
            found = Outlier(name, float(reported[node]), limit, replacements[name])
            self.outliers.setdefault(node, []).append(found)


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
