"""The average τ*, weighted by updates, against the control parameter φ."""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from matplotlib.figure import Figure as Picture

from fedbudget.experiments.figures import paper_words
from fedbudget.experiments.figures.figure import CASES, Claim, Figure, GridSize
from fedbudget.experiments.figures.rows import Rows, distinct, means, where
from fedbudget.experiments.figures.style import TAU, case_line, finish, picture
from fedbudget.experiments.figures.varying import ALMOST_ALL
from fedbudget.experiments.sweep import Sweep
from fedbudget.settings import Settings

_PHI = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
_FEW = (0.0025, 0.025, 0.25)
_LINEAR = 0.9  # the share of τ*'s variance that a line explains, from which on it counts as about linear
_CONSTANT = 0.05  # the share of its mean by which τ* may vary and still count as constant
_OF_PAPER = 0.025  # the φ whose order of cases the others are compared with
_MUCH = 0.5  # a τ* that changes less than as the root of φ, between two φ next to each other, does not change much


class Sensitivity(Figure):
    def runs(self, base: Settings, size: GridSize) -> Sweep:
        return Sweep.of(base, {"case": CASES, "phi": size.choose(_PHI, _FEW), "seeds": size.runs})

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
        measured = [f"slope {slope:.1f}, R² {share:.2f} in Case {case}" for case, (slope, share) in fits.items()]
        linear = all(slope < 0 and share >= _LINEAR for slope, share in fits.values())
        same = _taus(rows, 3)
        low, high = min(same), max(same)
        constant = (high - low) / float(np.mean(same)) <= _CONSTANT
        return [
            self._order(rows),
            self.claim(
                "τ* falls about linearly in log φ in Cases 1, 2 and 4", ", ".join(measured), linear, paper_words.LINEAR
            ),
            self.claim(
                "in Case 3 τ* does not depend on φ",
                f"τ* between {low:.1f} and {high:.1f}",
                constant,
                paper_words.SAME,
            ),
            self._steepness(rows, logs),
        ]

    def _order(self, rows: Rows) -> Claim:
        phis, taus = distinct(rows, "phi"), {case: _taus(rows, case) for case in CASES}
        reference = phis.index(_OF_PAPER)
        kept = [
            np.sign(taus[one][at] - taus[other][at]) == np.sign(taus[one][reference] - taus[other][reference])
            for one, other in combinations(CASES, 2)
            for at in range(len(phis))
            if at != reference
        ]
        return self.claim(
            "the order of τ* in Cases 1-4 is mostly the same for every φ",
            f"{sum(kept)} of {len(kept)} pairs of cases are in the order that they have with φ = {_OF_PAPER}",
            sum(kept) >= ALMOST_ALL * len(kept),
            paper_words.ORDER,
        )

    def _steepness(self, rows: Rows, logs: Sequence[float]) -> Claim:
        steepest = {case: float(np.abs(np.diff(np.log(_taus(rows, case))) / np.diff(logs)).max()) for case in CASES}
        measured = ", ".join(f"{value:.2f}" for value in steepest.values())
        return self.claim(
            "small changes of φ do not change τ* much",
            f"between two φ next to each other τ* changes at most as φ to the power {measured} in Cases 1-4; up to "
            f"{_MUCH} counts as not much",
            max(steepest.values()) <= _MUCH,
            paper_words.SMALL_CHANGES,
        )


def _taus(rows: Rows, case: int) -> list[float]:
    return means(where(rows, case=case), "phi", distinct(rows, "phi"), "update_weighted_tau")


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """The slope of the best line, and the share of the variance of y that it explains."""
    slope, _ = np.polyfit(x, y, 1)
    return float(slope), float(np.corrcoef(x, y)[0, 1] ** 2)
