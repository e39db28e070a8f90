"""Limits on the numbers that nodes on other machines report."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.arrays import Float64
from fedbudget.protocol.features.drift import DriftCorrection
from fedbudget.protocol.features.estimates import EstimateSlopes
from fedbudget.protocol.messages import LossReport, SampleReport
from fedbudget.protocol.outliers import CappedFigures, Outlier, PeerGroups, cap_figures
from support.hand_made import ONE, last, make, train_report, with_values

USUAL: dict[str, float] = {
    "rho": 2.0,
    "beta": 5.0,
    "plain": 0.3,
    "corrected": 0.2,
}
GROUPS = [DriftCorrection().reported(False), EstimateSlopes().reported(False)]


def figures(
    *peers: Mapping[str, float], counts: tuple[int, ...] = ()
) -> tuple[LossReport, PeerGroups]:
    """Reports of peers with the usual numbers and some others; and the peers.

    Args:
      peers: numbers of each peer that differ from the usual ones.
      counts: nodes of each peer; one by default.
    """
    peer = np.repeat(np.arange(len(peers)), counts or [1] * len(peers))
    numbers = {
        name: np.array([own.get(name, usual) for own in peers])[peer]
        for name, usual in USUAL.items()
    }
    w = np.zeros((len(peer), 2), np.float32)
    return train_report(w, round=3, **numbers), PeerGroups(peer)


def capped(
    given: tuple[LossReport, PeerGroups], scales: Mapping[str, float] | None = None
) -> CappedFigures:
    return cap_figures(*given, GROUPS, scales or {})


def names(found: CappedFigures) -> dict[int, tuple[str, ...]]:
    return {
        node: tuple(each.name for each in outliers)
        for node, outliers in found.outliers.items()
    }


@given(
    st.lists(st.floats(0.2, 5.0), min_size=3, max_size=12), st.sampled_from(sorted(USUAL))
)
def test_normal_figures_stay(factors: list[float], name: str) -> None:
    given = figures(*[{name: factor * USUAL[name]} for factor in factors])
    found = capped(given)
    assert found.report is given[0]
    assert found.outliers == {}


@pytest.mark.parametrize(
    ("name", "attack", "limit", "counts"),
    [
        ("beta", 9e11, 500, np.nan),
        ("rho", 1e9, 2e4, np.nan),
        ("plain", 1e14, 300, 0.3),
        ("corrected", 1e14, 200, 0.2),
    ],
)
def test_outliers_are_capped(name: str, attack: float, limit: float, counts: float) -> None:
    """An outlier becomes NaN (ρ, β) or the median (other values)."""
    given = figures({}, {}, {name: attack})
    found = capped(given)
    ((outlier,),) = found.outliers.values()
    assert names(found) == {2: (name,)}
    assert outlier.reported == attack
    assert outlier.limit == pytest.approx(limit)
    for value in (outlier.counted, found.report.numbers[name][2]):
        assert value == pytest.approx(counts, nan_ok=True)
    for other in USUAL.keys() - {name}:
        assert found.report.numbers[other] == pytest.approx(given[0].numbers[other])


def test_figures_of_a_group_are_replaced_together() -> None:
    """A node with an implausible divergence without correction has no valid one with it."""
    found = capped(figures({}, {}, {"plain": 1e14, "corrected": 7.0}))
    assert names(found) == {2: ("plain",)}
    assert found.report.numbers["corrected"].tolist() == pytest.approx([0.2, 0.2, 0.2])


def test_limits_have_a_floor() -> None:
    """β of two nodes fell to 0.001; the third still has the β of the first round."""
    first = capped(figures({}, {}, {}))
    later = figures({"beta": 0.001}, {"beta": 0.001}, {"beta": 5.0})
    assert names(capped(later)) == {2: ("beta",)}
    assert capped(later, first.scales).report is later[0]


def test_limits_grow_with_numbers() -> None:
    """The floor is no upper limit: β of all nodes has grown a thousandfold."""
    first = capped(figures({}, {}, {}))
    later = figures(*[{"beta": 5e3}] * 3)
    assert capped(later, first.scales).report is later[0]


def test_first_numbers_may_be_zero() -> None:
    """Nodes have no divergence in the first round."""
    zero = {"plain": 0.0, "corrected": 0.0}
    scales = capped(figures(zero, zero, zero)).scales
    assert capped(figures({}, {}, {}), scales).scales["plain"] == pytest.approx(0.3)


def products(lasting: Float64, shifted: Float64) -> CappedFigures:
    """Cap the terms of α of three nodes."""
    groups = [DriftCorrection(partly=True).reported(False)]
    numbers = {"lasting": lasting, "shifted": shifted}
    report = train_report(np.zeros((3, 2), np.float32), round=3, **numbers)
    return cap_figures(report, PeerGroups(np.arange(3)), groups, {})


def test_products_have_wider_limits() -> None:
    """A shift 500 times as long as the median is normal, and so is its square."""
    found = products(np.array([1.0, 1.0, 2.5e5]), np.array([1.0, 1.0, 2.5e5]))
    assert found.outliers == {}


def test_products_may_cancel() -> None:
    """The median product is nearly 0, as that of two random directions."""
    found = products(np.array([1e-9, -1e-9, 3.0]), np.array([1.0, 1.0, 1.0]))
    assert found.outliers == {}
    assert names(products(np.array([0.0, 0.0, 1e7]), np.ones(3))) == {2: ("lasting",)}


def test_large_fleet_counts_once() -> None:
    """A peer with 50 nodes is one of three, and all its nodes are capped."""
    found = capped(figures({}, {}, {"beta": 9e11}, counts=(1, 1, 50)))
    assert names(found) == dict.fromkeys(range(2, 52), ("beta",))
    assert found.report.numbers["beta"][:2].tolist() == [5, 5]
    assert np.isnan(found.report.numbers["beta"][2:]).all()


def test_one_node_of_a_peer_is_capped() -> None:
    """The median of every peer is 5, so the limit of β is 500."""
    given, peers = figures({}, {}, {}, counts=(2, 3, 1))
    given = with_values(given, beta=np.array([4.0, 6.0, 5.0, 501.0, 5.0, 5.0]))
    found = capped((given, peers))
    assert names(found) == {3: ("beta",)}
    expected = [4, 6, 5, np.nan, 5, 5]
    assert found.report.numbers["beta"].tolist() == pytest.approx(expected, nan_ok=True)


def test_peer_without_figures_is_ignored() -> None:
    """A peer whose nodes all lack β has no median, and is no outlier."""
    given, peers = figures({}, {}, {}, {}, counts=(2, 1, 1, 1))
    beta = np.array([np.nan, np.nan, 5.0, 6.0, 9e11])
    found = capped((with_values(given, beta=beta), peers))
    assert names(found) == {4: ("beta",)}
    assert found.report.numbers["beta"][2:4].tolist() == [5, 6]


@pytest.mark.parametrize("counts", [(1, 1), (1, 30)])
def test_two_peers_stay(counts: tuple[int, ...]) -> None:
    given = figures({}, {"beta": 9e11}, counts=counts)
    assert capped(given).report is given[0]


def test_report_without_losses_stays() -> None:
    """A report of private rounds has w_i, and no numbers to limit."""
    w = np.array([[1, 0], [0, 1], [9, 9]], np.float32)
    ones = np.ones(3, np.int64)
    given = SampleReport(round=1, nodes=np.arange(3), sizes=ones, vectors={"w": w})
    assert cap_figures(given, PeerGroups(np.arange(3)), GROUPS, {}).report is given


@given(st.sampled_from(sorted(USUAL)), st.floats(allow_nan=False, allow_infinity=False))
def test_outlier_influence_is_bounded(name: str, attack: float) -> None:
    numbers = capped(figures({}, {}, {name: attack})).report.numbers
    bounds = {"rho": 1e4, "beta": 100, "plain": 1e3, "corrected": 1e3}
    assert np.nanmax(np.abs(numbers[name])) <= bounds[name] * USUAL[name] * (1 + 1e-9)


def test_messages_tell_what_counts() -> None:
    assert str(Outlier("loss change", 240.0, 4.4, 4.4)) == (
        "loss change 240; the numbers of the other nodes allow 4.4, so it counts as 4.4"
    )
    assert str(Outlier("beta", 9e11, 500.0, np.nan)).endswith("allow 500, so it is ignored")


def test_round_records_outliers() -> None:
    """The aggregator names outliers by node number, and only if peers are given."""
    losses = np.array([1.0, 1.0, 1e9])
    for peers, expected in ((None, []), (np.arange(3), [7])):
        aggregator = make()
        broadcast = aggregator.start()
        given = train_report(
            np.zeros((3, 2), np.float32),
            nodes=np.array([2, 4, 7]),
            losses=losses,
            best_losses=losses,
        )
        given.require_answers(broadcast)
        aggregator.receive(given, ONE, peers=peers)
        assert list(last(aggregator).outliers) == expected
        mean = 1002 / 3 if expected else losses.mean()
        assert last(aggregator).loss == pytest.approx(mean)
