"""Centres of K-means that have no samples are put where there are some."""

from typing import Any

import numpy as np

import fedbudget
from fedbudget.arrays import Float32
from fedbudget.data import load
from fedbudget.protocol.update import Average, KMeansSplitState, KMeansSplit, restarted


def centres(*values: float) -> Float32:
    """Of one feature each."""
    return np.array(values, np.float32)


class TestSplitting:
    def test_begins_with_the_one_that_moved_furthest(self) -> None:
        """Of the two that moved less than half as far, one is put beside it: a centre is
        split once in a round.
        """
        rule, w = KMeansSplit(4), centres(0, 9, 9, 9)
        state, moved = rule.next(rule.first(w), w, centres(4, 9, 8, 7.5))
        assert state.counted.tolist() == [True, False, False, False]
        np.testing.assert_allclose(moved, [4, 4.04, 8, 7.5], rtol=1e-6)

    def test_doubles_round_by_round(self) -> None:
        rule, w = KMeansSplit(8), centres(*range(8))
        state, counts = rule.first(w), list[int]()
        for _ in range(4):
            mean = w + np.where(
                np.arange(8) < max(1, 2 ** len(counts)), np.float32(1), np.float32(0)
            )
            state, w = rule.next(state, w, mean)
            counts.append(int(state.counted.sum()))
        assert counts == [1, 2, 4, 8]

    def test_who_has_counted_stays(self) -> None:
        """One that has converged does not move either."""
        rule, w = KMeansSplit(2), centres(0, 9)
        state = KMeansSplitState(np.array([True, True]), rounds=3)
        assert rule.next(state, w, centres(1, 9))[1].tolist() == [1, 9]

    def test_rounding_is_no_motion(self) -> None:
        """A mean over nodes of the same number may differ from it in the last digit."""
        rule, w = KMeansSplit(2), centres(0, 9)
        state = KMeansSplitState(np.array([True, False]), rounds=3)
        np.testing.assert_allclose(
            rule.next(state, w, centres(1, np.nextafter(9, 10)))[1], [1, 1.01], rtol=1e-6
        )

    def test_nothing_moves(self) -> None:
        rule, w = KMeansSplit(2), centres(0, 9)
        assert rule.next(rule.first(w), w, w)[1].tolist() == [0, 9]

    def test_after_going_back_all_stay(self) -> None:
        """A short round after it moves few of them."""
        rule, w = KMeansSplit(3), centres(0, 9, 5)
        state = restarted(rule, rule.first(w), w)
        assert rule.next(state, w, centres(1, 9, 5))[1].tolist() == [1, 9, 5]
        assert restarted(Average(), None, w) is None


def test_digits_have_ten_clusters() -> None:
    """One centre takes all samples without, and the loss is that of one cluster."""
    task: Any = {
        "model": "kmeans",
        "dataset": "digits",
        "clusters": 10,
        "case": 2,
        "nodes": 5,
        "budget": "time=5s",
    }
    split = fedbudget.train(**task)
    average = fedbudget.train(**task, update="average", drift_correction=True)
    assert len(np.unique(split.model.predict(load("digits").train.x))) == 10
    assert split.loss < 0.7 * average.loss
