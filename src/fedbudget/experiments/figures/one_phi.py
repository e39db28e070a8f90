"""Past the paper: how much the control parameter φ matters, with its method and with ours, for many tasks."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from matplotlib.figure import Figure as Picture
from matplotlib.lines import Line2D

from fedbudget.experiments.figures.figure import Claim, Figure, FigureTable, GridSize
from fedbudget.experiments.figures.methods import task_columns, tasks_in
from fedbudget.experiments.figures.rows import Rows, mean, where
from fedbudget.experiments.figures.style import COLOURS, MARKERS, finish, panels
from fedbudget.experiments.sweep import Sweep
from fedbudget.settings import Settings

FEW = 0.05
"""Of the loss: a φ that is as near to the best φ as this is as good as any."""

_PHI = (0.00025, 0.0025, 0.025, 0.25)
_OURS = 0.0025
_CASES = (1, 2, 4)  # in Case 3 nodes do not differ, and φ plays no part
_LINES: Mapping[str, Literal[":", "-"]] = {"paper": ":", "frugal": "-"}


class OnePhi(Figure):
    def runs(self, base: Settings, size: GridSize) -> Sweep:
        task = {**task_columns(base), "method": list(_LINES), "case": size.choose(_CASES, (1, 4))}
        return Sweep.of(replace(base, step_size=0.01), {**task, "phi": _PHI, "seeds": size.runs})

    def draw(self, rows: Rows) -> Picture:
        by_task = tasks_in(rows)
        drawn, axes = panels(list(by_task))
        for axis, own in zip(axes, by_task.values(), strict=True):
            for case in _cases(own):
                for method, line in _LINES.items():
                    losses = _losses(own, method, case)
                    axis.plot(_PHI, losses, linestyle=line, color=COLOURS[case], marker=MARKERS[case], markersize=4)
            axis.set_xscale("log")
            finish(axis, "φ", "loss")
        cases = [
            Line2D([], [], color=COLOURS[case], marker=MARKERS[case], label=f"Case {case}") for case in _cases(rows)
        ]
        lines = [Line2D([], [], color="black", linestyle=line, label=method) for method, line in _LINES.items()]
        axes[0].legend(handles=[*cases, *lines], fontsize="small")
        return drawn

    def claims(self, rows: Rows) -> list[Claim]:
        claims = []
        for task, own in tasks_in(rows).items():
            above = []
            for case in _cases(own):
                losses = _losses(own, "frugal", case)
                above.append(losses[_PHI.index(_OURS)] / min(losses) - 1)
            claims.append(
                Claim(
                    f"{task}: with frugal, φ = {_OURS} is within {FEW:.0%} of the best φ",
                    ", ".join(f"{share:+.1%}" for share in above) + f" in Cases {', '.join(map(str, _cases(own)))}",
                    max(above) <= FEW,
                )
            )
        return claims

    def table(self, rows: Rows) -> FigureTable:
        head = ("task", "case", *(f"{method}, φ = {phi:g}" for method in _LINES for phi in _PHI))
        lines = []
        for task, own in tasks_in(rows).items():
            for case in _cases(own):
                losses = [loss for method in _LINES for loss in _losses(own, method, case)]
                lines.append((task, str(case), *(f"{loss:.4f}" for loss in losses)))
        return FigureTable(head, tuple(lines))


def _losses(rows: Rows, method: str, case: int) -> list[float]:
    return [mean(where(rows, method=method, case=case, phi=phi), "loss") for phi in _PHI]


def _cases(rows: Rows) -> list[int]:
    return [case for case in _CASES if where(rows, case=case)]
