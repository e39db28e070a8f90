"""How a single run of 30 seconds goes, round by round, in Cases 1-4: simulated, or for real.

For real it is the paper's prototype in small: five processes that talk over this machine's network, two of them four
times as fast as the others, and 30 seconds of wall clock.
"""

from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure as Picture

from fedbudget.experiments.figures.figure import CASES, Claim, Figure, GridSize
from fedbudget.experiments.figures.rows import Rows, mean, where
from fedbudget.experiments.figures.style import case_line, finish, picture
from fedbudget.experiments.sweep import Sweep
from fedbudget.settings import Settings

_SPEEDS = (4.0, 4.0, 1.0, 1.0, 1.0)  # two laptops and three Raspberry Pis

_PANELS = {
    "loss": "loss of this round's samples",
    "accuracy": "accuracy on test samples",
    "tau": "τ*",
    "rho": "ρ̂",
    "beta": "β̂",
    "delta": "δ̂",
    "c_time": "c, a local update (s)",
    "b_time": "b, an aggregation (s)",
}


class Instantaneous(Figure):
    def runs(self, base: Settings, size: GridSize) -> Sweep:
        if self.engine == "network":
            base = replace(base, costs="measured", nodes=len(_SPEEDS), speeds=_SPEEDS)
        base = replace(base, budget=("time=30s",), evaluations=50)
        return Sweep.of(base, {"case": CASES, "seeds": 1}, each="round")

    def draw(self, rows: Rows) -> Picture:
        drawn = picture(13, 5.6)
        for axis, (name, label) in zip(drawn.subplots(2, 4).flat, _PANELS.items(), strict=True):
            for case in CASES:
                known = [row for row in where(rows, case=case) if row[name] is not None]
                here = [row for row in known if name != "tau" or row["tau"]]
                case_line(axis, case, [row["spent_time"] for row in here], [row[name] for row in here], markers=False)
            finish(axis, "time spent (s)", label, legend=name == "loss")
        return drawn

    def claims(self, rows: Rows) -> list[Claim]:
        delta = {case: mean(where(rows, case=case), "delta") for case in CASES}
        deltas = ", ".join(f"{value:.3g}" for value in delta.values())
        slopes = [abs(row[name]) for row in where(rows, case=3) for name in ("rho", "beta") if row[name] is not None]
        stable = [_variation(where(rows, case=case)) for case in CASES]
        return [
            self.claim(
                "δ̂ is larger in Cases 2 and 4",
                f"mean δ̂ {deltas} in Cases 1-4",
                min(delta[2], delta[4]) > max(delta[1], delta[3]),
            ),
            self.claim(
                "in Case 3 ρ̂ and β̂ are zero",
                f"largest of {len(slopes)} estimates: {max(slopes, default=0):g}",
                bool(slopes) and max(slopes) == 0,
            ),
            self.claim(
                "τ* is stable after it has adapted",
                "deviation over mean, between a third and nine tenths of the time: "
                f"{', '.join(f'{value:.2f}' for value in stable)} in Cases 1-4; up to 0.5 counts as stable",
                max(stable) <= 0.5,
            ),
        ]


def _variation(rounds: Rows) -> float:
    """Of τ, after it has adapted and before the end of the budget cuts it."""
    end = max(row["spent_time"] for row in rounds)
    taus = np.array([row["tau"] for row in rounds if end / 3 <= row["spent_time"] <= 0.9 * end], dtype=float)
    return float(taus.std() / taus.mean()) if len(taus) else 0.0
