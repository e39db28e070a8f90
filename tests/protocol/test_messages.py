"""Messages: merging of reports, sizes on the wire, and the layout of reports."""

from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, ClassVar

import numpy as np
import pytest

from fedbudget.arrays import Int64
from fedbudget.protocol.features.drift import DriftCatchUp, DriftPart
from fedbudget.protocol.features.feature import report_layout
from fedbudget.protocol.features.momentum import MomentumCatchUp, MomentumPart
from fedbudget.protocol.messages import (
    ROUNDS,
    Broadcast,
    CandidateRound,
    CatchUp,
    CurvatureRound,
    FinalRound,
    LossReport,
    NormReport,
    NormRound,
    PeerError,
    PersonalRound,
    PrivateRound,
    Report,
    ReportLayout,
    RoundPart,
    SampleNormReport,
    SampleNormRound,
    SampleReport,
    SampleRound,
    SampleSumNormRound,
    SampleSumReport,
    SampleSumRound,
    TrainReport,
    TrainRound,
    UpdateReport,
    VoteRound,
)
from support.hand_made import without
from support.methods import bits

W = np.zeros(3, np.float32)
LAYOUT = ReportLayout(
    ("losses", "best_losses", "rho", "beta"), ("w", "gradients"), ("rho", "beta")
)


def train_round(**other: Any) -> TrainRound:
    known: dict[str, Any] = {"round": 4, "w": W, "tau": 2, "eta": 0.1, "effective": 2}
    return TrainRound(**known | {"report": LAYOUT} | other)


def report(*nodes: int, round: int = 4) -> TrainReport:
    """A report in which every value identifies its node."""
    number = np.array(nodes, dtype=np.int64)
    figure = number.astype(np.float64)
    vectors = (figure[:, None] + np.array([0.1, 0.2, 0.3])).astype(np.float32)
    return TrainReport(
        round=round,
        nodes=number,
        sizes=number + 10,
        numbers={
            "losses": figure + 0.5,
            "best_losses": figure + 0.25,
            "rho": figure * 2,
            "beta": figure * 3,
        },
        vectors={"w": vectors, "gradients": -vectors},
    )


class TestMerge:
    @pytest.mark.parametrize("order", list(permutations(range(3))))
    def test_sorts_nodes(self, order: tuple[int, ...]) -> None:
        parts = [report(0, 4, 5), report(2), report(1, 3)]
        merged = Report.merge([parts[index] for index in order])
        assert isinstance(merged, TrainReport)
        assert bits(merged) == bits(report(0, 1, 2, 3, 4, 5))

    def test_single_report_is_returned(self) -> None:
        only = report(0, 1)
        assert Report.merge([only]) is only

    @pytest.mark.parametrize("name", ["losses", "beta", "w", "gradients"])
    def test_refuses_partly_missing_arrays(self, name: str) -> None:
        with pytest.raises(PeerError, match=f"only some reports have {name}"):
            Report.merge([report(0), without(report(1), name)])
        with pytest.raises(PeerError, match="different fields"):
            Report.merge([without(report(0), name), report(1)])

    def test_refuses_different_rounds(self) -> None:
        with pytest.raises(PeerError, match=r"reports of different rounds: \[4, 5\]"):
            Report.merge([report(1, round=5), report(0)])

    def test_refuses_duplicate_nodes(self) -> None:
        with pytest.raises(PeerError, match="a node reported twice in round 4"):
            Report.merge([report(0, 2), report(1), report(2)])

    def test_refuses_different_lengths(self) -> None:
        longer = replace(
            report(1),
            vectors={**report(1).vectors, "w": np.zeros((1, 4), np.float32)},
        )
        with pytest.raises(PeerError, match="reports have w of different shapes"):
            Report.merge([report(0), longer])


class TestReportSize:
    def test_one_message_per_node(self) -> None:
        # Three nodes: header, four numbers of 8 bytes, two vectors of three float32.
        assert report(0, 1, 2).wire_bytes == 3 * (32 + 4 * 8 + 2 * 12)
        assert report(0, 1, 2).without_vectors.wire_bytes == 3 * (32 + 4 * 8)

    def test_independent_of_fleets(self) -> None:
        assert report(0, 1, 2).wire_bytes == report(0, 2).wire_bytes + report(1).wire_bytes


class TestBroadcastSize:
    def test_header_and_w(self) -> None:
        assert train_round(w=np.zeros(784, np.float32)).wire_bytes == 32 + 4 * 784

    @pytest.mark.parametrize(
        ("part", "size"),
        [
            (DriftPart(correct=True, share=1.0), 8),
            (DriftPart(correct=True, share=1.0, strength=0.5), 16),
            (DriftPart(correct=False, share=1.0, mean=W), 8 + 12),
            (MomentumPart(0.9), 0),  # in the header
        ],
    )
    def test_parts_add_their_values(self, part: RoundPart, size: int) -> None:
        added = train_round(parts=(part,)).wire_bytes - train_round().wire_bytes
        assert added == size

    @pytest.mark.parametrize(
        ("parts", "size"),
        [
            ((), 12),
            ((DriftCatchUp(W, 3),), 12 + 12 + 8),
            ((DriftCatchUp(W, 3), MomentumCatchUp(W)), 12 + 12 + 8 + 12),
        ],
    )
    def test_catch_up_is_counted_separately(
        self, parts: tuple[RoundPart, ...], size: int
    ) -> None:
        plain = train_round()
        missed = train_round(catch_up=CatchUp(W, parts))
        assert missed.wire_bytes == plain.wire_bytes == plain.wire_bytes_with_catch_up
        assert missed.wire_bytes_with_catch_up == plain.wire_bytes + size


@dataclass(frozen=True)
class Gain(RoundPart):
    """A factor for each node, and a vector for the coming round only."""

    once: ClassVar[bool] = True
    addressed: ClassVar[bool] = True
    factors: tuple[float, ...]
    bonus: float | None = None

    def to(self, nodes: Int64) -> "Gain":
        return replace(self, factors=tuple(self.factors[node] for node in nodes.tolist()))

    @property
    def remembered(self) -> "Gain":
        return replace(self, bonus=None)


class TestParts:
    def test_part_of_a_class(self) -> None:
        drift = DriftPart(correct=True, share=1.0)
        broadcast = train_round(parts=(MomentumPart(0.5), drift))
        assert broadcast.part(DriftPart) is drift
        assert broadcast.part(Gain) is None
        missed = CatchUp(W, (MomentumCatchUp(W),))
        assert missed.part(MomentumCatchUp) is missed.parts[0]
        assert missed.part(DriftCatchUp) is None

    def test_nodes_receive_their_own_values(self) -> None:
        broadcast = train_round(parts=(MomentumPart(0.5), Gain((1.0, 2.0, 3.0))))
        sent = broadcast.to(np.array([0, 2]))
        assert sent.parts == (MomentumPart(0.5), Gain((1.0, 3.0)))
        assert bits(replace(sent, parts=broadcast.parts)) == bits(broadcast)

    def test_same_values_are_not_copied(self) -> None:
        broadcast = train_round(parts=(MomentumPart(0.5),))
        assert broadcast.to(np.array([1])) is broadcast

    def test_vectors_of_one_round_are_forgotten(self) -> None:
        parts = (DriftPart(correct=True, share=0.5, mean=W), Gain((1.0,), bonus=2.0))
        kept = train_round(parts=parts, catch_up=CatchUp(W)).remembered
        assert kept.parts == (DriftPart(correct=True, share=0.5), Gain((1.0,)))
        assert kept.catch_up is None

    @pytest.mark.parametrize(
        "part", [DriftPart(correct=True, share=1.5), DriftCatchUp(W, -1)]
    )
    def test_impossible_values_are_refused(self, part: RoundPart) -> None:
        with pytest.raises(ValueError, match="round"):
            part.require_possible()


class TestLayout:
    def test_complete_report_is_accepted(self) -> None:
        report(0, 1).require_answers(train_round())

    @pytest.mark.parametrize("name", [*LAYOUT.numbers, *LAYOUT.vectors])
    def test_missing_name_is_refused(self, name: str) -> None:
        with pytest.raises(PeerError, match=f"a report without {name}"):
            without(report(0, 1), name).require_answers(train_round())

    def test_additional_name_is_refused(self) -> None:
        fewer = train_round(report=ReportLayout(LAYOUT.numbers, ("w",)))
        with pytest.raises(PeerError, match="a report with gradients"):
            report(0, 1).require_answers(fewer)
        fewer = train_round(report=ReportLayout(LAYOUT.numbers[:3], LAYOUT.vectors))
        with pytest.raises(PeerError, match="a report with beta"):
            report(0, 1).require_answers(fewer)

    def test_vector_among_numbers_is_refused(self) -> None:
        given = without(report(0, 1), "w")
        given = replace(given, numbers={**given.numbers, "w": np.zeros(2)})
        with pytest.raises(PeerError, match="a report with w"):
            given.require_answers(train_round())

    def test_layout_without_features(self) -> None:
        assert report_layout((), True) == ReportLayout(("losses", "best_losses"), ("w",))


KINDS: list[tuple[type[Broadcast], dict[str, Any], type[Report], tuple[str, ...], int]] = [
    (
        TrainRound,
        {"tau": 7, "eta": 0.1, "effective": 5.0, "report": report_layout((), True)},
        TrainReport,
        ("losses", "best_losses", "w"),
        7,
    ),
    (FinalRound, {}, LossReport, ("losses", "best_losses"), 1),
    (CurvatureRound, {}, LossReport, ("losses", "best_losses"), 1),
    (CandidateRound, {}, LossReport, ("losses", "best_losses"), 1),
    (
        PrivateRound,
        {"tau": 7, "eta": 0.1, "rho": 0.5, "clip": 2.0},
        UpdateReport,
        ("lengths", "updates"),
        7,
    ),
    (NormRound, {"tau": 7, "eta": 0.1, "rho": 0.5}, NormReport, ("lengths",), 7),
    (
        SampleRound,
        {"tau": 7, "eta": 0.1, "rho": 0.5, "clip": 2.0},
        SampleReport,
        ("w",),
        7,
    ),
    (SampleNormRound, {"rho": 0.5}, SampleNormReport, ("octaves",), 1),
    (
        SampleSumRound,
        {"rho": 0.5, "clip": 2.0},
        SampleSumReport,
        ("decay", "sums"),
        1,
    ),
    (SampleSumNormRound, {"rho": 0.5}, SampleNormReport, ("octaves",), 1),
]


class TestKinds:
    def test_all_kinds_are_listed(self) -> None:
        listed = [kind for kind, *_ in KINDS]
        last = [VoteRound, PersonalRound]  # tests/protocol/test_personal.py
        assert [*listed, *last] == list(ROUNDS)

    @pytest.mark.parametrize(("kind", "fields", "answer", "names", "steps"), KINDS)
    def test_answer_of_each_kind(
        self,
        kind: type[Broadcast],
        fields: dict[str, Any],
        answer: type[Report],
        names: tuple[str, ...],
        steps: int,
    ) -> None:
        """A round has its own report, and costs its local updates, or one evaluation."""
        broadcast = kind(round=1, w=W, **fields)
        layout = broadcast.report
        assert broadcast.answer is answer
        assert layout.numbers + layout.vectors == names
        assert broadcast.steps == steps
        given = answer(
            round=1,
            nodes=np.arange(2),
            sizes=np.ones(2, np.int64),
            numbers={name: np.arange(2.0) for name in layout.numbers},
            vectors={
                name: np.ones((2, 3), np.float32) for name in broadcast.report.vectors
            },
        )
        given.require_answers(broadcast)
        for name in names:
            assert getattr(given, name).shape[0] == 2

    @pytest.mark.parametrize(("kind", "fields"), [each[:2] for each in KINDS])
    def test_tallies_of_each_kind(
        self, kind: type[Broadcast], fields: dict[str, Any]
    ) -> None:
        """A final round evaluates w and w^f, any other round w."""
        broadcast = kind(round=1, w=W, **fields)
        assert broadcast.tallies == 0
        wanted = 2 if kind is FinalRound else 1
        assert replace(broadcast, evaluate=True).tallies == wanted

    def test_span_is_of_effective_updates(self) -> None:
        assert train_round(tau=7, eta=0.5, effective=5.0).span == 2.5
