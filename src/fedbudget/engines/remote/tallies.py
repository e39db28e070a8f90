"""What nodes' test samples say of a w, as bytes, for every network; see models/tally.py.

A node sends a tally of the broadcast's w and, in the final round, of w^f after it. What comes from another machine is
checked here: counts that can be, of as many classes in all places, that add up to the number of samples. Histograms are
sent without their empty bins, compressed, and not at all where that would be long.
"""

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from fedbudget.arrays import Int64
from fedbudget.models.tally import BINS, MOST_SCORED, ClassCounts, ErrorSums, Tally
from fedbudget.protocol.belief import FEWEST, MOST_SAMPLES
from fedbudget.protocol.messages import PeerError

LONGEST = 2**17
"""Bytes of all tallies of a report, at most."""

_LARGEST = 2**23  # bytes, before they were compressed
_MOST_SAMPLES = 2**40
_MOST_CLASSES = 100_000
_MOST_OWN, _LONG_NAME = 64, 200


def expected_bytes(samples: int, classes: int) -> int:
    """About what a tally takes, of so many samples; 0 classes where targets are real."""
    scored = 0 if not classes or classes > MOST_SCORED else 1 if classes == 2 else classes
    return min(LONGEST, 100 + 4 * classes + 3 * scored * min(samples, 2 * BINS))


class _SentClasses(msgspec.Struct, array_like=True):
    """Counts of classes; of histograms how many there are, which bins are not empty, and how many are in each."""

    actual: list[int]
    predicted: list[int]
    right: list[int]
    scored: int
    bins: list[int]
    counts: list[int]


class _Sent(msgspec.Struct, array_like=True):
    samples: int
    loss: float
    classes: _SentClasses | None
    errors: tuple[float, float, float, float] | None
    own: dict[str, float]


_DECODER = msgspec.msgpack.Decoder(list[_Sent])


def pack_tallies(tallies: Sequence[Tally]) -> bytes:
    """Nothing for none."""
    if not tallies:
        return b""
    data = zlib.compress(msgspec.msgpack.encode([_out(each) for each in tallies]), 1)
    if len(data) <= LONGEST:
        return data
    return pack_tallies([_without_scores(each) for each in tallies])


def unpack_tallies(data: bytes, most: int) -> tuple[Tally, ...]:
    """Refuses what cannot be with `PeerError`.

    Args:
      most: how many were asked for; a node without test samples has none.
    """
    if not data:
        return ()
    if len(data) > LONGEST:
        raise PeerError(f"tallies of {len(data)} bytes")
    try:
        unpacking = zlib.decompressobj()
        sent = _DECODER.decode(unpacking.decompress(data, _LARGEST))
    except (zlib.error, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"tallies that cannot be read: {error}") from None
    if len(sent) != most:
        raise PeerError(f"{len(sent)} tallies where {most} were asked for")
    return tuple(map(_in, sent))


def believable_tallies(tallies: Sequence[Sequence[Tally]]) -> list[bool]:
    """Of each peer, whether what its test samples say has a part in the sums; nobody can look at these samples.

    It has not where nothing could be said of all if it had: a loss that is no number, or no classes, where most have
    them; nor where it says that it has out of all proportion more samples than most.

    Args:
      tallies: of each, none where it has no test samples.
    """
    known = [each for each in tallies if each]
    if len(known) < FEWEST:
        return [True] * len(tallies)
    usual = float(np.median([each[0].samples for each in known]))
    (form, _), *_ = Counter(map(_form, known)).most_common()
    most = MOST_SAMPLES * usual
    return [not each or (_form(each) == form and all(part.samples <= most for part in each)) for each in tallies]


def _form(tallies: Sequence[Tally]) -> tuple[tuple[bool, ...], ...]:
    return tuple((math.isfinite(each.loss), each.classes is None, each.errors is None) for each in tallies)


def _without_scores(tally: Tally) -> Tally:
    return tally if tally.classes is None else replace(tally, classes=replace(tally.classes, scores=None))


def _out(tally: Tally) -> _Sent:
    classes, errors = None, None
    if tally.classes is not None:
        own = tally.classes
        flat = np.empty(0, np.int64) if own.scores is None else own.scores.ravel()
        bins = np.flatnonzero(flat)
        counts = own.actual.tolist(), own.predicted.tolist(), own.right.tolist()
        scored = 0 if own.scores is None else len(own.scores)
        classes = _SentClasses(*counts, scored, bins.tolist(), flat[bins].tolist())
    if tally.errors is not None:
        errors = tally.errors.targets, tally.errors.spread, tally.errors.absolute, tally.errors.squared
    return _Sent(tally.samples, tally.loss, classes, errors, dict(tally.own))


def _in(sent: _Sent) -> Tally:
    if not 1 <= sent.samples < _MOST_SAMPLES:
        raise PeerError(f"a tally of {sent.samples} samples")
    if len(sent.own) > _MOST_OWN or any(len(name) > _LONG_NAME for name in sent.own):
        raise PeerError(f"a tally with {len(sent.own)} metrics of its own, or with long names")
    errors = None
    if sent.errors is not None:
        errors = ErrorSums(*sent.errors)
        if not math.isfinite(errors.targets) or errors.spread < 0 or math.isinf(errors.spread):
            raise PeerError(f"targets that add up to {errors.targets}, with a spread of {errors.spread}")
        if errors.absolute < 0 or errors.squared < 0:  # nan passes, of a w that has diverged
            raise PeerError(f"errors of {errors.absolute} and {errors.squared}")
    classes = None if sent.classes is None else _class_counts(sent.classes, sent.samples)
    return Tally(sent.samples, sent.loss, classes, errors, sent.own)


def _class_counts(sent: _SentClasses, samples: int) -> ClassCounts:
    classes = len(sent.actual)
    if not 2 <= classes <= _MOST_CLASSES or not len(sent.predicted) == len(sent.right) == classes:
        raise PeerError(f"counts of {classes}, {len(sent.predicted)} and {len(sent.right)} classes")
    actual, predicted, right = (_counts(each, samples) for each in (sent.actual, sent.predicted, sent.right))
    if actual.sum() != samples or predicted.sum() > samples or (right > np.minimum(actual, predicted)).any():
        raise PeerError("counts of classes that are not those of as many samples")
    if not sent.scored:
        return ClassCounts(actual, predicted, right)
    if sent.scored != (1 if classes == 2 else classes) or classes > MOST_SCORED or len(sent.bins) != len(sent.counts):
        raise PeerError(f"histograms of {sent.scored} scores where there are {classes} classes")
    scores, places = np.zeros(sent.scored * 2 * BINS, np.int64), _counts(sent.bins, sent.scored * 2 * BINS - 1)
    scores[places] = _counts(sent.counts, samples)
    shaped = scores.reshape(sent.scored, 2, BINS)
    own = actual[1:] if classes == 2 else actual
    if (np.diff(places) <= 0).any() or (shaped[:, 1].sum(axis=1) != own).any():
        raise PeerError("histograms that are not of as many samples of each class")
    if (shaped.sum(axis=(1, 2)) != samples).any():
        raise PeerError("histograms that are not of all samples")
    return ClassCounts(actual, predicted, right, shaped)


def _counts(values: list[int], most: int) -> Int64:
    if values and not (min(values) >= 0 and max(values) <= most):
        raise PeerError(f"counts from {min(values)} to {max(values)}, of {most}")
    return np.array(values, np.int64)
