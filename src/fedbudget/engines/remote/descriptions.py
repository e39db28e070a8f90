"""What describes data and tasks, as bytes and back: the same for every network, and for checkpoints.

Nothing that comes from elsewhere is used before it was checked here: msgspec checks types, and what numbers and texts
may be, by the annotations of the dataclasses, so a new field needs no change here but another VERSION. What goes beyond
one field is checked below. What breaks the rules raises `PeerError` with a reason, whatever the bytes.
"""

import math
from typing import Any, TypeVar, get_origin

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from fedbudget.arrays import Float64
from fedbudget.data.agreement import TableDescription
from fedbudget.data.layout import Layout
from fedbudget.data.moments import Moments
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.costs import check_resource
from fedbudget.engines.remote.messages import Hello, Welcome
from fedbudget.engines.remote.task import LONG_NAME, SamplesDescription, Task
from fedbudget.errors import UserError
from fedbudget.protocol.messages import PeerError

VERSION = 7
LONGEST = 2**20 + 2**18
"""Bytes of a description, at most: it goes in one message or not at all."""

_MOST_FEATURES = 2**28
_Described = TypeVar("_Described", Hello, Welcome, Task)


def describe(value: Hello | Welcome | Task) -> pb.Description:
    """Raises `UserError` where that is too long to tell."""
    description = pb.Description(version=VERSION, value=msgspec.msgpack.encode(value, enc_hook=_array_out))
    if len(description.value) > LONGEST - 100:
        raise UserError(
            f"what the samples are like takes {len(description.value)} bytes to tell, and {LONGEST} is the most: there "
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
    kind: msgspec.msgpack.Decoder(kind, dec_hook=_array_in) for kind in (Hello, Welcome, Task)
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
    features = math.prod(samples.shape[:5])  # not of all: a product of very many numbers takes very long
    if not 1 <= len(samples.shape) <= 4 or min(samples.shape) < 1 or features > _MOST_FEATURES:
        raise PeerError(f"samples of shape {tuple(samples.shape[:8])}")
    _check_moments(samples.features, features)
    _check_moments(samples.target, 1)
    if samples.table is not None:
        _check_table(samples.table, samples)
    if samples.layout is not None:
        _check_layout(samples.layout, features)


def _check_table(table: TableDescription, samples: SamplesDescription) -> None:
    columns, named = len(table.names), len(set(table.names))
    lists = [each for each in (table.kinds, table.present, table.fills, table.weights) if each is not None]
    if samples.features is not None or samples.shape != (columns,) or table.rows != sum(samples.sizes):
        raise PeerError("a table that is not what its samples are")
    if named != columns or any(len(each) != columns for each in lists):
        raise PeerError("columns whose names, kinds and figures are not as many")
    if table.kinds.count("category") != len(table.categories) or (table.fills is None) != (table.weights is None):
        raise PeerError("categories, or what missing cells get, that are not those of the columns")
    _check_moments(table.numbers, columns)
    for counts in (table.present, table.weights):
        if counts is not None and not ((counts >= 0) & (counts <= table.rows) & (counts == np.round(counts))).all():
            raise PeerError("a column with numbers of rows that cannot be")
    if any(sum(counts.values()) > table.rows for counts in table.categories):
        raise PeerError("a category with more rows than there are")
    if table.fills is not None and table.weights is not None and not np.isfinite(table.fills[table.weights > 0]).all():
        raise PeerError("what missing cells get is not finite")


def _check_layout(layout: Layout, features: int) -> None:
    if len(set(layout.names)) != len(layout.names) or layout.features != features:
        raise PeerError(f"columns that do not make {features} features")
    for column in layout.columns:
        if column.categories is None:
            fits = column.fill is None or (not isinstance(column.fill, str) and math.isfinite(column.fill))
        else:
            fits = len(set(column.categories)) == len(column.categories) and column.fill in (None, *column.categories)
        if not fits:
            raise PeerError(f"a column {column.name} that cannot be")


def _check_moments(moments: Moments | None, columns: int) -> None:
    if moments is None:
        return
    if len(moments.mean) != columns or len(moments.deviation) != columns:
        raise PeerError(f"means of {len(moments.mean)} columns, not {columns}")
    if not (np.isfinite(moments.mean).all() and np.isfinite(moments.deviation).all() and moments.deviation.min() >= 0):
        raise PeerError("means or deviations that cannot be")
