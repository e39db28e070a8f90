"""What the next round is thought to cost: odd rounds have no say, lasting changes have."""

import json
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.budget import Costs
from fedbudget.meters.expectation import Expectation

numbers = st.floats(0, 1e6)
rounds = st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=1, max_size=12)


def costs(*figures: float) -> Costs:
    """c and b of as many resources as there are pairs."""
    return Costs(np.array(figures[::2]), np.array(figures[1::2]))


def after(expectation: Expectation, steps: list[float]) -> list[float]:
    """What is expected of c after each of these rounds."""
    return [float(expectation.after(costs(step, 0.0)).step[0]) for step in steps]


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("odd", [0.0, 1000.0])
def test_a_single_odd_round_changes_nothing(place: int, odd: float) -> None:
    steps = [2.0] * 8
    steps[place] = odd
    seen = after(Expectation(), steps)
    # Before there are three rounds to compare, an odd one may be taken for what it is: the first, or the quicker.
    assert seen[2:] == [2.0] * 6
    if odd > 2 and place:
        assert seen == [2.0] * 8


def test_two_slow_rounds_among_five_change_nothing_either() -> None:
    assert after(Expectation(), [2, 2, 2, 50, 70, 2, 2, 2])[2:] == [2] * 6


@pytest.mark.parametrize("before", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("later", [1.0, 9.0])
def test_a_lasting_change_is_followed_after_three_rounds(before: int, later: float) -> None:
    seen = after(Expectation(), [3.0] * before + [later] * 4)
    assert seen[:before] == [3.0] * before
    assert seen[before + 2 :] == [later] * 2
    if before >= 3:
        assert seen[before : before + 2] == [3.0] * 2


@given(rounds)
def test_it_is_the_median_of_the_last_five_of_each_figure_by_itself(history: list[tuple[float, ...]]) -> None:
    expectation = Expectation()
    for figures in history:
        expected = expectation.after(costs(*figures))
    medians = [statistics.median_low(figure) for figure in zip(*history[-5:], strict=True)]
    assert expected.step.tolist() == medians[::2]
    assert expected.aggregation.tolist() == medians[1::2]


@given(rounds, rounds)
def test_one_that_is_restored_goes_on_as_the_first_would(
    history: list[tuple[float, ...]], future: list[tuple[float, ...]]
) -> None:
    first, second = Expectation(), Expectation()
    for figures in history:
        first.after(costs(*figures))
    second.after(costs(7.0, 7.0, 7.0, 7.0))  # to be forgotten
    second.restore(json.loads(json.dumps(first.state())))
    assert second.state() == first.state()
    for figures in future:
        one, other = first.after(costs(*figures)), second.after(costs(*figures))
        assert one.step.tolist() == other.step.tolist()
        assert one.aggregation.tolist() == other.aggregation.tolist()


def test_a_new_one_remembers_nothing() -> None:
    expectation = Expectation()
    assert expectation.state() == []
    expectation.after(costs(1.0, 2.0))
    assert expectation.state() == [[[1.0], [2.0]]]
