"""Tallies: exact round trips, refusal of invalid ones, and which of them count."""

import math
import zlib
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.engines.remote.tallies import (
    MAX_TALLIES_BYTES,
    expected_bytes,
    pack_tallies,
    plausible_tallies,
    unpack_tallies,
)
from fedbudget.evaluation.metrics import BINS, ClassCounts, ErrorSums, Tally
from fedbudget.protocol.messages import PeerError


def tally_of(seed: int, samples: int, classes: int, *, scored: bool = True) -> Tally:
    rng = np.random.default_rng(seed)
    actual, predicted = rng.integers(0, classes, samples), rng.integers(0, classes, samples)
    scores = rng.normal(size=(samples, 1 if classes == 2 else classes)) if scored else None
    return Tally(
        samples, 0.25, ClassCounts.of(actual, predicted, classes, scores), own={"own": 3.5}
    )


def same_tally(one: Tally, other: Tally) -> bool:
    return str(_as_lists(one)) == str(_as_lists(other))


def _as_lists(tally: Tally) -> list[Any]:
    counts = tally.classes
    arrays = (
        []
        if counts is None
        else [counts.actual, counts.predicted, counts.right, counts.scores]
    )
    lists = [each if each is None else each.tolist() for each in arrays]
    return [tally.samples, tally.loss, lists, tally.errors, tally.own]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 1000), st.integers(1, 300), st.sampled_from([2, 3, 10]), st.booleans()
)
def test_class_counts_round_trip(
    seed: int, samples: int, classes: int, scored: bool
) -> None:
    tally = tally_of(seed, samples, classes, scored=scored)
    (result,) = unpack_tallies(pack_tallies([tally]), 1)
    assert same_tally(result, tally)


def test_error_sums_round_trip() -> None:
    """NaN and infinity included."""
    errors = ErrorSums(-3.0, 2.0, 1.0, 0.5), ErrorSums(1.0, 0.0, np.nan, np.inf)
    tallies = [Tally(5, 0.5, errors=errors[0]), Tally(5, np.inf, errors=errors[1])]
    assert all(map(same_tally, unpack_tallies(pack_tallies(tallies), 2), tallies))


def test_no_tallies_take_no_bytes() -> None:
    assert pack_tallies([]) == b""
    assert unpack_tallies(b"", 1) == ()


def test_long_histograms_are_omitted() -> None:
    tally = tally_of(1, 50_000, 100)
    data = pack_tallies([tally])
    assert len(data) <= MAX_TALLIES_BYTES
    (result,) = unpack_tallies(data, 1)
    assert result.classes is not None
    assert result.classes.scores is None
    assert result.metrics()["f1"] == tally.metrics()["f1"]


@pytest.mark.parametrize(("samples", "classes"), [(60, 2), (300, 10), (5000, 3), (100, 0)])
def test_tally_size_matches_estimate(samples: int, classes: int) -> None:
    errors = ErrorSums(1.1, 2.2, 3.3, 4.4)
    tally = tally_of(0, samples, classes) if classes else Tally(samples, 0.1, errors=errors)
    assert 0.3 < len(pack_tallies([tally])) / expected_bytes(samples, classes) < 1.5


def class_counts(**changed: Any) -> ClassCounts:
    scores = np.zeros((1, 2, BINS), np.int64)
    scores[0, 0, 3], scores[0, 1, 7] = 6, 4
    given: dict[str, Any] = {
        "actual": [6, 4],
        "predicted": [5, 5],
        "right": [4, 3],
        "scores": scores,
        **changed,
    }
    return ClassCounts(*(np.array(each, np.int64) for each in given.values()))


WRONG_TOTAL = np.array([[[1] + [0] * (BINS - 1), [4] + [0] * (BINS - 1)]])


@pytest.mark.parametrize(
    ("tally", "reason"),
    [
        (Tally(0, 0.1), "of 0 samples"),
        (Tally(2**41, 0.1), "of 2199023255552 samples"),
        (Tally(9, 0.1, class_counts()), "class counts that do not match"),
        (Tally(10, 0.1, class_counts(actual=[-1, 11])), "counts from -1 to 11"),
        (Tally(10, 0.1, class_counts(right=[6, 3])), "class counts that do not match"),
        (Tally(10, 0.1, class_counts(predicted=[6, 5])), "class counts that do not match"),
        (
            Tally(10, 0.1, class_counts(actual=[10], predicted=[10], right=[3])),
            "counts of 1, 1 and 1 classes",
        ),
        (Tally(10, 0.1, class_counts(right=[4, 3, 0])), "counts of 2, 2 and 3 classes"),
        (
            Tally(10, 0.1, class_counts(scores=np.zeros((3, 2, BINS)))),
            "histograms of 3 scores",
        ),
        (Tally(10, 0.1, class_counts(scores=0)), "histograms of 0 scores"),
        (Tally(10, 0.1, class_counts(scores=[[6, 4]])), "histograms of 0 scores"),
        (Tally(10, 0.1, class_counts(actual=[[6, 4]])), "counts of 2, 2 and 2 classes"),
        (Tally(10, 0.1, class_counts(right=4)), "counts of 2, 2 and 1 classes"),
        (
            Tally(10, 0.1, class_counts(scores=WRONG_TOTAL)),
            "do not match the number of samples",
        ),
        (
            Tally(10, 0.1, class_counts(actual=[5, 5], predicted=[5, 5])),
            "do not match the samples of each class",
        ),
        (Tally(10, 0.1, errors=ErrorSums(np.nan, 1, 1, 1)), "the sum nan"),
        (Tally(10, 0.1, errors=ErrorSums(1, -1, 1, 1)), "the spread -1"),
        (Tally(10, 0.1, errors=ErrorSums(1, 1, -1, 1)), "errors of -1"),
        (Tally(10, 0.1, own={"x" * 201: 1.0}), "long names"),
        (
            Tally(10, 0.1, own={str(number): 1.0 for number in range(65)}),
            "65 custom metrics",
        ),
    ],
)
def test_invalid_tallies_are_refused(tally: Tally, reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        unpack_tallies(pack_tallies([tally]), 1)


def test_number_of_tallies_must_match() -> None:
    tally = replace(tally_of(0, 20, 3), own={})
    for expected in (0, 2):
        with pytest.raises(PeerError, match=f"1 tallies instead of {expected}"):
            unpack_tallies(pack_tallies([tally]), expected)


@pytest.mark.parametrize(
    "data",
    [
        b"\x00",
        zlib.compress(b"\xff"),
        zlib.compress(msgspec.msgpack.encode([[1, "a"]])),
        b"\x01" * (MAX_TALLIES_BYTES + 1),
        zlib.compress(b"\x00" * 2**26),
    ],
)
def test_invalid_tally_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(PeerError, match="tallies"):
        unpack_tallies(data, 1)


@pytest.mark.parametrize(
    ("changes", "plausible"),
    [
        ({}, True),
        ({"loss": 1e9}, True),
        ({"loss": math.nan}, False),
        ({"classes": None}, False),
        ({"samples": 400_000}, True),
        ({"samples": 2**40 - 1}, False),
    ],
)
def test_implausible_tally_is_ignored(changes: dict[str, Any], plausible: bool) -> None:
    """One node of three cannot distort the evaluation."""
    honest = [(tally_of(seed, 50, 3),) for seed in (1, 2)]
    other = (replace(tally_of(3, 50, 3), **changes),)
    assert plausible_tallies([honest[0], other, (), honest[1]]) == [
        True,
        plausible,
        True,
        True,
    ]


def test_two_tallies_are_both_kept() -> None:
    """Two nodes have no majority."""
    diverged = (replace(tally_of(1, 50, 3), loss=math.nan),)
    assert plausible_tallies([diverged, (), (tally_of(2, 50, 3),)]) == [True, True, True]


def test_diverged_majority_is_kept() -> None:
    diverged = [(replace(tally_of(seed, 50, 3), loss=math.nan),) for seed in (1, 2)]
    assert plausible_tallies([*diverged, (tally_of(3, 50, 3),)]) == [True, True, False]
