"""Combination rules for who does not trust all nodes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget import train
from fedbudget.errors import UserError
from fedbudget.protocol.combine import ClippedMean, CoordinateMedian, TrimmedMean, WeightedMean, without_outliers
from fedbudget.protocol.messages import Report
from fedbudget.protocol.steps import changed

START = np.array([1.0, 1.0], np.float32)


def report(*updates: tuple[float, float], gradients: Any = None) -> Report:
    n = len(updates)
    w = START + np.array(updates, np.float32)
    return Report(2, np.arange(n), np.full(n, 5), np.ones(n), np.ones(n), w=w, gradients=gradients)


class TestClippedMean:
    def test_an_update_too_long_gets_the_median_length(self) -> None:
        """Lengths 1, 1, 2 and 100: the median of them is 1.5."""
        given = report((1, 0), (0, 1), (2, 0), (0, -100))
        found = ClippedMean(6.0).shortened(given, START, 2)
        assert found.w is not None
        assert (found.w - START).tolist() == pytest.approx(np.array([[1, 0], [0, 1], [2, 0], [0, -1.5]]))
        assert changed(given, found) == (3,)

    @given(st.integers(0, 2**32 - 1))
    def test_all_others_stay_as_they_are_to_the_bit(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        start, w = rng.normal(size=9).astype(np.float32), rng.normal(size=(5, 9)).astype(np.float32)
        w[4] = start + 1000 * (w[4] - start)
        reported = Report(2, np.arange(5), np.full(5, 5), np.ones(5), np.ones(5), w=w)
        found = ClippedMean().shortened(reported, start, 9)
        assert found.w is not None
        assert found.w[:4].tobytes() == w[:4].tobytes()
        assert changed(reported, found) == (4,)

    def test_nothing_changes_where_none_is_too_long(self) -> None:
        given = report((1, 0), (0, 1), (5.9, 0))
        assert ClippedMean(6.0).shortened(given, START, 2) is given

    def test_of_two_nobody_knows_which_one_is_too_long(self) -> None:
        given = report((1, 0), (0, 1e9))
        assert ClippedMean(6.0).shortened(given, START, 2) is given

    def test_what_is_not_finite_is_left_to_others(self) -> None:
        given = report((1, 0), (0, 1), (2, 0), (np.nan, 0), (0, -100))
        found = ClippedMean(6.0).shortened(given, START, 2)
        assert found.w is not None
        assert np.isnan(found.w[3]).any()
        assert found.w[4] - START == pytest.approx(np.array([0, -1.5]))

    def test_gradients_are_held_too(self) -> None:
        gradients = np.array([[1, 0], [1, 0], [50, 0]], np.float32)
        found = ClippedMean(6.0).shortened(report((1, 0), (0, 1), (1, 0), gradients=gradients), START, 2)
        assert found.gradients is not None
        assert found.gradients.tolist() == pytest.approx(np.array([[1, 0], [1, 0], [1, 0]]))

    def test_running_statistics_are_not_looked_at(self) -> None:
        given = report((1, 0), (1, 0), (1, 1e6))
        assert ClippedMean(6.0).shortened(given, START, 1) is given

    def test_an_honest_run_has_the_bits_of_the_mean(self) -> None:
        """SVM, Case 2: nobody is too long, and drift is corrected as with the mean."""
        how: Any = {"model": "svm", "case": 2, "budget": "time=2s"}
        mean, clipped = train(**how), train(**how, combine="clipped")
        assert mean.w.tobytes() == clipped.w.tobytes()


VECTORS = st.lists(st.tuples(st.floats(-1, 1, width=32), st.floats(-1, 1, width=32)), min_size=5, max_size=15)


@pytest.mark.parametrize("rule", [TrimmedMean(0.2), CoordinateMedian()])
@given(honest=VECTORS, lie=st.floats(-(2.0**100), 2.0**100, width=32))
def test_some_cannot_leave_what_others_span(rule: Any, honest: list[tuple[float, float]], lie: float) -> None:
    """As many as a fifth of all nodes, with any number in any coordinate."""
    liars = len(honest) // 4
    w = np.array([*honest, *[(lie, -lie)] * liars], np.float32)
    found = rule.combine(w, np.full(len(w), 7), np.arange(len(w)))
    values = np.array(honest, np.float32)
    assert (values.min(axis=0) - 1e-6 <= found).all()
    assert (found <= values.max(axis=0) + 1e-6).all()


def test_trimmed_mean_by_hand() -> None:
    """Of 1, 2, 3, 4, 100 with sizes 1, 1, 2, 1, 9 those in the middle: (2 + 2*3 + 4) / 4."""
    w = np.array([[1], [2], [3], [4], [100]], np.float32)
    assert TrimmedMean(0.2).combine(w, np.array([1, 1, 2, 1, 9]), np.arange(5)).tolist() == [3.0]


def test_nothing_to_trim_is_the_weighted_mean() -> None:
    w, sizes = np.array([[1, 2], [4, 8]], np.float32), np.array([1, 2])
    assert TrimmedMean(0.2).combine(w, sizes, np.arange(2)) == pytest.approx(
        WeightedMean().combine(w, sizes, np.arange(2))
    )


def test_losses_are_trimmed_with_w() -> None:
    """The gap of one node is 90, that of the others -1, 0 and 1; the losses at w^f are within the others'."""
    given = Report(2, np.arange(4), np.full(4, 5), np.array([1.0, 3.0, 5.0, 100.0]), np.array([2.0, 3.0, 4.0, 10.0]))
    found = without_outliers(given, 1)
    assert found.best_losses.tolist() == [3, 3, 4, 4]
    assert (found.losses - found.best_losses).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("name", ["trimmed", "median"])
def test_drift_is_not_corrected_where_the_mean_is_not_taken(name: str) -> None:
    run = train(model="svm", case=2, budget="time=1s", combine=name)
    assert not any(record.corrected for record in run.rounds)
    with pytest.raises(UserError, match="drift is corrected only where reports are averaged"):
        train(model="svm", budget="time=1s", combine=name, drift_correction=True)
