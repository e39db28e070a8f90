"""Adaptive τ against τ = 10 while something varies: the number of nodes, the time of an aggregation, or the budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from matplotlib.figure import Figure as Picture
from scipy.stats import spearmanr

from fedbudget.budget import Budget
from fedbudget.experiments.figures import paper_words
from fedbudget.experiments.figures.figure import CASES, Claim, Figure, GridSize
from fedbudget.experiments.figures.rows import Rows, distinct, mean, means, where
from fedbudget.experiments.figures.style import BASELINE, COLOURS, MARKERS, TAU, case_line, finish, log_scale, picture
from fedbudget.experiments.sweep import Sweep
from fedbudget.settings import Settings

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


NODES = VariedSetting("nodes", "number of nodes", (5, 10, 20, 50, 100, 200, 500), (5, 50, 500), quote=paper_words.NODES)
AGGREGATION = VariedSetting(
    "aggregation_factor",
    "time of an aggregation, times that of the prototype",
    (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
    (0.1, 1.0, 10.0),
    quote=paper_words.BETTER,
    better=True,
    trend=Trend(1, CASES, "τ* grows with the time of an aggregation", paper_words.LARGER_TAU),
    falls_at_last=paper_words.SLIGHTLY_DECREASES,
)
BUDGET = VariedSetting(
    "budget",
    "budget (s)",
    [[f"time={seconds}s"] for seconds in (5, 10, 15, 20, 30, 45, 60)],
    [[f"time={seconds}s"] for seconds in (5, 15, 45)],
    number=seconds,
    quote=paper_words.BUDGET,
    log=False,
    trend=Trend(-1, (1, 2, 4), "τ* falls as the budget grows, except in Case 3", paper_words.DECREASES),
)


@dataclass(frozen=True)
class Varying(Figure):
    """The figure of one task and of what varies in it."""

    varied: VariedSetting

    def runs(self, base: Settings, size: GridSize) -> Sweep:
        values = size.choose(self.varied.values, self.varied.few)
        taus = ["adaptive", FIXED]
        return Sweep.of(base, {"case": CASES, self.varied.setting: values, "tau": taus, "seeds": size.runs})

    def draw(self, rows: Rows) -> Picture:
        varied, (values, x) = self.varied, self._values(rows)
        drawn = picture(13, 5.2)
        panels = drawn.subplot_mosaic("T1234;TABCD", width_ratios=[1.5, 1, 1, 1, 1])
        for case, upper, lower in zip(CASES, "1234", "ABCD", strict=True):
            here = where(rows, case=case)
            adaptive = where(here, tau="adaptive")
            case_line(panels["T"], case, x, means(adaptive, varied.setting, values, "update_weighted_tau"))
            for name, axis in (("loss", panels[upper]), ("accuracy", panels[lower])):
                fixed = means(where(here, tau=str(FIXED)), varied.setting, values, name)
                axis.plot(x, fixed, color=BASELINE, linestyle="--", marker="x", markersize=4, label=f"τ = {FIXED}")
                ours = means(adaptive, varied.setting, values, name)
                axis.plot(x, ours, color=COLOURS[case], marker=MARKERS[case], markersize=4, label="adaptive τ")
            panels[upper].set_title(f"Case {case}", fontsize="medium")
        for name, axis in panels.items():
            if varied.log:
                log_scale(axis, x if name == "T" else x[::3])
            label = {"T": TAU, "1": "loss", "A": "accuracy"}.get(name, "")
            finish(axis, varied.label if name == "T" else varied.label.partition(",")[0], label, legend=name in "T1234")
        return drawn

    def claims(self, rows: Rows) -> list[Claim]:
        varied, (values, x) = self.varied, self._values(rows)
        taus = {
            case: means(where(rows, case=case, tau="adaptive"), varied.setting, values, "update_weighted_tau")
            for case in CASES
        }
        claims = [self._comparison(rows, values)]
        if (trend := varied.trend) is not None:
            trends = {case: rank_correlation(x, taus[case]) for case in trend.cases}
            measured = ", ".join(f"{value:+.2f} in Case {case}" for case, value in trends.items())
            holds = all(trend.sign * value >= TREND for value in trends.values())
            claims.append(self.claim(trend.claim, f"rank correlation {measured}", holds, trend.quote))
        if varied.falls_at_last:
            ends = [f"{max(each[:-1]):.1f} to {each[-1]:.1f} in Case {case}" for case, each in taus.items()]
            measured = f"τ* from its largest before to that at {values[-1]}: {', '.join(ends)}"
            falls = all(each[-1] < max(each[:-1]) for each in taus.values())
            claims.append(
                self.claim("τ* is smaller again at the largest factor", measured, falls, varied.falls_at_last)
            )
        return claims

    def _comparison(self, rows: Rows, values: Sequence[Any]) -> Claim:
        """Adaptive τ's loss against the fixed one's, in every setting."""
        varied, excess = self.varied, {}
        for case, value in product(CASES, values):
            here = where(rows, case=case, **{varied.setting: value})
            excess[case, value] = (
                mean(where(here, tau="adaptive"), "loss") / mean(where(here, tau=str(FIXED)), "loss") - 1
            )
        (case, value), worst = max(excess.items(), key=lambda item: item[1])
        better = sum(share < 0 for share in excess.values())
        similar = sum(share <= SIMILAR for share in excess.values())
        measured = f"loss lower in {better} of {len(excess)} settings"
        if not varied.better:
            measured += f", and at most {SIMILAR:.0%} higher in {similar}"
        measured += f"; at worst {worst:+.1%}, in Case {case} at {value}"
        if varied.better:
            text, holds = f"better than τ = {FIXED} in almost all settings", better >= ALMOST_ALL * len(excess)
        else:
            text, holds = f"better than or similar to τ = {FIXED} in all settings", similar == len(excess)
        return self.claim(text, measured, holds, varied.quote)

    def _values(self, rows: Rows) -> tuple[list[Any], list[float]]:
        """What varies, as it is in the rows, and as numbers."""
        values = distinct(rows, self.varied.setting)
        return values, [self.varied.number(value) for value in values]


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's: 1 where y only rises with x, -1 where it only falls, 0 where it stays the same."""
    return 0.0 if len(set(y)) == 1 else float(spearmanr(x, y).statistic)
