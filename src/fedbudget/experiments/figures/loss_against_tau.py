"""Loss and accuracy at the end of the budget against fixed τ, in Cases 1-4, with adaptive τ and centralized descent."""

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from fedbudget.experiments.figures.figure import CASES, TAUS, Claim, Figure, GridSize, joined
from fedbudget.experiments.figures.rows import Rows, distinct, mean, where
from fedbudget.experiments.figures.style import ACCURACY, BASELINE, COLOURS, LOSS, case_line, finish, log_scale, picture
from fedbudget.experiments.sweep import Sweep
from fedbudget.settings import Settings

NEAR = 0.05
"""Of the way from the best to the worst fixed τ: as near to the best as this counts as near-optimal."""


def loss_against_tau(
    name: str, title: str, task: str, *, differs: bool = False, slower: bool = False, long: bool = False
) -> Figure:
    """The figure of one model and dataset.

    Args:
      differs: no τ is the best in all cases.
      slower: with whole shards, Case 3 has more to do in a step than Case 1, and so ends with a higher loss.
    """
    return Figure(name, title, (task,), _sweep, _draw, _claims(title, differs=differs, slower=slower), long=long)


def regret(rows: Rows, case: int) -> float:
    """What not knowing the best fixed τ costs: 0 for as good as the best, 1 for as bad as the worst."""
    losses = _fixed(rows, case, "loss").values()
    best, worst = min(losses), max(losses)
    return (_adaptive(rows, case, "loss") - best) / (worst - best) if worst > best else 0.0


def _sweep(base: Settings, size: GridSize) -> Sweep:
    taus = size.choose(TAUS, (1, 3, 10, 30, 100))
    federated = Sweep.of(base, {"method": ["paper"], "case": CASES, "tau": ["adaptive", *taus], "seeds": size.runs})
    return joined(federated, Sweep.of(base, {"method": ["centralized"], "seeds": size.runs}))


def _draw(rows: Rows) -> Picture:
    figures = [("loss", LOSS), *([("accuracy", ACCURACY)] if any(row["accuracy"] is not None for row in rows) else [])]
    drawn = picture(5.2 * len(figures), 4.2)
    for axis, (name, label) in zip(drawn.subplots(1, len(figures), squeeze=False)[0], figures, strict=True):
        _panel(axis, rows, name)
        log_scale(axis, (1, 3, 10, 30, 100))
        finish(axis, "τ (fixed), or average τ* weighted by updates (adaptive)", label, legend=name == "loss")
    return drawn


def _panel(axis: Axes, rows: Rows, name: str) -> None:
    for case in CASES:
        fixed = _fixed(rows, case, name)
        case_line(axis, case, list(fixed), list(fixed.values()))
        axis.plot(
            _adaptive(rows, case, "update_weighted_tau"),
            _adaptive(rows, case, name),
            marker="*",
            markersize=15,
            color=COLOURS[case],
            markeredgecolor="black",
            linestyle="none",
            label="adaptive τ, by case" if case == CASES[-1] else None,
        )
    axis.axhline(mean(where(rows, method="centralized"), name), color=BASELINE, linewidth=1, label="centralized")


def _claims(title: str, *, differs: bool, slower: bool) -> Callable[[Rows], list[Claim]]:
    def judge(rows: Rows) -> list[Claim]:
        regrets = {case: regret(rows, case) for case in CASES}
        measured = ", ".join(f"{value:.3f}" for value in regrets.values())
        claims = [
            Claim(
                f"{title}: adaptive τ is near the best fixed τ in all cases",
                f"regret {measured} in Cases 1-4; up to {NEAR} counts as near",
                max(regrets.values()) <= NEAR,
            )
        ]
        if differs:
            best = [min(fixed, key=fixed.__getitem__) for case in CASES if (fixed := _fixed(rows, case, "loss"))]
            claims.append(
                Claim(
                    f"{title}: the best fixed τ differs from case to case",
                    "best τ " + ", ".join(f"{tau:g}" for tau in best) + " in Cases 1-4",
                    len(set(best)) > 1,
                )
            )
        if slower:
            first, third = (_adaptive(rows, case, "loss") for case in (1, 3))
            claims.append(
                Claim(
                    f"{title}: Case 3 is worse than Case 1, because a step takes longer",
                    f"loss {third:.4f} in Case 3, {first:.4f} in Case 1",
                    third > first,
                )
            )
        return claims

    return judge


def _fixed(rows: Rows, case: int, name: str) -> dict[float, float]:
    """The mean of a figure for each fixed τ."""
    fixed = [row for row in where(rows, method="paper", case=case) if row["tau"] != "adaptive"]
    values = {float(tau): mean(where(fixed, tau=tau), name) for tau in distinct(fixed, "tau")}
    return {tau: value for tau, value in values.items() if np.isfinite(value)}


def _adaptive(rows: Rows, case: int, name: str) -> float:
    return mean(where(rows, method="paper", case=case, tau="adaptive"), name)
