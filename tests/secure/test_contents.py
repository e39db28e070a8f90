"""The contents of masked vectors add up to the plain sums over the same reports."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.evaluation.metrics import ClassCounts, ErrorSums, Tally
from fedbudget.protocol.features.drift import DriftCorrection, DriftPart
from fedbudget.protocol.features.estimates import EstimateSlopes
from fedbudget.protocol.features.feature import report_layout
from fedbudget.protocol.messages import FinalRound, Report, TrainReport, TrainRound
from fedbudget.protocol.sums import Sums, column_names
from fedbudget.secure.contents import (
    Contents,
    InvalidReport,
    OpenedSums,
    nothing_finite,
    scale_of,
    shape_of,
    weights_of,
)

FEATURES = (DriftCorrection(partly=True), EstimateSlopes(curvature=True, one_step=True))
LAYOUT = report_layout(FEATURES, False)
PARAMETERS = 9


def broadcast_of(evaluate: bool = False) -> TrainRound:
    return TrainRound(
        round=4,
        w=np.zeros(PARAMETERS, np.float32),
        tau=3,
        eta=0.1,
        effective=3,
        report=LAYOUT,
        parts=(DriftPart(correct=True, share=1.0),),
        evaluate=evaluate,
    )


def report_of(nodes: list[int], sizes: list[int], seed: int = 0) -> TrainReport:
    rng = np.random.default_rng(seed)
    numbers = {name: rng.gamma(1.0, 3.0, len(nodes)) for name in LAYOUT.numbers}
    w = rng.normal(size=(len(nodes), PARAMETERS)).astype(np.float32)
    return TrainReport(
        round=4,
        nodes=np.array(nodes),
        sizes=np.array(sizes),
        numbers=numbers,
        vectors={"w": w},
    )


def with_numbers(report: TrainReport, **numbers: Any) -> TrainReport:
    return replace(report, numbers={**report.numbers, **numbers})


def encode_and_open(
    contents: Contents, reports: list[TrainReport], scale: int, tallies: Any = ()
) -> OpenedSums:
    tallies = tallies or [()] * len(reports)
    encoded = [
        contents.encode(report, scale, each)
        for report, each in zip(reports, tallies, strict=True)
    ]
    assert {len(each) for each in encoded} == {contents.length}
    total = np.array(encoded).sum(axis=0)
    nodes = np.concatenate([report.nodes for report in reports])
    sizes = np.concatenate([report.sizes for report in reports])
    return contents.open(broadcast_of(), total, nodes, sizes, scale)


def sums_of(opened: OpenedSums) -> Sums:
    assert isinstance(opened.sums, Sums)
    return opened.sums


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=3, max_size=12), st.integers(0, 1000))
def test_opened_sums_equal_plain_sums(sizes: list[int], seed: int) -> None:
    cut = 2  # the first member reports for two nodes
    whole = report_of(list(range(len(sizes))), sizes, seed)
    plain = Sums.of(whole, LAYOUT)

    def some(first: int, end: int) -> TrainReport:
        return TrainReport(
            round=4,
            nodes=whole.nodes[first:end],
            sizes=whole.sizes[first:end],
            numbers={name: each[first:end] for name, each in whole.numbers.items()},
            vectors={"w": whole.w[first:end]},
        )

    parts = [some(0, cut), *(some(at, at + 1) for at in range(cut, len(sizes)))]
    scale = int(sum(sizes) - 1).bit_length()
    contents = Contents.of(broadcast_of(), None)
    opened = encode_and_open(contents, parts, scale)
    result = sums_of(opened)
    assert not opened.left_out
    assert dict(result.totals) == pytest.approx(dict(plain.totals), rel=1e-12)
    # Every member rounds to 2^-46 of at most twice the sum of weights.
    error = np.abs(result.vectors["w"] - plain.vectors["w"]).max()
    assert error / plain.totals["used"] < len(parts) * 2.0**-44
    assert np.abs(result.mean("w") - plain.mean("w")).max() < 1e-7
    assert result.largest_beta is not None
    assert plain.largest_beta is not None
    assert plain.largest_beta * (1 - 1e-6) <= result.largest_beta <= 2 * plain.largest_beta
    assert result.report is not None
    assert (result.report.sizes == whole.sizes).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1e-7, 1e10), min_size=1, max_size=6))
def test_largest_beta_is_an_upper_bound(betas: list[float]) -> None:
    """The upper end of its level, an eighth of a factor of two wide."""
    contents = Contents.of(broadcast_of(), None)
    reports = [
        with_numbers(report_of([at], [1]), beta=np.array([value]))
        for at, value in enumerate(betas)
    ]
    largest = sums_of(encode_and_open(contents, reports, 10)).largest_beta
    assert largest is not None
    within = min(max(betas), 2.0**28 * 2 ** (-1 / 8))
    assert within <= largest * (1 + 1e-12)
    assert largest <= max(within, 2.0**-16) * 2 ** (1 / 8) * (1 + 1e-12)


def test_beta_is_absent_if_no_node_has_it() -> None:
    contents = Contents.of(broadcast_of(), None)
    reports = [
        with_numbers(report_of([at], [1]), beta=np.array([value]))
        for at, value in enumerate([0.0, -1.0, 1e13])
    ]
    assert sums_of(encode_and_open(contents, reports, 10)).largest_beta is None


def test_only_the_largest_beta_shows() -> None:
    """Whatever the other two nodes report, levels up to the largest are random numbers, and
    all above are 0.
    """
    contents = Contents.of(broadcast_of(), None)
    figures = 3 * len(column_names(LAYOUT))
    seen = []
    for others in ([0.0, 0.0], [0.01, 3.9], [4.0, 4.0]):
        total = sum(
            contents.encode(
                with_numbers(report_of([at], [1]), beta=np.array([value])), scale=10
            )[figures : figures + contents.levels]
            for at, value in enumerate([4.0, *others])
        )
        assert len(np.unique(total)) == 8 * 18 + 2  # from 2^-16 to 2^2, and 0
        seen.append(np.flatnonzero(total))
    assert all(np.array_equal(each, seen[0]) for each in seen)


def test_weights_follow_from_own_samples() -> None:
    assert weights_of(np.array([7]), 10).tolist() == [7]
    assert weights_of(np.array([30, 10]), 20).tolist() == [15, 5]
    assert weights_of(np.array([10**9, 1]), 20).tolist() == [19, 1]
    for cap, members in ((1, 3), (10**6, 50), (2**40 - 1, 1000)):
        assert members * cap <= 2 ** scale_of(cap, members) <= 2**60


@pytest.mark.parametrize(
    ("name", "value"),
    [("w", np.nan), ("w", 1e9), ("losses", np.inf), ("shifted", 1e300)],
)
def test_non_finite_reports_are_excluded(name: str, value: float) -> None:
    contents = Contents.of(broadcast_of(), None)
    good = [report_of([at], [10 + at], at) for at in range(3)]
    bad = report_of([3], [1000])
    if name == "w":
        bad = replace(bad, vectors={"w": np.full((1, PARAMETERS), value, np.float32)})
    else:
        bad = with_numbers(bad, **{name: np.array([value])})
    with pytest.raises(InvalidReport):
        contents.encode(bad, 11)
    # A member of two nodes excludes only one of them.
    both = Report.merge([good[2], bad])
    assert isinstance(both, TrainReport)
    opened = encode_and_open(contents, [*good[:2], both], 11)
    assert opened.left_out
    result = sums_of(opened)
    assert result.totals["data"] == pytest.approx(33)
    without = sums_of(encode_and_open(contents, good, 11))
    assert (result.vectors["w"] == without.vectors["w"]).all()


def test_infinite_test_loss_is_no_zero() -> None:
    """Zeros in the place of its test results would leave those of other nodes alone."""
    tally = Tally(5, 0.5, None, None, {})
    contents = Contents.of(replace(broadcast_of(), evaluate=True), shape_of(tally))
    contents.encode(report_of([1], [5]), 10, [tally])
    for loss in (np.inf, np.nan, 1e300):
        with pytest.raises(InvalidReport):
            contents.encode(report_of([1], [5]), 10, [replace(tally, loss=loss)])


def test_round_without_finite_report() -> None:
    sums = nothing_finite(broadcast_of(), np.arange(3), np.array([5, 6, 7]))
    assert (sums.totals["used"], sums.totals["data"]) == (0, 18)
    assert sums.totals["losses"] == np.inf
    assert not sums.vectors["w"].any()


def test_final_round_has_only_losses() -> None:
    broadcast = FinalRound(round=4, w=np.zeros(PARAMETERS, np.float32))
    contents = Contents.of(broadcast, None)
    names = column_names(broadcast.report)
    assert set(names) == {"data", "used", "losses", "best_losses", "squared_loss_gap"}
    assert contents.length == 3 * len(names)


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
    contents = Contents.of(broadcast_of(evaluate=True), shape)
    reports = [report_of([at], [1], at) for at in range(5)]
    # One node has no test samples.
    result = encode_and_open(contents, reports, 3, [*((each,) for each in tallies), ()])
    (total,) = result.tallies
    plain = Tally.total(tallies)
    assert total.samples == plain.samples
    assert total.loss == pytest.approx(plain.loss)
    assert total.own == pytest.approx(plain.own)
    if classes:
        assert total.classes is not None
        assert plain.classes is not None
        assert total.classes.metrics() == plain.classes.metrics()
    else:
        assert total.errors is not None
        assert plain.errors is not None
        expected = plain.errors.metrics(plain.samples)
        assert total.errors.metrics(total.samples) == pytest.approx(expected)


def test_tally_of_wrong_shape_is_ignored() -> None:
    shape = shape_of(tally_of(0, classes=True))
    contents = Contents.of(broadcast_of(evaluate=True), shape)
    reports = [report_of([at], [1], at) for at in range(3)]
    result = encode_and_open(
        contents,
        reports,
        2,
        [(tally_of(0, True),), (tally_of(1, False),), (tally_of(2, True),)],
    )
    assert result.tallies[0].samples == 100
