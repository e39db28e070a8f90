"""Evaluation points: spread over the budget, and fewer if an evaluation is expensive."""

import numpy as np
import pytest

from fedbudget.budget.budget import Budget, Costs, Ledger
from fedbudget.evaluation.points import SHARE, EvaluationPoints, share_of


def evaluated_at(
    points: EvaluationPoints, step: float = 0.001, cost: float = 0.0
) -> list[float]:
    """Shares of the budget at which w is evaluated; every round spends `step`."""
    spent, found = 0.0, []
    while spent < 1:
        if points.due(spent):
            found.append(spent)
            points = points.after(spent, cost)
            spent += cost
        spent += step
    return found


def test_points_are_spread_evenly() -> None:
    found = evaluated_at(EvaluationPoints(10))
    assert found == pytest.approx([0.1 * point for point in range(10)], abs=0.002)


def test_often_adds_early_points() -> None:
    """`often` evaluates more in the first tenth of the budget."""
    usual, often = (
        evaluated_at(EvaluationPoints(10)),
        evaluated_at(EvaluationPoints(10, often=True)),
    )
    assert sum(share < 0.1 for share in often) > 3
    assert sum(share >= 0.1 for share in often) == sum(share >= 0.1 for share in usual)


@pytest.mark.parametrize("cost", [0.002, 0.01, 0.05])
def test_expensive_evaluations_are_rare(cost: float) -> None:
    found = evaluated_at(EvaluationPoints(50), cost=cost)
    assert len(found) * cost <= SHARE + cost
    assert len(found) >= 1


def test_share_of_scarcest_resource() -> None:
    budget, nothing = Budget({"time": 10.0, "bytes": 1e6}), np.zeros(2)
    ledger = Ledger.open(budget, Costs(nothing, nothing))
    assert share_of(np.array([1.0, 2e5]), ledger) == pytest.approx(0.2)
