"""The paper's figures of means over runs.

- `LossAgainstTau`: final loss and accuracy against fixed τ, with adaptive τ and centralized
  descent.
- `Varying`: adaptive τ against τ = 10 while one setting varies.
- `Sensitivity`: the average τ* against the control parameter φ.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from scipy.stats import linregress, spearmanr

from fedbudget.budget.budget import Budget
from fedbudget.experiments.figures.figure import (
    BASELINE,
    CASES,
    COLOURS,
    FEW_TAUS,
    TAU,
    TAUS,
    Claim,
    Figure,
    GridSize,
    Points,
    Rows,
    by_fixed_tau,
    case_line,
    case_losses,
    distinct,
    draw_cases,
    finish,
    in_cases,
    joined,
    listed,
    log_scale,
    mean,
    means,
    per_case,
    picture,
    where,
)
from fedbudget.experiments.sweep import Sweep
from fedbudget.settings.settings import Settings

NEAR = 0.05
"""Largest regret that counts as near the best fixed τ."""

FIXED = 10
"""A good fixed τ in all cases, according to the paper."""

SIMILAR = 0.05
"""Largest relative excess of a loss that counts as similar."""

ALMOST_ALL = 0.9
"""Fraction of settings for the paper's "(almost) all" and "mostly"."""

TREND = 0.8
"""Smallest absolute rank correlation that counts as a trend."""

_PHI = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
_FEW_PHI = (0.0025, 0.025, 0.25)
_REFERENCE_PHI = 0.025  # the order of cases is compared with the one at this φ
_LINEAR = 0.9  # smallest R² that counts as about linear
_CONSTANT = 0.05  # largest range of τ*, relative to its mean, that counts as constant
_NEAR_QUOTES = {
    "loss": "We see that the proposed approach performs close to the optimal point for all "
    "cases and all models",
    "accuracy": "Our proposed solution (represented by a single marker for each case) "
    "gives an average τ and loss/accuracy that is close to the optimum in all cases.",
}
_MUCH = 0.5  # largest power of φ, between neighbouring φ, that counts as not much


@dataclass(frozen=True)
class LossAgainstTau(Figure):
    """Loss and accuracy of one model and dataset.

    Args:
      taus, few: fixed τ of the full and of the small grid.
    """

    taus: tuple[int, ...] = TAUS
    few: tuple[int, ...] = FEW_TAUS

    def runs(self, base: Settings, size: GridSize) -> Sweep:
        taus = ["adaptive", *size.choose(self.taus, self.few)]
        seeds = size.runs
        return joined(
            Sweep.of(
                base, {"method": ["paper"], "case": CASES, "tau": taus, "seeds": seeds}
            ),
            Sweep.of(base, {"method": ["centralized"], "seeds": seeds}),
        )

    def draw(self, rows: Rows) -> Picture:
        labels = {"loss": "loss on all training samples"}
        if distinct(rows, "accuracy"):
            labels["accuracy"] = "accuracy on test samples"
        drawn = picture(5.2 * len(labels), 4.2)
        axes = drawn.subplots(1, len(labels), squeeze=False)[0]
        for axis, (name, label) in zip(axes, labels.items(), strict=True):
            _draw_taus(axis, rows, name)
            log_scale(axis, FEW_TAUS)
            x_label = "τ (fixed), or average τ* weighted by updates (adaptive)"
            finish(axis, x_label, label, legend=name == "loss")
        return drawn

    def claims(self, rows: Rows) -> list[Claim]:
        claims = []
        for name, quote in _NEAR_QUOTES.items():
            if distinct(rows, name):
                regrets = [each.regret(each.paper) for each in case_losses(rows, name)]
                claims.append(
                    self.claim(
                        f"adaptive τ's {name} is near the best fixed τ's in all cases",
                        f"regret {in_cases(regrets, '.3f')}; up to {NEAR} counts as near",
                        max(regrets) <= NEAR,
                        quote,
                    )
                )
        cases = case_losses(rows)
        best = [each.best_tau for each in cases]
        claims.append(
            self.claim(
                "the best fixed τ differs from case to case",
                f"best τ {in_cases(best)}",
                len(set(best)) > 1,
                "We also see that the (empirically) optimal value of τ is different for "
                "different cases and models, so a fixed value of τ does not work well for "
                "all cases.",
            )
        )
        losses = {each.case: each.paper for each in cases}
        centralized = mean(where(rows, method="centralized"), "loss")
        better = [case for case, loss in losses.items() if loss < centralized]
        plural = "s" if len(better) > 1 else ""
        lower = f"Case{plural} {listed(better)}" if better else "no case"
        claims.append(
            self.claim(
                "adaptive τ is better than centralized descent in some case",
                f"loss {in_cases(losses.values(), '.4f')}, {centralized:.4f} centralized; "
                f"lower in {lower}",
                bool(better),
                "In some cases, the distributed approach can perform better than the "
                "centralized approach, because for a given amount of time budget, "
                "federated learning is able to make use of the computation resource at "
                "multiple nodes.",
            )
        )
        if self.whole_shards:
            claims.append(
                self.claim(
                    "Case 3 is worse than Case 1, because a step takes longer",
                    f"loss {losses[3]:.4f} in Case 3, {losses[1]:.4f} in Case 1",
                    losses[3] > losses[1],
                    "For DGD approaches, Case 3 does not perform as well as Case 1, "
                    "because the amount of data at each node in Case 3 is larger than that "
                    "in Case 1",
                )
            )
        return claims


def _draw_taus(axis: Axes, rows: Rows, name: str) -> None:
    for case in CASES:
        fixed = by_fixed_tau(rows, case, name)
        case_line(axis, case, list(map(float, fixed)), list(fixed.values()))
        adaptive = where(rows, method="paper", case=case, tau="adaptive")
        axis.plot(
            mean(adaptive, "update_weighted_tau"),
            mean(adaptive, name),
            "*",
            color=COLOURS[case],
            markersize=15,
            markeredgecolor="black",
            label="adaptive τ, by case" if case == CASES[-1] else None,
        )
    centralized = mean(where(rows, method="centralized"), name)
    axis.axhline(centralized, color=BASELINE, linewidth=1, label="centralized")


@dataclass(frozen=True)
class Trend:
    """A claim that τ* rises (sign 1) or falls (sign -1) with the setting in some cases."""

    sign: int
    cases: tuple[int, ...]
    claim: str
    quote: str


def seconds(budget: str) -> float:
    """Return a budget of time in seconds.

    >>> seconds("time=2min")
    120.0
    """
    return Budget.parse((budget,)).limits["time"]


@dataclass(frozen=True)
class Varying(Figure):
    """Adaptive τ and τ = 10 in one task while one setting varies.

    Args:
      setting: its name in the settings.
      label: of the axis, with its unit.
      values, few: values of the full and of the small grid.
      quote: the paper's comparison of adaptive and fixed τ.
      log: whether the axis is logarithmic.
      better: the paper's claim is "better in (almost) all cases" instead of "better than or
        similar to ... in all cases".
      trend: the paper's claim about τ*, if any.
      falls_at_last: the paper's words for a τ* that falls at the largest value, if any.
    """

    setting: str
    label: str
    values: list[Any]
    few: list[Any]
    quote: str
    log: bool = True
    better: bool = False
    trend: Trend | None = None
    falls_at_last: str = ""

    def runs(self, base: Settings, size: GridSize) -> Sweep:
        values = size.choose(self.values, self.few)
        grid = {"case": CASES, self.setting: values, "tau": ["adaptive", FIXED]}
        return Sweep.of(base, {**grid, "seeds": size.runs})

    def draw(self, rows: Rows) -> Picture:
        x = self._positions(rows)
        drawn = picture(13, 5.2)
        panels = drawn.subplot_mosaic("T1234;TABCD", width_ratios=[1.5, 1, 1, 1, 1])
        for case in CASES:
            case_line(panels["T"], case, x, self._taus(rows, case))
        finish(panels["T"], self.label, TAU, legend=True)

        def lines(case: int, name: str) -> dict[str, Points]:
            fixed = self._means(rows, name, case=case, tau=str(FIXED))
            own = self._means(rows, name, case=case, tau="adaptive")
            return {f"τ = {FIXED}": (x, fixed), "adaptive τ": (x, own)}

        axes = [[panels[letter] for letter in line] for line in ("1234", "ABCD")]
        x_label = self.label.partition(",")[0]
        draw_cases(axes, x_label, {"loss": "loss", "accuracy": "accuracy"}, lines)
        if self.log:
            for letter, axis in panels.items():
                log_scale(axis, x if letter == "T" else x[::3])
        return drawn

    def claims(self, rows: Rows) -> list[Claim]:
        values = distinct(rows, self.setting)
        taus = {case: self._taus(rows, case) for case in CASES}
        claims = [self._comparison(rows, values)]
        if (trend := self.trend) is not None:
            x = self._positions(rows)
            trends = {case: rank_correlation(x, taus[case]) for case in trend.cases}
            measured = f"rank correlation {per_case(trends, '+.2f')}"
            holds = all(trend.sign * value >= TREND for value in trends.values())
            claims.append(self.claim(trend.claim, measured, holds, trend.quote))
        if self.falls_at_last:
            ends = {case: (max(each[:-1]), each[-1]) for case, each in taus.items()}
            texts = {case: f"{top:.1f} to {end:.1f}" for case, (top, end) in ends.items()}
            claims.append(
                self.claim(
                    "τ* is smaller again at the largest factor",
                    f"τ* from its largest before to that at {values[-1]}: "
                    f"{per_case(texts)}",
                    all(end < top for top, end in ends.values()),
                    self.falls_at_last,
                )
            )
        return claims

    def _comparison(self, rows: Rows, values: Sequence[Any]) -> Claim:
        """Compare the loss of adaptive and fixed τ in every setting."""
        excess = {}
        for case, value in product(CASES, values):
            here = where(rows, case=case, **{self.setting: value})
            own, fixed = means(here, "tau", ("adaptive", str(FIXED)), "loss")
            excess[case, value] = own / fixed - 1
        (case, value), worst = max(excess.items(), key=lambda item: item[1])
        at_worst = f"at worst {worst:+.1%}, in Case {case} at {value}"
        better = sum(share < 0 for share in excess.values())
        lower = f"loss lower in {better} of {len(excess)} settings"
        if self.better:
            return self.claim(
                f"better than τ = {FIXED} in almost all settings",
                f"{lower}; {at_worst}",
                better >= ALMOST_ALL * len(excess),
                self.quote,
            )
        similar = sum(share <= SIMILAR for share in excess.values())
        return self.claim(
            f"better than or similar to τ = {FIXED} in all settings",
            f"{lower}, and at most {SIMILAR:.0%} higher in {similar}; {at_worst}",
            similar == len(excess),
            self.quote,
        )

    def _taus(self, rows: Rows, case: int) -> list[float]:
        return self._means(rows, "update_weighted_tau", case=case, tau="adaptive")

    def _means(self, rows: Rows, name: str, **values: Any) -> list[float]:
        """Return the means of a column over rows with these values, for each setting."""
        setting = self.setting
        return means(where(rows, **values), setting, distinct(rows, setting), name)

    def _positions(self, rows: Rows) -> list[float]:
        """Return the values of the setting as numbers."""
        values = distinct(rows, self.setting)
        return [seconds(each) if isinstance(each, str) else float(each) for each in values]


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Spearman's rank correlation; 0 if all y are equal."""
    return 0.0 if len(set(y)) == 1 else float(spearmanr(x, y).statistic)


class Sensitivity(Figure):
    """The average τ* of one task against φ."""

    def runs(self, base: Settings, size: GridSize) -> Sweep:
        phis = size.choose(_PHI, _FEW_PHI)
        return Sweep.of(base, {"case": CASES, "phi": phis, "seeds": size.runs})

    def draw(self, rows: Rows) -> Picture:
        drawn = picture(5.6, 4.2)
        axis = drawn.subplots()
        for case, taus in _taus(rows).items():
            case_line(axis, case, distinct(rows, "phi"), taus)
        axis.set_xscale("log")
        finish(axis, "φ", TAU, legend=True)
        return drawn

    def claims(self, rows: Rows) -> list[Claim]:
        taus = _taus(rows)
        logs = [math.log(phi) for phi in distinct(rows, "phi")]
        fits = {case: linregress(logs, taus[case]) for case in CASES if case != 3}
        texts = {
            case: f"slope {fit.slope:.1f}, R² {fit.rvalue**2:.2f}"
            for case, fit in fits.items()
        }
        low = min(taus[3])
        high = max(taus[3])
        steepest = [
            float(np.abs(np.diff(np.log(each)) / np.diff(logs)).max())
            for each in taus.values()
        ]
        return [
            self._order(rows, taus),
            self.claim(
                "τ* falls about linearly in log φ in Cases 1, 2 and 4",
                per_case(texts),
                all(fit.slope < 0 and fit.rvalue**2 >= _LINEAR for fit in fits.values()),
                "The value of τ* decreases approximately linearly with log φ",
            ),
            self.claim(
                "in Case 3 τ* does not depend on φ",
                f"τ* between {low:.1f} and {high:.1f}",
                (high - low) / float(np.mean(taus[3])) <= _CONSTANT,
                "For Case 3, τ* remains the same with different φ",
            ),
            self.claim(
                "small changes of φ do not change τ* much",
                "between two φ next to each other τ* changes at most as φ to the power "
                f"{in_cases(steepest, '.2f')}; up to {_MUCH} counts as not much",
                max(steepest) <= _MUCH,
                "We also see that small changes of φ does not change τ* much",
            ),
        ]

    def _order(self, rows: Rows, taus: dict[int, list[float]]) -> Claim:
        reference = distinct(rows, "phi").index(_REFERENCE_PHI)
        kept = []
        for one, other in combinations(CASES, 2):
            signs = np.sign(np.subtract(taus[one], taus[other]))
            kept += np.delete(signs == signs[reference], reference).tolist()
        return self.claim(
            "the order of τ* in Cases 1-4 is mostly the same for every φ",
            f"{sum(kept)} of {len(kept)} pairs of cases are in the order that they have "
            f"with φ = {_REFERENCE_PHI}",
            sum(kept) >= ALMOST_ALL * len(kept),
            "We see that the relationship among τ* in different cases is mostly maintained "
            "with different values of φ.",
        )


def _taus(rows: Rows) -> dict[int, list[float]]:
    """Return the average τ* for each φ, by case."""
    phis = distinct(rows, "phi")
    return {
        case: means(where(rows, case=case), "phi", phis, "update_weighted_tau")
        for case in CASES
    }
