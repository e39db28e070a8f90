"""Adaptive τ against τ = 10 while something varies: the number of nodes, the time of an aggregation, or the budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure as Picture
from scipy.stats import spearmanr

from fedbudget.budget import Budget
from fedbudget.experiments.figures.figure import CASES, Claim, Figure, GridSize
from fedbudget.experiments.figures.rows import Rows, distinct, mean, means, where
from fedbudget.experiments.figures.style import BASELINE, COLOURS, MARKERS, TAU, case_line, finish, log_scale, picture
from fedbudget.experiments.sweep import Sweep
from fedbudget.settings import Settings

FIXED = 10
"""What the paper found to be a good fixed τ in all cases."""

SIMILAR = 0.05
"""A loss that is higher by no more than this share counts as similar."""

TREND = 0.8
"""A rank correlation of at least this counts as rising, and of at most its negative as falling."""


@dataclass(frozen=True)
class VariedSetting:
    """What varies.

    Args:
      setting: its name among the settings.
      label: of the axis, with its unit.
      values, few: all values, and those for a first look.
      number: a value as it is in the results, as a number.
      log: whether the axis is logarithmic.
      almost: the paper says of it "(almost) all", which is taken for nine in ten.
      trend: the sign of the change of τ* that the paper reports, if any, in Cases 1, 2 and 4.
      claim: the claim of that trend.
    """

    setting: str
    label: str
    values: Sequence[Any]
    few: Sequence[Any]
    number: Callable[[Any], float] = float
    log: bool = True
    almost: bool = False
    trend: int = 0
    claim: str = ""


def seconds(budget: str) -> float:
    """A budget of time, as it is in the results, in seconds."""
    return next(iter(Budget.parse((budget,)).limits.values()))


NODES = VariedSetting("nodes", "number of nodes", (5, 10, 20, 50, 100, 200, 500), (5, 50, 500))
AGGREGATION = VariedSetting(
    "aggregation_factor",
    "time of an aggregation, times that of the prototype",
    (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
    (0.1, 1.0, 10.0),
    almost=True,
    trend=1,
    claim="τ* grows with the time of an aggregation",
)
BUDGET = VariedSetting(
    "budget",
    "budget (s)",
    tuple((f"time={seconds}s",) for seconds in (5, 10, 15, 20, 30, 45, 60)),
    tuple((f"time={seconds}s",) for seconds in (5, 15, 45)),
    number=seconds,
    log=False,
    trend=-1,
    claim="τ* falls as the budget grows, except in Case 3",
)


def varying(name: str, title: str, task: str, varied: VariedSetting) -> Figure:
    """The figure of one task and of what varies in it."""

    def sweep(base: Settings, size: GridSize) -> Sweep:
        values = [
            list(value) if isinstance(value, tuple) else value for value in size.choose(varied.values, varied.few)
        ]
        grid: dict[str, Any] = {"case": CASES, varied.setting: values, "tau": ["adaptive", FIXED], "seeds": size.runs}
        return Sweep.of(base, grid)

    return Figure(
        name, title, (task,), sweep, lambda rows: _draw(rows, varied), lambda rows: _claims(rows, title, varied)
    )


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's: 1 where y only rises with x, -1 where it only falls, 0 where it stays the same."""

    return 0.0 if len(set(y)) == 1 else float(spearmanr(x, y).statistic)


def _draw(rows: Rows, varied: VariedSetting) -> Picture:
    drawn = picture(13, 5.2)
    panels = drawn.subplot_mosaic("T1234;TABCD", width_ratios=[1.5, 1, 1, 1, 1])
    values, x = _values(rows, varied)
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


def _claims(rows: Rows, title: str, varied: VariedSetting) -> list[Claim]:
    values, x = _values(rows, varied)
    excess = {
        (case, value): mean(where(rows, case=case, tau="adaptive", **{varied.setting: value}), "loss")
        / mean(where(rows, case=case, tau=str(FIXED), **{varied.setting: value}), "loss")
        - 1
        for case in CASES
        for value in values
    }
    (case, value), worst = max(excess.items(), key=lambda item: item[1])
    better = sum(share <= 0 for share in excess.values())
    similar = sum(share <= SIMILAR for share in excess.values())
    claims = [
        Claim(
            f"{title}: better than or similar to τ = {FIXED} in {'almost ' if varied.almost else ''}all settings",
            f"loss lower in {better} of {len(excess)} settings, and at most {SIMILAR:.0%} higher in {similar}; at "
            f"worst {worst:+.1%}, in Case {case} at {value}",
            similar >= (0.9 if varied.almost else 1) * len(excess),
        )
    ]
    if varied.trend:
        trends = {
            each: rank_correlation(
                x, means(where(rows, case=each, tau="adaptive"), varied.setting, values, "update_weighted_tau")
            )
            for each in (1, 2, 4)
        }
        measured = ", ".join(f"{trend:+.2f} in Case {each}" for each, trend in trends.items())
        claims.append(
            Claim(
                f"{title}: {varied.claim}",
                f"rank correlation {measured}",
                all(varied.trend * trend >= TREND for trend in trends.values()),
            )
        )
    return claims


def _values(rows: Rows, varied: VariedSetting) -> tuple[list[Any], list[float]]:
    """What varies, as it is in the rows, and as numbers."""
    values = distinct(rows, varied.setting)
    return values, [varied.number(value) for value in values]
