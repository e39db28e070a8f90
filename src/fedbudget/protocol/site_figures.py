"""Figures of models at one site, with their errors, and their form in reports.

All figures of a site are on the same rows. Errors are standard errors of the mean over
rows. Figures that a node keeps to itself are NaN in its report.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedbudget.arrays import Float64, Int64
from fedbudget.evaluation.metrics import RowScores
from fedbudget.protocol.messages import FIGURES, PersonalReport, PersonalRound

Kept = Literal["", "few rows", "one class"]
"""Why a node keeps the global model; empty if it fitted candidates."""

_KEPT: tuple[Kept, ...] = ("", "few rows", "one class")
METRICS = ("loss", "accuracy", "rmse")


@dataclass(frozen=True)
class SiteFigure:
    """A figure of one model at one node.

    Args:
      value: the metric.
      error: its standard error.
    """

    value: float
    error: float


@dataclass(frozen=True)
class SiteFigures:
    """Figures of all models at one node, on the same rows.

    Args:
      metric: `accuracy`, `rmse` (in the unit of the model) or `loss`.
      rows: rows of the node.
      measured: rows that the figures are for.
      held_out: whether these rows were held out of the training.
      trivial: the most frequent class or the mean of the node; None without targets.
      alone: the same model, trained on this node only; None if the node is too small.
      shared: the global model; None if the node has too few rows.
      personal: the personal model; None in the same case.
      gain: how much better the personal model is than `alone`: positive if it is better,
        with the error of the difference; None without `alone`.
      correction: how much better the personal model is than the global one.
      weights: shares of the global model, of corrections and of `alone` in the personal
        model.
      kept: why the node keeps the global model.
    """

    metric: str
    rows: int
    measured: int
    held_out: bool
    trivial: SiteFigure | None
    alone: SiteFigure | None
    shared: SiteFigure | None
    personal: SiteFigure | None
    gain: SiteFigure | None
    correction: SiteFigure | None
    weights: tuple[float, float, float]
    kept: Kept = ""

    def in_unit(self, unit: float) -> "SiteFigures":
        """Return the figures in the unit of the target.

        Args:
          unit: standard deviation by which real targets were divided.
        """
        if self.metric != "rmse":
            return self

        def scaled(figure: SiteFigure | None) -> SiteFigure | None:
            return figure and SiteFigure(unit * figure.value, unit * figure.error)

        return replace(
            self,
            trivial=scaled(self.trivial),
            alone=scaled(self.alone),
            shared=scaled(self.shared),
            personal=scaled(self.personal),
            gain=scaled(self.gain),
            correction=scaled(self.correction),
        )

    @property
    def served(self) -> bool:
        """Whether the global model is better here than a trivial prediction."""
        if self.trivial is None or self.shared is None:
            return True
        better = self.shared.value - self.trivial.value
        return better > 0 if self.metric == "accuracy" else better < 0


def trivial_scores(scores: RowScores, others: RowScores) -> Float64:
    """Return the scores of a constant that the other rows determine, [rows]."""
    if scores.metric == "accuracy":
        values, counts = np.unique(others.targets, return_counts=True)
        return np.asarray(scores.targets == values[counts.argmax()], np.float64)
    return np.asarray(np.square(scores.targets - others.targets.mean()), np.float64)


def figure_of(metric: str, values: Float64) -> SiteFigure:
    """Return the mean of the rows' scores; its root for squared errors."""
    mean = float(values.mean())
    error = _error(values)
    if metric != "rmse":
        return SiteFigure(mean, error)
    root = math.sqrt(mean)
    return SiteFigure(root, error / (2 * root) if root else 0.0)


def difference_of(metric: str, values: Float64, others: Float64) -> SiteFigure:
    """Return how much better the first model is, from the same rows."""
    gap = values - others
    mean = float(gap.mean())
    error = _error(gap)
    if metric == "accuracy":
        return SiteFigure(mean, error)
    if metric == "loss":
        return SiteFigure(-mean, error)
    first = math.sqrt(float(values.mean()))
    second = math.sqrt(float(others.mean()))
    total = first + second
    return SiteFigure(second - first, error / total if total else 0.0)


def _error(values: Float64) -> float:
    """Return the standard error of the mean; of one row, the value itself."""
    if len(values) == 1:
        return abs(float(values[0]))
    return float(values.std(ddof=1) / math.sqrt(len(values)))


# Reports.


def report_of(
    broadcast: PersonalRound, nodes: Int64, sizes: Int64, figures: Sequence[SiteFigures]
) -> PersonalReport:
    """Return the report of nodes; figures that they keep to themselves are NaN.

    Args:
      broadcast: the request.
      nodes: numbers of the nodes.
      sizes: D_i.
      figures: figures of the nodes; none if they keep them to themselves.
    """
    count = len(nodes)
    numbers = {name: np.full(count, math.nan) for name in broadcast.report.numbers}
    for index, each in enumerate(figures if numbers else ()):
        for name, value in _to_numbers(each).items():
            numbers[name][index] = value
    return PersonalReport(round=broadcast.round, nodes=nodes, sizes=sizes, numbers=numbers)


def _to_numbers(figures: SiteFigures) -> dict[str, float]:
    numbers = {
        "metric": METRICS.index(figures.metric),
        "rows": figures.rows,
        "measured": figures.measured,
        "held_out": figures.held_out,
        "kept": _KEPT.index(figures.kept),
        "weight_shared": figures.weights[0],
        "weight_corrected": figures.weights[1],
        "weight_alone": figures.weights[2],
    }
    for name in FIGURES:
        figure: SiteFigure | None = getattr(figures, name)
        if figure is not None:
            numbers[name] = figure.value
            numbers[f"{name}_error"] = figure.error
    return numbers


def figures_of(report: PersonalReport) -> dict[int, SiteFigures]:
    """Return the figures by node number; without nodes that keep theirs.

    Numbers come from other machines: figures that are impossible are left out.
    """
    found = {}
    for index, node in enumerate(report.nodes.tolist()):
        numbers = {name: float(each[index]) for name, each in report.numbers.items()}
        figures = _from_numbers(numbers)
        if figures is not None:
            found[node] = figures
    return found


def _from_numbers(numbers: dict[str, float]) -> SiteFigures | None:
    def figure(name: str) -> SiteFigure | None:
        value = numbers[name]
        return SiteFigure(value, numbers[f"{name}_error"]) if math.isfinite(value) else None

    if not numbers or not math.isfinite(numbers["metric"]):
        return None
    shared = figure("shared")
    personal = figure("personal")
    metric = int(numbers["metric"])
    kept = int(numbers["kept"]) if math.isfinite(numbers["kept"]) else 0
    known = 0 <= metric < len(METRICS) and 0 <= kept < len(_KEPT)
    missing = shared is None or personal is None
    if not known or (missing and _KEPT[kept] != "few rows"):
        return None
    counts = numbers["rows"], numbers["measured"]
    if not all(0 <= count < 2**53 for count in counts):
        return None
    return SiteFigures(
        METRICS[metric],
        int(counts[0]),
        int(counts[1]),
        bool(numbers["held_out"]),
        figure("trivial"),
        figure("alone"),
        shared,
        personal,
        figure("gain"),
        figure("correction"),
        (
            numbers["weight_shared"],
            numbers["weight_corrected"],
            numbers["weight_alone"],
        ),
        _KEPT[kept],
    )
