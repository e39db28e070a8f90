"""Combination rules for who does not trust all nodes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget import train
from fedbudget.errors import UserError
from fedbudget.protocol.combine import (
    ClippedMean,
    CoordinateMedian,
    TrimmedMean,
    WeightedMean,
    mixed,
    without_outliers,
)
from fedbudget.protocol.messages import Report
from fedbudget.protocol.state import shortened_nodes

START = np.array([1.0, 1.0], np.float32)


def report(*updates: tuple[float, float], gradients: Any = None) -> Report:
    n = len(updates)
    w = START + np.array(updates, np.float32)
    return Report(
        2, np.arange(n), np.full(n, 5), np.ones(n), np.ones(n), w=w, gradients=gradients
    )


class TestClippedMean:
    def test_the_longer_an_update_was_the_shorter_it_gets(self) -> None:
        """Lengths 1, 1, 2 and 100: the median of them is 1.5, and 1.5 / (100 / 1.5) =
        0.0225.
        """
        given = report((1, 0), (0, 1), (2, 0), (0, -100))
        found = ClippedMean(6.0).capped(given, START, 2)
        assert found.w is not None
        assert (found.w - START).tolist() == pytest.approx(
            np.array([[1, 0], [0, 1], [2, 0], [0, -0.0225]])
        )
        assert shortened_nodes(given, found) == (3,)

    @given(st.integers(0, 2**32 - 1))
    def test_all_others_stay_as_they_are_to_the_bit(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        start, w = (
            rng.normal(size=9).astype(np.float32),
            rng.normal(size=(5, 9)).astype(np.float32),
        )
        w[4] = start + 1000 * (w[4] - start)
        reported = Report(2, np.arange(5), np.full(5, 5), np.ones(5), np.ones(5), w=w)
        found = ClippedMean().capped(reported, start, 9)
        assert found.w is not None
        assert found.w[:4].tobytes() == w[:4].tobytes()
        assert shortened_nodes(reported, found) == (4,)

    def test_nothing_changes_where_none_is_too_long(self) -> None:
        given = report((1, 0), (0, 1), (5.9, 0))
        assert ClippedMean(6.0).capped(given, START, 2) is given

    def test_of_two_nobody_knows_which_one_is_too_long(self) -> None:
        given = report((1, 0), (0, 1e9))
        assert ClippedMean(6.0).capped(given, START, 2) is given

    def test_what_is_not_finite_is_left_to_others(self) -> None:
        given = report((1, 0), (0, 1), (2, 0), (np.nan, 0), (0, -100))
        found = ClippedMean(6.0).capped(given, START, 2)
        assert found.w is not None
        assert np.isnan(found.w[3]).any()
        assert found.w[4] - START == pytest.approx(np.array([0, -0.0225]))

    def test_gradients_are_held_too(self) -> None:
        gradients = np.array([[1, 0], [1, 0], [50, 0]], np.float32)
        found = ClippedMean(6.0).capped(
            report((1, 0), (0, 1), (1, 0), gradients=gradients), START, 2
        )
        assert found.gradients is not None
        assert found.gradients.tolist() == pytest.approx(
            np.array([[1, 0], [1, 0], [0.02, 0]])
        )

    def test_running_statistics_are_not_looked_at(self) -> None:
        given = report((1, 0), (1, 0), (1, 1e6))
        assert ClippedMean(6.0).capped(given, START, 1) is given

    def test_an_honest_run_has_the_bits_of_the_mean(self) -> None:
        """SVM, Case 2: nobody is too long, and drift is corrected as with the mean."""
        how: Any = {"model": "svm", "case": 2, "budget": "time=2s"}
        mean, clipped = train(**how), train(**how, combine="clipped")
        assert mean.w.tobytes() == clipped.w.tobytes()


VECTORS = st.lists(
    st.tuples(st.floats(-1, 1, width=32), st.floats(-1, 1, width=32)),
    min_size=5,
    max_size=15,
)


@pytest.mark.parametrize("rule", [TrimmedMean(0.2), CoordinateMedian()])
@given(honest=VECTORS, lie=st.floats(-(2.0**100), 2.0**100, width=32))
def test_some_cannot_take_w_far(
    rule: Any, honest: list[tuple[float, float]], lie: float
) -> None:
    """As many as a fifth of all nodes, with any number in any coordinate. Whoever is among
    the neighbours of an honest node is no further from it than honest nodes are apart; so
    its mean is within what they span, and as much more as the share of liars among the
    neighbours."""
    liars = len(honest) // 4
    w = np.array([*honest, *[(lie, -lie)] * liars], np.float32)
    found = rule.combine(w, np.full(len(w), 7), np.arange(len(w)))
    values = np.array(honest, np.float32)
    apart = np.linalg.norm(values[:, None] - values, axis=2).max()
    beyond = liars / (len(w) - rule.outliers(len(w))) * apart + 1e-6
    assert (values.min(axis=0) - beyond <= found).all()
    assert (found <= values.max(axis=0) + beyond).all()


@pytest.mark.parametrize("rule", [TrimmedMean(0.2), CoordinateMedian()])
@given(seed=st.integers(0, 2**32 - 1))
def test_far_from_all_has_no_part(rule: Any, seed: int) -> None:
    """One of three, further from the two others than these are apart: what is left is their
    mean to the bit.
    """
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(3, 9)).astype(np.float32)
    w[1] += 100 * rng.choice([-1, 1], 9).astype(np.float32)
    found = rule.combine(w, np.full(3, 7), np.arange(3))
    honest = np.array([0, 2])
    assert (
        found.tobytes()
        == WeightedMean().combine(w[honest], np.full(2, 7), honest).tobytes()
    )


def test_means_of_neighbours_by_hand() -> None:
    """Of 1, 2, 3, 4, 100 with sizes 1, 1, 2, 1, 9 the four nearest to each: 13 / 5 and,
    without the first, 912 / 13.
    """
    w, sizes = np.array([[1], [2], [3], [4], [100]], np.float32), np.array([1, 1, 2, 1, 9])
    assert mixed(w, sizes, np.arange(5), 4).ravel().tolist() == pytest.approx(
        [2.6, 2.6, 2.6, 2.6, 912 / 13]
    )


def test_rules_by_hand() -> None:
    """Means of four neighbours of 0, 10, 20, 30 and 40 are 15, 15, 15, 25 and 25, of which
    one is left out at either end; of three, 10, 10, 20, 30 and 30."""
    w, sizes = np.array([[0], [10], [20], [30], [40]], np.float32), np.ones(5, np.int64)
    assert TrimmedMean(0.2).combine(w, sizes, np.arange(5)).tolist() == pytest.approx(
        [55 / 3]
    )
    assert CoordinateMedian().combine(w, sizes, np.arange(5)).tolist() == [20.0]


def test_nothing_to_trim_is_the_weighted_mean() -> None:
    w, sizes = np.array([[1, 2], [4, 8]], np.float32), np.array([1, 2])
    assert TrimmedMean(0.2).combine(w, sizes, np.arange(2)) == pytest.approx(
        WeightedMean().combine(w, sizes, np.arange(2))
    )


def test_losses_are_trimmed_with_w() -> None:
    """The gap of one node is 90, that of the others -1, 0 and 1; the losses at w^f are
    within the others'.
    """
    given = Report(
        2,
        np.arange(4),
        np.full(4, 5),
        np.array([1.0, 3.0, 5.0, 100.0]),
        np.array([2.0, 3.0, 4.0, 10.0]),
    )
    found = without_outliers(given, 1)
    assert found.best_losses.tolist() == [3, 3, 4, 4]
    assert (found.losses - found.best_losses).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("name", ["trimmed", "median"])
def test_drift_is_not_corrected_where_the_mean_is_not_taken(name: str) -> None:
    run = train(model="svm", case=2, budget="time=1s", combine=name)
    assert not any(record.corrected for record in run.rounds)
    with pytest.raises(
        UserError, match="drift correction requires that reports are averaged"
    ):
        train(model="svm", budget="time=1s", combine=name, drift_correction=True)
