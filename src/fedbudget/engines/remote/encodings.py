"""What a round took at a node, as bytes, for every network: readings by the name of their resource.

What comes from another machine is checked here: few readings, of finite numbers that are not negative, time among them.

What nodes' test samples say of a w, as bytes, for every network; see models/tally.py.

A node sends a tally of the broadcast's w and, in the final round, of w^f after it. What comes from another machine is
checked here: counts that can be, of as many classes in all places, that add up to the number of samples. Histograms are
sent without their empty bins, compressed, and not at all where that would be long.

What describes data and tasks, as bytes and back: the same for every network, and for checkpoints.

Nothing that comes from elsewhere is used before it was checked here: msgspec checks types, and what numbers and texts
may be, by the annotations of the dataclasses, so a new field needs no change here but another VERSION. What goes beyond
one field is checked below. What breaks the rules raises `PeerError` with a reason, whatever the bytes.
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
from fedbudget.resources.resource import NodeCosts, Reading

_LONG_NAME = 200
_MOST_BYTES = 20_000
_Rows = list[tuple[str, float, float, str]]
_COSTS_DECODER = msgspec.msgpack.Decoder(tuple[_Rows, _Rows])


def pack_costs(costs: NodeCosts) -> bytes:
    """Of every reading its name, what a local update and the whole round took, and whose counter it is if shared; and
    the same of what evaluating took.
    """
    parts = costs.readings.items(), costs.evaluation.items()
    return msgspec.msgpack.encode(
        [
            [(name, each.step, each.whole, each.host) for name, each in part]
            for part in parts
        ]
    )


def unpack_costs(data: bytes) -> NodeCosts:
    """Refuses what cannot be with `PeerError`."""
    if len(data) > _MOST_BYTES:
        raise PeerError(f"costs of {len(data)} bytes")
    try:
        whole, evaluation = _COSTS_DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"costs that cannot be read: {error}") from None
    readings = _readings(whole)
    if TIME.name not in readings:
        raise PeerError("costs without the time of a round")
    return NodeCosts(readings, evaluation=_readings(evaluation))


def _readings(rows: _Rows) -> dict[str, Reading]:
    if len(rows) > MOST_READINGS:
        raise PeerError(f"costs of {len(rows)} readings")
    readings: dict[str, Reading] = {}
    for name, step, whole, host in rows:
        if check_resource(name) in readings:
            raise PeerError(f"{name} is read twice")
        if len(host) > _LONG_NAME:
            raise PeerError(f"a name of a host of {len(host)} characters")
        for part, value in (("step", step), ("whole", whole)):
            if not 0 <= value < math.inf:
                raise PeerError(f"{name} ({part}) is {value}")
        readings[name] = Reading(step, whole, host)
    return readings


def check_resource(name: str) -> str:
    """Refuses what is no name of a resource, known here or not."""
    if len(name) > _LONG_NAME or not (name.isascii() and name.isalpha()):
        raise PeerError(f"{name[:20]!r} is no name of a resource")
    return name


MAX_TALLIES_BYTES = 2**17
"""Bytes of all tallies of a report, at most."""

_LARGEST = 2**23  # bytes, before they were compressed
_MOST_SAMPLES = 2**40
_MOST_CLASSES = 100_000
_MOST_OWN = 64


def expected_bytes(samples: int, classes: int) -> int:
    """About what a tally takes, of so many samples; 0 classes where targets are real."""
    scored = 0 if not classes or classes > MOST_SCORED else 1 if classes == 2 else classes
    return min(MAX_TALLIES_BYTES, 100 + 4 * classes + 3 * scored * min(samples, 2 * BINS))


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


_TALLIES_DECODER = msgspec.msgpack.Decoder(list[_Sent])


def pack_tallies(tallies: Sequence[Tally]) -> bytes:
    """Nothing for none."""
    if not tallies:
        return b""
    data = zlib.compress(msgspec.msgpack.encode([_out(each) for each in tallies]), 1)
    if len(data) <= MAX_TALLIES_BYTES:
        return data
    return pack_tallies([_without_scores(each) for each in tallies])


def unpack_tallies(data: bytes, most: int) -> tuple[Tally, ...]:
    """Refuses what cannot be with `PeerError`.

    Args:
      most: how many were asked for; a node without test samples has none.
    """
    if not data:
        return ()
    if len(data) > MAX_TALLIES_BYTES:
        raise PeerError(f"tallies of {len(data)} bytes")
    try:
        unpacking = zlib.decompressobj()
        sent = _TALLIES_DECODER.decode(unpacking.decompress(data, _LARGEST))
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
    return [
        not each or (_form(each) == form and all(part.samples <= most for part in each))
        for each in tallies
    ]


def _form(tallies: Sequence[Tally]) -> tuple[tuple[bool, ...], ...]:
    return tuple(
        (math.isfinite(each.loss), each.classes is None, each.errors is None)
        for each in tallies
    )


def _without_scores(tally: Tally) -> Tally:
    return (
        tally
        if tally.classes is None
        else replace(tally, classes=replace(tally.classes, scores=None))
    )


def _out(tally: Tally) -> _Sent:
    classes = None
    errors = None
    if tally.classes is not None:
        own = tally.classes
        flat = np.empty(0, np.int64) if own.scores is None else own.scores.ravel()
        bins = np.flatnonzero(flat)
        counts = own.actual.tolist(), own.predicted.tolist(), own.right.tolist()
        scored = 0 if own.scores is None else len(own.scores)
        classes = _SentClasses(*counts, scored, bins.tolist(), flat[bins].tolist())
    if tally.errors is not None:
        errors = (
            tally.errors.targets,
            tally.errors.spread,
            tally.errors.absolute,
            tally.errors.squared,
        )
    return _Sent(tally.samples, tally.loss, classes, errors, dict(tally.own))


def _in(sent: _Sent) -> Tally:
    if not 1 <= sent.samples < _MOST_SAMPLES:
        raise PeerError(f"a tally of {sent.samples} samples")
    if len(sent.own) > _MOST_OWN or any(len(name) > _LONG_NAME for name in sent.own):
        raise PeerError(
            f"a tally with {len(sent.own)} metrics of its own, or with long names"
        )
    errors = None
    if sent.errors is not None:
        errors = ErrorSums(*sent.errors)
        if (
            not math.isfinite(errors.targets)
            or errors.spread < 0
            or math.isinf(errors.spread)
        ):
            raise PeerError(
                f"targets that add up to {errors.targets}, with a spread of {errors.spread}"
            )
        if (
            errors.absolute < 0 or errors.squared < 0
        ):  # nan passes, of a w that has diverged
            raise PeerError(f"errors of {errors.absolute} and {errors.squared}")
    classes = None if sent.classes is None else _class_counts(sent.classes, sent.samples)
    return Tally(sent.samples, sent.loss, classes, errors, sent.own)


def _class_counts(sent: _SentClasses, samples: int) -> ClassCounts:
    classes = len(sent.actual)
    if (
        not 2 <= classes <= _MOST_CLASSES
        or not len(sent.predicted) == len(sent.right) == classes
    ):
        raise PeerError(
            f"counts of {classes}, {len(sent.predicted)} and {len(sent.right)} classes"
        )
    actual, predicted, right = (
        _counts(each, samples) for each in (sent.actual, sent.predicted, sent.right)
    )
    if (
        actual.sum() != samples
        or predicted.sum() > samples
        or (right > np.minimum(actual, predicted)).any()
    ):
        raise PeerError("counts of classes that are not those of as many samples")
    if not sent.scored:
        return ClassCounts(actual, predicted, right)
    if (
        sent.scored != (1 if classes == 2 else classes)
        or classes > MOST_SCORED
        or len(sent.bins) != len(sent.counts)
    ):
        raise PeerError(
            f"histograms of {sent.scored} scores where there are {classes} classes"
        )
    scores = np.zeros(sent.scored * 2 * BINS, np.int64)
    places = _counts(sent.bins, sent.scored * 2 * BINS - 1)
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


VERSION = 7
MAX_DESCRIPTION_BYTES = 2**20 + 2**18
"""Bytes of a description, at most: it goes in one message or not at all."""

_MOST_FEATURES = 2**28
_Described = TypeVar("_Described", Hello, Welcome, Task)


def describe(value: Hello | Welcome | Task) -> pb.Description:
    """Raises `UserError` where that is too long to tell."""
    description = pb.Description(
        version=VERSION, value=msgspec.msgpack.encode(value, enc_hook=_array_out)
    )
    if len(description.value) > MAX_DESCRIPTION_BYTES - 100:
        raise UserError(
            f"what the samples are like takes {len(description.value)} bytes to tell, and {MAX_DESCRIPTION_BYTES} is the most: there "
            "are too many classes, too many columns to standardise (a .npz is used as it is), or too many parameters "
            "with names of their own"
        )
    return description


def from_bytes(data: bytes) -> pb.Description:
    try:
        return pb.Description.FromString(data)
    except DecodeError:
        raise PeerError("bytes that are no description") from None


def read(kind: type[_Described], description: pb.Description) -> _Described:
    """What `describe` was given."""
    if description.version != VERSION:
        raise PeerError(
            f"it speaks version {description.version} of the protocol, and this is version {VERSION}; install the same "
            "fedbudget on both sides"
        )
    try:
        value: _Described = _DECODERS[kind].decode(description.value)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"a {kind.__name__.lower()} that cannot be read: {error}") from None
    _check(value)
    return value


def _array_out(array: Any) -> Any:
    return array.item() if isinstance(array, np.generic) else array.astype("<f8").tobytes()


def _array_in(annotation: Any, data: Any) -> Float64:
    if get_origin(annotation) is not np.ndarray or not isinstance(data, bytes):
        raise ValueError("an array is expected")
    return np.frombuffer(data, "<f8").astype(np.float64)


# Made here, once: msgspec does not bear that two threads look at a type for the first time together.
_DECODERS: dict[type, Any] = {
    kind: msgspec.msgpack.Decoder(kind, dec_hook=_array_in)
    for kind in (Hello, Welcome, Task)
}


def _check(value: Hello | Welcome | Task) -> None:
    if isinstance(value, Hello):
        if not value.samples.sizes:
            raise PeerError("a node without samples")
        _check_samples(value.samples)
    elif isinstance(value, Welcome):
        if list(value.numbers) != sorted(set(value.numbers)):
            raise PeerError("nodes' numbers that are not in rising order")
        _check(value.task)
    else:
        _check_task(value)


def _check_task(task: Task) -> None:
    for name in task.readings:
        check_resource(name)
    for name, value in task.model_options.items():
        fits = len(value) <= LONG_NAME if isinstance(value, str) else math.isfinite(value)
        if not fits or len(name) > LONG_NAME:
            raise PeerError(f"the option {name[:LONG_NAME]} is {str(value)[:LONG_NAME]}")
    _check_samples(task.samples)


def _check_samples(samples: SamplesDescription) -> None:
    features = math.prod(
        samples.shape[:5]
    )  # not of all: a product of very many numbers takes very long
    if (
        not 1 <= len(samples.shape) <= 4
        or min(samples.shape) < 1
        or features > _MOST_FEATURES
    ):
        raise PeerError(f"samples of shape {tuple(samples.shape[:8])}")
    _check_moments(samples.features, features)
    _check_moments(samples.target, 1)
    if samples.table is not None:
        _check_table(samples.table, samples)
    if samples.layout is not None:
        _check_layout(samples.layout, features)


def _check_table(table: TableDescription, samples: SamplesDescription) -> None:
    columns = len(table.names)
    named = len(set(table.names))
    lists = [
        each
        for each in (table.kinds, table.present, table.fills, table.weights)
        if each is not None
    ]
    if (
        samples.features is not None
        or samples.shape != (columns,)
        or table.rows != sum(samples.sizes)
    ):
        raise PeerError("a table that is not what its samples are")
    if named != columns or any(len(each) != columns for each in lists):
        raise PeerError("columns whose names, kinds and figures are not as many")
    if table.kinds.count("category") != len(table.categories) or (table.fills is None) != (
        table.weights is None
    ):
        raise PeerError(
            "categories, or what missing cells get, that are not those of the columns"
        )
    _check_moments(table.numbers, columns)
    for counts in (table.present, table.weights):
        if (
            counts is not None
            and not (
                (counts >= 0) & (counts <= table.rows) & (counts == np.round(counts))
            ).all()
        ):
            raise PeerError("a column with numbers of rows that cannot be")
    if any(sum(counts.values()) > table.rows for counts in table.categories):
        raise PeerError("a category with more rows than there are")
    if (
        table.fills is not None
        and table.weights is not None
        and not np.isfinite(table.fills[table.weights > 0]).all()
    ):
        raise PeerError("what missing cells get is not finite")


def _check_layout(layout: Layout, features: int) -> None:
    if len(set(layout.names)) != len(layout.names) or layout.features != features:
        raise PeerError(f"columns that do not make {features} features")
    for column in layout.columns:
        if column.categories is None:
            fits = column.fill is None or (
                not isinstance(column.fill, str) and math.isfinite(column.fill)
            )
        else:
            fits = len(set(column.categories)) == len(
                column.categories
            ) and column.fill in (
                None,
                *column.categories,
            )
        if not fits:
            raise PeerError(f"a column {column.name} that cannot be")


def _check_moments(moments: Moments | None, columns: int) -> None:
    if moments is None:
        return
    if len(moments.mean) != columns or len(moments.deviation) != columns:
        raise PeerError(f"means of {len(moments.mean)} columns, not {columns}")
    if not (
        np.isfinite(moments.mean).all()
        and np.isfinite(moments.deviation).all()
        and moments.deviation.min() >= 0
    ):
        raise PeerError("means or deviations that cannot be")
