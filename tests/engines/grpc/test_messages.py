"""Messages of both sides: exact round trips, and refusal of invalid broadcasts and
reports.
"""

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float32
from fedbudget.engines.grpc.messages import AggregatorReader, NodeReader
from fedbudget.engines.grpc.stream import frames, pack
from fedbudget.engines.remote.messages import Answer, Farewell, Hello, Ready, Welcome
from fedbudget.engines.remote.task import SamplesDescription
from fedbudget.engines.remote.wire import (
    EncodedBroadcast,
    pack_broadcast,
    pack_report,
    unpack,
)
from fedbudget.protocol.features.compression import (
    KINDS,
    BroadcastCompressor,
    decode,
    encode,
    with_feedback,
)
from fedbudget.protocol.features.drift import DriftCatchUp, DriftPart
from fedbudget.protocol.features.momentum import MomentumPart
from fedbudget.protocol.features.workload import SpeedWorkload, Work
from fedbudget.protocol.messages import (
    Broadcast,
    CatchUp,
    FinalRound,
    PeerError,
    TrainReport,
    TrainRound,
)
from fedbudget.resources.resource import Usage
from support.messages import (
    COSTS,
    EVERYTHING,
    FEATURES,
    NOTHING,
    TASK,
    as_final,
    as_received,
    random_broadcast,
    random_report,
    reader_after_welcome,
    reader_for_report,
    settings_of,
    vector,
    with_field,
)
from support.methods import bits
from support.usage import node_costs

BROADCAST = random_broadcast(3, np.random.default_rng(0), EVERYTHING)
(MESSAGE,) = frames(pack_broadcast(BROADCAST, 2, catch_up=True))
NOT_FINITE = np.array([0, np.nan, 0], np.float32).tobytes()


def test_welcome_round_trip() -> None:
    welcome = Welcome("run", TASK, (3, 4))
    assert bits(AggregatorReader().feed(pack(welcome)[0])) == bits(welcome)


@settings(deadline=None)
@given(st.text(max_size=2000), st.booleans())
def test_farewell_at_any_time(reason: str, again: bool) -> None:
    (message,) = pack(Farewell(reason, again))
    assert AggregatorReader().feed(message) == Farewell(reason, again)
    assert reader_after_welcome().feed(message) == Farewell(reason, again)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_broadcast_round_trip(data: st.DataObject) -> None:
    d = data.draw(st.integers(1, 600))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    features = data.draw(FEATURES)
    task = replace(TASK, parameters=d, features=settings_of(features))
    kind = data.draw(st.sampled_from(KINDS))
    trained = random_broadcast(
        d,
        rng,
        features,
        round=data.draw(st.integers(2, 2**31 - 1)),
        tau=data.draw(st.integers(1, task.tau_max)),
        eta=data.draw(st.floats(1e-300, 1e300)),
        best=data.draw(st.booleans()),
        stop=data.draw(st.booleans()),
        compress=kind,
    )
    broadcast: TrainRound | FinalRound = trained
    if data.draw(st.booleans()):
        broadcast = as_final(trained)
    base_round = data.draw(st.integers(0, broadcast.round - 1))
    catch_up = data.draw(st.booleans())
    before = None
    differences = []
    if data.draw(st.booleans()):
        before = vector(rng, d)
        moved = encode(kind, broadcast.w - before)
        broadcast = replace(broadcast, w=before + decode(kind, moved, d))
        differences.append((broadcast.w, moved))
        sends_mean = data.draw(st.booleans())
        if sends_mean and broadcast.parts:
            moved = encode(kind, vector(rng, d))
            mean = broadcast.w + decode(kind, moved, d)
            broadcast = replace(broadcast, parts=(DriftPart(True, 0.5, mean=mean),))
            differences.append((mean, moved))
    messages = frames(
        pack_broadcast(broadcast, base_round, catch_up=catch_up, differences=differences)
    )
    encoded = reader_after_welcome(task).feed(messages[0])
    assert isinstance(encoded, EncodedBroadcast)
    assert encoded.sent.base_round == base_round
    request_ = encoded.request(before)
    assert request_.base_round == base_round
    assert bits(request_.broadcast) == bits(
        replace(broadcast, catch_up=broadcast.catch_up if catch_up else None)
    )


def test_8_bit_broadcast() -> None:
    """The mean is encoded as its difference from w. Work per node is sent too, within
    tau_max.
    """
    features = (*EVERYTHING, SpeedWorkload(9))
    task = replace(TASK, compress="auto", tau_max=9, features=settings_of(features))
    before = np.array([1, 2, 3], np.float32)
    compressor = BroadcastCompressor("8-bit")
    w = compressor.quantize(before + np.array([0.5, -1, 0.25], np.float32), before)
    mean = compressor.quantize(w + np.array([1e-3, -2e-3, 5e-4], np.float32), w)
    drift = DriftPart(True, 0.5, mean=mean)
    work = Work(2.5, 4, (4,), 2)
    broadcast = replace(
        BROADCAST, w=w, effective=2.5, parts=(drift, work), compress="8-bit"
    )
    differences = compressor.differences(broadcast)
    assert [len(data) for _, data in differences] == [4 + 3, 4 + 3]
    messages = frames(pack_broadcast(broadcast, 2, catch_up=False, differences=differences))
    encoded = reader_after_welcome(task).feed(messages[0])
    assert isinstance(encoded, EncodedBroadcast)
    result = encoded.request(before).broadcast
    assert (result.part(Work), result.compress) == (work, "8-bit")
    assert result.w.tobytes() == w.tobytes()
    received = result.part(DriftPart)
    assert received is not None
    assert received.mean is not None
    assert received.mean.tobytes() == mean.tobytes()
    np.testing.assert_allclose(received.mean - w, [1e-3, -2e-3, 5e-4], rtol=2e-2)
    too_many = replace(broadcast, parts=(drift, Work(2.5, 10, (10,), 2)))
    refused = reader_after_welcome(task).feed(
        frames(pack_broadcast(too_many, 2, catch_up=False))[0]
    )
    assert isinstance(refused, EncodedBroadcast)
    with pytest.raises(PeerError, match=r"10 updates, 2\.5 in effect; the task allows 9"):
        refused.request(before)


def test_broadcast_numbers_are_compact() -> None:
    """Names are only those of the round, its parts and the report."""
    (message,) = frames(pack_broadcast(BROADCAST, 2, catch_up=False))
    names = [*BROADCAST.report.numbers, *BROADCAST.report.optional, "TrainRound"]
    names += [*BROADCAST.report.vectors, "DriftPart"]
    # w of three parameters, the names, and all other numbers
    assert len(message) < 12 + sum(len(name) + 1 for name in names) + 70


def decoded_broadcast(message: bytes, before: Float32 | None = None) -> Broadcast:
    encoded = reader_after_welcome().feed(message)
    assert isinstance(encoded, EncodedBroadcast)
    return encoded.request(before).broadcast


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base_round", 3),
        ("base_round", -1),
        ("header", b""),
        ("header", b"\xc1"),
        ("header", []),
        ("header", [1] * 8),
        ("header", {"round": 3}),
        ("broadcast", b""),
        ("broadcast", b"\xc1"),
        ("broadcast", msgspec.msgpack.encode([])),
        ("broadcast", msgspec.msgpack.encode([1] * 15)),
        ("broadcast", msgspec.msgpack.encode({"round": 3})),
        ("broadcast", msgspec.msgpack.encode("w" * 1000)),
        ("vectors", 0),
        ("vectors", 2),
        ("vectors", 4),
        ("vectors", 10**10),
        ("kind", "zip"),
        ("differences", [0]),
        ("differences", [3]),
        ("differences", [-1]),
        ("differences", [0, 1, 2]),
        ("rest", b""),
        ("rest", NOT_FINITE + bytes(24)),
        ("rest", bytes(12) + NOT_FINITE + bytes(12)),
        ("rest", bytes(24) + NOT_FINITE),
    ],
)
def test_invalid_broadcast_fields_are_refused(field: str, value: Any) -> None:
    assert decoded_broadcast(MESSAGE) is not None
    with pytest.raises(PeerError):
        decoded_broadcast(with_field(MESSAGE, field, value))


ZEROS = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    "other",
    [
        {"round": 0},
        {"round": 2},
        {"round": 2**31},
        {"round": 3.5},
        {"tau": -1},
        {"tau": 0},
        {"tau": 10**9 + 1},
        {"tau": True},
        {"eta": 0.0},
        {"eta": -0.1},
        {"eta": math.nan},
        {"eta": math.inf},
        {"effective": 0.0},
        {"effective": 2.5},
        {"effective": math.nan},
        {"best": 1},
        {"parts": ()},
        {"parts": (DriftPart(True, -0.1),)},
        {"parts": (DriftPart(True, 1.1),)},
        {"parts": (DriftPart(True, math.nan),)},
        {"parts": (DriftPart(True, 1.0), DriftPart(True, 1.0))},
        {"parts": (DriftPart(True, 1.0), MomentumPart(0.9))},
        {"parts": (DriftPart(True, 1.0), Work(2.0, 2, (2,), 2))},
        {"catch_up": CatchUp(ZEROS)},
        {"catch_up": CatchUp(ZEROS, (DriftCatchUp(ZEROS, -1),))},
    ],
)
def test_invalid_broadcast_values_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(PeerError):
        decoded_broadcast(
            frames(pack_broadcast(replace(BROADCAST, **other), 2, catch_up=True))[0]
        )


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, "Broadcast"),
        (0, "FinalRound"),
        (0, "PrivateRound"),
        (2, None),
        (2, 3),
        (2, -1),
        (2, 1),
        (5, None),
        (5, []),
        (5, [["NoSuchPart", 1]]),
        (6, [1, []]),
        (6, [1, [["DriftPart", True, 1.0, None, None]]]),
    ],
)
def test_vectors_must_match_fields(place: int, value: Any) -> None:
    """w and drift are present if the task requests them, and the request is the task's."""
    broadcast = msgspec.msgpack.decode(unpack(MESSAGE).header)[-1]
    values = msgspec.msgpack.decode(broadcast)
    assert (values[2], values[6][0], values[6][1][0][1]) == (0, 1, 2)
    values[place] = value
    with pytest.raises(PeerError):
        decoded_broadcast(with_field(MESSAGE, "broadcast", msgspec.msgpack.encode(values)))


def test_task_decides_what_is_reported() -> None:
    """A broadcast cannot request other reports than the task."""
    broadcast = msgspec.msgpack.decode(unpack(MESSAGE).header)[-1]
    values = msgspec.msgpack.decode(broadcast)
    values[3] = [["losses"], ["w"], []]
    changed = with_field(MESSAGE, "broadcast", msgspec.msgpack.encode(values))
    assert decoded_broadcast(changed).report == decoded_broadcast(MESSAGE).report


def test_overflowing_difference_is_refused() -> None:
    task = replace(TASK, compress="8-bit", features=())
    huge = np.full(3, 3e38, np.float32)
    plain = random_broadcast(3, np.random.default_rng(0), NOTHING)
    broadcast = replace(plain, w=huge, compress="8-bit")
    differences = [(huge, encode("8-bit", huge))]
    (message,) = frames(
        pack_broadcast(broadcast, 2, catch_up=False, differences=differences)
    )
    encoded = reader_after_welcome(task).feed(message)
    assert isinstance(encoded, EncodedBroadcast)
    assert np.isfinite(encoded.request(-huge).broadcast.w).all()
    with pytest.raises(PeerError, match="not finite"):
        encoded.request(huge)


REPORT_BROADCAST = random_broadcast(3, np.random.default_rng(0), EVERYTHING)
(REPORT,) = frames(
    pack_report(
        random_report(REPORT_BROADCAST, 2, np.random.default_rng(0)),
        node_costs(1, 2, energy=(5, 6)),
        b"w" * 48,
    )
)
NUMBERS = 2 * 6  # two losses, two estimates and two divergences of two nodes


def test_hello_round_trip() -> None:
    hello = Hello("me", SamplesDescription((5,), (2, 3)), "run", (3, 4))
    assert NodeReader().feed(pack(hello)[0]) == hello


@settings(deadline=None)
@given(COSTS)
def test_trial_costs_round_trip(costs: Usage) -> None:
    reader = NodeReader()
    reader.expect_ready()
    (message,) = pack(Ready(costs))
    assert bits(reader.feed(message)) == bits(Ready(costs))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_report_round_trip(data: st.DataObject) -> None:
    n, d = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 600))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    kind = data.draw(st.sampled_from(KINDS))
    number = data.draw(st.integers(1, 3))
    trained = random_broadcast(d, rng, data.draw(FEATURES), round=number)
    broadcast: TrainRound | FinalRound = trained
    if data.draw(st.booleans()):
        broadcast = as_final(trained)
    report, costs = random_report(broadcast, n, rng), data.draw(COSTS)
    expected, vectors = as_received(report, broadcast, kind)
    reader = reader_for_report(broadcast, n, kind)
    (message,) = frames(pack_report(report, costs, vectors))
    assert bits(reader.feed(message)) == bits(Answer(expected, costs))


def test_compression_error_reaches_next_report() -> None:
    rng, lost = np.random.default_rng(2), None
    broadcast = random_broadcast(300, rng, NOTHING, round=1)
    report = random_report(broadcast, 2, rng)
    assert isinstance(report, TrainReport)
    error = []
    for _ in range(10):
        reader = reader_for_report(broadcast, 2, "8-bit")
        sent, lost = with_feedback("8-bit", report.w - broadcast.w, lost)
        packed = pack_report(report, node_costs(1, 1), sent.to_bytes())
        answer = reader.feed(frames(packed)[0])
        assert isinstance(answer, Answer)
        assert isinstance(answer.report, TrainReport)
        error.append(answer.report.w.astype(np.float64) - report.w)
    # A report contains the error of the one before. Otherwise, ten equal errors add up.
    assert np.abs(sum(error)).mean() < 2 * np.abs(error[0]).mean()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("round", 2),
        ("round", 4),
        ("numbers", [[0], b""]),
        ("numbers", [[NUMBERS - 1], bytes(8 * NUMBERS - 8)]),
        ("numbers", [[NUMBERS], bytes(8 * NUMBERS - 1)]),
        ("numbers", [[NUMBERS + 1], bytes(8 * NUMBERS + 8)]),
        ("numbers", [[2, NUMBERS // 2], bytes(8 * NUMBERS)]),
        ("numbers", [[2**62], bytes(8 * NUMBERS)]),
        ("numbers", [["1"], bytes(8)]),
        ("numbers", bytes(8 * NUMBERS)),
        ("numbers", None),
        ("costs", []),
        ("costs", None),
        ("tallies", b"\x00"),
        ("tallies", None),
        ("header", b""),
        ("header", b"\xc1"),
        ("rest", b""),
        ("rest", b"w" * 24),
        ("rest", b"w" * 47),
        ("rest", b"w" * 49),
    ],
)
def test_invalid_report_fields_are_refused(field: str, value: Any) -> None:
    assert isinstance(reader_for_report(REPORT_BROADCAST, 2).feed(REPORT), Answer)
    with pytest.raises(PeerError):
        reader_for_report(REPORT_BROADCAST, 2).feed(with_field(REPORT, field, value))


@pytest.mark.parametrize("more", [1, 2, 4])
def test_unrequested_numbers_are_refused(more: int) -> None:
    broadcast = random_broadcast(3, np.random.default_rng(0), NOTHING)
    report = random_report(broadcast, 2, np.random.default_rng(0))
    (message,) = frames(pack_report(report, node_costs(1, 1), b"w" * 24))
    assert isinstance(reader_for_report(broadcast, 2).feed(message), Answer)
    count = 2 * (2 + more)
    with pytest.raises(PeerError, match="bytes of numbers instead of 32"):
        reader_for_report(broadcast, 2).feed(
            with_field(message, "numbers", [[count], bytes(8 * count)])
        )
