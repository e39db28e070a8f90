"""Byte encodings of costs, evaluation results and descriptions, for every transport.

Everything from another machine is checked here before use. Invalid bytes raise `PeerError`
with a reason.

- Costs: readings by resource name. They are few, finite and not negative, and include
  time.
- Tallies (evaluation/metrics.py): metrics of the broadcast's w on a node's test samples
  and, in the final round, of w^f. Counts must be consistent with the number of samples.
  Histograms are sent without empty bins, compressed, and left out if they are too long.
- Descriptions of samples and tasks, also for checkpoints. msgspec checks types and ranges
  by the annotations of the dataclasses; relations between fields are checked below. A new
  field needs no change here except a new VERSION.
"""

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, get_origin

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from fedbudget.arrays import Float64, Int64
from fedbudget.data.agreement import Moments, TableDescription
from fedbudget.data.tables import Layout
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.messages import Hello, Welcome
from fedbudget.engines.remote.task import LONG_NAME, MOST_READINGS, SamplesDescription, Task
from fedbudget.errors import UserError
from fedbudget.evaluation.metrics import BINS, MOST_SCORED, ClassCounts, ErrorSums, Tally
from fedbudget.protocol.combine import FEWEST, MOST_SAMPLES
from fedbudget.protocol.messages import PeerError
from fedbudget.resources import TIME
from fedbudget.resources.resource import Reading, Usage

VERSION = 7

MAX_TALLIES_BYTES = 2**17
"""Maximum number of bytes of all tallies of a report."""

MAX_DESCRIPTION_BYTES = 2**20 + 2**18
"""Maximum number of bytes of a description: it must fit in one message."""

_MOST_COST_BYTES = 20_000
_MOST_UNPACKED = 2**23  # bytes of tallies before compression
_MOST_TALLIED = 2**40
_MOST_CLASSES = 100_000
_MOST_CUSTOM = 64
_MOST_FEATURES = 2**28

_UNREADABLE = (zlib.error, msgspec.MsgspecError, ValueError, RecursionError)
_Rows = list[tuple[str, float, float, str]]
_Described = TypeVar("_Described", Hello, Welcome, Task)


class _SentClasses(msgspec.Struct, array_like=True):
    """Class counts, and score histograms by their number, non-empty bins and counts."""

    actual: list[int]
    predicted: list[int]
    right: list[int]
    scored: int
    bins: list[int]
    counts: list[int]


class _Sent(msgspec.Struct, array_like=True):
    """A tally on the wire."""

    samples: int
    loss: float
    classes: _SentClasses | None
    errors: tuple[float, float, float, float] | None
    own: dict[str, float]


_COSTS_DECODER = msgspec.msgpack.Decoder(tuple[_Rows, _Rows])
_TALLIES_DECODER = msgspec.msgpack.Decoder(list[_Sent])

# Costs.


def pack_costs(costs: Usage) -> bytes:
    """Encode costs: two lists, of the round and of the evaluation.

    Each entry has the resource's name, the amounts of a local update and of the whole
    round, and the host of a shared counter.
    """
    parts = (costs.readings, costs.evaluation)
    return msgspec.msgpack.encode(
        [
            [(name, each.step, each.whole, each.host) for name, each in part.items()]
            for part in parts
        ]
    )


def unpack_costs(data: bytes) -> Usage:
    """Decode and check costs; raise `PeerError` if they are invalid."""
    if len(data) > _MOST_COST_BYTES:
        raise PeerError(f"costs of {len(data)} bytes")
    try:
        whole, evaluation = _COSTS_DECODER.decode(data)
    except _UNREADABLE as error:
        raise PeerError(f"costs cannot be read: {error}") from None
    readings = _readings(whole)
    if TIME.name not in readings:
        raise PeerError("costs without the time of a round")
    return Usage(readings, evaluation=_readings(evaluation))


def _readings(rows: _Rows) -> dict[str, Reading]:
    if len(rows) > MOST_READINGS:
        raise PeerError(f"costs of {len(rows)} readings")
    readings: dict[str, Reading] = {}
    for name, step, whole, host in rows:
        _check_resource(name)
        if name in readings:
            raise PeerError(f"{name} is read twice")
        if len(host) > LONG_NAME:
            raise PeerError(f"a host name of {len(host)} characters")
        for part, value in (("step", step), ("whole", whole)):
            if not 0 <= value < math.inf:
                raise PeerError(f"{name} ({part}) is {value}")
        readings[name] = Reading(step, whole, host)
    return readings


def _check_resource(name: str) -> None:
    """Check the form of a resource's name; the resource may be unknown here."""
    if len(name) > LONG_NAME or not (name.isascii() and name.isalpha()):
        raise PeerError(f"{name[:20]!r} is not a name of a resource")


# Tallies.


def expected_bytes(samples: int, classes: int) -> int:
    """Approximate size of a tally in bytes; 0 classes for a real target."""
    scored = 0
    if 0 < classes <= MOST_SCORED:
        scored = _histograms(classes)
    return min(MAX_TALLIES_BYTES, 100 + 4 * classes + 3 * scored * min(samples, 2 * BINS))


def pack_tallies(tallies: Sequence[Tally]) -> bytes:
    """Encode tallies; no bytes for no tallies."""
    if not tallies:
        return b""
    data = zlib.compress(msgspec.msgpack.encode([_to_wire(each) for each in tallies]), 1)
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
        unpacked = zlib.decompressobj().decompress(data, _MOST_UNPACKED)
        sent = _TALLIES_DECODER.decode(unpacked)
    except _UNREADABLE as error:
        raise PeerError(f"tallies cannot be read: {error}") from None
    if len(sent) != requested:
        raise PeerError(f"{len(sent)} tallies instead of {requested}")
    return tuple(map(_from_wire, sent))


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


def _to_wire(tally: Tally) -> _Sent:
    classes = None
    if tally.classes is not None:
        counts = tally.classes
        scores = counts.scores
        flat = np.empty(0, np.int64) if scores is None else scores.ravel()
        bins = np.flatnonzero(flat)
        classes = _SentClasses(
            counts.actual.tolist(),
            counts.predicted.tolist(),
            counts.right.tolist(),
            scored=0 if scores is None else len(scores),
            bins=bins.tolist(),
            counts=flat[bins].tolist(),
        )
    errors = None
    if tally.errors is not None:
        sums = tally.errors
        errors = (sums.targets, sums.spread, sums.absolute, sums.squared)
    return _Sent(tally.samples, tally.loss, classes, errors, dict(tally.own))


def _from_wire(sent: _Sent) -> Tally:
    if not 1 <= sent.samples < _MOST_TALLIED:
        raise PeerError(f"a tally of {sent.samples} samples")
    if len(sent.own) > _MOST_CUSTOM or any(len(name) > LONG_NAME for name in sent.own):
        raise PeerError(f"a tally with {len(sent.own)} custom metrics, or with long names")
    errors = None if sent.errors is None else ErrorSums(*sent.errors)
    if errors is not None:
        impossible = errors.spread < 0 or math.isinf(errors.spread)
        if impossible or not math.isfinite(errors.targets):
            raise PeerError(
                f"targets with the sum {errors.targets} and the spread {errors.spread}"
            )
        if errors.absolute < 0 or errors.squared < 0:  # nan passes: a w that diverged
            raise PeerError(f"errors of {errors.absolute} and {errors.squared}")
    classes = None if sent.classes is None else _class_counts(sent.classes, sent.samples)
    return Tally(sent.samples, sent.loss, classes, errors, sent.own)


def _class_counts(sent: _SentClasses, samples: int) -> ClassCounts:
    classes = len(sent.actual)
    lengths = {classes, len(sent.predicted), len(sent.right)}
    if not 2 <= classes <= _MOST_CLASSES or len(lengths) > 1:
        raise PeerError(
            f"counts of {classes}, {len(sent.predicted)} and {len(sent.right)} classes"
        )
    actual = _counts(sent.actual, samples)
    predicted = _counts(sent.predicted, samples)
    right = _counts(sent.right, samples)
    if (
        actual.sum() != samples
        or predicted.sum() > samples
        or (right > np.minimum(actual, predicted)).any()
    ):
        raise PeerError(f"class counts that do not match {samples} samples")
    if not sent.scored:
        return ClassCounts(actual, predicted, right)

    if (
        sent.scored != _histograms(classes)
        or classes > MOST_SCORED
        or len(sent.bins) != len(sent.counts)
    ):
        raise PeerError(f"histograms of {sent.scored} scores for {classes} classes")
    flat = np.zeros(sent.scored * 2 * BINS, np.int64)
    bins = _counts(sent.bins, flat.size - 1)
    flat[bins] = _counts(sent.counts, samples)
    scores = flat.reshape(sent.scored, 2, BINS)
    positive = actual[1:] if classes == 2 else actual
    if (np.diff(bins) <= 0).any() or (scores[:, 1].sum(axis=1) != positive).any():
        raise PeerError("histograms that do not match the samples of each class")
    if (scores.sum(axis=(1, 2)) != samples).any():
        raise PeerError("histograms that do not match the number of samples")
    return ClassCounts(actual, predicted, right, scores)


def _counts(values: list[int], most: int) -> Int64:
    if values and not (min(values) >= 0 and max(values) <= most):
        raise PeerError(f"counts from {min(values)} to {max(values)}, of {most}")
    return np.array(values, np.int64)


# Descriptions.


def describe(value: Hello | Welcome | Task) -> pb.Description:
    """Encode a description; raise `UserError` if it is too long."""
    data = msgspec.msgpack.encode(value, enc_hook=_encode_array)
    if len(data) > MAX_DESCRIPTION_BYTES - 100:
        raise UserError(
            f"the description of the samples has {len(data)} bytes, and at most "
            f"{MAX_DESCRIPTION_BYTES} fit: use fewer classes, fewer columns to standardise "
            "(a .npz is not standardised), or fewer named parameters"
        )
    return pb.Description(version=VERSION, value=data)


def from_bytes(data: bytes) -> pb.Description:
    try:
        return pb.Description.FromString(data)
    except DecodeError:
        raise PeerError("bytes that are not a description") from None


def read(kind: type[_Described], description: pb.Description) -> _Described:
    """Decode and check a description; raise `PeerError` if it is invalid."""
    if description.version != VERSION:
        raise PeerError(
            f"it uses version {description.version} of the protocol, and this is version "
            f"{VERSION}; install the same fedbudget on both sides"
        )
    try:
        value: _Described = _DECODERS[kind].decode(description.value)
    except _UNREADABLE as error:
        raise PeerError(f"a {kind.__name__.lower()} cannot be read: {error}") from None
    _check(value)
    return value


def _encode_array(array: Any) -> Any:
    return array.item() if isinstance(array, np.generic) else array.astype("<f8").tobytes()


def _decode_array(annotation: Any, data: Any) -> Float64:
    if get_origin(annotation) is not np.ndarray or not isinstance(data, bytes):
        raise ValueError("an array is expected")
    return np.frombuffer(data, "<f8").astype(np.float64)


# Created once: msgspec must not inspect a type for the first time in two threads at once.
_DECODERS: dict[type, Any] = {
    kind: msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)
    for kind in (Hello, Welcome, Task)
}


def _check(value: Hello | Welcome | Task) -> None:
    if isinstance(value, Hello):
        if not value.samples.sizes:
            raise PeerError("a node without samples")
        _check_samples(value.samples)
    elif isinstance(value, Welcome):
        if list(value.numbers) != sorted(set(value.numbers)):
            raise PeerError("nodes' numbers that are not in ascending order")
        _check(value.task)
    else:
        _check_task(value)


def _check_task(task: Task) -> None:
    for name in task.readings:
        _check_resource(name)
    for name, value in task.model_options.items():
        fits = len(value) <= LONG_NAME if isinstance(value, str) else math.isfinite(value)
        if not fits or len(name) > LONG_NAME:
            raise PeerError(f"the option {name[:LONG_NAME]} is {str(value)[:LONG_NAME]}")
    _check_samples(task.samples)


def _check_samples(samples: SamplesDescription) -> None:
    shape = samples.shape
    features = math.prod(shape[:5])  # a product of very many numbers would take very long
    if not 1 <= len(shape) <= 4 or min(shape) < 1 or features > _MOST_FEATURES:
        raise PeerError(f"samples of shape {tuple(shape[:8])}")
    _check_moments(samples.features, features)
    _check_moments(samples.target, 1)
    if samples.table is not None:
        _check_table(samples.table, samples)
    if samples.layout is not None:
        _check_layout(samples.layout, features)


def _check_table(table: TableDescription, samples: SamplesDescription) -> None:
    columns = len(table.names)
    if (
        samples.features is not None
        or samples.shape != (columns,)
        or table.rows != sum(samples.sizes)
    ):
        raise PeerError("a table that does not match its samples")
    lists = (table.kinds, table.present, table.fills, table.weights)
    if len(set(table.names)) != columns or any(
        each is not None and len(each) != columns for each in lists
    ):
        raise PeerError("columns with different numbers of names, kinds and figures")
    if table.kinds.count("category") != len(table.categories) or (table.fills is None) != (
        table.weights is None
    ):
        raise PeerError("categories or fill values that do not match the columns")
    _check_moments(table.numbers, columns)
    for counts in (table.present, table.weights):
        if counts is None:
            continue
        whole = (counts >= 0) & (counts <= table.rows) & (counts == np.round(counts))
        if not whole.all():
            raise PeerError("a column with an impossible number of rows")
    if any(sum(counts.values()) > table.rows for counts in table.categories):
        raise PeerError("a category with more rows than the table")
    if table.fills is not None and table.weights is not None:
        used = table.fills[table.weights > 0]
        if not np.isfinite(used).all():
            raise PeerError("a fill value that is not finite")


def _check_layout(layout: Layout, features: int) -> None:
    if len(set(layout.names)) != len(layout.names) or layout.features != features:
        raise PeerError(f"columns that do not add up to {features} features")
    for column in layout.columns:
        if column.categories is None:
            fits = column.fill is None or (
                not isinstance(column.fill, str) and math.isfinite(column.fill)
            )
        else:
            unique = len(set(column.categories)) == len(column.categories)
            fits = unique and column.fill in (None, *column.categories)
        if not fits:
            raise PeerError(f"an invalid column {column.name}")


def _check_moments(moments: Moments | None, columns: int) -> None:
    if moments is None:
        return
    if len(moments.mean) != columns or len(moments.deviation) != columns:
        raise PeerError(f"means of {len(moments.mean)} columns, not {columns}")
    finite = np.isfinite(moments.mean).all() and np.isfinite(moments.deviation).all()
    if not finite or moments.deviation.min() < 0:
        raise PeerError("invalid means or deviations")
