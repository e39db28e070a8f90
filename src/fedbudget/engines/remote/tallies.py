"""Test results of nodes as bytes (evaluation/metrics.py), and checks of received ones.

A node reports a tally of the broadcast's w on its test samples and, in the final round, one
of w^f. Tallies are compressed. Histograms are left out if the result is too long. Received
counts must be consistent with the number of samples. Invalid bytes raise `PeerError`.
"""

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedbudget.codec import Codec
from fedbudget.engines.remote.members import DEFAULT_SHARE, largest_within
from fedbudget.engines.remote.task import LONG_NAME
from fedbudget.evaluation.metrics import BINS, MOST_SCORED, ClassCounts, ErrorSums, Tally
from fedbudget.protocol.messages import PeerError
from fedbudget.protocol.outliers import FEWEST, MOST_SAMPLES

MAX_TALLIES_BYTES = 2**17
"""Maximum number of bytes of all tallies of a report."""

_MOST_UNPACKED = 2**23  # bytes of tallies before compression
_MOST_TALLIED = 2**40
_MOST_CLASSES = 100_000
_MOST_CUSTOM = 64
_CODEC: Codec[tuple[Tally, ...]] = Codec(tuple[Tally, ...])


def expected_bytes(samples: int, classes: int) -> int:
    """Approximate size of a tally in bytes; 0 classes for a real target."""
    scored = 0
    if 0 < classes <= MOST_SCORED:
        scored = _histograms(classes)
    histogram = min(1500, 100 + 2 * samples)
    return min(MAX_TALLIES_BYTES, 100 + 4 * classes + scored * histogram)


def pack_tallies(tallies: Sequence[Tally]) -> bytes:
    """Encode tallies; no bytes for no tallies."""
    if not tallies:
        return b""
    data = zlib.compress(_CODEC.pack(tuple(tallies)), 1)
    if len(data) <= MAX_TALLIES_BYTES:
        return data
    return pack_tallies([_without_scores(each) for each in tallies])


def unpack_tallies(data: bytes, requested: int) -> tuple[Tally, ...]:
    """Decode and check tallies; raise `PeerError` if they are invalid.

    Args:
      requested: number of tallies; a node without test samples sends none.
    """
    if not data:
        return ()
    if len(data) > MAX_TALLIES_BYTES:
        raise PeerError(f"tallies of {len(data)} bytes")
    try:
        tallies = _CODEC.unpack(zlib.decompressobj().decompress(data, _MOST_UNPACKED))
    except (zlib.error, ValueError) as error:
        raise PeerError(f"tallies cannot be read: {error}") from None
    if len(tallies) != requested:
        raise PeerError(f"{len(tallies)} tallies instead of {requested}")
    for tally in tallies:
        _check(tally)
    return tallies


def plausible_tallies(tallies: Sequence[Sequence[Tally]]) -> list[bool]:
    """Whether the tallies of each peer count; the test samples cannot be inspected.

    Tallies do not count if they would make the sums useless: a loss that is not finite or
    missing classes, unlike most peers; or far more samples than the median.

    Args:
      tallies: of each peer; empty without test samples.
    """
    reported = [each for each in tallies if each]
    if len(reported) < FEWEST:
        return [True] * len(tallies)
    most = MOST_SAMPLES * float(np.median([each[0].samples for each in reported]))
    ((form, _),) = Counter(map(_form, reported)).most_common(1)
    return [
        not each or (_form(each) == form and all(part.samples <= most for part in each))
        for each in tallies
    ]


def capped_tallies(tallies: Sequence[Sequence[Tally]]) -> list[tuple[Tally, ...]]:
    """Cap the weight of each peer at half of the total, like that of training samples.

    Args:
      tallies: of each peer; empty without test samples.
    """
    sizes = [each[0].samples for each in tallies if each]
    most = largest_within(sizes, DEFAULT_SHARE) if len(sizes) >= FEWEST else math.inf
    if most == math.inf:
        return [tuple(each) for each in tallies]
    cap = max(1, int(most))
    return [tuple([part.capped(cap) for part in each]) for each in tallies]


def _form(tallies: Sequence[Tally]) -> tuple[tuple[bool, ...], ...]:
    return tuple(
        (math.isfinite(each.loss), each.classes is None, each.errors is None)
        for each in tallies
    )


def _histograms(classes: int) -> int:
    """Number of score histograms: one for two classes, otherwise one per class."""
    return 1 if classes == 2 else classes


def _without_scores(tally: Tally) -> Tally:
    if tally.classes is None:
        return tally
    return replace(tally, classes=replace(tally.classes, scores=None))


def _check(tally: Tally) -> None:
    if not 1 <= tally.samples < _MOST_TALLIED:
        raise PeerError(f"a tally of {tally.samples} samples")
    if len(tally.own) > _MOST_CUSTOM or any(len(name) > LONG_NAME for name in tally.own):
        raise PeerError(f"a tally with {len(tally.own)} custom metrics, or with long names")
    if tally.errors is not None:
        _check_errors(tally.errors)
    if tally.classes is not None:
        _check_counts(tally.classes, tally.samples)


def _check_errors(errors: ErrorSums) -> None:
    impossible = errors.spread < 0 or math.isinf(errors.spread)
    if impossible or not math.isfinite(errors.targets):
        raise PeerError(
            f"targets with the sum {errors.targets} and the spread {errors.spread}"
        )
    if errors.absolute < 0 or errors.squared < 0:  # nan passes: a w that diverged
        raise PeerError(f"errors of {errors.absolute} and {errors.squared}")


def _check_counts(counts: ClassCounts, samples: int) -> None:
    actual = counts.actual
    predicted = counts.predicted
    right = counts.right
    classes = actual.size
    shapes = {actual.shape, predicted.shape, right.shape}
    if not 2 <= classes <= _MOST_CLASSES or shapes != {(classes,)}:
        raise PeerError(f"counts of {classes}, {predicted.size} and {right.size} classes")
    scores = counts.scores
    for each in (actual, predicted, right, scores):
        if each is not None and each.size and not 0 <= each.min() <= each.max() <= samples:
            raise PeerError(f"counts from {each.min()} to {each.max()}, of {samples}")
    if (
        actual.sum() != samples
        or predicted.sum() > samples
        or (right > np.minimum(actual, predicted)).any()
    ):
        raise PeerError(f"class counts that do not match {samples} samples")
    if scores is None:
        return
    scored = _histograms(classes)
    if scores.shape != (scored, 2, BINS) or classes > MOST_SCORED:
        raise PeerError(
            f"histograms of {scores.size // (2 * BINS)} scores for {classes} classes"
        )
    positive = actual[1:] if classes == 2 else actual
    if (scores[:, 1].sum(axis=1) != positive).any():
        raise PeerError("histograms that do not match the samples of each class")
    if (scores.sum(axis=(1, 2)) != samples).any():
        raise PeerError("histograms that do not match the number of samples")
