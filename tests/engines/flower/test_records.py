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
from fedbudget.engines.remote.encodings import pack_costs
from fedbudget.engines.remote.messages import Hello, RoundRequest, Welcome
from fedbudget.protocol.messages import (
    Broadcast,
    CatchUp,
    Drift,
    PeerError,
    Report,
    Request,
)
from fedbudget.protocol.state import FleetState
from fedbudget.resources.resource import Reading, Usage
from support.flower_grid import serialized
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
vectors = arrays(np.float32, SIZE, elements=st.floats(width=32, allow_subnormal=True))
rows = arrays(np.float32, (2, SIZE), elements=st.floats(width=32))
numbers = arrays(np.float64, 2, elements=st.floats(allow_nan=True))
shares = st.floats(0, 1)


@st.composite
def broadcasts(draw: st.DrawFn) -> Broadcast:
    number = draw(st.integers(1, 2**31 - 1))
    drift = draw(st.none() | st.builds(Drift, st.booleans(), shares))
    return Broadcast(
        number,
        draw(vectors),
        draw(st.integers(0, 10**9)),
        draw(st.floats(1e-300, 1e300)),
        Request(
            draw(st.booleans()), draw(st.booleans()), draw(st.booleans()), drift is not None
        ),
        best=draw(st.booleans()),
        stop=draw(st.booleans()),
        drift=drift,
        catch_up=draw(
            st.none()
            | st.builds(
                CatchUp, vectors, st.none() if drift is None else vectors, st.integers(0, 9)
            )
        ),
    )


@given(broadcasts(), st.integers(0, 2**31))
def test_broadcast_round_trip(broadcast: Broadcast, base_round: int) -> None:
    assert bits(
        records.request_in(
            serialized(
                records.request_out(RoundRequest(broadcast, base_round), catch_up=True)
            )
        )
    ) == bits(RoundRequest(broadcast, base_round))
    without = records.request_in(
        serialized(records.request_out(RoundRequest(broadcast, base_round), catch_up=False))
    )
    assert bits(without) == bits(
        RoundRequest(replace(broadcast, catch_up=None), base_round)
    )


def answering(broadcast: Broadcast, draw: Any) -> Report:
    """A report of two nodes with arbitrary numbers."""
    estimates = broadcast.request.estimate and broadcast.round > 1 and broadcast.tau > 0
    drift = broadcast.drift is not None and broadcast.tau > 0
    some = {"rho": draw(numbers), "beta": draw(numbers)} if estimates else {}
    some |= {"plain": draw(numbers), "corrected": draw(numbers)} if drift else {}
    return Report(
        broadcast.round,
        np.array([3, 4]),
        np.array([10, 20]),
        draw(numbers),
        draw(numbers),
        w=draw(rows) if broadcast.tau > 0 else None,
        gradients=draw(rows) if estimates and broadcast.request.gradient else None,
        **some,
    )


@given(broadcasts(), st.data())
def test_report_round_trip(broadcast: Broadcast, data: st.DataObject) -> None:
    report = answering(broadcast, data.draw)
    result = records.answer_in(
        serialized(records.answer_out(report, COSTS)), broadcast, report.nodes, report.sizes
    )
    assert bits(result.report) == bits(report)
    assert result.costs == COSTS


@pytest.mark.parametrize(
    "costs", [COSTS, node_costs(0.5, 1.0), node_costs(0.0, 0.0, cpu=(1.0, 2.0))]
)
def test_costs_round_trip(costs: Usage) -> None:
    assert records.costs_in(serialized(records.costs_out(costs))) == costs


@pytest.mark.parametrize("batch", [None, 5])
@pytest.mark.parametrize("method", METHODS)
def test_memory_round_trip(method: str, batch: int | None) -> None:
    def stored(memory: FleetState) -> FleetState:
        some, others = records.memory_out(memory)
        state = serialized(RecordDict({"arrays": some, "numbers": others}))
        return records.memory_in(
            state.array_records["arrays"], state.config_records["numbers"]
        )

    aggregator, fleets, time = (
        new_aggregator("svm", method),
        nodes("svm", batch),
        simulated_time(),
    )
    aggregator.start()
    while aggregator.pending is not None:
        one_round(aggregator, fleets, time)
        for fleet in fleets:
            memory = fleet.memory()
            assert bits(stored(memory)) == bits(memory)


def test_hello_welcome_refusal_round_trip() -> None:
    hello = Hello("17", node_data(1).samples())
    for partition in (None, 0, 4):
        assert records.hello_in(serialized(records.hello_out(hello, partition))) == (
            hello,
            partition,
        )
    welcome = Welcome("a-run", task("paper", batch=7), (2, 3))
    assert records.welcome_in(serialized(records.welcome_out(welcome))) == welcome
    assert records.refusal_in(serialized(records.refusal_out("no", lost=True))) == (
        "no",
        True,
    )
    assert records.refusal_in(serialized(records.welcome_out(welcome))) is None


def test_size_counts_arrays_and_numbers() -> None:
    w = np.zeros(1000, np.float32)
    broadcast = Broadcast(1, w, 1, 0.1, request=Request(), best=False, stop=False)
    assert (
        4000
        < records.size(records.request_out(RoundRequest(broadcast, 0), catch_up=False))
        < 4000 + 600
    )
    assert records.size(RecordDict()) == 0


# Invalid content.

BROADCAST = Broadcast(
    3,
    np.zeros(SIZE, np.float32),
    2,
    0.1,
    request=Request(True, True),
    best=False,
    stop=False,
)
W: Float32 = np.ones((2, SIZE), np.float32)
ONES = np.ones(2)
VALID_REPORT = Report(
    3, np.array([0, 1]), np.array([5, 5]), ONES, ONES, w=W, rho=ONES, beta=ONES, gradients=W
)


def invalid(record: str, key: str, value: Any) -> RecordDict:
    """A valid report with one value replaced, or removed if it is None."""
    content = records.answer_out(VALID_REPORT, COSTS)
    if value is None:
        del content[record][key]
    else:
        content[record][key] = value
    return content


@pytest.mark.parametrize(
    ("record", "key", "value", "reason"),
    [
        ("report", "round", 2, "another round than 3"),
        ("report", "round", None, "another round than 3"),
        ("report", "losses", None, "a report with"),
        ("report", "rho", None, "a report with"),
        ("report", "plain", [1.0, 1.0], "a report with"),
        ("report", "losses", [1.0], "2 numbers for losses"),
        ("report", "losses", 1.0, "2 numbers for losses"),
        ("vectors", "w", None, "a report with"),
        ("vectors", "more", Array(W), "a report with"),
        ("vectors", "w", Array(W[:1]), r"shape \(1, 5\)"),
        ("vectors", "w", Array(W.astype(np.float64)), "type float64"),
        ("vectors", "w", Array(W[:, :4]), r"shape \(2, 4\)"),
        (
            "vectors",
            "w",
            Array("float32", (2, 5), "numpy.ndarray", b"not an array"),
            "cannot be read",
        ),
        ("costs", "costs", None, "costs is missing"),
        ("costs", "costs", b"", "costs cannot be read"),
        (
            "costs",
            "costs",
            pack_costs(node_costs(1.0, float("nan"))),
            r"time \(whole\) is nan",
        ),
    ],
)
def test_invalid_reports_are_refused(
    record: str, key: str, value: Any, reason: str
) -> None:
    with pytest.raises(PeerError, match=reason):
        records.answer_in(
            invalid(record, key, value), BROADCAST, VALID_REPORT.nodes, VALID_REPORT.sizes
        )


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"hello": ConfigRecord({"hello": b"\xff\xff"})}),
        RecordDict({"hello": ConfigRecord({"hello": "text"})}),
        RecordDict({"welcome": ConfigRecord({"welcome": b""})}),
        RecordDict(
            {
                "broadcast": ConfigRecord({"numbers": "three", "base_round": 2}),
                "vectors": ArrayRecord([np.zeros(2)]),
            }
        ),
        RecordDict({"costs": MetricRecord({})}),
    ],
    ids=["nothing", "other bytes", "text", "empty", "broadcast", "costs"],
)
def test_other_messages_are_refused(content: RecordDict) -> None:
    for read in (
        records.hello_in,
        records.welcome_in,
        records.request_in,
        records.costs_in,
    ):
        with pytest.raises(PeerError):
            read(content)


def test_pickled_arrays_are_refused() -> None:
    import io
    import pickle

    held = io.BytesIO()
    np.save(held, np.array([{"a": 1}], object), allow_pickle=True)
    assert pickle.dumps({"a": 1})[:2] in held.getvalue()
    content = invalid(
        "vectors", "w", Array("object", (1,), "numpy.ndarray", held.getvalue())
    )
    with pytest.raises(PeerError, match="cannot be read"):
        records.answer_in(content, BROADCAST, VALID_REPORT.nodes, VALID_REPORT.sizes)
