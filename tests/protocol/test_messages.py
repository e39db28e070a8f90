"""Messages: merging of reports, sizes on the wire, and required fields."""

import json
from dataclasses import make_dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from fedbudget.arrays import Float64
from fedbudget.codec import file_codec
from fedbudget.protocol.messages import (
    Broadcast,
    CatchUp,
    Drift,
    PeerError,
    Report,
    Request,
)
from support.methods import bits

ESTIMATE = Request(estimate=True, gradient=True)


def report(*nodes: int, round: int = 4) -> Report:
    """A report in which every value identifies its node."""
    number = np.array(nodes, dtype=np.int64)
    figure = number.astype(np.float64)
    vectors = (figure[:, None] + np.array([0.1, 0.2, 0.3])).astype(np.float32)
    return Report(
        round=round,
        nodes=number,
        sizes=number + 10,
        losses=figure + 0.5,
        best_losses=figure + 0.25,
        w=vectors,
        rho=figure * 2,
        beta=figure * 3,
        gradients=-vectors,
        plain=figure * 4,
        corrected=figure * 5,
    )


FIELDS = (
    "nodes",
    "sizes",
    "losses",
    "best_losses",
    "w",
    "rho",
    "beta",
    "gradients",
    "plain",
    "corrected",
)


class TestMerge:
    @pytest.mark.parametrize("order", list(permutations(range(3))))
    def test_sorts_nodes(self, order: tuple[int, ...]) -> None:
        parts = [report(0, 4, 5), report(2), report(1, 3)]
        merged, whole = Report.merge([parts[i] for i in order]), report(0, 1, 2, 3, 4, 5)
        assert merged.round == 4
        for field in FIELDS:
            np.testing.assert_array_equal(getattr(merged, field), getattr(whole, field))
            assert getattr(merged, field).dtype == getattr(whole, field).dtype

    def test_absent_fields_stay_absent(self) -> None:
        parts = [replace(report(i), w=None, rho=None) for i in (1, 0)]
        merged = Report.merge(parts)
        assert merged.w is None
        assert merged.rho is None
        assert merged.beta is not None

    def test_single_report_is_returned(self) -> None:
        only = report(0, 1)
        assert Report.merge([only]) is only

    @pytest.mark.parametrize(
        "field", ["w", "rho", "beta", "gradients", "plain", "corrected"]
    )
    def test_refuses_partly_missing_fields(self, field: str) -> None:
        without = replace(report(1), **{field: None})  # type: ignore[arg-type]
        with pytest.raises(PeerError, match=f"only some reports of round 4 have {field}"):
            Report.merge([report(0), without])

    def test_refuses_different_rounds(self) -> None:
        with pytest.raises(PeerError, match=r"reports of different rounds: \[4, 5\]"):
            Report.merge([report(1, round=5), report(0)])

    def test_refuses_duplicate_nodes(self) -> None:
        with pytest.raises(PeerError, match="a node reported twice in round 4"):
            Report.merge([report(0, 2), report(1), report(2)])

    def test_refuses_different_lengths(self) -> None:
        longer = replace(report(1), w=np.zeros((1, 4), np.float32))
        with pytest.raises(
            PeerError, match="reports of round 4 have w of different shapes"
        ):
            Report.merge([report(0), longer])


class TestWireBytes:
    def test_broadcast_is_header_and_w(self) -> None:
        broadcast = Broadcast(1, np.zeros(784, np.float32), 1, 0.01, ESTIMATE, False, False)
        assert broadcast.wire_bytes == 32 + 4 * 784

    def test_report_is_one_message_per_node(self) -> None:
        # Three nodes: header, six numbers of 8 bytes, two vectors of three float32.
        assert report(0, 1, 2).wire_bytes == 3 * (32 + 6 * 8 + 2 * 12)

    def test_report_without_estimates_is_smaller(self) -> None:
        plain = replace(
            report(0, 1, 2), rho=None, beta=None, gradients=None, plain=None, corrected=None
        )
        assert plain.wire_bytes == 3 * (32 + 16 + 12)
        assert replace(plain, w=None).wire_bytes == 3 * (32 + 16)

    def test_drift_correction_adds_one_number(self) -> None:
        broadcast = Broadcast(2, np.zeros(784, np.float32), 1, 0.01, ESTIMATE, False, False)
        corrected = replace(
            broadcast, request=Request(drift=True), drift=Drift(correct=True, share=1.0)
        )
        assert corrected.wire_bytes == broadcast.wire_bytes + 8

    def test_catch_up_is_counted_separately(self) -> None:
        w = np.zeros(784, np.float32)
        broadcast = Broadcast(2, w, 1, 0.01, ESTIMATE, False, False)
        assert (
            replace(broadcast, catch_up=CatchUp(w)).wire_bytes
            == broadcast.wire_bytes
            == broadcast.wire_bytes_with_catch_up
        )
        assert (
            replace(broadcast, catch_up=CatchUp(w)).wire_bytes_with_catch_up
            == broadcast.wire_bytes + 8 + 4 * 784
        )
        assert (
            replace(broadcast, catch_up=CatchUp(w, w)).wire_bytes_with_catch_up
            == broadcast.wire_bytes + 8 + 8 * 784
        )

    def test_independent_of_fleets(self) -> None:
        assert report(0, 1, 2).wire_bytes == report(0, 2).wire_bytes + report(1).wire_bytes


class TestReportFields:
    @pytest.mark.parametrize(
        ("request_", "round", "tau", "names"),
        [
            (Request(), 2, 3, {"w"}),
            (Request(estimate=True), 1, 3, {"w"}),  # there is no w_i(t₀) yet
            (Request(estimate=True), 2, 3, {"w", "rho", "beta"}),
            (
                Request(estimate=True, gradient=True),
                2,
                3,
                {"w", "rho", "beta", "gradients"},
            ),
            (Request(gradient=True, curvature=True), 2, 3, {"w"}),
            (Request(drift=True), 1, 3, {"w", "plain", "corrected"}),
            (Request(True, True, True, True), 2, 0, set()),
        ],
    )
    def test_follow_from_the_request(
        self, request_: Request, round: int, tau: int, names: set[str]
    ) -> None:
        drift = Drift(correct=True, share=1.0) if request_.drift else None
        broadcast = Broadcast(
            round, np.zeros(3, np.float32), tau, 0.1, request_, False, False, drift
        )
        assert broadcast.report_fields == names
        given = report(0, 1, round=round)
        given.require_answers(broadcast)
        for name in names:
            with pytest.raises(PeerError, match=f"a report without {name}"):
                replace(given, **{name: None}).require_answers(broadcast)  # type: ignore[arg-type]

    def test_drift_request_needs_drift(self) -> None:
        with pytest.raises(
            ValueError, match="`drift` is set if the request corrects drift"
        ):
            Broadcast(1, np.zeros(1, np.float32), 1, 0.1, Request(drift=True), False, False)


class TestNewField:
    def test_new_field_needs_only_a_declaration(self) -> None:
        """Merging, wire size and codec read the fields of the class."""
        kind = make_dataclass(
            "Wider", [("norms", Float64 | None, None)], bases=(Report,), frozen=True
        )
        parts = [
            kind(
                1,
                np.array([node]),
                np.array([5]),
                np.ones(1),
                np.ones(1),
                norms=np.array([node + 0.5]),
            )
            for node in (1, 0)
        ]
        merged: Any = kind.merge(parts)  # type: ignore[attr-defined]
        assert merged.norms.tolist() == [0.5, 1.5]
        assert merged.wire_bytes == 2 * (32 + 3 * 8)
        plain, arrays = file_codec(kind).plain(merged)
        result = file_codec(kind).restore(json.loads(json.dumps(plain)), arrays)
        assert bits(result) == bits(merged)
