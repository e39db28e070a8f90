"""20,000 damaged or random messages: each raises `PeerError` or decodes to a valid
value.
"""

import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from fedbudget.data.agreement import Moments
from fedbudget.engines.grpc import stream
from fedbudget.engines.grpc.messages import AggregatorReader, NodeReader
from fedbudget.engines.grpc.stream import MORE, frames, pack
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.messages import (
    Answer,
    Farewell,
    Hello,
    Ready,
    RoundRequest,
    Welcome,
)
from fedbudget.engines.remote.task import SamplesDescription, Task
from fedbudget.engines.remote.wire import EncodedBroadcast, ExpectedReport, pack_report
from fedbudget.protocol.features.compression import KINDS, encode
from fedbudget.protocol.features.drift import DriftCatchUp, DriftCorrection, DriftPart
from fedbudget.protocol.features.estimates import EstimateSlopes
from fedbudget.protocol.features.feature import report_layout
from fedbudget.protocol.messages import (
    CatchUp,
    FinalRound,
    Kind,
    PeerError,
    TrainReport,
    TrainRound,
)
from support.messages import settings_of
from support.usage import node_costs

MESSAGES = 20_000
D, NODES, PART = 20, 2, 64  # small parts, so vectors are split

RNG = np.random.default_rng(0)
NUMBERS, SIZES = np.arange(NODES) + 3, np.array([10, 20])
W, BEFORE, BEST, MEAN = (RNG.normal(size=D).astype(np.float32) for _ in range(4))
FEATURES = (DriftCorrection(), EstimateSlopes(gradient=True))
BROADCAST = TrainRound(
    round=5,
    w=W,
    tau=3,
    eta=0.1,
    effective=3,
    report=report_layout(FEATURES, False),
    best=True,
    parts=(DriftPart(True, 0.5),),
    catch_up=CatchUp(BEST, (DriftCatchUp(MEAN, 2),)),
)
EACH = RNG.random(D)
MOMENTS = Moments(EACH, EACH), Moments(EACH[:1], EACH[:1])
SAMPLES = SamplesDescription(
    (10, 20), (4, 5), "uint8", 1 / 255, ("a", "b"), True, True, *MOMENTS
)
COSTS = node_costs(0.1, 0.2, cpu=(0.3, 0.4), energy=(0.5, 0.6))


def task(kind: Kind) -> Task:
    samples = replace(SAMPLES, sizes=())
    features = settings_of(FEATURES)
    return Task("svm", D, 5, 1, {"clusters": 4}, kind, 100, samples, features)


def report(kind: Kind) -> list[bytes]:
    each, vectors = np.array([0.5, np.nan]), np.stack([W, BEST])
    layout = BROADCAST.report
    made = TrainReport(
        round=5,
        nodes=NUMBERS,
        sizes=SIZES,
        numbers=dict.fromkeys(layout.numbers, each),
        vectors=dict.fromkeys(layout.vectors, vectors),
    )
    encoded = encode(kind, vectors) + encode(kind, vectors)
    return frames(pack_report(made, COSTS, encoded))


def broadcasts(kind: Kind) -> list[list[bytes]]:
    differences = [(W, encode(kind, W - BEFORE))]
    compressed = replace(BROADCAST, compress=kind)
    packed = [
        wire.pack_broadcast(BROADCAST, 4, catch_up=False),
        wire.pack_broadcast(compressed, 4, catch_up=False, differences=differences),
        wire.pack_broadcast(BROADCAST, 2, catch_up=True),
    ]
    return [frames(each) for each in packed]


# Readers in all their states.


def expecting_ready() -> NodeReader:
    reader = NodeReader()
    reader.feed(pack(Hello("me", SAMPLES))[0])
    reader.expect_ready()
    return reader


def expecting_report(kind: Kind) -> Callable[[], NodeReader]:
    def make() -> NodeReader:
        reader = NodeReader()
        expected = ExpectedReport.of(replace(BROADCAST, compress=kind))
        reader.expect_report(expected, NUMBERS, SIZES)
        return reader

    return make


def welcomed(kind: Kind) -> Callable[[], AggregatorReader]:
    def make() -> AggregatorReader:
        reader = AggregatorReader()
        reader.feed(pack(Welcome("run", task(kind), (3, 4)))[0])
        return reader

    return make


def conversations() -> list[tuple[Callable[[], Any], list[bytes]]]:
    """Readers in all their states, and their next messages."""
    result: list[tuple[Callable[[], Any], list[bytes]]] = [
        (NodeReader, pack(Hello("me", SAMPLES, "run", (3, 4)))),
        (expecting_ready, pack(Ready(COSTS))),
        (AggregatorReader, pack(Farewell("the end", again=True))),
    ]
    for kind in KINDS:
        result.append((expecting_report(kind), report(kind)))
        result.append((AggregatorReader, pack(Welcome("run", task(kind), (3, 4)))))
        result += [(welcomed(kind), messages) for messages in broadcasts(kind)]
    return result


# Damage.


ODD = [
    bytes(6) + b"\xf8\x7f",
    b"\xff" * 8,
    b"\x00\x00\xc0\x7f",
    b"\xff\xff\x7f\x7f",
    bytes(8),
]
"""NaN, the largest numbers and zeros, as floats or as integers."""


def damaged(rng: np.random.Generator, original: bytes, real: list[bytes]) -> bytes:
    message = bytearray(original)
    for _ in range(rng.integers(1, 4)):
        at, other = int(rng.integers(len(message) + 1)), real[rng.integers(len(real))]
        match rng.integers(8):
            case 0 | 1:  # bits
                for _ in range(rng.integers(1, 5)):
                    if message:
                        message[rng.integers(len(message))] ^= 1 << int(rng.integers(8))
            case 2:  # truncated
                message = message[:at]
            case 3:  # a piece is repeated
                message[at:at] = message[at : at + int(rng.integers(1, 40))]
            case 4:  # spliced with another message
                message = message[:at] + other[rng.integers(len(other) + 1) :]
            case 5:  # NaN, or large numbers
                piece = ODD[rng.integers(len(ODD))]
                message[at : at + len(piece)] = piece
            case 6:  # a random field
                message[at:at] = field(rng)
            case _:  # two messages
                message += other
    if rng.integers(2) and not original.startswith(MORE) and len(message) > 6:
        # The length of the header, so that the damage reaches its values.
        length = max(0, len(message) - 6 - len(wire.unpack(original).rest))
        message[2:6] = length.to_bytes(4, "little")
    return bytes(message)


def field(rng: np.random.Generator) -> bytes:
    """Return a random value in MessagePack."""
    content = rng.bytes(int(rng.integers(0, 30)))
    values: list[Any] = [None, True, int(rng.integers(0, 2**63)), rng.normal(), np.inf]
    values += [content, content.hex(), [], [1, [2.5]], {"time": [0.1, 0.2, ""]}]
    return msgspec.msgpack.encode(values[rng.integers(len(values))])


def test_damaged_messages_fail_or_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PART", PART)
    rng, known = np.random.default_rng(20_000), conversations()
    real = [message for _, messages in known for message in messages]
    refused, understood = (
        [""],
        dict.fromkeys((Hello, Ready, Answer, Welcome, RoundRequest, Farewell), 0),
    )
    for number in range(MESSAGES):
        make, messages = known[number % len(known)]
        try:
            result = converse(rng, make(), messages, real)
        except PeerError as error:
            refused.append(str(error))
        else:
            if result is not None:
                check(result)
                understood[type(result)] += 1
    assert len(refused) > MESSAGES / 3
    assert max(map(len, refused)) < 1000
    assert min(understood.values()) > 40, understood


def converse(
    rng: np.random.Generator, reader: Any, messages: list[bytes], real: list[bytes]
) -> Any:
    """Feed all messages to a reader, one of them damaged or replaced."""
    which, result = rng.integers(len(messages)), None
    for number, message in enumerate(messages):
        result = reader.feed(other_than(rng, message, real) if number == which else message)
        assert held(reader) <= 2 * NODES * 4 * D
    if isinstance(result, EncodedBroadcast):
        result = result.request(BEFORE if rng.integers(4) else None)
    return result


def other_than(rng: np.random.Generator, message: bytes, real: list[bytes]) -> bytes:
    match rng.integers(12):
        case 0:
            return b"".join(field(rng) for _ in range(rng.integers(1, 6)))
        case 1:
            return damaged(rng, real[rng.integers(len(real))], real)
        case _:
            return damaged(rng, message, real)


def held(reader: Any) -> int:
    """Bytes of vectors in a reader."""
    return 0 if reader._vectors is None else sum(map(len, reader._vectors.vectors))


def check(result: Any) -> None:
    """Check that a decoded value is valid without further checks."""
    if isinstance(result, Hello):
        assert result.samples.sizes
        assert min(result.samples.sizes) >= 1
        assert 1 <= len(result.samples.shape) <= 4
    elif isinstance(result, Ready):
        assert (
            min(min(each.step, each.whole) for each in result.costs.readings.values()) >= 0
        )
    elif isinstance(result, Answer):
        report = result.report
        assert report.round == 5
        assert {each.shape for each in report.numbers.values()} == {(NODES,)}
        assert list(report.vectors) == ["w", "gradients"]
        assert {each.shape for each in report.vectors.values()} == {(NODES, D)}
    elif isinstance(result, Welcome):
        assert result.task.compress in KINDS
        assert result.task.parameters >= 1
    elif isinstance(result, RoundRequest):
        assert np.isfinite(result.broadcast.w).all()
        assert 0 <= result.base_round < result.broadcast.round
        assert result.broadcast.part(DriftPart) is not None
        if isinstance(result.broadcast, TrainRound):
            assert 0 < result.broadcast.eta < np.inf
            assert 0 < result.broadcast.effective <= result.broadcast.tau <= 100
        else:
            assert isinstance(result.broadcast, FinalRound)


def test_damaged_messages_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PART", PART)
    rng, known = np.random.default_rng(1), conversations()
    real = [message for _, messages in known for message in messages]
    tracemalloc.start()
    try:
        for number in range(1000):
            make, messages = known[number % len(known)]
            reader = make()
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with suppress(PeerError):
                converse(rng, reader, messages, real)
            assert tracemalloc.get_traced_memory()[1] - before < 100_000
    finally:
        tracemalloc.stop()
