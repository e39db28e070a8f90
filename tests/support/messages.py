"""Random broadcasts and reports, readers that expect them, and Hypothesis strategies."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from fedbudget.arrays import Float32
from fedbudget.data.agreement import Moments
from fedbudget.engines.grpc.messages import AggregatorReader, NodeReader
from fedbudget.engines.grpc.stream import pack
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.messages import Welcome
from fedbudget.engines.remote.task import SamplesDescription, Task
from fedbudget.engines.remote.wire import VERSION, ExpectedReport
from fedbudget.models.description import ModelDescription, TensorDescription
from fedbudget.protocol.features.compression import KINDS, decode, encode
from fedbudget.protocol.features.drift import DriftCatchUp, DriftCorrection, DriftPart
from fedbudget.protocol.features.estimates import EstimateSlopes
from fedbudget.protocol.features.feature import Feature, FeatureSettings, report_layout
from fedbudget.protocol.messages import (
    Broadcast,
    CatchUp,
    FinalRound,
    Kind,
    LossReport,
    RoundPart,
    TrainRound,
)
from fedbudget.resources.resource import Reading, Usage

AMOUNTS = st.floats(0, 1e300)
NAMES = st.text(max_size=200)
RESOURCE_NAMES = st.text("abcdefghijklmnopqrstuvwxyzXYZ", min_size=1, max_size=20)
READINGS = st.builds(Reading, AMOUNTS, AMOUNTS, NAMES)
COSTS = st.builds(
    lambda time, others: Usage({"time": time, **others}),
    READINGS,
    st.dictionaries(RESOURCE_NAMES, READINGS, max_size=5),
)
FEATURES = st.tuples(
    st.lists(st.builds(DriftCorrection, st.booleans()), max_size=1),
    st.lists(st.builds(EstimateSlopes, *[st.booleans()] * 4), max_size=1),
).map(lambda lists: tuple(feature for each in lists for feature in each))


def settings_of(features: Sequence[Feature]) -> tuple[FeatureSettings, ...]:
    return tuple(map(FeatureSettings.of, features))


def _moments(shape: list[int], seed: int | None) -> tuple[Moments | None, Moments | None]:
    if seed is None:
        return None, None
    rng, columns = np.random.default_rng(seed), math.prod(shape)
    return Moments(rng.normal(size=columns), rng.random(columns)), Moments(
        rng.normal(size=1), rng.random(1)
    )


SAMPLES = st.builds(
    lambda sizes, shape, stored, scale, classes, values, parity, seed: SamplesDescription(
        tuple(sizes),
        tuple(shape),
        stored,
        scale,
        tuple(classes),
        values,
        parity,
        *_moments(shape, seed),
    ),
    st.lists(st.integers(1, 2**40 - 1), min_size=1, max_size=5),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.sampled_from(["uint8", "float32", "float64", "samples"]),
    st.floats(1e-30, 1e30),
    st.lists(NAMES, max_size=4),
    st.booleans(),
    st.booleans(),
    st.none() | st.integers(0, 100),
)
OPTIONS = st.integers(-(2**63), 2**64 - 1) | st.floats(-1e300, 1e300) | NAMES
_WORDS = st.text(
    st.characters(min_codepoint=32, exclude_characters="\x7f", codec="utf-8"), max_size=500
)
_TENSORS = st.builds(
    TensorDescription,
    _WORDS,
    st.lists(st.integers(0, 2**40 - 1), max_size=5).map(tuple),
    _WORDS,
)
MODELS = st.builds(
    ModelDescription,
    _WORDS,
    _WORDS,
    st.lists(_TENSORS, max_size=4).map(tuple),
    _WORDS,
    _WORDS,
    _WORDS,
)
TASKS = st.builds(
    Task,
    NAMES | MODELS,
    st.integers(1, 2**34),
    st.none() | st.integers(1, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.dictionaries(NAMES, OPTIONS, max_size=4),
    st.sampled_from(KINDS),
    st.integers(1, 10**9),
    SAMPLES,
    FEATURES.map(settings_of),
    st.lists(RESOURCE_NAMES, max_size=4).map(tuple),
)

NOTHING: tuple[Feature, ...] = ()
EVERYTHING = (DriftCorrection(), EstimateSlopes(gradient=True, curvature=True))
TASK = Task(
    "svm",
    3,
    5,
    1,
    {"clusters": 4},
    "none",
    10**9,
    SamplesDescription((), (3,)),
    settings_of(EVERYTHING),
)


def vector(rng: np.random.Generator, d: int) -> Float32:
    return rng.normal(size=d).astype(np.float32)


def random_broadcast(
    d: int, rng: np.random.Generator, features: Sequence[Feature], **other: Any
) -> TrainRound:
    known: dict[str, Any] = {
        "round": 3,
        "w": vector(rng, d),
        "tau": 2,
        "eta": 0.1,
        "best": True,
        "stop": False,
        **other,
    }
    parts: tuple[RoundPart, ...] = ()
    missed: tuple[RoundPart, ...] = ()
    if any(isinstance(feature, DriftCorrection) for feature in features):
        parts = (DriftPart(bool(rng.integers(2)), rng.random()),)
        missed = (DriftCatchUp(vector(rng, d), int(rng.integers(100))),)
    return TrainRound(
        **known,
        effective=float(known["tau"]),
        report=report_layout(tuple(features), known["round"] == 1),
        parts=parts,
        catch_up=CatchUp(vector(rng, d), missed),
    )


def as_final(broadcast: TrainRound) -> FinalRound:
    """The final round with the same w and parts."""
    names = {each.name for each in fields(FinalRound)} - {"report"}
    return FinalRound(**{name: getattr(broadcast, name) for name in names})


def random_report(
    broadcast: TrainRound | FinalRound, n: int, rng: np.random.Generator
) -> LossReport:
    """A report with the requested fields and random values."""
    layout = broadcast.report
    numbers = {
        name: np.where(rng.random(n) < 0.2, np.nan, rng.normal(size=n))
        for name in layout.numbers
    }
    vectors = {
        name: rng.normal(size=(n, broadcast.w.size)).astype(np.float32)
        for name in layout.vectors
    }
    return broadcast.answer(
        round=broadcast.round,
        nodes=np.arange(n) + 7,
        sizes=np.arange(n) + 10,
        numbers=numbers,
        vectors=vectors,
    )


def as_received(
    report: LossReport, broadcast: TrainRound | FinalRound, kind: Kind
) -> tuple[LossReport, bytes]:
    """Return the report as the aggregator decodes it, and its encoded vectors."""
    received = {}
    encoded = b""
    for name, sent in report.vectors.items():
        base = broadcast.w if name == "w" and kind != "none" else np.float32(0)
        data = encode(kind, sent - base)
        received[name] = base + _decoded(kind, data, sent)
        encoded += data
    return replace(report, vectors=received), encoded


def _decoded(kind: Kind, data: bytes, like: Float32) -> Float32:
    rows, count = like.shape
    return decode(kind, data, count, rows).reshape(like.shape)


def reader_after_welcome(task: Task = TASK) -> AggregatorReader:
    reader = AggregatorReader()
    reader.feed(pack(Welcome("run", task, (0,)))[0])
    return reader


def reader_for_report(broadcast: Broadcast, n: int, kind: Kind = "none") -> NodeReader:
    reader = NodeReader()
    expected = ExpectedReport.of(replace(broadcast, compress=kind))
    reader.expect_report(expected, np.arange(n) + 7, np.arange(n) + 10)
    return reader


def frame(name: str, header: Any, rest: bytes = b"", version: int = VERSION) -> bytes:
    """Return the first frame of a message whose header has these plain values."""
    data = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    code = {each: code for code, each in wire._NAMES.items()}[name]
    return bytes([code, version]) + len(data).to_bytes(4, "little") + data + rest


def with_field(message: bytes, field: str, value: Any) -> bytes:
    """Return the first frame of a message with one field changed.

    Args:
      field: of the dataclass; `header` for all fields, `rest` for the bytes of vectors.
    """
    given = wire.unpack(message)
    if field == "header":
        return frame(given.name, value, bytes(given.rest))
    if field == "rest":
        return frame(given.name, bytes(given.header), value)
    values = msgspec.msgpack.decode(given.header)
    names = [each.name for each in fields(wire._KINDS[given.name])]
    values[names.index(field)] = value
    return frame(given.name, values, bytes(given.rest))
