"""Past the paper: its method and ours, beside the best fixed τ, for many tasks and all cases.

The fixed τ are those of the plain protocol, with the paper's η. Where data are uniform (Case 1) nothing drifts: the
paper's method there is the line that the other cases can be measured by. Two figures are made this way: one where ours
has the paper's η too, and one where it chooses η as well.

Past the paper: how much the control parameter φ matters, with its method and with ours, for many tasks.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.lines import Line2D

from fedbudget.experiments.figures.figure import (
    BASELINE,
    CASES,
    COLOURS,
    FEW_TAUS,
    MARKERS,
    TAUS,
    CaseLosses,
    Claim,
    Figure,
    FigureTable,
    GridSize,
    Row,
    Rows,
    finish,
    joined,
    mean,
    panels,
    where,
)
from fedbudget.experiments.sweep import Sweep
from fedbudget.settings.settings import Settings
from fedbudget.settings.types import Eta

REGRET = 0.03
"""Of the way from the best to the worst fixed τ: ours is never further from the best."""
WORSE = 0.02
"""Of that way: ours is never further behind the paper's method."""
GAP = 0.25
"""Of the loss that the paper's method loses to other kinds of data: what ours may still lose."""

QUARTER = -0.25
"""Of that way: with a step size of its own ours is further ahead of any fixed τ, where the paper's η is too small."""

_ETA = 0.01  # the paper's
_DRIFTING = (
    "svm",
    "softmax",
    "mlp",
)  # models that gain in Cases 2 and 4, not only lose nothing
_SLOW = ("softmax", "mlp", "kmeans")  # models for which the paper's η is too small


class Methods(Figure):
    """Both methods with the paper's η."""

    own_eta: ClassVar[Eta] = _ETA  # of ours

    def runs(self, base: Settings, size: GridSize) -> Sweep:
        taus = size.choose(TAUS, FEW_TAUS)
        cases: dict[str, Any] = {"case": CASES, "seeds": size.runs}
        paper = {
            **task_columns(base),
            "method": ["paper"],
            "tau": ["adaptive", *taus],
            **cases,
        }
        frugal = {**task_columns(base), "method": ["frugal"], "tau": ["adaptive"], **cases}
        ours = replace(base, step_size=self.own_eta)
        return joined(
            Sweep.of(replace(base, step_size=_ETA), paper), Sweep.of(ours, frugal)
        )

    def draw(self, rows: Rows) -> Picture:
        by_task = tasks_in(rows)
        drawn, axes = panels(list(by_task))
        for number, (axis, own) in enumerate(zip(axes, by_task.values(), strict=True)):
            _panel(axis, [CaseLosses(own, case) for case in CASES])
            finish(axis, "", "loss", legend=number == 0)
        return drawn

    def claims(self, rows: Rows) -> list[Claim]:
        claims: list[Claim] = []
        for task, own in tasks_in(rows).items():
            cases = [CaseLosses(own, case) for case in CASES]
            regrets = [each.regret(each.frugal) for each in cases]
            behind = [each.regret(each.frugal) - each.regret(each.paper) for each in cases]
            claims += self.task_claims(task, own[0], cases, regrets, behind)
        return claims

    def task_claims(
        self,
        task: str,
        first: Row,
        cases: list[CaseLosses],
        regrets: list[float],
        behind: list[float],
    ) -> Iterator[Claim]:
        """About one task.

        Args:
          first: one of its rows, which tells what it is.
          regrets: of ours, case by case.
          behind: how far ours is behind the paper's method, case by case.
        """
        gains = first["model"] in _DRIFTING
        yield Claim(
            f"{task}: frugal has a regret of at most {REGRET}{', below 0 in Cases 2 and 4' if gains else ''}",
            f"{_numbers(regrets)} in Cases 1-4",
            max(regrets) <= REGRET and not (gains and max(regrets[1], regrets[3]) >= 0),
        )
        yield Claim(
            f"{task}: frugal is not behind the paper's method by more than {WORSE} of the spread of fixed τ",
            f"{_numbers(behind)} in Cases 1-4",
            max(behind) <= WORSE,
        )
        if (first["model"], first["dataset"], str(first["batch_size"])) == (
            "svm",
            "mnist",
            "100",
        ):
            one, two, _, four = cases
            shares = [
                (case.frugal - one.frugal) / (case.paper - one.paper)
                for case in (two, four)
            ]
            yield Claim(
                f"{task}: what Cases 2 and 4 lose to Case 1 shrinks to a quarter or less",
                f"to {_numbers(shares)} of the paper's method's",
                max(shares) <= GAP,
            )

    def table(self, rows: Rows) -> FigureTable:
        head = (
            "task",
            "case",
            "best fixed τ",
            "paper",
            "frugal",
            "regret, paper",
            "regret, frugal",
        )
        lines = []
        for task, own in tasks_in(rows).items():
            for cell in (CaseLosses(own, case) for case in CASES):
                losses = (
                    f"{cell.best:.4f} (τ={cell.best_tau})",
                    f"{cell.paper:.4f}",
                    f"{cell.frugal:.4f}",
                )
                regrets = (
                    f"{cell.regret(loss):+.3f}" for loss in (cell.paper, cell.frugal)
                )
                lines.append((task, str(cell.case), *losses, *regrets))
        return FigureTable(head, tuple(lines))


class NoKnobs(Methods):
    """The paper's method with its η, and ours with one of its own."""

    own_eta = "auto"

    def task_claims(
        self,
        task: str,
        first: Row,
        cases: list[CaseLosses],
        regrets: list[float],
        behind: list[float],
    ) -> Iterator[Claim]:
        yield Claim(
            f"{task}: with a step size of its own, frugal is in no case behind the paper's method",
            f"{_numbers(behind)} of the spread of fixed τ in Cases 1-4",
            max(behind) <= 0,
        )
        if first["model"] in _SLOW:
            yield Claim(
                f"{task}: it is better than the best fixed τ by a quarter of that spread or more",
                f"regret {_numbers(regrets)} in Cases 1-4",
                max(regrets) <= QUARTER,
            )


def task_columns(base: Settings) -> dict[str, list[Any]]:
    """What tells one task's rows from another's, as part of a grid."""
    return {
        "model": [base.model],
        "dataset": [base.dataset],
        "batch-size": [base.batch_size],
    }


def tasks_in(rows: Rows) -> dict[str, list[Row]]:
    """The rows of each task."""
    by_task: dict[str, list[Row]] = {}
    for row in rows:
        whole = " (whole shards)" if row["batch_size"] == "full" else ""
        by_task.setdefault(f"{row['model']}, {row['dataset']}{whole}", []).append(row)
    return by_task


def _panel(axis: Axes, cells: list[CaseLosses]) -> None:
    x = [f"Case {cell.case}" for cell in cells]
    axis.axhline(cells[0].paper, color=BASELINE, linewidth=1, label="paper, uniform data")
    axis.plot(
        x,
        [cell.best for cell in cells],
        "_",
        color="black",
        markersize=22,
        label="best fixed τ",
    )
    axis.plot(x, [cell.paper for cell in cells], "s", color=COLOURS[2], label="paper")
    axis.plot(
        x,
        [cell.frugal for cell in cells],
        "*",
        color=COLOURS[1],
        markersize=12,
        label="frugal",
    )
    axis.margins(x=0.15)


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:+.3f}" for value in values)


FEW = 0.05
"""Of the loss: a φ that is as near to the best φ as this is as good as any."""

_PHI = (0.00025, 0.0025, 0.025, 0.25)
_OURS = 0.0025
_CASES = (1, 2, 4)  # in Case 3 nodes do not differ, and φ plays no part
_LINES: Mapping[str, Literal[":", "-"]] = {"paper": ":", "frugal": "-"}


class OnePhi(Figure):
    def runs(self, base: Settings, size: GridSize) -> Sweep:
        task = {
            **task_columns(base),
            "method": list(_LINES),
            "case": size.choose(_CASES, (1, 4)),
        }
        return Sweep.of(
            replace(base, step_size=0.01), {**task, "phi": _PHI, "seeds": size.runs}
        )

    def draw(self, rows: Rows) -> Picture:
        by_task = tasks_in(rows)
        drawn, axes = panels(list(by_task))
        for axis, own in zip(axes, by_task.values(), strict=True):
            for case in _cases(own):
                for method, line in _LINES.items():
                    losses = _losses(own, method, case)
                    axis.plot(
                        _PHI,
                        losses,
                        linestyle=line,
                        color=COLOURS[case],
                        marker=MARKERS[case],
                        markersize=4,
                    )
            axis.set_xscale("log")
            finish(axis, "φ", "loss")
        cases = [
            Line2D([], [], color=COLOURS[case], marker=MARKERS[case], label=f"Case {case}")
            for case in _cases(rows)
        ]
        lines = [
            Line2D([], [], color="black", linestyle=line, label=method)
            for method, line in _LINES.items()
        ]
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
                    ", ".join(f"{share:+.1%}" for share in above)
                    + f" in Cases {', '.join(map(str, _cases(own)))}",
                    max(above) <= FEW,
                )
            )
        return claims

    def table(self, rows: Rows) -> FigureTable:
        head = (
            "task",
            "case",
            *(f"{method}, φ = {phi:g}" for method in _LINES for phi in _PHI),
        )
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
