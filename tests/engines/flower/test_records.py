"""Flower's records: exact round trips of messages and memories, and refusal of invalid
content.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedbudget.arrays import Float32
from fedbudget.engines.flower import records
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.messages import (
    Hello,
    NodeRefusal,
    Ready,
    RoundRequest,
    Welcome,
)
from fedbudget.engines.remote.wire import ExpectedReport, pack_broadcast, pack_report
from fedbudget.protocol.features.compression import encode
from fedbudget.protocol.features.drift import DriftCatchUp, DriftCorrection, DriftPart
from fedbudget.protocol.features.estimates import EstimateSlopes
from fedbudget.protocol.features.feature import Feature, FleetState, report_layout
from fedbudget.protocol.messages import (
    Broadcast,
    CatchUp,
    FinalRound,
    PeerError,
    Report,
    RoundPart,
    TrainReport,
    TrainRound,
)
from fedbudget.resources.resource import Reading, Usage
from support.flower_grid import serialized
from support.hand_made import FIRST
from support.messages import FEATURES, settings_of, with_field
from support.methods import METHODS, bits, new_aggregator, nodes, one_round, simulated_time
from support.networked import node_data, task
from support.usage import node_costs

SIZE = 5
COSTS = Usage(
    {
        "time": Reading(0.25, 2.0),
        "cpu": Reading(0.125, 1.0),
        "energy": Reading(3.0, 40.0, "here"),
    }
)
finite = st.floats(width=32, allow_subnormal=True, allow_nan=False, allow_infinity=False)
vectors = arrays(np.float32, SIZE, elements=finite)
rows = arrays(np.float32, (2, SIZE), elements=st.floats(width=32))
numbers = arrays(np.float64, 2, elements=st.floats(allow_nan=True))
shares = st.floats(0, 1)


@st.composite
def broadcasts(draw: st.DrawFn, features: tuple[Feature, ...]) -> Broadcast:
    """A training or final round of a run with these features."""
    parts: tuple[RoundPart, ...] = ()
    missed: tuple[RoundPart, ...] = ()
    if any(isinstance(feature, DriftCorrection) for feature in features):
        parts = (DriftPart(draw(st.booleans()), draw(shares)),)
        missed = (DriftCatchUp(draw(vectors), draw(st.integers(0, 9))),)
    common: dict[str, Any] = {
        "round": draw(st.integers(1, 2**31 - 1)),
        "w": draw(vectors),
        "best": draw(st.booleans()),
        "parts": parts,
        "catch_up": draw(st.none() | st.builds(CatchUp, vectors, st.just(missed))),
    }
    if draw(st.booleans()):
        return FinalRound(**common)
    tau = draw(st.integers(1, 10**9))
    return TrainRound(
        **common,
        report=report_layout(features, common["round"] == 1),
        tau=tau,
        eta=draw(st.floats(1e-300, 1e300)),
        effective=float(tau),
        stop=draw(st.booleans()),
    )


@given(FEATURES, st.data())
def test_broadcast_round_trip(features: tuple[Feature, ...], data: st.DataObject) -> None:
    broadcast = data.draw(broadcasts(features))
    agreed = replace(task(), parameters=SIZE, features=settings_of(features), tau_max=10**9)

    def received(content: RecordDict) -> RoundRequest:
        return records.broadcast(serialized(content), agreed, 1).request(None)

    base_round = data.draw(st.integers(0, broadcast.round - 1))
    for catch_up in (True, False):
        packed = pack_broadcast(broadcast, base_round, catch_up=catch_up)
        kept = broadcast if catch_up else replace(broadcast, catch_up=None)
        assert bits(received(records.to_content(packed))) == bits(
            RoundRequest(kept, base_round)
        )


def answering(broadcast: Broadcast, draw: Any) -> Report:
    """A report of two nodes with arbitrary numbers."""
    layout = broadcast.report
    return broadcast.answer(
        round=broadcast.round,
        nodes=np.array([3, 4]),
        sizes=np.array([10, 20]),
        numbers={name: draw(numbers) for name in layout.numbers},
        vectors={name: draw(rows) for name in layout.vectors},
    )


def report_content(report: Report) -> RecordDict:
    encoded = [encode("none", each) for each in report.vectors.values()]
    return records.to_content(pack_report(report, COSTS, b"".join(encoded)))


@given(FEATURES.flatmap(broadcasts), st.data())
def test_report_round_trip(broadcast: Broadcast, data: st.DataObject) -> None:
    report = answering(broadcast, data.draw)
    result = records.answer(
        serialized(report_content(report)),
        ExpectedReport.of(broadcast),
        report.nodes,
        report.sizes,
    )
    assert bits(result.report) == bits(report)
    assert result.costs == COSTS


@pytest.mark.parametrize(
    "costs", [COSTS, node_costs(0.5, 1.0), node_costs(0.0, 0.0, cpu=(1.0, 2.0))]
)
def test_costs_round_trip(costs: Usage) -> None:
    content = serialized(records.to_content(wire.pack(Ready(costs))))
    assert wire.read_ready(records.frame(content, "ready")).costs == costs


@pytest.mark.parametrize("batch", [None, 5])
@pytest.mark.parametrize("method", METHODS)
def test_memory_round_trip(method: str, batch: int | None) -> None:
    def stored(memory: FleetState) -> FleetState:
        some, others = records.memory_out(memory)
        state = serialized(RecordDict({"arrays": some, "numbers": others}))
        return records.memory_in(
            state.array_records["arrays"], state.config_records["numbers"]
        )

    aggregator = new_aggregator("svm", method)
    fleets = nodes("svm", batch, METHODS[method].features)
    time = simulated_time()
    aggregator.start()
    while aggregator.pending is not None:
        one_round(aggregator, fleets, time)
        for fleet in fleets:
            memory = fleet.memory()
            assert bits(stored(memory)) == bits(memory)


def test_hello_welcome_refusal_round_trip() -> None:
    messages = {
        "hello": Hello("17", node_data(1).samples()),
        "welcome": Welcome("a-run", task("paper", batch=7), (2, 3)),
        "refusal": NodeRefusal("no", lost=True),
    }
    for name, message in messages.items():
        content = serialized(records.to_content(wire.pack(message)))
        assert wire.read(records.frame(content, name)) == message
        for other in messages.keys() - {name}:
            with pytest.raises(PeerError, match=f"a message without {other}"):
                records.frame(content, other)


def test_size_counts_arrays_and_numbers() -> None:
    w = np.zeros(1000, np.float32)
    broadcast = replace(FIRST, w=w)
    content = records.to_content(pack_broadcast(broadcast, 0, catch_up=False))
    assert 4000 < records.size(content) < 4000 + 600
    assert records.size(RecordDict()) == 0


# Invalid content.

BROADCAST = replace(
    FIRST,
    round=3,
    w=np.zeros(SIZE, np.float32),
    report=report_layout((EstimateSlopes(gradient=True),), False),
)
W: Float32 = np.ones((2, SIZE), np.float32)
ONES = np.ones(2)
VALID_REPORT = TrainReport(
    round=3,
    nodes=np.array([0, 1]),
    sizes=np.array([5, 5]),
    numbers={"losses": ONES, "best_losses": ONES, "rho": ONES, "beta": ONES},
    vectors={"w": W, "gradients": W},
)


EXPECTED = ExpectedReport.of(BROADCAST)
NAN_COSTS = [{"time": [1.0, np.nan, "", 1]}, 1, 0, 1, False, {}, 1.0]


def read(content: RecordDict) -> None:
    records.answer(content, EXPECTED, VALID_REPORT.nodes, VALID_REPORT.sizes)


@pytest.mark.parametrize(
    ("vectors", "reason"),
    [
        (None, "0 bytes of vectors instead of 80"),
        (Array(np.zeros(79, np.uint8)), "79 bytes of vectors instead of 80"),
        (Array(np.zeros(81, np.uint8)), "81 bytes of vectors instead of 80"),
        (Array(W), "vectors of type float32"),
        (Array(np.zeros((2, 40), np.uint8)), r"shape \(2, 40\)"),
        (Array("uint8", (80,), "numpy.ndarray", b"not an array"), "cannot be read"),
    ],
)
def test_invalid_vectors_are_refused(vectors: Array | None, reason: str) -> None:
    content = report_content(VALID_REPORT)
    read(content)
    if vectors is None:
        del content["vectors"]
    else:
        content["vectors"] = ArrayRecord({"vectors": vectors})
    with pytest.raises(PeerError, match=reason):
        read(content)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("round", 2, "a report of round 2 instead of round 3"),
        ("numbers", [[0], b""], "0 bytes of numbers instead of 64"),
        ("numbers", [[10], bytes(80)], "80 bytes of numbers instead of 64"),
        ("numbers", None, "a report cannot be read"),
        ("costs", [{}, 1, 0, 1, False, {}, 1.0], "costs without the time"),
        ("costs", None, "a report cannot be read"),
        ("costs", NAN_COSTS, r"time \(whole\) is nan"),
        ("tallies", b"\x00", "tallies cannot be read"),
    ],
)
def test_invalid_reports_are_refused(field: str, value: Any, reason: str) -> None:
    content = report_content(VALID_REPORT)
    message = content.config_records["report"]["message"]
    assert isinstance(message, bytes)
    content["report"] = ConfigRecord({"message": with_field(message, field, value)})
    with pytest.raises(PeerError, match=reason):
        read(content)


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"hello": ConfigRecord({"message": b"\xff\xff"})}),
        RecordDict({"hello": ConfigRecord({"message": "text"})}),
        RecordDict({"welcome": ConfigRecord({"message": b""})}),
        RecordDict(
            {"hello": ConfigRecord({"message": wire.pack(NodeRefusal("no")).message})}
        ),
        RecordDict(
            {
                "broadcast": ConfigRecord({"message": b"\x8a\x08\x00\x00\x00\x00"}),
                "vectors": ArrayRecord([np.zeros(2)]),
            }
        ),
        RecordDict({"ready": MetricRecord({})}),
    ],
    ids=["nothing", "other bytes", "text", "empty", "other kind", "broadcast", "ready"],
)
def test_other_messages_are_refused(content: RecordDict) -> None:
    for name in ("hello", "welcome", "broadcast", "ready", "report"):
        with pytest.raises(PeerError):
            wire.read(records.frame(content, name))
    with pytest.raises(PeerError):
        records.broadcast(content, task(), 1)
    with pytest.raises(PeerError):
        read(content)


def test_pickled_arrays_are_refused() -> None:
    import io
    import pickle

    held = io.BytesIO()
    np.save(held, np.array([{"a": 1}], object), allow_pickle=True)
    assert pickle.dumps({"a": 1})[:2] in held.getvalue()
    content = report_content(VALID_REPORT)
    pickled = Array("object", (1,), "numpy.ndarray", held.getvalue())
    content["vectors"] = ArrayRecord({"vectors": pickled})
    with pytest.raises(PeerError, match="cannot be read"):
        read(content)
