"""When a w is evaluated: at points that are spread over the budget, fewer where it costs
much.
"""

import numpy as np
import pytest

from fedbudget.budget.budget import Budget, Costs, Ledger
from fedbudget.evaluation.points import SHARE, EvaluationPoints, share_of


def looked(points: EvaluationPoints, step: float = 0.001, cost: float = 0.0) -> list[float]:
    """At which shares of the budget it is evaluated, when every round takes one step of it."""
    spent, found = 0.0, []
    while spent < 1:
        if points.due(spent):
            found.append(spent)
            points = points.after(spent, cost)
            spent += cost
        spent += step
    return found


def test_so_many_points_evenly_over_the_budget() -> None:
    found = looked(EvaluationPoints(10))
    assert found == pytest.approx([0.1 * point for point in range(10)], abs=0.002)


def test_where_something_hangs_on_it_it_is_oftener_at_the_beginning() -> None:
    usual, often = looked(EvaluationPoints(10)), looked(EvaluationPoints(10, often=True))
    assert sum(share < 0.1 for share in often) > 3
    assert sum(share >= 0.1 for share in often) == sum(share >= 0.1 for share in usual)


@pytest.mark.parametrize("cost", [0.002, 0.01, 0.05])
def test_what_is_dear_is_done_seldom(cost: float) -> None:
    found = looked(EvaluationPoints(50), cost=cost)
    assert len(found) * cost <= SHARE + cost
    assert len(found) >= 1


def test_the_share_is_that_of_the_scarcest_resource() -> None:
    budget, nothing = Budget({"time": 10.0, "bytes": 1e6}), np.zeros(2)
    ledger = Ledger.open(budget, Costs(nothing, nothing))
    assert share_of(np.array([1.0, 2e5]), ledger) == pytest.approx(0.2)
