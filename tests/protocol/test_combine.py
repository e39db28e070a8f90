"""Combination rules and caps that limit the influence of single nodes."""

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
    capped_reports,
    mixed,
    without_outliers,
)
from fedbudget.protocol.messages import NUMBERS, Report
from fedbudget.protocol.state import shortened_nodes

START = np.array([1.0, 1.0], np.float32)


def report(*updates: tuple[float, float], gradients: Any = None) -> Report:
    n = len(updates)
    w = START + np.array(updates, np.float32)
    return Report(
        2, np.arange(n), np.full(n, 5), np.ones(n), np.ones(n), w=w, gradients=gradients
    )


class TestClippedMean:
    def test_clips_long_updates(self) -> None:
        """Lengths 1, 1, 2 and 100 have median 1.5; the longest shrinks to 1.5 / (100 / 1.5)
        = 0.0225.
        """
        given = report((1, 0), (0, 1), (2, 0), (0, -100))
        found = ClippedMean(6.0).capped(given, START, 2)
        assert found.w is not None
        assert (found.w - START).tolist() == pytest.approx(
            np.array([[1, 0], [0, 1], [2, 0], [0, -0.0225]])
        )
        assert shortened_nodes(given, found) == (3,)

    @given(st.integers(0, 2**32 - 1))
    def test_other_nodes_keep_their_bits(self, seed: int) -> None:
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
        assert found.w is not None
        assert np.isnan(found.w[3]).any()
        assert found.w[4] - START == pytest.approx(np.array([0, -0.0225]))

    def test_clips_gradients(self) -> None:
        gradients = np.array([[1, 0], [1, 0], [50, 0]], np.float32)
        found = ClippedMean(6.0).capped(
            report((1, 0), (0, 1), (1, 0), gradients=gradients), START, 2
        )
        assert found.gradients is not None
        assert found.gradients.tolist() == pytest.approx(
            np.array([[1, 0], [1, 0], [0.02, 0]])
        )

    def test_ignores_running_statistics(self) -> None:
        given = report((1, 0), (1, 0), (1, 1e6))
        assert ClippedMean(6.0).capped(given, START, 1) is given

    def test_normal_run_matches_the_mean(self) -> None:
        """SVM, Case 2: no update is too long, and drift is corrected as with the mean."""
        how: Any = {"model": "svm", "case": 2, "budget": "time=2s"}
        mean, clipped = train(**how), train(**how, combine="clipped")
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
    w, sizes = np.array([[1], [2], [3], [4], [100]], np.float32), np.array([1, 1, 2, 1, 9])
    assert mixed(w, sizes, np.arange(5), 4).ravel().tolist() == pytest.approx(
        [2.6, 2.6, 2.6, 2.6, 912 / 13]
    )


def test_rules_by_hand() -> None:
    """Means of four neighbours of 0, 10, 20, 30, 40 are 15, 15, 15, 25, 25; one is trimmed
    at either end. Means of three are 10, 10, 20, 30, 30.
    """
    w, sizes = np.array([[0], [10], [20], [30], [40]], np.float32), np.ones(5, np.int64)
    assert TrimmedMean(0.2).combine(w, sizes, np.arange(5)).tolist() == pytest.approx(
        [55 / 3]
    )
    assert CoordinateMedian().combine(w, sizes, np.arange(5)).tolist() == [20.0]


def test_two_nodes_are_averaged() -> None:
    w, sizes = np.array([[1, 2], [4, 8]], np.float32), np.array([1, 2])
    assert TrimmedMean(0.2).combine(w, sizes, np.arange(2)) == pytest.approx(
        WeightedMean().combine(w, sizes, np.arange(2))
    )


def test_losses_are_winsorized() -> None:
    """The loss gap of one node is 90, those of the others -1, 0 and 1."""
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
def test_robust_rules_disable_drift_correction(name: str) -> None:
    run = train(model="svm", case=2, budget="time=1s", combine=name)
    assert not any(record.corrected for record in run.rounds)
    with pytest.raises(
        UserError, match="drift correction requires that reports are averaged"
    ):
        train(model="svm", budget="time=1s", combine=name, drift_correction=True)


USUAL: dict[str, float] = {
    "losses": 1.0,
    "best_losses": 1.1,
    "rho": 2.0,
    "beta": 5.0,
    "plain": 0.3,
    "corrected": 0.2,
}


def report_with(node: int, **other: Any) -> Report:
    nodes = other.pop("nodes", 1)
    numbers: dict[str, Any] = {
        name: np.full(nodes, value) for name, value in (USUAL | other).items()
    }
    return Report(3, np.arange(node, node + nodes), np.full(nodes, 10), **numbers)


@given(
    st.lists(st.floats(0.2, 5.0), min_size=3, max_size=12),
    st.sampled_from(
        [("losses", "best_losses"), ("rho",), ("beta",), ("plain",), ("corrected",)]
    ),
)
def test_normal_reports_stay(factors: list[float], names: tuple[str, ...]) -> None:
    """Both losses of a node use the same samples, so they vary together."""
    reports = [
        report_with(node, **{name: factor * USUAL[name] for name in names})
        for node, factor in enumerate(factors)
    ]
    capped, outliers = capped_reports(reports)
    assert not any(outliers)
    assert all(ours is theirs for ours, theirs in zip(capped, reports, strict=True))


@pytest.mark.parametrize(
    ("name", "attack", "counts"),
    [
        ("beta", 9e11, np.nan),
        ("rho", 1e9, np.nan),
        ("losses", 1e14, 1.0),
        ("losses", -1e14, 1.0),
        ("best_losses", -1e14, 1.1),
        ("plain", 1e14, 0.3),
        ("corrected", 1e14, 0.2),
    ],
)
def test_outliers_are_capped(name: str, attack: float, counts: float) -> None:
    """An outlier becomes NaN (ρ, β) or the median (other values)."""
    capped, outliers = capped_reports(
        [report_with(0), report_with(1), report_with(2, **{name: attack})]
    )
    assert outliers == [(), (), (name,)]
    assert getattr(capped[2], name).tolist() == pytest.approx([counts], nan_ok=True)


def test_capped_gap_is_the_median() -> None:
    """Two nodes see the loss fall by 0.1; the third reports a rise by 50."""
    capped, _ = capped_reports(
        [report_with(0), report_with(1), report_with(2, losses=51.0)]
    )
    assert capped[2].losses - capped[2].best_losses == pytest.approx(-0.1)


def test_large_fleet_counts_once() -> None:
    capped, outliers = capped_reports(
        [report_with(0), report_with(1), report_with(2, nodes=50, beta=9e11)]
    )
    assert outliers[:2] == [(), ()]
    assert np.isnan(capped[2].beta).all()  # type: ignore[arg-type]


def test_two_reports_stay() -> None:
    reports = [report_with(0), report_with(1, beta=9e11)]
    assert capped_reports(reports) == (reports, [(), ()])


@given(st.data())
def test_outlier_influence_is_bounded(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(USUAL)))
    attack = data.draw(st.floats(allow_nan=False, allow_infinity=False))
    capped, _ = capped_reports(
        [report_with(0), report_with(1), report_with(2, **{name: attack})]
    )
    bounds = {
        "rho": 1e4,
        "beta": 100,
        "losses": 1e3,
        "best_losses": 1e3,
        "plain": 1e3,
        "corrected": 1e3,
    }
    values = np.concatenate([getattr(each, name) for each in capped])
    assert np.nanmax(np.abs(values)) <= bounds[name] * 1.1 * USUAL[name] * (1 + 1e-9)
    assert {each for each in NUMBERS if getattr(capped[2], each) is None} == {
        "lasting",
        "shifted",
        "length",
    }
