"""The contents of masked vectors add up to the plain sums over the same reports."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.evaluation.metrics import ClassCounts, ErrorSums, Tally
from fedbudget.protocol.messages import Broadcast, Drift, Report, Request
from fedbudget.protocol.sums import Numbers, ReportsHere
from fedbudget.secure.contents import Contents, OpenedReports, shape_of
from fedbudget.secure.messages import Group

REQUEST = Request(estimate=True, curvature=True, drift=True, partly=True, one_step=True)
PARAMETERS = 9


def broadcast_of(tau: int = 3, evaluate: bool = False) -> Broadcast:
    drift = Drift(correct=True, share=1.0)
    w = np.zeros(PARAMETERS, np.float32)
    return Broadcast(
        4, w, tau, 0.1, REQUEST, best=False, stop=False, drift=drift, evaluate=evaluate
    )


def report_of(nodes: list[int], sizes: list[int], seed: int = 0) -> Report:
    rng = np.random.default_rng(seed)
    numbers = [rng.gamma(1.0, 3.0, len(nodes)) for _ in range(8)]
    w = rng.normal(size=(len(nodes), PARAMETERS)).astype(np.float32)
    losses, best, rho, beta, plain, corrected, lasting, shifted = numbers
    return Report(
        4,
        np.array(nodes),
        np.array(sizes),
        losses,
        best,
        w,
        rho,
        beta,
        plain=plain,
        corrected=corrected,
        lasting=lasting,
        shifted=shifted,
    )


def group_of(report: Report, scale: int) -> Group:
    weights = tuple(report.sizes.tolist())
    return Group(4, 1, ("a", "b", "c"), 3, weights, scale, 16, 8, None, ())


def encode_and_open(
    contents: Contents, reports: list[Report], scale: int, tallies: Any = ()
) -> Any:
    tallies = tallies or [()] * len(reports)
    encoded = [
        contents.encode(report, group_of(report, scale), each)
        for report, each in zip(reports, tallies, strict=True)
    ]
    assert {len(each) for each in encoded} == {contents.length}
    return contents.decode(np.sum(encoded, axis=0, dtype=np.uint64))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=3, max_size=12), st.integers(0, 1000))
def test_opened_sums_equal_plain_sums(sizes: list[int], seed: int) -> None:
    broadcast = broadcast_of()
    cut = 2  # the first member reports for two nodes
    whole = report_of(list(range(len(sizes))), sizes, seed)
    plain = ReportsHere(whole).sums

    def some(first: int, end: int) -> Report:
        arrays: dict[str, Any] = {
            name: value[first:end]
            for name, value in vars(whole).items()
            if isinstance(value, np.ndarray)
        }
        return replace(whole, **arrays)

    parts = [some(0, cut), *(some(at, at + 1) for at in range(cut, len(sizes)))]
    scale = int(sum(sizes) - 1).bit_length()
    contents = Contents.of(broadcast, 16, None)
    result = OpenedReports(
        broadcast, encode_and_open(contents, parts, scale), whole.nodes, whole.sizes, scale
    ).sums
    assert np.array(result.totals) == pytest.approx(np.array(plain.totals), rel=1e-12)
    assert plain.w is not None
    assert result.w is not None
    # Every member rounds to 2^-53 of at most twice the sum of weights.
    assert np.abs(result.w - plain.w).max() / plain.totals.used < len(parts) * 2.0**-52
    assert np.abs(result.mean(result.w) - plain.mean(plain.w)).max() < 1e-7
    assert result.largest_beta is not None
    assert plain.largest_beta is not None
    assert plain.largest_beta * (1 - 1e-6) <= result.largest_beta <= 2 * plain.largest_beta
    assert result.report is not None
    assert (result.report.sizes == whole.sizes).all()


def test_largest_beta_with_enough_slots() -> None:
    rng = np.random.default_rng(1)
    contents = Contents.of(broadcast_of(), 4096, None)
    beta = rng.gamma(1.0, 5.0, 10)
    reports = [replace(report_of([at], [1]), beta=beta[at : at + 1]) for at in range(10)]
    assert encode_and_open(contents, reports, 4).beta == pytest.approx(
        beta.max(), rel=1e-12
    )


def test_largest_beta_in_one_slot() -> None:
    contents = Contents.of(broadcast_of(), 1, None)
    reports = [
        replace(report_of([at], [1]), beta=np.array([value]))
        for at, value in enumerate([3.25, 0.5])
    ]
    assert encode_and_open(contents, reports, 1).beta == pytest.approx(3.25, rel=1e-9)


@pytest.mark.parametrize(
    "wrong",
    [
        {"w": np.full((1, PARAMETERS), np.nan, np.float32)},
        {"w": np.full((1, PARAMETERS), 1e9, np.float32)},
        {"losses": np.array([np.inf])},
        {"shifted": np.array([1e300])},
    ],
)
def test_non_finite_reports_are_excluded(wrong: dict[str, Any]) -> None:
    broadcast, contents = broadcast_of(), Contents.of(broadcast_of(), 16, None)
    good = [report_of([at], [10 + at], at) for at in range(3)]
    bad = replace(report_of([3], [1000]), **wrong)
    result = encode_and_open(contents, [*good, bad], 11)
    assert result.figures[Numbers._fields.index("data")] * 2**11 == pytest.approx(33)
    assert (result.w == encode_and_open(contents, good, 11).w).all()
    alone = OpenedReports(
        broadcast, encode_and_open(contents, [bad], 11), bad.nodes, bad.sizes, 11
    ).sums
    assert (alone.totals.used, alone.totals.data, alone.totals.loss) == (0, 1000, np.inf)


def test_final_round_has_only_losses() -> None:
    contents = Contents.of(broadcast_of(tau=0), 16, None)
    assert contents.length == 3 * len(Numbers._fields)


def tally_of(seed: int, classes: bool) -> Tally:
    rng = np.random.default_rng(seed)
    if not classes:
        y, predicted = rng.normal(3.0, 2.0, 40), rng.normal(size=40)
        return Tally(
            40, 1.5 + seed, None, ErrorSums.of(y, predicted), {"mine": float(seed)}
        )
    actual, scores = rng.integers(0, 3, 50), rng.normal(size=(50, 3))
    return Tally(50, 0.5 * seed, ClassCounts.of(actual, scores.argmax(axis=1), 3, scores))


@pytest.mark.parametrize("classes", [True, False])
def test_tallies_add_up(classes: bool) -> None:
    tallies = [tally_of(seed, classes) for seed in range(4)]
    shape = shape_of(tallies[0])
    contents = Contents.of(broadcast_of(evaluate=True), 0, shape)
    reports = [report_of([at], [1], at) for at in range(5)]
    # One node has no test samples.
    result = encode_and_open(contents, reports, 3, [*((each,) for each in tallies), ()])
    (total,) = result.tallies
    plain = Tally.total(tallies)
    assert (total.samples, total.loss) == (plain.samples, pytest.approx(plain.loss))
    assert total.own == pytest.approx(plain.own)
    if classes:
        assert total.classes.metrics() == plain.classes.metrics()  # type: ignore[union-attr]
    else:
        assert total.errors is not None
        assert plain.errors is not None
        expected = plain.errors.metrics(plain.samples)
        assert total.errors.metrics(total.samples) == pytest.approx(expected)


def test_tally_of_wrong_shape_is_ignored() -> None:
    shape = shape_of(tally_of(0, classes=True))
    contents = Contents.of(broadcast_of(evaluate=True), 0, shape)
    reports = [report_of([at], [1], at) for at in range(3)]
    result = encode_and_open(
        contents,
        reports,
        2,
        [(tally_of(0, True),), (tally_of(1, False),), (tally_of(2, True),)],
    )
    assert result.tallies[0].samples == 100
