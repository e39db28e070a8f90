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


class Synchrony(Figure):
    def runs(self, base: Settings, size: GridSize) -> Sweep:
        budgets = [[f"time={each}s"] for each in size.choose(_BUDGETS, _FEW)]
        methods = list(_LABELS)
        return Sweep.of(base, {"case": CASES, "method": methods, "budget": budgets, "tau": [1], "seeds": size.runs})

    def draw(self, rows: Rows) -> Picture:
        drawn = picture(13, 5.2)
        axes = drawn.subplots(2, len(CASES))
        budgets = distinct(rows, "budget")
        x = [seconds(budget) for budget in budgets]
        for column, case in enumerate(CASES):
            looks = {"paper": (BASELINE, "x", "--"), "asynchronous": (COLOURS[case], MARKERS[case], "-")}
            for axis, name in ((axes[0, column], "loss"), (axes[1, column], "accuracy")):
                for method, (colour, marker, line) in looks.items():
                    y = means(where(rows, case=case, method=method), "budget", budgets, name)
                    axis.plot(x, y, color=colour, marker=marker, linestyle=line, markersize=4, label=_LABELS[method])
                finish(axis, "time spent (s)", name if column == 0 else "", legend=name == "loss")
            axes[0, column].set_title(f"Case {case}", fontsize="medium")
        return drawn

    def claims(self, rows: Rows) -> list[Claim]:
        longest = distinct(rows, "budget")[-1]
        last, excess = where(rows, budget=longest), {}
        for case in CASES:
            synchronous, asynchronous = means(where(last, case=case), "method", _LABELS, "loss")
            excess[case] = asynchronous / synchronous - 1
        shares = ", ".join(f"{share:+.1%} in Case {case}" for case, share in excess.items())
        measured = f"loss after {seconds(longest):g} s, against synchronous: {shares}"
        worse, similar = min(excess[2], excess[4]) > SIMILAR, max(excess[1], excess[3]) <= SIMILAR
        return [
            self.claim("asynchronous is worse in Cases 2 and 4", measured, worse),
            self.claim("asynchronous is similar or slightly better in Cases 1 and 3", measured, similar),
        ]
