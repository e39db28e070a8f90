"""Loss and accuracy at the end of the budget against fixed τ, in Cases 1-4, with adaptive τ and centralized descent.

Adaptive τ against τ = 10 while something varies: the number of nodes, the time of an aggregation, or the budget.

The average τ*, weighted by updates, against the control parameter φ.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from scipy.stats import spearmanr

from fedbudget.budget.budget import Budget
from fedbudget.experiments.figures import figure
from fedbudget.experiments.figures.figure import (
    ACCURACY,
    BASELINE,
    CASES,
    COLOURS,
    FEW_TAUS,
    LOSS,
    MARKERS,
    TAU,
    TAUS,
    CaseLosses,
    Claim,
    Figure,
    GridSize,
    Rows,
    by_fixed_tau,
    case_line,
    distinct,
    finish,
    joined,
    log_scale,
    mean,
    means,
    picture,
    where,
)
from fedbudget.experiments.sweep import Sweep
from fedbudget.settings.settings import Settings

NEAR = 0.05
"""Of the way from the best to the worst fixed τ: as near to the best as this counts as near-optimal."""


@dataclass(frozen=True)
class LossAgainstTau(Figure):
    """The figure of one model and dataset.

    Args:
      taus, few: the fixed τ, and those for a first look.
      slower: with whole shards, Case 3 has more to do in a step than Case 1, and so ends with a higher loss.
    """

    taus: tuple[int, ...] = TAUS
    few: tuple[int, ...] = FEW_TAUS
    slower: bool = False

    def runs(self, base: Settings, size: GridSize) -> Sweep:
        taus = ["adaptive", *size.choose(self.taus, self.few)]
        federated = Sweep.of(
            base, {"method": ["paper"], "case": CASES, "tau": taus, "seeds": size.runs}
        )
        return joined(
            federated, Sweep.of(base, {"method": ["centralized"], "seeds": size.runs})
        )

    def draw(self, rows: Rows) -> Picture:
        labels = {"loss": LOSS}
        if any(row["accuracy"] is not None for row in rows):
            labels["accuracy"] = ACCURACY
        drawn = picture(5.2 * len(labels), 4.2)
        for axis, (name, label) in zip(
            drawn.subplots(1, len(labels), squeeze=False)[0], labels.items(), strict=True
        ):
            _panel(axis, rows, name)
            log_scale(axis, (1, 3, 10, 30, 100))
            finish(
                axis,
                "τ (fixed), or average τ* weighted by updates (adaptive)",
                label,
                legend=name == "loss",
            )
        return drawn

    def claims(self, rows: Rows) -> list[Claim]:
        cases = {case: CaseLosses(rows, case) for case in CASES}
        losses = {case: cell.paper for case, cell in cases.items()}
        best = [cell.best_tau for cell in cases.values()]
        centralized = mean(where(rows, method="centralized"), "loss")
        better = [str(case) for case, loss in losses.items() if loss < centralized]
        claims = [
            self._near(
                "loss", [cell.regret(cell.paper) for cell in cases.values()], figure.CLOSE
            ),
            self.claim(
                "the best fixed τ differs from case to case",
                f"best τ {', '.join(best)} in Cases 1-4",
                len(set(best)) > 1,
                figure.DIFFERENT,
            ),
            self.claim(
                "adaptive τ is better than centralized descent in some case",
                f"loss {', '.join(f'{loss:.4f}' for loss in losses.values())} in Cases 1-4, {centralized:.4f} "
                f"centralized; lower in {_cases(better)}",
                bool(better),
                figure.DISTRIBUTED,
            ),
        ]
        if any(row["accuracy"] is not None for row in rows):
            regrets = [_accuracy_regret(rows, case) for case in CASES]
            claims.insert(1, self._near("accuracy", regrets, figure.CLOSE_ACCURACY))
        if self.slower:
            worse = "Case 3 is worse than Case 1, because a step takes longer"
            measured = f"loss {losses[3]:.4f} in Case 3, {losses[1]:.4f} in Case 1"
            claims.append(self.claim(worse, measured, losses[3] > losses[1], figure.CASE_3))
        return claims

    def _near(self, what: str, regrets: Sequence[float], quote: str) -> Claim:
        measured = f"regret {', '.join(f'{value:.3f}' for value in regrets)} in Cases 1-4; up to {NEAR} counts as near"
        text = f"adaptive τ's {what} is near the best fixed τ's in all cases"
        return self.claim(text, measured, max(regrets) <= NEAR, quote)


def _cases(numbers: Sequence[str]) -> str:
    return (
        f"{'Case' if len(numbers) == 1 else 'Cases'} {', '.join(numbers)}"
        if numbers
        else "no case"
    )


def _accuracy_regret(rows: Rows, case: int) -> float:
    """As of losses: 0 for as good as the best fixed τ, 1 for as bad as the worst."""
    fixed = by_fixed_tau(rows, case, "accuracy").values()
    best = max(fixed)
    worst = min(fixed)
    own = mean(where(rows, method="paper", case=case, tau="adaptive"), "accuracy")
    return (best - own) / (best - worst) if best > worst else 0.0


def _panel(axis: Axes, rows: Rows, name: str) -> None:
    for case in CASES:
        fixed = by_fixed_tau(rows, case, name)
        case_line(axis, case, list(map(float, fixed)), list(fixed.values()))
        adaptive = where(rows, method="paper", case=case, tau="adaptive")
        label = "adaptive τ, by case" if case == CASES[-1] else None
        star: dict[str, Any] = {
            "marker": "*",
            "markersize": 15,
            "markeredgecolor": "black",
            "linestyle": "none",
        }
        axis.plot(
            mean(adaptive, "update_weighted_tau"),
            mean(adaptive, name),
            color=COLOURS[case],
            label=label,
            **star,
        )
    axis.axhline(
        mean(where(rows, method="centralized"), name),
        color=BASELINE,
        linewidth=1,
        label="centralized",
    )


FIXED = 10
"""What the paper found to be a good fixed τ in all cases."""

SIMILAR = 0.05
"""A loss that is higher by no more than this share counts as similar."""

ALMOST_ALL = 0.9
"""Of all settings: what the paper's "(almost) all" and "mostly" are taken for."""

TREND = 0.8
"""A rank correlation of at least this counts as rising, and of at most its negative as falling."""


@dataclass(frozen=True)
class Trend:
    """How τ* changes with what varies: its sign, in which cases, as a claim, and in the paper's words."""

    sign: int
    cases: tuple[int, ...]
    claim: str
    quote: str


@dataclass(frozen=True)
class VariedSetting:
    """What varies.

    Args:
      setting: its name among the settings.
      label: of the axis, with its unit.
      values, few: all values, and those for a first look.
      number: a value as it is in the results, as a number.
      log: whether the axis is logarithmic.
      quote: of how adaptive τ compares to the fixed one.
      better: the paper says "better in (almost) all cases" of it, and not "better than or similar to ... in all cases".
      trend: how τ* changes, if the paper says so.
      falls_at_last: the paper's words for a τ* that falls where the value is the largest, if it does.
    """

    setting: str
    label: str
    values: Sequence[Any]
    few: Sequence[Any]
    number: Callable[[Any], float] = float
    quote: str = ""
    log: bool = True
    better: bool = False
    trend: Trend | None = None
    falls_at_last: str = ""


def seconds(budget: str) -> float:
    """A budget of time, as it is in the results, in seconds."""
    return next(iter(Budget.parse((budget,)).limits.values()))


NODES = VariedSetting(
    "nodes",
    "number of nodes",
    (5, 10, 20, 50, 100, 200, 500),
    (5, 50, 500),
    quote=figure.NODES,
)
AGGREGATION = VariedSetting(
    "aggregation_factor",
    "time of an aggregation, times that of the prototype",
    (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
    (0.1, 1.0, 10.0),
    quote=figure.BETTER,
    better=True,
    trend=Trend(1, CASES, "τ* grows with the time of an aggregation", figure.LARGER_TAU),
    falls_at_last=figure.SLIGHTLY_DECREASES,
)
BUDGET = VariedSetting(
    "budget",
    "budget (s)",
    [[f"time={seconds}s"] for seconds in (5, 10, 15, 20, 30, 45, 60)],
    [[f"time={seconds}s"] for seconds in (5, 15, 45)],
    number=seconds,
    quote=figure.BUDGET,
    log=False,
    trend=Trend(
        -1, (1, 2, 4), "τ* falls as the budget grows, except in Case 3", figure.DECREASES
    ),
)


@dataclass(frozen=True)
class Varying(Figure):
    """The figure of one task and of what varies in it."""

    varied: VariedSetting

    def runs(self, base: Settings, size: GridSize) -> Sweep:
        values = size.choose(self.varied.values, self.varied.few)
        taus = ["adaptive", FIXED]
        return Sweep.of(
            base,
            {"case": CASES, self.varied.setting: values, "tau": taus, "seeds": size.runs},
        )

    def draw(self, rows: Rows) -> Picture:
        varied, (values, x) = self.varied, self._values(rows)
        drawn = picture(13, 5.2)
        panels = drawn.subplot_mosaic("T1234;TABCD", width_ratios=[1.5, 1, 1, 1, 1])
        for case, upper, lower in zip(CASES, "1234", "ABCD", strict=True):
            here = where(rows, case=case)
            adaptive = where(here, tau="adaptive")
            case_line(
                panels["T"],
                case,
                x,
                means(adaptive, varied.setting, values, "update_weighted_tau"),
            )
            for name, axis in (("loss", panels[upper]), ("accuracy", panels[lower])):
                fixed = means(where(here, tau=str(FIXED)), varied.setting, values, name)
                axis.plot(
                    x,
                    fixed,
                    color=BASELINE,
                    linestyle="--",
                    marker="x",
                    markersize=4,
                    label=f"τ = {FIXED}",
                )
                ours = means(adaptive, varied.setting, values, name)
                axis.plot(
                    x,
                    ours,
                    color=COLOURS[case],
                    marker=MARKERS[case],
                    markersize=4,
                    label="adaptive τ",
                )
            panels[upper].set_title(f"Case {case}", fontsize="medium")
        for name, axis in panels.items():
            if varied.log:
                log_scale(axis, x if name == "T" else x[::3])
            label = {"T": TAU, "1": "loss", "A": "accuracy"}.get(name, "")
            finish(
                axis,
                varied.label if name == "T" else varied.label.partition(",")[0],
                label,
                legend=name in "T1234",
            )
        return drawn

    def claims(self, rows: Rows) -> list[Claim]:
        varied, (values, x) = self.varied, self._values(rows)
        taus = {
            case: means(
                where(rows, case=case, tau="adaptive"),
                varied.setting,
                values,
                "update_weighted_tau",
            )
            for case in CASES
        }
        claims = [self._comparison(rows, values)]
        if (trend := varied.trend) is not None:
            trends = {case: rank_correlation(x, taus[case]) for case in trend.cases}
            measured = ", ".join(
                f"{value:+.2f} in Case {case}" for case, value in trends.items()
            )
            holds = all(trend.sign * value >= TREND for value in trends.values())
            claims.append(
                self.claim(trend.claim, f"rank correlation {measured}", holds, trend.quote)
            )
        if varied.falls_at_last:
            ends = [
                f"{max(each[:-1]):.1f} to {each[-1]:.1f} in Case {case}"
                for case, each in taus.items()
            ]
            measured = (
                f"τ* from its largest before to that at {values[-1]}: {', '.join(ends)}"
            )
            falls = all(each[-1] < max(each[:-1]) for each in taus.values())
            claims.append(
                self.claim(
                    "τ* is smaller again at the largest factor",
                    measured,
                    falls,
                    varied.falls_at_last,
                )
            )
        return claims

    def _comparison(self, rows: Rows, values: Sequence[Any]) -> Claim:
        """Adaptive τ's loss against the fixed one's, in every setting."""
        varied = self.varied
        excess = {}
        for case, value in product(CASES, values):
            here = where(rows, case=case, **{varied.setting: value})
            excess[case, value] = (
                mean(where(here, tau="adaptive"), "loss")
                / mean(where(here, tau=str(FIXED)), "loss")
                - 1
            )
        (case, value), worst = max(excess.items(), key=lambda item: item[1])
        better = sum(share < 0 for share in excess.values())
        similar = sum(share <= SIMILAR for share in excess.values())
        measured = f"loss lower in {better} of {len(excess)} settings"
        if not varied.better:
            measured += f", and at most {SIMILAR:.0%} higher in {similar}"
        measured += f"; at worst {worst:+.1%}, in Case {case} at {value}"
        if varied.better:
            text = f"better than τ = {FIXED} in almost all settings"
            holds = better >= ALMOST_ALL * len(excess)
        else:
            text = f"better than or similar to τ = {FIXED} in all settings"
            holds = similar == len(excess)
        return self.claim(text, measured, holds, varied.quote)

    def _values(self, rows: Rows) -> tuple[list[Any], list[float]]:
        """What varies, as it is in the rows, and as numbers."""
        values = distinct(rows, self.varied.setting)
        return values, [self.varied.number(value) for value in values]


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's: 1 where y only rises with x, -1 where it only falls, 0 where it stays the same."""
    return 0.0 if len(set(y)) == 1 else float(spearmanr(x, y).statistic)


_PHI = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
_FEW = (0.0025, 0.025, 0.25)
_LINEAR = 0.9  # the share of τ*'s variance that a line explains, from which on it counts as about linear
_CONSTANT = 0.05  # the share of its mean by which τ* may vary and still count as constant
_OF_PAPER = 0.025  # the φ whose order of cases the others are compared with
_MUCH = 0.5  # a τ* that changes less than as the root of φ, between two φ next to each other, does not change much


class Sensitivity(Figure):
    def runs(self, base: Settings, size: GridSize) -> Sweep:
        return Sweep.of(
            base, {"case": CASES, "phi": size.choose(_PHI, _FEW), "seeds": size.runs}
        )

    def draw(self, rows: Rows) -> Picture:
        drawn = picture(5.6, 4.2)
        axis = drawn.subplots()
        for case in CASES:
            case_line(axis, case, distinct(rows, "phi"), _taus(rows, case))
        axis.set_xscale("log")
        finish(axis, "φ", TAU, legend=True)
        return drawn

    def claims(self, rows: Rows) -> list[Claim]:
        logs = [math.log(phi) for phi in distinct(rows, "phi")]
        fits = {case: _line(logs, _taus(rows, case)) for case in CASES if case != 3}
        measured = [
            f"slope {slope:.1f}, R² {share:.2f} in Case {case}"
            for case, (slope, share) in fits.items()
        ]
        linear = all(slope < 0 and share >= _LINEAR for slope, share in fits.values())
        same = _taus(rows, 3)
        low = min(same)
        high = max(same)
        constant = (high - low) / float(np.mean(same)) <= _CONSTANT
        return [
            self._order(rows),
            self.claim(
                "τ* falls about linearly in log φ in Cases 1, 2 and 4",
                ", ".join(measured),
                linear,
                figure.LINEAR,
            ),
            self.claim(
                "in Case 3 τ* does not depend on φ",
                f"τ* between {low:.1f} and {high:.1f}",
                constant,
                figure.SAME,
            ),
            self._steepness(rows, logs),
        ]

    def _order(self, rows: Rows) -> Claim:
        phis = distinct(rows, "phi")
        taus = {case: _taus(rows, case) for case in CASES}
        reference = phis.index(_OF_PAPER)
        kept = [
            np.sign(taus[one][at] - taus[other][at])
            == np.sign(taus[one][reference] - taus[other][reference])
            for one, other in combinations(CASES, 2)
            for at in range(len(phis))
            if at != reference
        ]
        return self.claim(
            "the order of τ* in Cases 1-4 is mostly the same for every φ",
            f"{sum(kept)} of {len(kept)} pairs of cases are in the order that they have with φ = {_OF_PAPER}",
            sum(kept) >= ALMOST_ALL * len(kept),
            figure.ORDER,
        )

    def _steepness(self, rows: Rows, logs: Sequence[float]) -> Claim:
        steepest = {
            case: float(np.abs(np.diff(np.log(_taus(rows, case))) / np.diff(logs)).max())
            for case in CASES
        }
        measured = ", ".join(f"{value:.2f}" for value in steepest.values())
        return self.claim(
            "small changes of φ do not change τ* much",
            f"between two φ next to each other τ* changes at most as φ to the power {measured} in Cases 1-4; up to "
            f"{_MUCH} counts as not much",
            max(steepest.values()) <= _MUCH,
            figure.SMALL_CHANGES,
        )


def _taus(rows: Rows, case: int) -> list[float]:
    return means(
        where(rows, case=case), "phi", distinct(rows, "phi"), "update_weighted_tau"
    )


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """The slope of the best line, and the share of the variance of y that it explains."""
    slope, _ = np.polyfit(x, y, 1)
    return float(slope), float(np.corrcoef(x, y)[0, 1] ** 2)
