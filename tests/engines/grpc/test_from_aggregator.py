"""What the aggregator sends: what is sent is what is read, and a broadcast that cannot be
is refused.
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
from fedbudget.engines.grpc.messages import (
    AggregatorReader,
    EncodedBroadcast,
    pack_broadcast,
    pack_farewell,
    pack_welcome,
)
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.messages import Farewell, Welcome
from fedbudget.protocol.compression import KINDS, BroadcastCompressor, decode, encode
from fedbudget.protocol.messages import Broadcast, CatchUp, Drift, PeerError, Work
from support.messages import (
    EVERYTHING,
    NOTHING,
    REQUESTS,
    TASK,
    a_broadcast,
    changed,
    vector,
    welcomed,
)
from support.methods import bits

BROADCAST = a_broadcast(3, np.random.default_rng(0), EVERYTHING)
MESSAGE = pb.FromAggregator.FromString(pack_broadcast(BROADCAST, 2, catch_up=True)[0])
NOT_FINITE = np.array([0, np.nan, 0], np.float32).tobytes()


def test_a_welcome() -> None:
    welcome = Welcome("run", TASK, (3, 4))
    assert bits(AggregatorReader().feed(pack_welcome(welcome)[0])) == bits(welcome)


@settings(deadline=None)
@given(st.text(max_size=2000), st.booleans())
def test_a_farewell_at_any_time(reason: str, again: bool) -> None:
    (message,) = pack_farewell(Farewell(reason, again))
    assert AggregatorReader().feed(message) == Farewell(reason, again)
    assert welcomed().feed(message) == Farewell(reason, again)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_broadcast(data: st.DataObject) -> None:
    d = data.draw(st.integers(1, 600))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    request = data.draw(REQUESTS)
    task, kind = (
        replace(TASK, parameters=d, request=request),
        data.draw(st.sampled_from(KINDS)),
    )
    broadcast = a_broadcast(
        d,
        rng,
        request,
        round=data.draw(st.integers(2, 2**31 - 1)),
        tau=data.draw(st.integers(0, task.tau_max)),
        eta=data.draw(st.floats(1e-300, 1e300)),
        best=data.draw(st.booleans()),
        stop=data.draw(st.booleans()),
        compress=kind,
    )
    base_round = data.draw(st.integers(0, broadcast.round - 1))
    catch_up = data.draw(st.booleans())
    before, differences = None, {}
    if data.draw(st.booleans()):
        before = vector(rng, d)
        differences["w"] = encode(kind, broadcast.w - before)
        broadcast = replace(broadcast, w=before + decode(kind, differences["w"], d))
        if broadcast.mean is not None:
            differences["mean"] = encode(kind, broadcast.mean - broadcast.w)
            broadcast = replace(
                broadcast, mean=broadcast.w + decode(kind, differences["mean"], d)
            )
    messages = pack_broadcast(
        broadcast, base_round, catch_up=catch_up, differences=differences
    )
    encoded = welcomed(task).feed(messages[0])
    assert isinstance(encoded, EncodedBroadcast)
    assert encoded.base_round == base_round
    request_ = encoded.request(before)
    assert request_.base_round == base_round
    assert bits(request_.broadcast) == bits(
        replace(broadcast, catch_up=broadcast.catch_up if catch_up else None)
    )


def test_with_8_bits_the_mean_is_told_by_how_far_it_is_from_w() -> None:
    """And what each node is to do is told it alone, whatever else is agreed on round by
    round.
    """
    task, before = (
        replace(TASK, compress="auto", tau_max=9),
        np.array([1, 2, 3], np.float32),
    )
    compressor = BroadcastCompressor("8-bit")
    w = compressor.quantize(before + np.array([0.5, -1, 0.25], np.float32), before)
    mean = compressor.quantize(w + np.array([1e-3, -2e-3, 5e-4], np.float32), w)
    broadcast = replace(
        BROADCAST, w=w, mean=mean, work=Work(2.5, 4, (4,)), compress="8-bit"
    )
    told = compressor.differences(broadcast)
    assert [len(data) for data in told.values()] == [4 + 3, 4 + 3]
    messages = pack_broadcast(broadcast, 2, catch_up=False, differences=told)
    encoded = welcomed(task).feed(messages[0])
    assert isinstance(encoded, EncodedBroadcast)
    found = encoded.request(before).broadcast
    assert (found.work, found.compress) == (broadcast.work, "8-bit")
    assert found.w.tobytes() == w.tobytes()
    assert found.mean is not None
    assert found.mean.tobytes() == mean.tobytes()
    np.testing.assert_allclose(found.mean - w, [1e-3, -2e-3, 5e-4], rtol=2e-2)
    too_many = replace(broadcast, work=Work(2.5, 10, (10,)))
    refused = welcomed(task).feed(pack_broadcast(too_many, 2, catch_up=False)[0])
    assert isinstance(refused, EncodedBroadcast)
    with pytest.raises(PeerError, match=r"10 updates, 2\.5 in effect; the task allows 9"):
        refused.request(before)


def test_numbers_take_few_bytes() -> None:
    """Neither the names of fields nor what is asked for is sent in every round."""
    (message,) = pack_broadcast(BROADCAST, 2, catch_up=False)
    assert len(message) < 12 + 60  # w of three parameters, and all other numbers


def understood(message: bytes, before: Float32 | None = None) -> Broadcast:
    encoded = welcomed().feed(message)
    assert isinstance(encoded, EncodedBroadcast)
    return encoded.request(before).broadcast


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base_round", 3),
        ("numbers", b""),
        ("numbers", b"\xc1"),
        ("numbers", msgspec.msgpack.encode([])),
        ("numbers", msgspec.msgpack.encode([1] * 8)),
        ("numbers", msgspec.msgpack.encode({"round": 3})),
        ("numbers", msgspec.msgpack.encode("w" * 1000)),
        ("size", 0),
        ("size", 10**10),
        ("vectors", b""),
        ("vectors", NOT_FINITE + bytes(24)),
        ("vectors", bytes(12) + NOT_FINITE + bytes(12)),
        ("vectors", bytes(24) + NOT_FINITE),
        ("difference", True),
    ],
)
def test_a_message_that_cannot_be(field: str, value: Any) -> None:
    assert understood(MESSAGE.SerializeToString()) is not None
    with pytest.raises(PeerError):
        understood(changed(MESSAGE, "broadcast", field, value))


ZEROS = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    "other",
    [
        {"round": 0},
        {"round": 2},
        {"round": 2**31},
        {"round": 3.5},
        {"tau": -1},
        {"tau": 10**9 + 1},
        {"tau": True},
        {"eta": 0.0},
        {"eta": -0.1},
        {"eta": math.nan},
        {"eta": math.inf},
        {"best": 1},
        {"drift": Drift(True, -0.1)},
        {"drift": Drift(True, 1.1)},
        {"drift": Drift(True, math.nan)},
        {"catch_up": CatchUp(ZEROS, None, 0)},
        {"catch_up": CatchUp(ZEROS, ZEROS, -1)},
    ],
)
def test_a_broadcast_that_cannot_be(other: dict[str, Any]) -> None:
    with pytest.raises(PeerError):
        understood(pack_broadcast(replace(BROADCAST, **other), 2, catch_up=True)[0])


@pytest.mark.parametrize(
    ("place", "value"), [(1, None), (1, "best"), (6, None), (7, ["w", None, 0])]
)
def test_vectors_are_in_their_places(place: int, value: Any) -> None:
    """Each is named by its own field, and w and drift are always there where they were
    agreed on.
    """
    numbers = msgspec.msgpack.decode(MESSAGE.broadcast.numbers)
    assert (numbers[1], numbers[7][:2]) == ("w", ["catch_up.best", "catch_up.mean"])
    numbers[place] = value
    with pytest.raises(PeerError):
        understood(
            changed(MESSAGE, "broadcast", "numbers", msgspec.msgpack.encode(numbers))
        )


def test_a_difference_beyond_all_numbers() -> None:
    task, huge = (
        replace(TASK, compress="8-bit", request=NOTHING),
        np.full(3, 3e38, np.float32),
    )
    broadcast = replace(BROADCAST, w=huge, request=NOTHING, drift=None, compress="8-bit")
    (message,) = pack_broadcast(
        broadcast, 2, catch_up=False, differences={"w": encode("8-bit", huge)}
    )
    encoded = welcomed(task).feed(message)
    assert isinstance(encoded, EncodedBroadcast)
    assert np.isfinite(encoded.request(-huge).broadcast.w).all()
    with pytest.raises(PeerError, match="not finite"):
        encoded.request(huge)
