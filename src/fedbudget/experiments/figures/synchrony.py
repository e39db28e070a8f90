"""Synchronous against asynchronous gradient descent over time, in Cases 1-4.

Both make one local update between exchanges. `Synchrony` shows means: each point is the end
of runs with that budget. `SingleSynchrony` shows single runs, because a mean hides sudden
changes.
"""

from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure as Picture

from fedbudget.experiments.figures.figure import (
    CASES,
    CaseLines,
    Claim,
    Figure,
    GridSize,
    Points,
    Row,
    Rows,
    distinct,
    draw_cases,
    in_cases,
    listed,
    means,
    per_case,
    picture,
    where,
)
from fedbudget.experiments.figures.paper import SIMILAR, budgets, seconds
from fedbudget.experiments.sweep import Sweep
from fedbudget.settings.settings import Settings

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


class Synchrony(Figure):
    """Means over runs with different budgets."""

    def runs(self, base: Settings, size: GridSize) -> Sweep:
        times = size.choose((5, 10, 20, 35, 50, 75, 100), (5, 20, 100))
        grid = {"case": CASES, "method": list(_LABELS), "budget": budgets(*times)}
        return Sweep.of(base, {**grid, "tau": [1], "seeds": size.runs})

    def draw(self, rows: Rows) -> Picture:
        x = list(map(seconds, distinct(rows, "budget")))

        def lines(case: int, name: str) -> dict[str, Points]:
            return {
                label: (x, _means(rows, case, method, name))
                for method, label in _LABELS.items()
            }

        return _drawn("loss", "loss", lines, markers=True)

    def claims(self, rows: Rows) -> list[Claim]:
        excess = {}
        lost = {}
        slower = {}
        for case in CASES:
            synchronous, asynchronous = (
                np.array(_means(rows, case, method, "loss")) for method in _LABELS
            )
            excess[case] = asynchronous[-1] / synchronous[-1] - 1
            slower[case] = int(np.sum(asynchronous > synchronous))
            before, after = (_means(rows, case, each, "accuracy")[-1] for each in _LABELS)
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


def _means(rows: Rows, case: int, method: str, name: str) -> list[float]:
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
