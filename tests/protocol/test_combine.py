"""Combination rules and caps that limit the influence of single nodes."""

from dataclasses import replace
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
    cap_reports,
    mixed,
    shortened_nodes,
    without_outliers,
)
from fedbudget.protocol.messages import SampleReport, TrainReport
from support.hand_made import train_report

START = np.array([1.0, 1.0], np.float32)


def report(*updates: tuple[float, float]) -> TrainReport:
    return train_report(START + np.array(updates, np.float32), round=2)


class TestClippedMean:
    def test_clips_long_updates(self) -> None:
        """Lengths 1, 1, 2 and 100 have median 1.5; the longest shrinks to 1.5 / (100 / 1.5)
        = 0.0225.
        """
        given = report((1, 0), (0, 1), (2, 0), (0, -100))
        found = ClippedMean(6.0).capped(given, START, 2)
        assert (found.vectors["w"] - START).tolist() == pytest.approx(
            np.array([[1, 0], [0, 1], [2, 0], [0, -0.0225]])
        )
        assert shortened_nodes(given, found) == (3,)

    @given(st.integers(0, 2**32 - 1))
    def test_other_nodes_keep_their_bits(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        start = rng.normal(size=9).astype(np.float32)
        w = rng.normal(size=(5, 9)).astype(np.float32)
        w[4] = start + 1000 * (w[4] - start)
        reported = train_report(w, round=2)
        found = ClippedMean().capped(reported, start, 9)
        assert found.vectors["w"][:4].tobytes() == w[:4].tobytes()
        assert shortened_nodes(reported, found) == (4,)

    def test_similar_lengths_stay(self) -> None:
        given = report((1, 0), (0, 1), (5.9, 0))
        assert ClippedMean(6.0).capped(given, START, 2) is given

    def test_two_nodes_stay(self) -> None:
        """Two nodes have no majority."""
        given = report((1, 0), (0, 1e9))
        assert ClippedMean(6.0).capped(given, START, 2) is given

    def test_nonfinite_updates_stay(self) -> None:
        """Other code drops nodes with a non-finite w."""
        given = report((1, 0), (0, 1), (2, 0), (np.nan, 0), (0, -100))
        found = ClippedMean(6.0).capped(given, START, 2)
        assert np.isnan(found.vectors["w"][3]).any()
        assert found.vectors["w"][4] - START == pytest.approx(np.array([0, -0.0225]))

    def test_clips_gradients(self) -> None:
        """Gradients are measured from 0, and w_i from w(t₀)."""
        gradients = np.array([[1, 0], [1, 0], [50, 0]], np.float32)
        given = report((1, 0), (0, 1), (1, 0))
        given = replace(given, vectors={**given.vectors, "gradients": gradients})
        found = ClippedMean(6.0).capped(given, START, 2)
        expected = np.array([[1, 0], [1, 0], [0.02, 0]])
        assert found.vectors["gradients"].tolist() == pytest.approx(expected)
        assert found.vectors["w"] is given.vectors["w"]
        assert shortened_nodes(given, found) == ()

    def test_small_nodes_keep_long_updates(self) -> None:
        """The node has a twelfth of the samples, and balances the others at a minimum."""
        given = replace(report((1, 0), (1, 0), (-11, 0)), sizes=np.array([55, 55, 10]))
        assert ClippedMean(6.0).capped(given, START, 2) is given
        mean = WeightedMean().combine(given.vectors["w"], given.sizes, given.nodes)
        assert mean == pytest.approx(START)

    def test_small_node_is_clipped(self) -> None:
        """An update of 100 with a fifth of the usual samples counts as one of 20."""
        given = report((1, 0), (1, 0), (100, 0))
        given = replace(given, sizes=np.array([50, 50, 10]))
        found = ClippedMean(6.0).capped(given, START, 2)
        assert found.vectors["w"][2] - START == pytest.approx(np.array([5 / 20, 0]))

    def test_ignores_running_statistics(self) -> None:
        given = report((1, 0), (1, 0), (1, 1e6))
        assert ClippedMean(6.0).capped(given, START, 1) is given

    def test_normal_run_matches_the_mean(self) -> None:
        """SVM, Case 2: no update is too long, and drift is corrected as with the mean."""
        how: Any = {"model": "svm", "case": 2, "budget": "time=2s"}
        mean = train(**how)
        clipped = train(**how, combine="clipped")
        assert mean.w.tobytes() == clipped.w.tobytes()


VECTORS = st.lists(
    st.tuples(st.floats(-1, 1, width=32), st.floats(-1, 1, width=32)),
    min_size=5,
    max_size=15,
)


@pytest.mark.parametrize("rule", [TrimmedMean(0.2), CoordinateMedian()])
@given(honest=VECTORS, attack=st.floats(-(2.0**100), 2.0**100, width=32))
def test_few_attackers_move_w_little(
    rule: Any, honest: list[tuple[float, float]], attack: float
) -> None:
    """Up to a fifth of all nodes send any number.

    A neighbour of an honest node is no further away than honest nodes are apart. So each
    mean lies within their range, plus the share of attackers among the neighbours.
    """
    attackers = len(honest) // 4
    w = np.array([*honest, *[(attack, -attack)] * attackers], np.float32)
    found = rule.combine(w, np.full(len(w), 7), np.arange(len(w)))
    values = np.array(honest, np.float32)
    apart = np.linalg.norm(values[:, None] - values, axis=2).max()
    beyond = attackers / (len(w) - rule.outliers(len(w))) * apart + 1e-6
    assert (values.min(axis=0) - beyond <= found).all()
    assert (found <= values.max(axis=0) + beyond).all()


@pytest.mark.parametrize("rule", [TrimmedMean(0.2), CoordinateMedian()])
@given(seed=st.integers(0, 2**32 - 1))
def test_distant_node_is_excluded(rule: Any, seed: int) -> None:
    """One of three is far from the others; the result has the bits of their mean."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(3, 9)).astype(np.float32)
    w[1] += 100 * rng.choice([-1, 1], 9).astype(np.float32)
    found = rule.combine(w, np.full(3, 7), np.arange(3))
    honest = np.array([0, 2])
    assert (
        found.tobytes()
        == WeightedMean().combine(w[honest], np.full(2, 7), honest).tobytes()
    )


def test_neighbour_means_by_hand() -> None:
    """Values 1, 2, 3, 4, 100 with sizes 1, 1, 2, 1, 9: the four nearest have mean 13 / 5
    or, without the first, 912 / 13.
    """
    w = np.array([[1], [2], [3], [4], [100]], np.float32)
    sizes = np.array([1, 1, 2, 1, 9])
    assert mixed(w, sizes, np.arange(5), 4).ravel().tolist() == pytest.approx(
        [2.6, 2.6, 2.6, 2.6, 912 / 13]
    )


def test_rules_by_hand() -> None:
    """Means of four neighbours of 0, 10, 20, 30, 40 are 15, 15, 15, 25, 25; one is trimmed
    at either end. Means of three are 10, 10, 20, 30, 30.
    """
    w = np.array([[0], [10], [20], [30], [40]], np.float32)
    sizes = np.ones(5, np.int64)
    assert TrimmedMean(0.2).combine(w, sizes, np.arange(5)).tolist() == pytest.approx(
        [55 / 3]
    )
    assert CoordinateMedian().combine(w, sizes, np.arange(5)).tolist() == [20.0]


def test_two_nodes_are_averaged() -> None:
    w = np.array([[1, 2], [4, 8]], np.float32)
    sizes = np.array([1, 2])
    assert TrimmedMean(0.2).combine(w, sizes, np.arange(2)) == pytest.approx(
        WeightedMean().combine(w, sizes, np.arange(2))
    )


def test_losses_are_winsorized() -> None:
    """The loss gap of one node is 90, those of the others -1, 0 and 1."""
    given = train_report(
        np.zeros((4, 2), np.float32),
        losses=np.array([1.0, 3.0, 5.0, 100.0]),
        best_losses=np.array([2.0, 3.0, 4.0, 10.0]),
    )
    found = without_outliers(given, 1).numbers
    assert found["best_losses"].tolist() == [3, 3, 4, 4]
    assert (found["losses"] - found["best_losses"]).tolist() == [0, 0, 1, 1]


def test_report_without_losses_stays() -> None:
    """A report of private rounds has w_i, and no losses to limit."""
    w = np.array([[1, 0], [0, 1], [9, 9]], np.float32)
    ones = np.ones(3, np.int64)
    given = SampleReport(round=1, nodes=np.arange(3), sizes=ones, vectors={"w": w})
    assert cap_reports(TrimmedMean(), given, START, 2) is given


@pytest.mark.parametrize("name", ["trimmed", "median"])
def test_robust_rules_disable_drift_correction(name: str) -> None:
    run = train(model="svm", case=2, budget="time=1s", combine=name)
    assert not any(record.corrected for record in run.rounds)
    with pytest.raises(
        UserError, match="drift correction requires that reports are averaged"
    ):
        train(model="svm", budget="time=1s", combine=name, drift_correction=True)
