"""How a single run of 30 seconds goes, round by round, in Cases 1-4: simulated, or for real with the simulation beside.

For real it is the paper's prototype in small: five node processes that talk to an aggregator over this machine's
network, with steps and messages that take about as long as its Raspberry Pis and its Wi-Fi took (see `PROTOTYPE`), and
30 seconds of wall clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from fedbudget.experiments.cells import PROTOTYPE
from fedbudget.experiments.figures import figure
from fedbudget.experiments.figures.figure import (
    CASES,
    Claim,
    Figure,
    GridSize,
    Rows,
    case_line,
    finish,
    mean,
    picture,
    where,
)
from fedbudget.experiments.sweep import Sweep
from fedbudget.settings.settings import Settings

STABLE = 0.5
"""A deviation of τ* over its mean that is no more than this counts as stable."""

MUCH_LONGER = 2.0
"""A step that takes at least so many times as long takes much longer."""

FLUCTUATES = 0.1
"""A deviation of b over its mean that is at least this is a fluctuation."""

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
_SIDES = {"simulated": "simulation", "measured": "prototype"}


@dataclass(frozen=True)
class Instantaneous(Figure):
    """The figure of one task.

    Args:
      slower: with whole shards, a step takes longer in Case 3 than in others.
    """

    slower: bool = False

    def runs(self, base: Settings, size: GridSize) -> Sweep:
        base = replace(base, budget=("time=30s",), evaluations=50)
        grid: dict[str, Sequence[int] | int] = {"case": CASES, "seeds": 1}
        if self.engine != "network":
            return Sweep.of(base, grid, each="round")
        base = replace(base, nodes=len(PROTOTYPE.paces))
        return replace(
            Sweep.of(base, {"costs": list(_SIDES), **grid}, each="round"), testbed=PROTOTYPE
        )

    def draw(self, rows: Rows) -> Picture:
        if self.engine == "network":
            return _side_by_side(rows)
        drawn = picture(13, 5.6)
        for axis, name in zip(drawn.subplots(2, 4).flat, _PANELS, strict=True):
            _panel(axis, rows, name, legend=name == "loss")
        return drawn

    def claims(self, rows: Rows) -> list[Claim]:
        if self.engine == "network":
            rows = where(rows, costs="measured")
        cases = {case: where(rows, case=case) for case in CASES}
        claims = [*self._tau(cases), *self._estimates(cases)]
        if self.slower:
            c = {case: mean(own, "c_time") for case, own in cases.items()}
            factor = c[3] / max(c[1], c[2], c[4])
            claims.append(
                self.claim(
                    "a step takes much longer in Case 3",
                    f"mean c {_listed(c, '.3g')} s in Cases 1-4: {factor:.1f} times as long as in any other; from "
                    f"{MUCH_LONGER:g} on counts as much",
                    factor >= MUCH_LONGER,
                    figure.LARGER_C,
                )
            )
        b = {
            case: _variation([row["b_time"] for row in own if row["tau"]])
            for case, own in cases.items()
        }
        measured = f"deviation over mean {_listed(b, '.2f')} in Cases 1-4; from {FLUCTUATES} on counts as fluctuating"
        claims.append(
            self.claim(
                "b fluctuates", measured, min(b.values()) >= FLUCTUATES, figure.FLUCTUATES
            )
        )
        return claims

    def _tau(self, cases: Mapping[int, Rows]) -> list[Claim]:
        settled = {case: _settled(own) for case, own in cases.items()}
        varies = {case: _variation(taus) for case, taus in settled.items()}
        middle = {
            case: float(np.median(taus)) if taus else 0.0 for case, taus in settled.items()
        }
        last = {
            case: [row["tau"] for row in own if row["tau"]][-1]
            for case, own in cases.items()
        }
        ends = [f"{middle[case]:g} to {last[case]} in Case {case}" for case in CASES]
        claims = [
            self.claim(
                "τ* is stable after it has adapted",
                f"deviation over mean, between a third and nine tenths of the time: {_listed(varies, '.2f')} in Cases "
                f"1-4; up to {STABLE} counts as stable",
                max(varies.values()) <= STABLE,
                figure.STABLE,
            ),
            self.claim(
                "τ* falls at the end",
                f"from its median to that of the last round: {', '.join(ends)}",
                all(last[case] < middle[case] for case in CASES),
                figure.END,
            ),
        ]
        if self.engine == "network":
            measured = f"median {_listed(middle, 'g')} in Cases 1-4"
            claims.insert(
                0,
                self.claim(
                    "τ* is above 1 in Cases 1 and 2",
                    measured,
                    min(middle[1], middle[2]) > 1,
                ),
            )
        return claims

    def _estimates(self, cases: Mapping[int, Rows]) -> list[Claim]:
        means = {
            name: {case: mean(own, name) for case, own in cases.items()}
            for name in ("delta", "rho", "beta")
        }
        larger = {
            name: min(each[2], each[4]) > max(each[1], each[3])
            for name, each in means.items()
        }
        slopes = [
            abs(row[name])
            for row in cases[3]
            for name in ("rho", "beta")
            if row[name] is not None
        ]
        return [
            self.claim(
                "δ̂ is larger in Cases 2 and 4",
                f"mean δ̂ {_listed(means['delta'], '.3g')} in Cases 1-4",
                larger["delta"],
                figure.DELTA,
            ),
            self.claim(
                "ρ̂ and β̂ are larger in Cases 2 and 4",
                f"mean ρ̂ {_listed(means['rho'], '.3g')} and mean β̂ {_listed(means['beta'], '.3g')} in Cases 1-4",
                larger["rho"] and larger["beta"],
                figure.RHO_AND_BETA,
            ),
            self.claim(
                "in Case 3 ρ̂ and β̂ are zero",
                f"largest of {len(slopes)} estimates: {max(slopes, default=0):g}",
                bool(slopes) and max(slopes) == 0,
                figure.ZERO,
            ),
        ]


def _side_by_side(rows: Rows) -> Picture:
    """Each quantity twice, simulated on the left and measured on the right, with the same scale."""
    drawn = picture(13, 10.4)
    axes = drawn.subplots(len(_PANELS) // 2, 4).reshape(len(_PANELS), 2)
    for (left, right), name in zip(axes, _PANELS, strict=True):
        right.sharey(left)
        for axis, (costs, side) in zip((left, right), _SIDES.items(), strict=True):
            _panel(axis, where(rows, costs=costs), name, legend=name == "loss")
            axis.set_title(side, fontsize="medium")
        right.set_ylabel("")
    return drawn


def _panel(axis: Axes, rows: Rows, name: str, *, legend: bool) -> None:
    for case in CASES:
        known = [row for row in where(rows, case=case) if row[name] is not None]
        here = [row for row in known if name != "tau" or row["tau"]]
        case_line(
            axis,
            case,
            [row["spent_time"] for row in here],
            [row[name] for row in here],
            markers=False,
        )
    finish(axis, "time spent (s)", _PANELS[name], legend=legend)


def _settled(rounds: Rows) -> list[float]:
    """τ after it has adapted and before the end of the budget cuts it."""
    end = max(row["spent_time"] for row in rounds)
    return [
        float(row["tau"]) for row in rounds if end / 3 <= row["spent_time"] <= 0.9 * end
    ]


def _variation(values: list[float]) -> float:
    return float(np.std(values) / np.mean(values)) if values else 0.0


def _listed(values: Mapping[int, float], form: str) -> str:
    return ", ".join(f"{value:{form}}" for value in values.values())
