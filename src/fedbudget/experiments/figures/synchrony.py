"""Synchronous against asynchronous gradient descent: loss and accuracy over time, in Cases 1-4.

Both make one step between exchanges. One figure is a mean: each of its points is the end of runs with that much time to
spend. The other is of single runs, where sudden changes can be seen, which a mean would hide.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure as Picture

from fedbudget.experiments.figures import figure
from fedbudget.experiments.figures.figure import (
    BASELINE,
    CASES,
    COLOURS,
    MARKERS,
    Claim,
    Figure,
    GridSize,
    Row,
    Rows,
    distinct,
    finish,
    means,
    picture,
    where,
)
from fedbudget.experiments.figures.paper import SIMILAR, seconds
from fedbudget.experiments.sweep import Sweep
from fedbudget.settings.settings import Settings

MUCH_WORSE = 0.1
"""A loss that is higher by more than this share is much worse: twice what still counts as similar."""

_BUDGETS = (5, 10, 20, 35, 50, 75, 100)
_FEW = (5, 20, 100)
_LABELS = {"paper": "synchronous (τ = 1)", "asynchronous": "asynchronous"}
_LONGEST = 100  # seconds, of a single run
_LOOKS = 200  # at the model, in a single run


class Synchrony(Figure):
    def runs(self, base: Settings, size: GridSize) -> Sweep:
        budgets = [[f"time={each}s"] for each in size.choose(_BUDGETS, _FEW)]
        methods = list(_LABELS)
        return Sweep.of(
            base,
            {
                "case": CASES,
                "method": methods,
                "budget": budgets,
                "tau": [1],
                "seeds": size.runs,
            },
        )

    def draw(self, rows: Rows) -> Picture:
        budgets = distinct(rows, "budget")
        x = [seconds(budget) for budget in budgets]

        def line(case: int, method: str, name: str) -> tuple[list[float], list[float]]:
            return x, means(where(rows, case=case, method=method), "budget", budgets, name)

        return _drawn(line, {"loss": "loss", "accuracy": "accuracy"}, markers=True)

    def claims(self, rows: Rows) -> list[Claim]:
        budgets = distinct(rows, "budget")
        excess = {}
        lost = {}
        slower = {}
        for case in CASES:
            here = where(rows, case=case)
            by_method = {
                each: means(where(here, method=each), "budget", budgets, "loss")
                for each in _LABELS
            }
            excess[case] = by_method["asynchronous"][-1] / by_method["paper"][-1] - 1
            pairs = zip(by_method["asynchronous"], by_method["paper"], strict=True)
            slower[case] = sum(
                asynchronous > synchronous for asynchronous, synchronous in pairs
            )
            synchronous, asynchronous = means(
                where(here, budget=budgets[-1]), "method", _LABELS, "accuracy"
            )
            lost[case] = asynchronous - synchronous
        after = f"after {seconds(budgets[-1]):g} s, against synchronous"
        losses = f"loss {after}: {', '.join(f'{share:+.1%} in Case {case}' for case, share in excess.items())}"
        accuracies = ", ".join(f"{100 * lost[case]:+.1f} in Case {case}" for case in (2, 4))
        times = ", ".join(
            f"{slower[case]} of {len(budgets)} times in Case {case}" for case in (2, 4)
        )
        return [
            self.claim(
                "asynchronous is much worse in Cases 2 and 4",
                f"{losses}; more than {MUCH_WORSE:.0%} counts as much worse",
                min(excess[2], excess[4]) > MUCH_WORSE,
                figure.MUCH_WORSE,
            ),
            self.claim(
                "asynchronous has a lower accuracy in Cases 2 and 4",
                f"points of accuracy {after}: {accuracies}",
                max(lost[2], lost[4]) < 0,
                figure.MUCH_WORSE,
            ),
            self.claim(
                "asynchronous converges more slowly in Cases 2 and 4",
                f"its loss is higher at {times}",
                min(slower[2], slower[4]) == len(budgets),
                figure.MUCH_WORSE,
            ),
            self.claim(
                "asynchronous is similar or slightly better in Cases 1 and 3",
                f"{losses}; up to {SIMILAR:.0%} counts as similar",
                max(excess[1], excess[3]) <= SIMILAR,
                figure.SIMILAR,
            ),
        ]


class SingleSynchrony(Figure):
    def runs(self, base: Settings, size: GridSize) -> Sweep:
        base = replace(base, tau=1, budget=(f"time={_LONGEST}s",), evaluations=_LOOKS)
        return Sweep.of(
            base, {"case": CASES, "method": list(_LABELS), "seeds": 1}, each="round"
        )

    def draw(self, rows: Rows) -> Picture:
        def line(case: int, method: str, name: str) -> tuple[list[float], list[float]]:
            seen = _looked_at(rows, case, method)
            return [row["spent_time"] for row in seen], [row[name] for row in seen]

        return _drawn(
            line,
            {"test_loss": "loss on test samples", "accuracy": "accuracy"},
            markers=False,
        )

    def claims(self, rows: Rows) -> list[Claim]:
        jumps = {
            method: {
                case: _largest_jump(
                    [row["test_loss"] for row in _looked_at(rows, case, method)]
                )
                for case in CASES
            }
            for method in _LABELS
        }
        listed = {
            method: ", ".join(f"{share:+.1%}" for share in of_case.values())
            for method, of_case in jumps.items()
        }
        ours = jumps["asynchronous"]
        return [
            self.claim(
                "asynchronous changes suddenly in Cases 2 and 4",
                f"largest rise of the loss on test samples from one of {_LOOKS} looks to the next: "
                f"{listed['asynchronous']} in Cases 1-4, {listed['paper']} with synchronous; more than {SIMILAR:.0%} "
                "counts as sudden",
                all(ours[case] > SIMILAR >= jumps["paper"][case] for case in (2, 4)),
                figure.MUCH_WORSE,
            )
        ]


Line = Callable[[int, str, str], tuple[list[float], list[float]]]
"""The x and y of a case, a method and a column."""


def _drawn(line: Line, names: Mapping[str, str], *, markers: bool) -> Picture:
    """A column of panels for each case, with both methods in each."""
    drawn = picture(13, 5.2)
    axes = drawn.subplots(2, len(CASES), sharey="row")
    for column, case in enumerate(CASES):
        looks = {
            "paper": (BASELINE, "x", "--"),
            "asynchronous": (COLOURS[case], MARKERS[case], "-"),
        }
        for axis, (name, label) in zip(axes[:, column], names.items(), strict=True):
            for method, (colour, marker, style) in looks.items():
                own = marker if markers else None
                axis.plot(
                    *line(case, method, name),
                    color=colour,
                    marker=own,
                    linestyle=style,
                    markersize=4,
                    linewidth=1.5 if markers else 1,
                    label=_LABELS[method],
                )
            finish(
                axis,
                "time spent (s)",
                label if column == 0 else "",
                legend=axis is axes[0, column],
            )
        axes[0, column].set_title(f"Case {case}", fontsize="medium")
    return drawn


def _looked_at(rows: Rows, case: int, method: str) -> list[Row]:
    return [
        row for row in where(rows, case=case, method=method) if row["test_loss"] is not None
    ]


def _largest_jump(losses: Sequence[float]) -> float:
    """The largest rise from one to the next, as a share."""
    return float(np.max(np.array(losses[1:]) / np.array(losses[:-1]))) - 1
