"""Synchronous against asynchronous gradient descent: loss and accuracy after so much time, in Cases 1-4.

Both make one step between exchanges. Each point is the end of runs with that much time to spend.
"""

from matplotlib.figure import Figure as Picture

from fedbudget.experiments.figures.figure import CASES, Claim, Figure, GridSize
from fedbudget.experiments.figures.rows import Rows, distinct, means, where
from fedbudget.experiments.figures.style import BASELINE, COLOURS, MARKERS, finish, picture
from fedbudget.experiments.figures.varying import SIMILAR, seconds
from fedbudget.experiments.sweep import Sweep
from fedbudget.settings import Settings

_BUDGETS = (5, 10, 20, 35, 50, 75, 100)
_FEW = (5, 20, 100)
_LABELS = {"paper": "synchronous (τ = 1)", "asynchronous": "asynchronous"}


def synchrony(name: str, title: str, task: str) -> Figure:
    return Figure(name, title, (task,), _sweep, _draw, lambda rows: _claims(rows, title))


def _sweep(base: Settings, size: GridSize) -> Sweep:
    budgets = [[f"time={each}s"] for each in size.choose(_BUDGETS, _FEW)]
    return Sweep.of(
        base,
        {"case": CASES, "method": list(_LABELS), "budget": budgets, "tau": [1], "seeds": size.runs},
    )


def _draw(rows: Rows) -> Picture:
    drawn = picture(13, 5.2)
    axes = drawn.subplots(2, len(CASES))
    budgets = distinct(rows, "budget")
    for column, case in enumerate(CASES):
        for axis, name in ((axes[0, column], "loss"), (axes[1, column], "accuracy")):
            for method, label in _LABELS.items():
                ours = method == "asynchronous"
                axis.plot(
                    [seconds(budget) for budget in budgets],
                    means(where(rows, case=case, method=method), "budget", budgets, name),
                    color=COLOURS[case] if ours else BASELINE,
                    marker=MARKERS[case] if ours else "x",
                    linestyle="-" if ours else "--",
                    markersize=4,
                    label=label,
                )
            finish(axis, "time spent (s)", name if column == 0 else "", legend=name == "loss")
        axes[0, column].set_title(f"Case {case}", fontsize="medium")
    return drawn


def _claims(rows: Rows, title: str) -> list[Claim]:
    longest = distinct(rows, "budget")[-1]
    last = where(rows, budget=longest)
    loss = {
        (case, method): means(where(last, case=case), "method", [method], "loss")[0]
        for case in CASES
        for method in _LABELS
    }
    excess = {case: loss[case, "asynchronous"] / loss[case, "paper"] - 1 for case in CASES}
    measured = ", ".join(f"{share:+.1%} in Case {case}" for case, share in excess.items())
    return [
        Claim(
            f"{title}: asynchronous is worse in Cases 2 and 4",
            f"loss after {seconds(longest):g} s, against synchronous: {measured}",
            min(excess[2], excess[4]) > SIMILAR,
        ),
        Claim(
            f"{title}: asynchronous is similar or slightly better in Cases 1 and 3",
            f"loss after {seconds(longest):g} s, against synchronous: {measured}",
            max(excess[1], excess[3]) <= SIMILAR,
        ),
    ]
