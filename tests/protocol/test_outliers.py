"""Figures out of all proportion to the others' are not believed, and honest ones stay as
they are.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.protocol.combine import capped_reports
from fedbudget.protocol.messages import NUMBERS, Report

USUAL: dict[str, float] = {
    "losses": 1.0,
    "best_losses": 1.1,
    "rho": 2.0,
    "beta": 5.0,
    "plain": 0.3,
    "corrected": 0.2,
}


def report(node: int, **other: Any) -> Report:
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
def test_honest_reports_stay_as_they_are(
    factors: list[float], names: tuple[str, ...]
) -> None:
    """A node's two losses are of the same samples, and differ from others' together."""
    reports = [
        report(node, **{name: factor * USUAL[name] for name in names})
        for node, factor in enumerate(factors)
    ]
    capped, outliers = capped_reports(reports)
    assert not any(outliers)
    assert all(ours is theirs for ours, theirs in zip(capped, reports, strict=True))


@pytest.mark.parametrize(
    ("name", "lie", "counts"),
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
def test_a_lie_counts_as_unknown_or_as_what_most_say(
    name: str, lie: float, counts: float
) -> None:
    capped, outliers = capped_reports([report(0), report(1), report(2, **{name: lie})])
    assert outliers == [(), (), (name,)]
    assert getattr(capped[2], name).tolist() == pytest.approx([counts], nan_ok=True)


def test_a_gap_that_is_not_believed_is_the_one_that_most_have() -> None:
    """Two see the loss fall by 0.1; the third says that it rose by 50, within what a loss
    may be.
    """
    capped, _ = capped_reports([report(0), report(1), report(2, losses=51.0)])
    assert capped[2].losses - capped[2].best_losses == pytest.approx(-0.1)


def test_who_speaks_for_many_nodes_has_one_voice() -> None:
    capped, outliers = capped_reports(
        [report(0), report(1), report(2, nodes=50, beta=9e11)]
    )
    assert outliers[:2] == [(), ()]
    assert np.isnan(capped[2].beta).all()  # type: ignore[arg-type]


def test_of_two_nobody_knows_who_lies() -> None:
    reports = [report(0), report(1, beta=9e11)]
    assert capped_reports(reports) == (reports, [(), ()])


@given(st.data())
def test_one_of_three_moves_no_mean_by_more_than_its_bound(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(USUAL)))
    lie = data.draw(st.floats(allow_nan=False, allow_infinity=False))
    capped, _ = capped_reports([report(0), report(1), report(2, **{name: lie})])
    bounds = {
        "rho": 1e4,
        "beta": 100,
        "losses": 1e3,
        "best_losses": 1e3,
        "plain": 1e3,
        "corrected": 1e3,
    }
    told = np.concatenate([getattr(each, name) for each in capped])
    assert np.nanmax(np.abs(told)) <= bounds[name] * 1.1 * USUAL[name] * (1 + 1e-9)
    assert {each for each in NUMBERS if getattr(capped[2], each) is None} == {
        "lasting",
        "shifted",
        "length",
    }
