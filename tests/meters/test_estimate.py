"""What the next round is thought to cost: odd rounds have no say, lasting changes have."""

import json
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.budget import Costs
from fedbudget.meters.estimate import CostEstimator

numbers = st.floats(0, 1e6)
rounds = st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=1, max_size=12)


def costs(*figures: float) -> Costs:
    """c and b of as many resources as there are pairs."""
    return Costs(np.array(figures[::2]), np.array(figures[1::2]))


def after(estimator: CostEstimator, steps: list[float]) -> list[float]:
    """What is expected of c after each of these rounds."""
    return [float(estimator.update(costs(step, 0.0)).step[0]) for step in steps]


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("odd", [0.0, 1000.0])
def test_a_single_odd_round_changes_nothing(place: int, odd: float) -> None:
    steps = [2.0] * 8
    steps[place] = odd
    estimates = after(CostEstimator(), steps)
    # Before there are three rounds to compare, an odd one may be taken for what it is: the first, or the quicker.
    assert estimates[2:] == [2.0] * 6
    if odd > 2 and place:
        assert estimates == [2.0] * 8


def test_two_slow_rounds_among_five_change_nothing_either() -> None:
    assert after(CostEstimator(), [2, 2, 2, 50, 70, 2, 2, 2])[2:] == [2] * 6


@pytest.mark.parametrize("before", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("later", [1.0, 9.0])
def test_a_lasting_change_is_followed_after_three_rounds(before: int, later: float) -> None:
    estimates = after(CostEstimator(), [3.0] * before + [later] * 4)
    assert estimates[:before] == [3.0] * before
    assert estimates[before + 2 :] == [later] * 2
    if before >= 3:
        assert estimates[before : before + 2] == [3.0] * 2


@given(rounds)
def test_it_is_the_median_of_the_last_five_of_each_figure_by_itself(history: list[tuple[float, ...]]) -> None:
    estimator = CostEstimator()
    for figures in history:
        expected = estimator.update(costs(*figures))
    medians = [statistics.median_low(figure) for figure in zip(*history[-5:], strict=True)]
    assert expected.step.tolist() == medians[::2]
    assert expected.aggregation.tolist() == medians[1::2]


@given(rounds, rounds)
def test_one_that_is_restored_goes_on_as_the_first_would(
    history: list[tuple[float, ...]], future: list[tuple[float, ...]]
) -> None:
    first, second = CostEstimator(), CostEstimator()
    for figures in history:
        first.update(costs(*figures))
    second.update(costs(7.0, 7.0, 7.0, 7.0))  # to be forgotten
    second.restore(json.loads(json.dumps(first.state())))
    assert second.state() == first.state()
    for figures in future:
        one, other = first.update(costs(*figures)), second.update(costs(*figures))
        assert one.step.tolist() == other.step.tolist()
        assert one.aggregation.tolist() == other.aggregation.tolist()


def test_a_new_one_remembers_nothing() -> None:
    estimator = CostEstimator()
    assert estimator.state() == []
    estimator.update(costs(1.0, 2.0))
    assert estimator.state() == [[[1.0], [2.0]]]
