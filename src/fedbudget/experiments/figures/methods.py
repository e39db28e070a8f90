"""Past the paper: its method and ours, beside the best fixed τ, for many tasks and all cases.

The fixed τ are those of the plain protocol, with the paper's η. Where data are uniform (Case 1) nothing drifts: the
paper's method there is the line that the other cases can be measured by. Two figures are made this way: one where ours
has the paper's η too, and one where it chooses η as well.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from fedbudget.experiments.figures.figure import CASES, TAUS, Claim, Figure, FigureTable, GridSize, joined
from fedbudget.experiments.figures.rows import Row, Rows, distinct, mean, where
from fedbudget.experiments.figures.style import BASELINE, COLOURS, finish, panels
from fedbudget.experiments.sweep import Sweep
from fedbudget.settings import Eta, Settings

REGRET = 0.03
"""Of the way from the best to the worst fixed τ: ours is never further from the best."""
WORSE = 0.02
"""Of that way: ours is never further behind the paper's method."""
GAP = 0.25
"""Of the loss that the paper's method loses to other kinds of data: what ours may still lose."""

QUARTER = -0.25
"""Of that way: with a step size of its own ours is further ahead of any fixed τ, where the paper's η is too small."""

_ETA = 0.01  # the paper's
_DRIFTING = ("svm", "softmax", "mlp")  # models that gain in Cases 2 and 4, not only lose nothing
_SLOW = ("softmax", "mlp", "kmeans")  # models for which the paper's η is too small


def methods(name: str, title: str, tasks: tuple[str, ...]) -> Figure:
    """Both methods with the paper's η."""
    return Figure(name, title, tasks, _runs(_ETA), _draw, _claims, _table)


def no_knobs(name: str, title: str, tasks: tuple[str, ...]) -> Figure:
    """The paper's method with its η, and ours with one of its own."""
    return Figure(name, title, tasks, _runs("auto"), _draw, _claims_without_knobs, _table)


class CaseLosses:
    """One task in one case."""

    def __init__(self, rows: Rows, case: int) -> None:
        here = where(rows, case=case)
        fixed = [row for row in here if row["tau"] != "adaptive"]
        losses = {tau: mean(where(fixed, tau=tau), "loss") for tau in distinct(fixed, "tau")}
        self.case = case
        self.best_tau = min(losses, key=losses.__getitem__)
        self.best, self.worst = losses[self.best_tau], max(losses.values())
        self.paper = mean(where(here, method="paper", tau="adaptive"), "loss")
        self.frugal = mean(where(here, method="frugal"), "loss")

    def regret(self, loss: float) -> float:
        """0 for as good as the best fixed τ, 1 for as bad as the worst, less than 0 for better than any."""
        return (loss - self.best) / (self.worst - self.best) if self.worst > self.best else 0.0


def task_columns(base: Settings) -> dict[str, list[Any]]:
    """What tells one task's rows from another's, as part of a grid."""
    return {"model": [base.model], "dataset": [base.dataset], "batch-size": [base.batch_size]}


def tasks_in(rows: Rows) -> dict[str, list[Row]]:
    """The rows of each task."""
    by_task: dict[str, list[Row]] = {}
    for row in rows:
        whole = " (whole shards)" if row["batch_size"] == "full" else ""
        by_task.setdefault(f"{row['model']}, {row['dataset']}{whole}", []).append(row)
    return by_task


def _runs(ours: Eta) -> Callable[[Settings, GridSize], Sweep]:
    def runs(base: Settings, size: GridSize) -> Sweep:
        taus = size.choose(TAUS, (1, 3, 10, 30, 100))
        cases: dict[str, Any] = {"case": CASES, "seeds": size.runs}
        paper = {**task_columns(base), "method": ["paper"], "tau": ["adaptive", *taus], **cases}
        frugal = {**task_columns(base), "method": ["frugal"], "tau": ["adaptive"], **cases}
        return joined(Sweep.of(replace(base, step_size=_ETA), paper), Sweep.of(replace(base, step_size=ours), frugal))

    return runs


def _draw(rows: Rows) -> Picture:
    by_task = tasks_in(rows)
    drawn, axes = panels(list(by_task))
    for number, (axis, own) in enumerate(zip(axes, by_task.values(), strict=True)):
        _panel(axis, [CaseLosses(own, case) for case in CASES])
        finish(axis, "", "loss", legend=number == 0)
    return drawn


def _panel(axis: Axes, cells: list[CaseLosses]) -> None:
    x = [f"Case {cell.case}" for cell in cells]
    axis.axhline(cells[0].paper, color=BASELINE, linewidth=1, label="paper, uniform data")
    axis.plot(x, [cell.best for cell in cells], "_", color="black", markersize=22, label="best fixed τ")
    axis.plot(x, [cell.paper for cell in cells], "s", color=COLOURS[2], label="paper")
    axis.plot(x, [cell.frugal for cell in cells], "*", color=COLOURS[1], markersize=12, label="frugal")
    axis.margins(x=0.15)


def _claims(rows: Rows) -> list[Claim]:
    claims = []
    for task, own in tasks_in(rows).items():
        cells = [CaseLosses(own, case) for case in CASES]
        regrets = {cell.case: cell.regret(cell.frugal) for cell in cells}
        behind = [cell.regret(cell.frugal) - cell.regret(cell.paper) for cell in cells]
        gains = own[0]["model"] in _DRIFTING
        claims.append(
            Claim(
                f"{task}: frugal has a regret of at most {REGRET}{', below 0 in Cases 2 and 4' if gains else ''}",
                f"{_numbers(regrets.values())} in Cases 1-4",
                max(regrets.values()) <= REGRET and not (gains and max(regrets[2], regrets[4]) >= 0),
            )
        )
        claims.append(
            Claim(
                f"{task}: frugal is not behind the paper's method by more than {WORSE} of the spread of fixed τ",
                f"{_numbers(behind)} in Cases 1-4",
                max(behind) <= WORSE,
            )
        )
        if (own[0]["model"], own[0]["dataset"], str(own[0]["batch_size"])) == ("svm", "mnist", "100"):
            claims.append(_gap(task, cells))
    return claims


def _claims_without_knobs(rows: Rows) -> list[Claim]:
    claims = []
    for task, own in tasks_in(rows).items():
        cells = [CaseLosses(own, case) for case in CASES]
        ahead = [cell.regret(cell.frugal) - cell.regret(cell.paper) for cell in cells]
        claims.append(
            Claim(
                f"{task}: with a step size of its own, frugal is in no case behind the paper's method",
                f"{_numbers(ahead)} of the spread of fixed τ in Cases 1-4",
                max(ahead) <= 0,
            )
        )
        if own[0]["model"] in _SLOW:
            regrets = [cell.regret(cell.frugal) for cell in cells]
            claims.append(
                Claim(
                    f"{task}: it is better than the best fixed τ by a quarter of that spread or more",
                    f"regret {_numbers(regrets)} in Cases 1-4",
                    max(regrets) <= QUARTER,
                )
            )
    return claims


def _gap(task: str, cells: list[CaseLosses]) -> Claim:
    by_case = {cell.case: cell for cell in cells}
    shares = [(by_case[case].frugal - by_case[1].frugal) / (by_case[case].paper - by_case[1].paper) for case in (2, 4)]
    return Claim(
        f"{task}: what Cases 2 and 4 lose to Case 1 shrinks to a quarter or less",
        f"to {_numbers(shares)} of the paper's method's",
        max(shares) <= GAP,
    )


def _table(rows: Rows) -> FigureTable:
    head = ("task", "case", "best fixed τ", "paper", "frugal", "regret, paper", "regret, frugal")
    lines = []
    for task, own in tasks_in(rows).items():
        for cell in (CaseLosses(own, case) for case in CASES):
            losses = f"{cell.best:.4f} (τ={cell.best_tau})", f"{cell.paper:.4f}", f"{cell.frugal:.4f}"
            regrets = (f"{cell.regret(loss):+.3f}" for loss in (cell.paper, cell.frugal))
            lines.append((task, str(cell.case), *losses, *regrets))
    return FigureTable(head, tuple(lines))


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:+.3f}" for value in values)
