"""The bookkeeping of a round: when it is over, who is counted, and what each is remembered
to have done.
"""

import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.engines.remote.members import Members
from fedbudget.engines.remote.messages import Answer
from fedbudget.engines.remote.round import FAILURES, NextStep, PendingRound
from fedbudget.evaluation.metrics import Tally
from fedbudget.protocol.messages import Report
from fedbudget.protocol.state import updated
from fedbudget.protocol.sums import SummedReports
from support.hand_made import ONE, make, report
from support.methods import bits
from support.usage import node_costs

BROADCAST = replace(make().start(), round=5)
NAMES = ("a", "b", "c")


def members() -> Members[str]:
    """Three, with a node each that stands after round 4."""
    ours: Members[str] = Members()
    for name in NAMES:
        ours.join(name, [10]).base_round = 4
    return ours


def pending(*asked: str, least: int = 2) -> PendingRound[str]:
    """With its deadline at 10 and its end at 20."""
    ours: PendingRound[str] = PendingRound(BROADCAST, least, 10.0, 20.0)
    for name in asked:
        ours.ask(name, f"process of {name}")
    return ours


def answer(name: str, w: float = 0.5) -> Answer:
    made = report(BROADCAST, 0.5)
    one = replace(made, nodes=np.array([NAMES.index(name)]), w=np.full_like(made.w, w))
    return Answer(one, node_costs(0.1 * (1 + NAMES.index(name)), 1.0))


class TestNextStep:
    def test_waits_for_all_until_the_deadline(self) -> None:
        ours, fleet = pending(*NAMES), members()
        for name in ("a", "b"):
            ours.receive(name, answer(name))
        assert ours.next_step(9.9, fleet) is NextStep.WAIT
        assert ours.next_step(10.0, fleet) is NextStep.CLOSE
        ours.receive("c", answer("c"))
        assert ours.next_step(0.0, fleet) is NextStep.CLOSE

    def test_too_few_are_asked_again_until_the_end(self) -> None:
        ours, fleet = pending(*NAMES), members()
        ours.receive("a", answer("a"))
        assert ours.next_step(10.0, fleet) is NextStep.ASK
        assert [name for name in NAMES if ours.can_ask(name)] == []
        ours.withdraw("b")
        assert [name for name in NAMES if ours.can_ask(name)] == ["b"]
        assert ours.next_step(20.0, fleet) is NextStep.CLOSE
        assert not ours.close(fleet, {}).enough

    def test_one_that_is_gone_is_not_waited_for(self) -> None:
        ours, fleet = pending(*NAMES), members()
        ours.receive("a", answer("a"))
        ours.receive("b", answer("b"))
        ours.withdraw("c")
        assert ours.next_step(0.0, fleet) is NextStep.CLOSE
        assert ours.close(fleet, {}).missed == (2,)

    def test_stops_at_once_when_told(self) -> None:
        ours = pending(*NAMES)
        ours.stopped = True
        assert ours.next_step(0.0, members()) is NextStep.CLOSE

    def test_gives_up_when_all_have_failed_too_often(self) -> None:
        ours, fleet = pending(), members()
        for attempt in range(FAILURES):
            assert ours.next_step(0.0, fleet) is NextStep.ASK
            for name in ("a", "b"):
                assert ours.can_ask(name)
                ours.ask(name)
                ours.fail(name, f"attempt {attempt} of {name}")
        assert ours.next_step(0.0, fleet) is NextStep.GIVE_UP
        assert not ours.can_ask("a")
        assert ours.failure == f"attempt {FAILURES - 1} of b"

    def test_nobody_to_ask_is_no_reason_to_give_up(self) -> None:
        """Someone may come."""
        assert pending().next_step(15.0, members()) is NextStep.ASK


def test_what_is_not_believed_is_left_out_and_named() -> None:
    """Of test samples that are too many, and of a claim of training samples."""
    ours, fleet = pending(*NAMES), members()
    for name, samples in zip(NAMES, (20, 30, 2**39), strict=True):
        ours.receive(name, replace(answer(name), tallies=(Tally(samples, 0.5),)))
    fleet["b"].oversized = True
    found = ours.close(fleet, {})
    assert [len(each.tallies) for each in found.answers] == [1, 1, 0]
    assert found.outliers == {"b": ("samples",), "c": ("test samples",)}


def test_what_was_not_asked_for_came_too_late() -> None:
    ours = pending("a")
    assert ours.expects("a", 5)
    assert not ours.expects("a", 4)
    assert not ours.expects("b", 5)
    ours.receive("a", answer("a"))
    assert not ours.expects("a", 5)


def test_one_in_anothers_place_has_missed_nothing() -> None:
    ours, fleet = pending(*NAMES), members()
    ours.fail("b", "going down")
    ours.forget("b")
    ours.receive("a", answer("a"))
    ours.receive("c", answer("c"))
    assert ours.close(fleet, {}).missed == ()
    assert ours.failures == {}


class TestClose:
    def test_counts_who_has_answered(self) -> None:
        ours, fleet = pending(*NAMES), members()
        for name in ("c", "a"):
            ours.receive(name, answer(name))
        collected = ours.close(fleet, {})
        assert [each.report.nodes.tolist() for each in collected.answers] == [[0], [2]]
        assert (collected.missed, collected.not_finite, collected.enough) == (
            (1,),
            (),
            True,
        )
        assert [(each.base_round, each.rounds, each.missed) for each in fleet.values()] == [
            (5, 1, 0),
            (4, 0, 1),
            (5, 1, 0),
        ]
        assert fleet["c"].step_seconds == pytest.approx(0.3)

    def test_another_process_remembers_nothing_of_it(self) -> None:
        ours, fleet = pending("a", "b"), members()
        for name in ("a", "b"):
            ours.receive(name, answer(name))
        ours.close(fleet, {"a": "process of a", "b": "another"})
        assert (fleet["a"].base_round, fleet["b"].base_round) == (5, 4)
        assert fleet["b"].rounds == 1

    def test_what_is_not_finite_is_set_aside(self) -> None:
        fleet = members()
        for times in (1, 2):
            ours = pending("a", "b")
            ours.receive("a", answer("a"))
            ours.receive("b", answer("b", float("nan")))
            collected = ours.close(fleet, {})
            assert (len(collected.answers), collected.not_finite, collected.missed) == (
                1,
                (1,),
                (),
            )
            assert (fleet["b"].not_finite, fleet["b"].base_round, fleet["b"].rounds) == (
                times,
                4,
                0,
            )
            assert not collected.enough
        ours = pending("b")
        ours.receive("b", answer("b"))
        ours.close(fleet, {})
        assert fleet["b"].not_finite == 0

    def test_where_most_have_diverged_nobody_is_believed_to_have_not(self) -> None:
        """One of three that says all is well, of a w that it may have spoiled itself."""
        ours = pending("a", "b", "c")
        ours.receive("a", answer("a", float("nan")))
        ours.receive("b", answer("b"))
        ours.receive("c", answer("c", float("inf")))
        collected = ours.close(members(), {})
        assert [each.report.nodes.tolist() for each in collected.answers] == [[0], [2]]
        assert collected.not_finite == (1,)

    def test_all_count_when_none_is_finite(self) -> None:
        ours, fleet = pending("a", "b"), members()
        for name in ("a", "b"):
            ours.receive(name, answer(name, float("inf")))
        collected = ours.close(fleet, {})
        assert (len(collected.answers), collected.not_finite, collected.enough) == (
            2,
            (),
            True,
        )


def of_one_node(number: int, w: float) -> Answer:
    losses, vector = np.full(1, 0.5), np.full((1, BROADCAST.w.size), w, np.float32)
    return Answer(
        Report(5, np.array([number]), np.array([10 + number]), losses, losses, vector),
        node_costs(0.1, 1.0),
    )


class TestSummed:
    """Reports that are added up as they come."""

    def test_vectors_are_let_go_as_soon_as_they_are_added(self) -> None:
        ours: PendingRound[str] = PendingRound(BROADCAST, 1, needs_reports=False)
        alive = []
        for number, held in enumerate([1, 1, 2, 1, 2, 2, 3, 1]):
            ours.ask(str(number))
            one = of_one_node(number, 0.5)
            assert one.report.w is not None
            alive.append(weakref.ref(one.report.w))
            ours.receive(str(number), one)
            del one
            assert ours.vectors == held
        assert [ref() for ref in alive] == [None] * 8

    @pytest.mark.parametrize("broken", ["", "b", "abc"])
    def test_give_the_same_round_to_the_last_bit(self, broken: str) -> None:
        """Also where some are not finite, or all."""
        found = []
        for needs_reports in (True, False):
            fleet, ours = members(), pending()
            ours.needs_reports = needs_reports
            for name in ("c", "a", "b"):
                ours.ask(name)
                number = NAMES.index(name)
                ours.receive(
                    name,
                    of_one_node(
                        number, float("nan") if name in broken else 0.1 * (1 + number)
                    ),
                )
            aggregator = make()
            aggregator.start()
            collected = ours.close(fleet, {})
            report = collected.reports
            if not needs_reports:
                assert all(each.report.w is None for each in collected.answers)
                assert isinstance(report, SummedReports)
            aggregator.state = updated(aggregator.state, round=5)
            after = aggregator.receive(report, ONE)
            found.append(
                bits([after, aggregator.last, collected.not_finite, collected.missed])
            )
        assert found[0] == found[1]


ACTIONS = st.tuples(
    st.sampled_from(["ask", "receive", "fail", "withdraw", "forget"]),
    st.sampled_from(NAMES),
)


@given(st.lists(ACTIONS, max_size=30))
def test_whatever_comes_nobody_is_counted_twice(actions: list[tuple[str, str]]) -> None:
    """Everyone who was asked has answered, owes, or has missed the round; and only they."""
    ours, fleet = pending(), members()
    for action, name in actions:
        if action == "ask" and ours.can_ask(name):
            ours.ask(name)
        elif action == "receive" and ours.expects(name, 5):
            ours.receive(name, answer(name))
        elif action == "fail" and ours.expects(name, 5):
            ours.fail(name, "no")
        elif action == "withdraw":
            ours.withdraw(name)
        elif action == "forget" and name not in ours.answers:
            ours.forget(name)
        assert not ours.awaited & ours.answers.keys()
        assert ours.awaited <= ours.asked
    collected = ours.close(fleet, {})
    numbers = [int(each.report.nodes[0]) for each in collected.answers]
    assert sorted([*numbers, *collected.missed]) == sorted(
        NAMES.index(name) for name in ours.asked
    )
    assert sum(member.rounds + member.missed for member in fleet.values()) == len(
        ours.asked
    )
