"""Messages as bytes and back: what is said is what is heard, and what breaks the rules is a `PeerError`."""

import contextlib
import math
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float32
from fedbudget.engines.grpc.codec import (
    KINDS,
    LONGEST,
    PART,
    AggregatorReader,
    EncodedBroadcast,
    NodeReader,
    pack_broadcast,
    pack_farewell,
    pack_hello,
    pack_ready,
    pack_report,
    pack_welcome,
    task_in,
    task_out,
)
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.compression import ErrorFeedback, Kind, encode, encoded_size, settled
from fedbudget.engines.remote.messages import Answer, Farewell, Hello, Ready, Welcome
from fedbudget.engines.remote.task import Moments, Request, Samples, Task
from fedbudget.errors import UserError
from fedbudget.protocol.messages import Broadcast, CatchUp, Drift, PeerError, Report
from fedbudget.resources.usage import NodeCosts, Reading
from support.methods import bits
from support.usage import node_costs

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
AMOUNTS = st.floats(0, 1e300)
NAMES = st.text(max_size=200)

SAMPLES = st.builds(
    lambda sizes, shape, stored, scale, classes, values, parity, seed: Samples(
        tuple(sizes), tuple(shape), stored, scale, tuple(classes), values, parity, *moments(shape, seed)
    ),
    st.lists(st.integers(1, 2**40 - 1), min_size=1, max_size=5),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.sampled_from(["uint8", "float32", "float64"]),
    st.floats(1e-30, 1e30),
    st.lists(NAMES, max_size=4),
    st.booleans(),
    st.booleans(),
    st.none() | st.integers(0, 100),
)
RESOURCE_NAMES = st.text("abcdefghijklmnopqrstuvwxyzXYZ", min_size=1, max_size=20)
ASKED = st.builds(Request, *[st.booleans()] * 4, st.lists(RESOURCE_NAMES, max_size=4).map(tuple))
TASKS = st.builds(
    Task,
    NAMES,
    st.integers(1, 2**34),
    st.none() | st.integers(1, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.sampled_from(KINDS),
    st.integers(1, 10**9),
    SAMPLES,
    ASKED,
)
READINGS = st.builds(Reading, AMOUNTS, AMOUNTS, NAMES)
COSTS = st.builds(
    lambda time, others: NodeCosts({"time": time, **others}),
    READINGS,
    st.dictionaries(RESOURCE_NAMES, READINGS, max_size=5),
)


def moments(shape: list[int], seed: int | None) -> tuple[Moments | None, Moments | None]:
    if seed is None:
        return None, None
    rng, columns = np.random.default_rng(seed), math.prod(shape)
    return Moments(rng.normal(size=columns), rng.random(columns)), Moments(rng.normal(size=1), rng.random(1))


# What is said is what is heard.


@settings(deadline=None)
@given(NAMES, SAMPLES, NAMES, st.lists(st.integers(0, 2**32 - 1), max_size=8))
def test_a_hello(instance: str, samples: Samples, run: str, rounds: list[int]) -> None:
    hello = Hello(instance, samples, run, tuple(rounds))
    (message,) = pack_hello(hello)
    assert bits(NodeReader().feed(message)) == bits(hello)


@settings(deadline=None)
@given(COSTS)
def test_what_a_trial_has_cost(costs: NodeCosts) -> None:
    reader = NodeReader()
    reader.expect_ready()
    (message,) = pack_ready(costs)
    assert bits(reader.feed(message)) == bits(Ready(costs))


@settings(deadline=None)
@given(NAMES, TASKS, st.sets(st.integers(0, 2**62 - 1), max_size=5))
def test_a_welcome(run: str, task: Task, numbers: set[int]) -> None:
    welcome = Welcome(run, task, tuple(sorted(numbers)))
    (message,) = pack_welcome(welcome)
    assert bits(AggregatorReader().feed(message)) == bits(welcome)
    assert bits(task_in(task_out(task))) == bits(task)


def test_samples_that_take_too_much_to_describe_are_refused_where_they_are() -> None:
    columns = LONGEST // 16 + 1
    many = Samples((10,), (columns,), features=Moments(np.ones(columns), np.ones(columns)))
    with pytest.raises(UserError, match="too many columns to standardise"):
        pack_hello(Hello("me", many))
    with pytest.raises(UserError, match="too many classes"):
        pack_welcome(Welcome("run", replace(TASK, samples=Samples((), (1,), classes=("name" * 40,) * 10_000)), (0,)))


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
    asked = data.draw(ASKED)
    task = replace(TASK, parameters=d, asked=asked, compress=data.draw(st.sampled_from(KINDS)))
    broadcast = a_broadcast(
        d,
        rng,
        asked,
        round=data.draw(st.integers(2, 2**31 - 1)),
        tau=data.draw(st.integers(0, task.tau_max)),
        eta=data.draw(st.floats(1e-300, 1e300)),
        best=data.draw(st.booleans()),
        stop=data.draw(st.booleans()),
    )
    base_round = data.draw(st.integers(0, broadcast.round - 1))
    catch_up = data.draw(st.booleans())
    before, difference = None, None
    if data.draw(st.booleans()):
        before = vector(rng, d)
        difference = encode(task.compress, broadcast.w - before)
        broadcast = replace(broadcast, w=settled(task.compress, broadcast.w, before))
    messages = pack_broadcast(broadcast, base_round=base_round, catch_up=catch_up, difference=difference)
    half = welcomed(task).feed(messages[0])
    assert isinstance(half, EncodedBroadcast)
    assert half.base_round == base_round
    request = half.request(before)
    assert request.base_round == base_round
    assert bits(request.broadcast) == bits(replace(broadcast, catch_up=broadcast.catch_up if catch_up else None))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_report(data: st.DataObject) -> None:
    n, d = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 600))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    kind, asked = data.draw(st.sampled_from(KINDS)), data.draw(ASKED)
    broadcast = a_broadcast(d, rng, asked, round=data.draw(st.integers(1, 3)), tau=data.draw(st.integers(0, 3)))
    report, costs = report_to(broadcast, n, rng), data.draw(COSTS)
    expected, vectors = as_received(report, broadcast, kind)
    reader = expecting(broadcast, n, kind)
    (message,) = pack_report(report, costs, vectors)
    assert bits(reader.feed(message)) == bits(Answer(expected, costs))


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_of_megabytes_come_in_several_parts(kind: Kind) -> None:
    d, rng, asked = 900_001, np.random.default_rng(1), Request(True, True, False, True)
    broadcast = a_broadcast(d, rng, asked, round=2)
    report = report_to(broadcast, 1, rng)
    expected, vectors = as_received(report, broadcast, kind)
    messages = pack_report(report, node_costs(1.0, 2.0, cpu=(3.0, 4.0)), vectors)
    assert len(messages) == -(-2 * encoded_size(kind, d) // PART)
    assert max(len(message) for message in messages) <= LONGEST
    parts = [vectors[at : at + PART] for at in range(PART, len(vectors), PART)]
    assert messages[1:] == [pb.FromNode(more=part).SerializeToString() for part in parts]
    reader, found = expecting(broadcast, 1, kind), []
    for message in messages:
        found.append(reader.feed(message))
        assert reader.in_the_middle == (len(found) < len(messages))
    assert found[:-1] == [None] * (len(messages) - 1)
    assert bits(found[-1]) == bits(Answer(expected, node_costs(1.0, 2.0, cpu=(3.0, 4.0))))

    messages = pack_broadcast(broadcast, base_round=1, catch_up=True, difference=None)
    assert len(messages) == 11  # of three vectors, each 3.6 MB
    other = welcomed(replace(TASK, parameters=d, asked=asked))
    *none, half = [other.feed(message) for message in messages]
    assert none == [None] * 10
    assert isinstance(half, EncodedBroadcast)
    assert bits(half.request(None).broadcast) == bits(broadcast)


def test_what_a_node_lost_to_compression_comes_with_the_next_report() -> None:
    rng, feedback = np.random.default_rng(2), ErrorFeedback()
    broadcast = a_broadcast(300, rng, ASKED_NOTHING, round=1)
    report = report_to(broadcast, 2, rng)
    assert report.w is not None
    error = []
    for _ in range(2):
        reader = expecting(broadcast, 2, "8-bit")
        vectors = feedback.send("8-bit", report.w - broadcast.w)
        found = reader.feed(pack_report(report, node_costs(1, 1, cpu=(1, 1)), vectors)[0])
        assert isinstance(found, Answer)
        assert found.report.w is not None
        error.append(found.report.w.astype(np.float64) - report.w)
    # The second brings what the first lacked: their mean is nearer than either.
    assert np.abs(sum(error)).mean() < np.abs(error[0]).mean()


# What breaks the rules.


def vector(rng: np.random.Generator, d: int) -> Float32:
    return rng.normal(size=d).astype(np.float32)


ASKED_NOTHING = Request(estimate=False, gradient=False, curvature=False, drift=False)
ASKED_ALL = Request(estimate=True, gradient=True, curvature=True, drift=True)
TASK = Task("svm", 3, 5, 1, 4, "none", 10**9, Samples((), (3,)), ASKED_ALL)


def a_broadcast(d: int, rng: np.random.Generator, asked: Request, **other: Any) -> Broadcast:
    known: dict[str, Any] = {"round": 3, "w": vector(rng, d), "tau": 2, "eta": 0.1, "best": True, "stop": False}
    return Broadcast(
        **{**known, **other},
        estimate=asked.estimate,
        gradient=asked.gradient,
        curvature=asked.curvature,
        drift=Drift(bool(rng.integers(2)), rng.random()) if asked.drift else None,
        catch_up=CatchUp(vector(rng, d), vector(rng, d) if asked.drift else None, int(rng.integers(100))),
    )


def report_to(broadcast: Broadcast, n: int, rng: np.random.Generator) -> Report:
    """With what was asked for."""
    updated = broadcast.tau > 0
    estimates = broadcast.estimate and broadcast.round > 1 and updated
    drift = broadcast.drift is not None and updated

    def numbers(wanted: bool) -> Any:
        return np.where(rng.random(n) < 0.2, np.nan, rng.normal(size=n)) if wanted else None

    def vectors(wanted: bool) -> Any:
        return rng.normal(size=(n, broadcast.w.size)).astype(np.float32) if wanted else None

    return Report(
        broadcast.round,
        np.arange(n) + 7,
        np.arange(n) + 10,
        rng.normal(size=n),
        rng.normal(size=n),
        vectors(updated),
        numbers(estimates),
        numbers(estimates),
        vectors(estimates and broadcast.gradient),
        numbers(drift),
        numbers(drift),
    )


def as_received(report: Report, broadcast: Broadcast, kind: Kind) -> tuple[Report, bytes]:
    """What the aggregator gets of a report's vectors, and how they are sent."""
    if report.w is None:
        return report, b""
    vectors = encode(kind, report.w if kind == "none" else report.w - broadcast.w)
    w = report.w if kind == "none" else settled(kind, report.w, np.broadcast_to(broadcast.w, report.w.shape))
    if report.gradients is None:
        return replace(report, w=w), vectors
    gradients = settled(kind, report.gradients, np.zeros_like(report.gradients))
    return replace(report, w=w, gradients=gradients), vectors + encode(kind, report.gradients)


def welcomed(task: Task = TASK) -> AggregatorReader:
    reader = AggregatorReader()
    reader.feed(pack_welcome(Welcome("run", task, (0,)))[0])
    return reader


def expecting(broadcast: Broadcast, n: int, kind: Kind = "none") -> NodeReader:
    reader = NodeReader()
    reader.expect_report(broadcast, np.arange(n) + 7, np.arange(n) + 10, kind)
    return reader


SAID = a_broadcast(3, np.random.default_rng(0), ASKED_ALL)
REPORT = pb.FromNode.FromString(
    pack_report(report_to(SAID, 2, np.random.default_rng(0)), node_costs(1, 2, cpu=(3, 4), energy=(5, 6)), b"w" * 48)[0]
)
HELLO = pb.FromNode.FromString(pack_hello(Hello("me", Samples((5,), (2, 3), features=Moments(*np.ones((2, 6))))))[0])
WELCOME = pb.FromAggregator.FromString(pack_welcome(Welcome("run", TASK, (0, 1)))[0])
BROADCAST = pb.FromAggregator.FromString(pack_broadcast(SAID, base_round=2, catch_up=True, difference=None)[0])


def changed(message: Any, path: str, value: Any) -> bytes:
    """The message with one field changed, as bytes; a list for a repeated field."""
    copy = type(message)()
    copy.CopyFrom(message)
    *parents, name = path.split(".")
    owner = copy
    for parent in parents:
        owner = getattr(owner, parent)
    if isinstance(value, list):
        del getattr(owner, name)[:]
        getattr(owner, name).extend(value)
    elif value is None:
        owner.ClearField(name)
    else:
        setattr(owner, name, value)
    return bytes(copy.SerializeToString())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 0),
        ("version", 1),
        ("instance", "x" * 201),
        ("run", "x" * 201),
        ("rounds", [1] * 17),
        ("samples", None),
        ("samples.sizes", []),
        ("samples.sizes", [5, 0]),
        ("samples.sizes", [2**40]),
        ("samples.sizes", [1] * 5001),
        ("samples.shape", []),
        ("samples.shape", [0]),
        ("samples.shape", [1, 1, 1, 1, 6]),
        ("samples.shape", [10**4, 10**4]),
        ("samples.shape", [2**32 - 1] * 200_000),
        ("samples.stored", "object"),
        ("samples.scale", 0.0),
        ("samples.scale", -1.0),
        ("samples.scale", math.nan),
        ("samples.scale", math.inf),
        ("samples.classes", [""] * 100_001),
        ("samples.classes", ["x" * 201]),
        ("samples.features.mean", [1.0] * 5),
        ("samples.features.mean", [math.nan] * 6),
        ("samples.features.deviation", [1.0] * 7),
        ("samples.features.deviation", [-1.0] * 6),
        ("samples.features.deviation", [math.inf] * 6),
        ("samples.target.mean", [1.0, 1.0]),
    ],
)
def test_a_hello_that_cannot_be(path: str, value: Any) -> None:
    with pytest.raises(PeerError):
        NodeReader().feed(changed(HELLO, f"hello.{path}", value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("round", 2),
        ("round", 4),
        ("losses", [0.0]),
        ("losses", [0.0] * 3),
        ("best_losses", []),
        ("rho", []),
        ("beta", [1.0]),
        ("plain", []),
        ("corrected", [1.0] * 3),
        ("costs", None),
        ("size", 47),
        ("size", 49),
        ("size", 24),
        ("size", 10**10),
        ("size", 2**64 - 1),
        ("vectors", b""),
        ("vectors", b"w" * 47),
        ("vectors", b"w" * 49),
    ],
)
def test_a_report_that_cannot_be(path: str, value: Any) -> None:
    whole = expecting(SAID, 2).feed(REPORT.SerializeToString())
    assert isinstance(whole, Answer)
    with pytest.raises(PeerError):
        expecting(SAID, 2).feed(changed(REPORT, f"report.{path}", value))


@pytest.mark.parametrize("name", ["rho", "beta", "plain", "corrected"])
def test_numbers_that_nobody_asked_for(name: str) -> None:
    broadcast = a_broadcast(3, np.random.default_rng(0), ASKED_NOTHING)
    report = report_to(broadcast, 2, np.random.default_rng(0))
    message = pb.FromNode.FromString(pack_report(report, node_costs(1, 1, cpu=(1, 1)), b"w" * 24)[0])
    assert isinstance(expecting(broadcast, 2).feed(message.SerializeToString()), Answer)
    with pytest.raises(PeerError, match=r"2 numbers for .*, not 0"):
        expecting(broadcast, 2).feed(changed(message, f"report.{name}", [1.0, 1.0]))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 1),
        ("run", "x" * 201),
        ("numbers", [2**62]),
        ("numbers", [1, 1]),
        ("numbers", [2, 1]),
        ("numbers", list(range(5001))),
        ("task", None),
        ("task.model", "x" * 201),
        ("task.parameters", 0),
        ("task.parameters", 2**34 + 1),
        ("task.compress", "zip"),
        ("task.tau_max", 0),
        ("task.tau_max", 10**9 + 1),
        ("task.samples.shape", [0]),
    ],
)
def test_a_welcome_that_cannot_be(path: str, value: Any) -> None:
    assert isinstance(AggregatorReader().feed(WELCOME.SerializeToString()), Welcome)
    with pytest.raises(PeerError):
        AggregatorReader().feed(changed(WELCOME, f"welcome.{path}", value))


NOT_FINITE = np.array([0, np.nan, 0], np.float32).tobytes()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("round", 0),
        ("round", 2),
        ("round", 2**31),
        ("stands", 3),
        ("tau", 10**9 + 1),
        ("eta", 0.0),
        ("eta", -0.1),
        ("eta", math.nan),
        ("eta", math.inf),
        ("share", -0.1),
        ("share", 1.1),
        ("share", math.nan),
        ("news", False),
        ("size", 0),
        ("size", 10**10),
        ("vectors", b""),
        ("vectors", NOT_FINITE + bytes(24)),
        ("vectors", bytes(12) + NOT_FINITE + bytes(12)),
        ("vectors", bytes(24) + NOT_FINITE),
        ("difference", True),
    ],
)
def test_a_broadcast_that_cannot_be(path: str, value: Any) -> None:
    assert understood(BROADCAST.SerializeToString()) is not None
    with pytest.raises(PeerError):
        understood(changed(BROADCAST, f"broadcast.{path}", value))


def understood(message: bytes, before: Float32 | None = None) -> Broadcast:
    half = welcomed().feed(message)
    assert isinstance(half, EncodedBroadcast)
    return half.request(before).broadcast


def test_a_difference_that_goes_beyond_all_numbers() -> None:
    task, huge = replace(TASK, compress="8-bit", asked=ASKED_NOTHING), np.full(3, 3e38, np.float32)
    broadcast = replace(SAID, w=huge, drift=None)
    (message,) = pack_broadcast(broadcast, base_round=2, catch_up=False, difference=encode("8-bit", huge))
    half = welcomed(task).feed(message)
    assert isinstance(half, EncodedBroadcast)
    assert np.isfinite(half.request(-huge).broadcast.w).all()
    with pytest.raises(PeerError, match="not finite"):
        half.request(huge)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (NodeReader, pb.FromNode()),
        (NodeReader, pb.FromNode(more=b"1")),
        (NodeReader, pb.FromNode(ready=pb.Ready())),
        (NodeReader, REPORT),
        (lambda: fed(NodeReader(), HELLO), HELLO),
        (lambda: fed(NodeReader(), HELLO), pb.FromNode(ready=pb.Ready())),
        (lambda: expecting(SAID, 2), HELLO),
        (lambda: expecting(SAID, 2), pb.FromNode(more=b"w" * 48)),
        (lambda: fed(expecting(SAID, 2), REPORT), REPORT),
        (lambda: fed(expecting(SAID, 2), REPORT), pb.FromNode(more=b"w")),
        (AggregatorReader, pb.FromAggregator()),
        (AggregatorReader, BROADCAST),
        (AggregatorReader, pb.FromAggregator(more=b"1")),
        (welcomed, WELCOME),
        (welcomed, pb.FromAggregator(more=b"1")),
        (lambda: fed(welcomed(), BROADCAST), pb.FromAggregator(more=b"1")),
    ],
)
def test_what_comes_in_the_wrong_order(before: Callable[[], Any], message: Any) -> None:
    with pytest.raises(PeerError, match="expected"):
        before().feed(message.SerializeToString())


def fed(reader: Any, message: Any) -> Any:
    reader.feed(message.SerializeToString())
    return reader


LARGE = a_broadcast(PART, np.random.default_rng(0), ASKED_NOTHING)  # 4 MiB
LARGE_REPORT = pack_report(report_to(LARGE, 1, np.random.default_rng(0)), node_costs(1, 1, cpu=(1, 1)), bytes(4 * PART))


@pytest.mark.parametrize("part", [b"", b"1", bytes(PART - 1), bytes(PART + 1)])
def test_parts_are_as_long_as_they_can_be(part: bytes) -> None:
    reader = expecting(LARGE, 1)
    reader.feed(LARGE_REPORT[0])
    with pytest.raises(PeerError, match="a part of vectors of"):
        reader.feed(pb.FromNode(more=part).SerializeToString())


def test_there_are_no_more_parts_than_were_announced() -> None:
    reader = expecting(LARGE, 1)
    assert [reader.feed(message) is None for message in LARGE_REPORT] == [True, True, True, False]
    with pytest.raises(PeerError, match="'more' where 'nothing' was expected"):
        reader.feed(LARGE_REPORT[-1])


def test_another_report_in_the_middle_of_one() -> None:
    reader = expecting(LARGE, 1)
    reader.feed(LARGE_REPORT[0])
    with pytest.raises(PeerError, match="'report' where 'more of a report' was expected"):
        reader.feed(LARGE_REPORT[0])


def test_an_announcement_of_any_size_takes_no_memory() -> None:
    broadcast = replace(LARGE, w=np.broadcast_to(np.float32(0), 2**32))  # 16 GiB would be right
    message = pb.FromNode(report=pb.Report(round=3, losses=[0], best_losses=[0], size=2**34, vectors=bytes(PART)))
    data = message.SerializeToString()
    tracemalloc.start()
    try:
        assert expecting(broadcast, 1).feed(data) is None
        with pytest.raises(PeerError, match="announced"):
            expecting(LARGE, 1).feed(data)
        assert tracemalloc.get_traced_memory()[1] < 10 * PART
    finally:
        tracemalloc.stop()


def test_a_message_that_is_too_long() -> None:
    for reader in (NodeReader(), AggregatorReader()):
        with pytest.raises(PeerError, match="a message of"):
            reader.feed(bytes(LONGEST + 1))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    for reader in (NodeReader(), expecting(SAID, 2), AggregatorReader(), welcomed()):
        with contextlib.suppress(PeerError):
            reader.feed(data)
