"""Draws the plots of the documentation from real runs with simulated costs.

    python docs/pictures.py [NAME...]    # about a minute; writes docs/pictures/*.png

The runs repeat bit for bit. Lines also differ in their dashes and points in their
markers, so that plots are readable without colour.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedbudget.api import train
from fedbudget.budget.control import Reason
from fedbudget.experiments.compare import compare
from fedbudget.experiments.figures.figure import (
    COLOURS,
    LINES,
    MARKERS,
    finish,
    log_scale,
    picture,
)
from fedbudget.launch.method import build_method
from fedbudget.runs.explain import Explanation, explain
from fedbudget.runs.folder import Run
from fedbudget.runs.plot import GREY, VERMILION
from fedbudget.settings.settings import Settings

_FOLDER = Path(__file__).parent / "pictures"
_TAUS = (1, 2, 3, 5, 7, 10, 20, 30, 50, 70, 100)
_KINDS = {
    1: "every node has data of all kinds (Case 1)",
    4: "nodes have data of different kinds (Case 4)",
}


def loss_against_tau() -> Figure:
    """Plot the final loss of fixed values of τ and of fedbudget, in two cases."""
    drawn = picture(9, 3.6)
    axes: list[Axes] = list(drawn.subplots(1, 2, sharey=True))
    compared = compare(Settings(), cases=list(_KINDS), taus=_TAUS, seeds=range(3))
    for axis, found in zip(axes, compared, strict=True):
        case = found.case
        axis.plot(
            [fixed.tau for fixed in found.fixed],
            [fixed.loss for fixed in found.fixed],
            color=COLOURS[case],
            marker=MARKERS[case],
            linestyle=LINES[case],
            markersize=4,
            label="a fixed τ, plain averaging",
        )
        axis.axhline(found.adaptive.loss, color=GREY, linewidth=1)
        axis.plot(
            [found.adaptive.tau],
            [found.adaptive.loss],
            "*",
            color="black",
            markersize=13,
            label="fedbudget",
        )
        axis.set_title(_KINDS[case], fontsize="medium")
        log_scale(axis, (1, 3, 10, 30, 100))
        finish(
            axis,
            "τ, local updates between aggregations",
            "loss when the budget is spent",
            legend=True,
        )
    axes[1].set_ylabel("")
    return drawn


def accuracy_against_epsilon() -> Figure:
    """Plot accuracy against ε, for several numbers of nodes."""
    drawn = picture(6, 3.6)
    axis: Axes = drawn.subplots()
    epsilons = (0.5, 1, 2, 4, 8, 16)
    common: Any = {
        "model": "softmax",
        "dataset": "digits",
        "partition": "dirichlet:0.3",
        "evaluations": 1,
    }
    for at, nodes in enumerate((50, 100, 200), 1):
        private: Any = {**common, "nodes": nodes, "privacy_delta": 1e-5}
        found = [
            [
                train(budget=["time=15s", f"privacy={each}"], seed=seed, **private).accuracy
                or 0.0
                for seed in range(3)
            ]
            for each in epsilons
        ]
        means = [sum(each) / len(each) for each in found]
        look: Any = {
            "color": COLOURS[at],
            "marker": MARKERS[at],
            "linestyle": LINES[at],
        }
        axis.plot(epsilons, means, markersize=4, label=f"{nodes} nodes", **look)
    open_accuracy = train(budget="time=15s", nodes=100, **common).accuracy or 0.0
    axis.axhline(
        open_accuracy,
        color=GREY,
        linewidth=1,
        label=f"without privacy, {open_accuracy:.3f}",
    )
    log_scale(axis, epsilons)
    axis.margins(y=0.1)
    finish(axis, "ε, at δ = 1e-5", "accuracy", legend=True)
    return drawn


def curves() -> Figure:
    """Plot G(τ) for similar and different data, and for two costs of aggregation."""
    drawn = picture(9, 3.6)
    left, right = drawn.subplots(1, 2)
    for case, words in ((1, "data alike (Case 1)"), (4, "data different (Case 4)")):
        _curve(left, _chosen(case=case), words, COLOURS[case], LINES[case])
    for factor, colour, line in ((1, COLOURS[4], LINES[4]), (10, VERMILION, "-")):
        words = (
            "a usual aggregation"
            if factor == 1
            else f"one that takes {factor} times as long"
        )
        _curve(right, _chosen(case=4, aggregation_factor=factor), words, colour, line)
    left.set_title("how different the nodes' data are", fontsize="medium")
    right.set_title("what an aggregation costs", fontsize="medium")
    for axis in (left, right):
        axis.set_yscale("log")
        finish(axis, "τ", "G(τ)", legend=True)
    right.set_ylabel("")
    return drawn


def loss_against_budget() -> Figure:
    """Plot loss and accuracy against the budget."""
    drawn = picture(9, 3.6)
    left, right = drawn.subplots(1, 2)
    seconds = (1, 2, 4, 8, 15, 30, 60)
    for case in (1, 4):
        made = [
            train(model="softmax", case=case, budget=f"time={each}s") for each in seconds
        ]
        style = {
            "color": COLOURS[case],
            "marker": MARKERS[case],
            "linestyle": LINES[case],
            "label": f"Case {case}",
        }
        left.plot(seconds, [each.loss for each in made], **style)
        right.plot(seconds, [each.accuracy for each in made], **style)
    for axis, words in (
        (left, "loss when it is spent"),
        (right, "accuracy on test samples"),
    ):
        log_scale(axis, seconds)
        finish(axis, "budget of time (s)", words, legend=True)
    return drawn


def _chosen(**options: Any) -> Explanation:
    """Return the decision with the median τ among those made by the minimum of G."""
    with tempfile.TemporaryDirectory() as folder:
        train(
            model="svm",
            method="paper",
            budget="time=15s",
            out=Path(folder) / "run",
            **options,
        )
        run = Run.open(Path(folder) / "run")
        decided = sorted(
            (record.tau, record.round)
            for record in run.rounds
            if record.reason == Reason.MINIMUM
        )
        return explain(
            run, decided[len(decided) // 2][1], build_method(run.settings).controller
        )


def _curve(axis: Axes, choice: Explanation, words: str, colour: str, line: str) -> None:
    assert choice.minimum is not None
    shown = choice.candidates <= 60
    axis.plot(
        choice.candidates[shown],
        choice.curve[shown],
        color=colour,
        linestyle=line,
        label=words,
    )
    axis.plot([choice.minimum], [choice.curve.min()], "o", color=colour)
    axis.annotate(
        f"τ* = {choice.minimum}",
        (choice.minimum, choice.curve.min()),
        textcoords="offset points",
        xytext=(4, -13),
        fontsize="small",
    )
    axis.margins(y=0.2)


PICTURES: dict[str, Callable[[], Figure]] = {
    "tau": loss_against_tau,
    "curve": curves,
    "budget": loss_against_budget,
    "privacy": accuracy_against_epsilon,
}

if __name__ == "__main__":
    _FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        draw().savefig(_FOLDER / f"{name}.png")
        print(_FOLDER / f"{name}.png")
