"""What one of many may say of itself: figures out of all proportion to the others' are not believed.

An aggregator cannot check a loss or a smoothness that a peer reports, but it can compare it with what the others
report. With three peers or more, a figure beyond a multiple of their median counts as unknown, or as the median. So a
lie has either no effect or one within that multiple, whoever tells it; and reports of honest nodes, which are within
it, stay as they are to the bit. Peers are compared, not nodes: who speaks for a hundred nodes has one voice here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedbudget.arrays import Float64
from fedbudget.protocol.messages import Report
from fedbudget.protocol.sums import DIVERGENCES, SLOPES

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
    believed, doubts = list(reports), [set[str]() for _ in reports]
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
    ordered, half = sorted(figures), len(figures) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2)


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

        def median(report: Report, beyond: Any, name: str = name, usual: float = usual) -> Report:
            return _with(report, {name: np.where(beyond, usual, getattr(report, name))})

        _replace_beyond(reports, doubts, name, _LOSS * usual, median)
    gaps = [report.losses - report.best_losses for report in reports]
    middles = _each_median(gaps)
    usual, of_loss = middle(middles), reference(_medians(reports, "best_losses"))
    most = max(_GAP * reference(middles), _NOISE * of_loss)
    if (np.abs(np.concatenate(gaps)) <= most).all():
        return
    for index, (report, gap) in enumerate(zip(reports, gaps, strict=True)):
        beyond = ~(np.abs(gap) <= most)
        if beyond.any():
            reports[index] = replace(report, losses=np.where(beyond, report.best_losses + usual, report.losses))
            doubts[index].add("losses")


def _bound_divergences(reports: list[Report], doubts: list[set[str]]) -> None:
    names = [name for name in DIVERGENCES if getattr(reports[0], name) is not None]
    middles = {name: _medians(reports, name) for name in names}
    usual = {name: middle(values) for name, values in middles.items()}

    def as_usual(report: Report, beyond: Any) -> Report:
        return _with(report, {name: np.where(beyond, usual[name], getattr(report, name)) for name in names})

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
    if any(each is None for each in values) or not (np.abs(np.concatenate(values)) > most).any():
        return
    for index, each in enumerate(values):
        beyond = np.abs(each) > most
        if beyond.any():
            reports[index] = replacement(reports[index], beyond)
            doubts[index].add(name)
