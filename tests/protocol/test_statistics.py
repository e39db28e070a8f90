"""Running statistics, the last numbers of w: averaged by samples, and touched by nothing
else.
"""

from typing import Any

import numpy as np
import pytest

from fedbudget.arrays import Float32
from fedbudget.budget.budget import Budget, Costs
from fedbudget.budget.control import FixedTau
from fedbudget.budget.step_size import FixedStep
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.combine import WeightedMean
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.protocol.method import Method
from fedbudget.protocol.update import UPDATE_RULES, with_statistics_of, without_statistics

PARAMETERS, STATISTICS, SIZES = 3, 2, np.array([10, 30])
W = np.array([1, 2, 3, 10, 20], np.float32)


def reported(broadcast: Broadcast, round_: int, statistics: int) -> Report:
    """Two nodes that go the same ways, whatever they have for statistics."""
    rng = np.random.default_rng(round_)
    steps = rng.normal(size=(2, PARAMETERS)).astype(np.float32)
    measured = rng.normal(size=(2, STATISTICS)).astype(np.float32)
    w = np.concatenate([broadcast.w[:PARAMETERS] + steps, measured[:, :statistics]], axis=1)
    plain: dict[str, Any] = {
        name: np.zeros(2)
        for name in ("plain", "corrected")
        if name in broadcast.report_fields
    }
    return Report(
        broadcast.round, np.arange(2), SIZES, np.ones(2) / round_, np.ones(2), w, **plain
    )


def run(rule: Any, statistics: int, *, correct_drift: bool) -> list[Broadcast]:
    method = Method(
        FixedTau(2),
        FixedStep(0.1),
        rule,
        WeightedMean(),
        correct_drift=correct_drift,
        delta="parameters",
    )
    cost, budget = Costs(np.ones(1), np.ones(1)), Budget.parse(["time=1000s"])
    start = W[: PARAMETERS + statistics]
    aggregator = Aggregator(
        start, method=method, budget=budget, expected=cost, statistics=statistics
    )
    broadcasts = [aggregator.start()]
    for round_ in range(1, 7):
        answer = aggregator.receive(reported(broadcasts[-1], round_, statistics), cost)
        assert isinstance(answer, Broadcast)
        broadcasts.append(answer)
        assert aggregator.state.statistics == statistics
    return broadcasts


@pytest.mark.parametrize("name", UPDATE_RULES)
@pytest.mark.parametrize("correct_drift", [False, True])
def test_rules_move_the_parameters_as_ever_and_leave_the_mean_of_the_statistics(
    name: str, correct_drift: bool
) -> None:
    rule = UPDATE_RULES[name]()
    ours = run(rule, STATISTICS, correct_drift=correct_drift)
    theirs = run(rule, 0, correct_drift=correct_drift)
    for round_, (one, other) in enumerate(zip(ours[1:], theirs[1:], strict=True), start=1):
        np.testing.assert_array_equal(one.w[:PARAMETERS], other.w)
        measured = reported(ours[round_ - 1], round_, STATISTICS).w
        assert measured is not None
        expected = (SIZES @ measured[:, PARAMETERS:].astype(np.float64)) / SIZES.sum()
        np.testing.assert_allclose(one.w[PARAMETERS:], expected, rtol=1e-6)
        assert (one.mean is None) == (other.mean is None)
        if one.catch_up is not None and one.catch_up.mean is not None:
            assert one.catch_up.mean[PARAMETERS:].tolist() == [0, 0]  # of drift


@pytest.mark.parametrize("shape", [(5,), (2, 5)])
def test_of_two_w_one_is_given_the_statistics_of_the_other(shape: tuple[int, ...]) -> None:
    other, w = W.copy(), np.zeros(shape, np.float32)
    found = with_statistics_of(other, w, 2)
    assert found.reshape(-1, 5)[-1].tolist() == [0, 0, 0, 10, 20]
    assert not w.any()
    assert with_statistics_of(other, w, 0) is w


def test_it_is_the_other_itself_where_they_differ_in_nothing_else() -> None:
    w: Float32 = np.append(W[:3], np.zeros(2, np.float32)).astype(np.float32)
    assert with_statistics_of(W, w, 2) is W


def test_without_them_parameters_are_left() -> None:
    assert without_statistics(W, 2).tolist() == [1, 2, 3]
    assert without_statistics(W, 0).tolist() == W.tolist()
