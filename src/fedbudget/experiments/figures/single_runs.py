"""Figures over time, in Cases 1-4.

- `Instantaneous`: a single run of 30 seconds, round by round. With engine network, the run
  repeats the paper's prototype on one machine: five node processes connect to an aggregator
  for 30 seconds of wall clock. Local updates and messages are slowed down to the speed of
  Raspberry Pis and Wi-Fi (see `PROTOTYPE`). The simulation is shown next to it.
- `Synchrony`: synchronous against asynchronous gradient descent, both with one local update
  between exchanges. Each point is the mean at the end of runs with that budget.
- `SingleSynchrony`: the same for single runs, because a mean hides sudden changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from fedbudget.experiments.cells import PROTOTYPE
from fedbudget.experiments.figures.figure import (
    CASES,
    CaseLines,
    Claim,
    Figure,
    GridSize,
    Points,
    Row,
    Rows,
    case_line,
    distinct,
    draw_cases,
    finish,
    in_cases,
    listed,
    mean,
    means,
    per_case,
    picture,
    where,
)
from fedbudget.experiments.figures.paper import SIMILAR, seconds
from fedbudget.experiments.sweep import Sweep
from fedbudget.settings.settings import Settings

STABLE = 0.5
"""Largest relative deviation of τ* that counts as stable."""

MUCH_LONGER = 2.0
"""Smallest ratio of durations that counts as much longer."""

FLUCTUATES = 0.1
"""Smallest relative deviation of b that counts as a fluctuation."""

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

MUCH_WORSE = 0.1
"""Relative excess of a loss above which it counts as much worse: twice `SIMILAR`."""

_LABELS = {"paper": "synchronous (τ = 1)", "asynchronous": "asynchronous"}
_SECONDS = 100  # budget of a single run
_EVALUATIONS = 200  # in a single run
_QUOTE = (
    "We see that the performance of asynchronous gradient descent is much worse than "
    "synchronous gradient descent for non-uniform data distribution in Cases 2 and 4, with "
    "slower convergence, sudden changes (indicating instability of the training process), "
    "and convergence to higher loss and lower accuracy values."
)


class Instantaneous(Figure):
    """Single runs of one task, simulated or over a network."""

    def runs(self, base: Settings, size: GridSize) -> Sweep:
        base = replace(base, budget=("time=30s",), evaluations=50)
        grid: dict[str, Sequence[int] | int] = {"case": CASES, "seeds": 1}
        if self.engine != "network":
            return Sweep.of(base, grid, each="round")
        base = replace(base, nodes=len(PROTOTYPE.paces))
        both = Sweep.of(base, {"costs": list(_SIDES), **grid}, each="round")
        return replace(both, testbed=PROTOTYPE)

    def draw(self, rows: Rows) -> Picture:
        if self.engine == "network":
            return _side_by_side(rows)
        drawn = picture(13, 5.6)
        for axis, name in zip(drawn.subplots(2, 4).flat, _PANELS, strict=True):
            _panel(axis, rows, name)
        return drawn

    def claims(self, rows: Rows) -> list[Claim]:
        if self.engine == "network":
            rows = where(rows, costs="measured")
        cases = {case: where(rows, case=case) for case in CASES}
        claims = [*self._tau(cases), *self._estimates(cases)]
        if self.whole_shards:
            c = _means(cases, "c_time")
            factor = c[3] / max(c[1], c[2], c[4])
            claims.append(
                self.claim(
                    "a step takes much longer in Case 3",
                    f"mean c {listed(c.values(), '.3g')} s in Cases 1-4: {factor:.1f} "
                    f"times as long as in any other; from {MUCH_LONGER:g} on counts as "
                    "much",
                    factor >= MUCH_LONGER,
                    "Case 3 of SVM (DGD) has a much larger value of c because it processes "
                    "more data than in other cases and thus takes more time, as explained "
                    "before.",
                )
            )
        varies = [
            _variation([row["b_time"] for row in own if row["tau"]])
            for own in cases.values()
        ]
        claims.append(
            self.claim(
                "b fluctuates",
                f"deviation over mean {in_cases(varies, '.2f')}; from {FLUCTUATES} on "
                "counts as fluctuating",
                min(varies) >= FLUCTUATES,
                "The value of b exhibits fluctuations because of the randomness of the "
                "wireless channel.",
            )
        )
        return claims

    def _tau(self, cases: Mapping[int, Rows]) -> list[Claim]:
        settled = {case: _settled(own) for case, own in cases.items()}
        varies = [_variation(taus) for taus in settled.values()]
        middle = {
            case: float(np.median(taus)) if taus else 0.0 for case, taus in settled.items()
        }
        last = {
            case: [row["tau"] for row in own if row["tau"]][-1]
            for case, own in cases.items()
        }
        ends = {case: f"{middle[case]:g} to {last[case]}" for case in CASES}
        claims = [
            self.claim(
                "τ* is stable after it has adapted",
                "deviation over mean, between a third and nine tenths of the time: "
                f"{in_cases(varies, '.2f')}; up to {STABLE} counts as stable",
                max(varies) <= STABLE,
                "We see that the value of τ* remains stable after an initial adaptation "
                "period, showing that the control algorithm is stable.",
            ),
            self.claim(
                "τ* falls at the end",
                f"from its median to that of the last round: {per_case(ends)}",
                all(last[case] < middle[case] for case in CASES),
                "The value of τ* decreases at the end due to adjustment caused by the "
                "system reaching the resource budget",
            ),
        ]
        if self.engine == "network":
            measured = f"median {in_cases(middle.values(), 'g')}"
            above = self.claim(
                "τ* is above 1 in Cases 1 and 2", measured, min(middle[1], middle[2]) > 1
            )
            claims.insert(0, above)
        return claims

    def _estimates(self, cases: Mapping[int, Rows]) -> list[Claim]:
        delta, rho, beta = (_means(cases, name) for name in ("delta", "rho", "beta"))
        slopes = [
            abs(row[name])
            for row in cases[3]
            for name in ("rho", "beta")
            if row[name] is not None
        ]
        return [
            self.claim(
                "δ̂ is larger in Cases 2 and 4",
                f"mean δ̂ {in_cases(delta.values(), '.3g')}",
                _larger(delta),
                "As expected, the gradient deviation δ is larger for Cases 2 and 4 where "
                "the data samples at different nodes are non-uniform.",
            ),
            self.claim(
                "ρ̂ and β̂ are larger in Cases 2 and 4",
                f"mean ρ̂ {listed(rho.values(), '.3g')} and mean β̂ "
                f"{in_cases(beta.values(), '.3g')}",
                _larger(rho) and _larger(beta),
                "The same is observed for ρ and β, indicating that the model parameter w "
                "is in a less smooth region for Cases 2 and 4.",
            ),
            self.claim(
                "in Case 3 ρ̂ and β̂ are zero",
                f"largest of {len(slopes)} estimates: {max(slopes, default=0):g}",
                bool(slopes) and max(slopes) == 0,
                "Thus, the estimated ρ and β values are zero by definition",
            ),
        ]


def _side_by_side(rows: Rows) -> Picture:
    """Draw each quantity twice on the same scale: simulated and measured."""
    drawn = picture(13, 10.4)
    axes = drawn.subplots(len(_PANELS) // 2, 4).reshape(len(_PANELS), 2)
    for pair, name in zip(axes, _PANELS, strict=True):
        pair[1].sharey(pair[0])
        for axis, (costs, side) in zip(pair, _SIDES.items(), strict=True):
            _panel(axis, where(rows, costs=costs), name)
            axis.set_title(side, fontsize="medium")
        pair[1].set_ylabel("")
    return drawn


def _panel(axis: Axes, rows: Rows, name: str) -> None:
    for case in CASES:
        known = [row for row in where(rows, case=case) if row[name] is not None]
        here = [row for row in known if name != "tau" or row["tau"]]
        x = [row["spent_time"] for row in here]
        case_line(axis, case, x, [row[name] for row in here], marker=None)
    finish(axis, "time spent (s)", _PANELS[name], legend=name == "loss")


def _settled(rounds: Rows) -> list[float]:
    """Return τ after its adaptation and before the end of the budget limits it."""
    end = max(row["spent_time"] for row in rounds)
    return [
        float(row["tau"]) for row in rounds if end / 3 <= row["spent_time"] <= 0.9 * end
    ]


def _means(cases: Mapping[int, Rows], name: str) -> dict[int, float]:
    return {case: mean(rows, name) for case, rows in cases.items()}


def _larger(values: Mapping[int, float]) -> bool:
    """Whether the values of Cases 2 and 4 are larger than those of Cases 1 and 3."""
    return min(values[2], values[4]) > max(values[1], values[3])


def _variation(values: Sequence[float]) -> float:
    return float(np.std(values) / np.mean(values)) if values else 0.0


class Synchrony(Figure):
    """Means over runs with different budgets."""

    def runs(self, base: Settings, size: GridSize) -> Sweep:
        times = size.choose((5, 10, 20, 35, 50, 75, 100), (5, 20, 100))
        budgets = [[f"time={seconds}s"] for seconds in times]
        grid = {"case": CASES, "method": list(_LABELS), "budget": budgets}
        return Sweep.of(base, {**grid, "tau": [1], "seeds": size.runs})

    def draw(self, rows: Rows) -> Picture:
        x = list(map(seconds, distinct(rows, "budget")))

        def lines(case: int, name: str) -> dict[str, Points]:
            return {
                label: (x, _method_means(rows, case, method, name))
                for method, label in _LABELS.items()
            }

        return _drawn("loss", "loss", lines, markers=True)

    def claims(self, rows: Rows) -> list[Claim]:
        excess = {}
        lost = {}
        slower = {}
        for case in CASES:
            synchronous, asynchronous = (
                np.array(_method_means(rows, case, method, "loss")) for method in _LABELS
            )
            excess[case] = asynchronous[-1] / synchronous[-1] - 1
            slower[case] = int(np.sum(asynchronous > synchronous))
            before, after = (
                _method_means(rows, case, each, "accuracy")[-1] for each in _LABELS
            )
            lost[case] = 100 * (after - before)
        times = distinct(rows, "budget")
        at_end = f"after {seconds(times[-1]):g} s, against synchronous"
        losses = f"loss {at_end}: {per_case(excess, '+.1%')}"
        drops = {case: lost[case] for case in (2, 4)}
        counts = {case: f"{slower[case]} of {len(times)} times" for case in (2, 4)}
        return [
            self.claim(
                "asynchronous is much worse in Cases 2 and 4",
                f"{losses}; more than {MUCH_WORSE:.0%} counts as much worse",
                min(excess[2], excess[4]) > MUCH_WORSE,
                _QUOTE,
            ),
            self.claim(
                "asynchronous has a lower accuracy in Cases 2 and 4",
                f"points of accuracy {at_end}: {per_case(drops, '+.1f')}",
                max(drops.values()) < 0,
                _QUOTE,
            ),
            self.claim(
                "asynchronous converges more slowly in Cases 2 and 4",
                f"its loss is higher at {per_case(counts)}",
                min(slower[2], slower[4]) == len(times),
                _QUOTE,
            ),
            self.claim(
                "asynchronous is similar or slightly better in Cases 1 and 3",
                f"{losses}; up to {SIMILAR:.0%} counts as similar",
                max(excess[1], excess[3]) <= SIMILAR,
                "With uniform data distribution (Cases 1 and 3), asynchronous gradient "
                "descent performs similar as or slightly better than synchronous gradient "
                "descent",
            ),
        ]


class SingleSynchrony(Figure):
    """Single runs, evaluated many times."""

    def runs(self, base: Settings, size: GridSize) -> Sweep:
        budget = (f"time={_SECONDS}s",)
        base = replace(base, tau=1, budget=budget, evaluations=_EVALUATIONS)
        return Sweep.of(
            base, {"case": CASES, "method": list(_LABELS), "seeds": 1}, each="round"
        )

    def draw(self, rows: Rows) -> Picture:
        def lines(case: int, name: str) -> dict[str, Points]:
            points: dict[str, Points] = {}
            for method, label in _LABELS.items():
                here = _evaluated(rows, case, method)
                x = [row["spent_time"] for row in here]
                points[label] = (x, [row[name] for row in here])
            return points

        return _drawn("test_loss", "loss on test samples", lines, markers=False)

    def claims(self, rows: Rows) -> list[Claim]:
        other, own = (
            [_largest_rise(_evaluated(rows, case, method)) for case in CASES]
            for method in _LABELS
        )
        return [
            self.claim(
                "asynchronous changes suddenly in Cases 2 and 4",
                f"largest rise of the loss on test samples from one of {_EVALUATIONS} "
                f"evaluations to the next: {in_cases(own, '+.1%')}, "
                f"{listed(other, '+.1%')} with synchronous; more than {SIMILAR:.0%} counts "
                "as sudden",
                min(own[1], own[3]) > SIMILAR >= max(other[1], other[3]),
                _QUOTE,
            )
        ]


def _drawn(loss: str, label: str, lines: CaseLines, *, markers: bool) -> Picture:
    """Draw loss and accuracy of both methods."""
    drawn = picture(13, 5.2)
    axes = drawn.subplots(2, len(CASES), sharey="row")
    labels = {loss: label, "accuracy": "accuracy"}
    draw_cases(axes, "time spent (s)", labels, lines, markers=markers)
    return drawn


def _method_means(rows: Rows, case: int, method: str, name: str) -> list[float]:
    """Return the mean of a column for each budget."""
    here = where(rows, case=case, method=method)
    return means(here, "budget", distinct(rows, "budget"), name)


def _evaluated(rows: Rows, case: int, method: str) -> list[Row]:
    here = where(rows, case=case, method=method)
    return [row for row in here if row["test_loss"] is not None]


def _largest_rise(rows: Rows) -> float:
    """Return the largest relative rise of the test loss between neighbouring rows."""
    losses = np.array([row["test_loss"] for row in rows])
    return float(np.max(losses[1:] / losses[:-1])) - 1
