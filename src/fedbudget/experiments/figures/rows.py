"""The rows of a sweep's results, as plain dictionaries, and what is asked of them."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]
Rows = Sequence[Row]


def where(rows: Rows, **values: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def distinct(rows: Rows, name: str) -> list[Any]:
    """The values of a column, each once, in the order of their first row."""
    return list(dict.fromkeys(row[name] for row in rows if row[name] is not None))


def mean(rows: Rows, name: str) -> float:
    """The mean of a column over the rows that have a value in it; NaN where none has."""
    values = [row[name] for row in rows if row[name] is not None]
    return float(np.mean(values)) if values else float("nan")


def means(rows: Rows, over: str, values: Iterable[Any], name: str) -> list[float]:
    """The mean of a column for each value of another."""
    return [mean(where(rows, **{over: value}), name) for value in values]


def by_fixed_tau(rows: Rows, case: int, name: str) -> dict[str, float]:
    """The mean of a column for each fixed τ, where it is finite."""
    fixed = [row for row in where(rows, method="paper", case=case) if row["tau"] != "adaptive"]
    taus = distinct(fixed, "tau")
    return {tau: value for tau, value in zip(taus, means(fixed, "tau", taus, name), strict=True) if np.isfinite(value)}


class CaseLosses:
    """One task in one case: the losses of fixed τ, of the paper's method, and of ours."""

    def __init__(self, rows: Rows, case: int) -> None:
        losses = by_fixed_tau(rows, case, "loss")
        self.case = case
        self.best_tau = min(losses, key=losses.__getitem__)
        self.best, self.worst = losses[self.best_tau], max(losses.values())
        self.paper = mean(where(rows, case=case, method="paper", tau="adaptive"), "loss")
        self.frugal = mean(where(rows, case=case, method="frugal"), "loss")

    def regret(self, loss: float) -> float:
        """What not knowing the best fixed τ costs: 0 for as good as the best, 1 for as bad as the worst."""
        return (loss - self.best) / (self.worst - self.best) if self.worst > self.best else 0.0
