"""Bookkeeping of a round: its end, its costs, the counted reports, and the memory of each
node.
"""

import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.engines.engine import SecondAnswers
from fedbudget.engines.remote.members import Members
from fedbudget.engines.remote.messages import Answer, MaskedAnswer, MemberAnswer
from fedbudget.engines.remote.round import FAILURES, CollectedRound, NextStep, PendingRound
from fedbudget.evaluation.metrics import Tally
from fedbudget.frozen import updated
from fedbudget.protocol.messages import SampleNormRound
from fedbudget.protocol.sums import Sums
from fedbudget.resources.resource import Reading, Usage
from support.hand_made import FIRST, ONE, make, report, train_report
from support.methods import bits
from support.private import aggregator as private_aggregator
from support.private import sample_aggregator
from support.usage import node_costs

BROADCAST = replace(FIRST, round=5)
NAMES = ("a", "b", "c")


def members() -> Members[str]:
    """Three members, each with one node and base round 4."""
    ours: Members[str] = Members()
    for name in NAMES:
        ours.join(name, [10]).base_round = 4
    return ours


def pending(*asked: str, least: int = 2) -> PendingRound[str]:
    """A round with its deadline at 10 and its end at 20."""
    ours: PendingRound[str] = PendingRound(BROADCAST, least, 10.0, 20.0)
    for name in asked:
        ours.ask(name, f"process of {name}")
    return ours


def answer(name: str, w: float = 0.5) -> Answer:
    made = report(BROADCAST, 0.5)
    one = train_report(
        np.full_like(made.vectors["w"], w), nodes=np.array([NAMES.index(name)]), round=5
    )
    return Answer(one, node_costs(0.1 * (1 + NAMES.index(name)), 1.0))


class TestNextStep:
    def test_waits_until_deadline(self) -> None:
        ours, fleet = pending(*NAMES), members()
        for name in ("a", "b"):
            ours.receive(name, answer(name))
        assert ours.next_step(9.9, fleet) is NextStep.WAIT
        assert ours.next_step(10.0, fleet) is NextStep.CLOSE
        ours.receive("c", answer("c"))
        assert ours.next_step(0.0, fleet) is NextStep.CLOSE

    def test_too_few_answers_ask_again(self) -> None:
        ours, fleet = pending(*NAMES), members()
        ours.receive("a", answer("a"))
        assert ours.next_step(10.0, fleet) is NextStep.ASK
        assert [name for name in NAMES if ours.can_ask(name)] == []
        ours.withdraw("b")
        assert [name for name in NAMES if ours.can_ask(name)] == ["b"]
        assert ours.next_step(20.0, fleet) is NextStep.CLOSE
        assert not ours.close(fleet, {}).enough

    def test_departed_node_is_not_awaited(self) -> None:
        ours, fleet = pending(*NAMES), members()
        ours.receive("a", answer("a"))
        ours.receive("b", answer("b"))
        ours.withdraw("c")
        assert ours.next_step(0.0, fleet) is NextStep.CLOSE
        assert ours.close(fleet, {}).missed == (2,)

    def test_stopped_round_closes_immediately(self) -> None:
        ours = pending(*NAMES)
        ours.stopped = True
        assert ours.next_step(0.0, members()) is NextStep.CLOSE

    def test_gives_up_after_repeated_failures(self) -> None:
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

    def test_empty_round_waits_for_nodes(self) -> None:
        """A node may still join."""
        assert pending().next_step(15.0, members()) is NextStep.ASK


def test_outliers_are_left_out_and_named() -> None:
    """Implausible counts of test samples and of training samples."""
    ours, fleet = pending(*NAMES), members()
    for name, samples in zip(NAMES, (20, 30, 2**39), strict=True):
        ours.receive(name, replace(answer(name), tallies=(Tally(samples, 0.5),)))
    fleet["b"].oversized = True
    result = ours.close(fleet, {})
    assert [len(each.tallies) for each in result.answers] == [1, 1, 0]
    assert result.outliers == {"b": ("samples",), "c": ("test samples",)}


class TestMaskedAnswers:
    """Members whose reports are known only as a sum."""

    def masked(self, name: str, *, energy: float = 1.0) -> MaskedAnswer:
        costs = answer(name).costs
        readings = {**costs.readings, "energy": Reading(energy, energy)}
        return MaskedAnswer(
            np.array([NAMES.index(name)]), replace(costs, readings=readings), waited=3.0
        )

    def test_costs_are_capped_without_reports(self) -> None:
        ours, fleet = pending(*NAMES, least=3), members()
        ours.receive("c", self.masked("c", energy=1e6))
        ours.receive("a", self.masked("a"))
        ours.receive("b", self.masked("b"))
        result = ours.close(fleet, {})
        assert result.enough
        assert result.outliers == {"c": ("energy",)}
        assert [each.nodes.tolist() for each in result.answers] == [[0], [1], [2]]
        assert [each.costs.readings["energy"].whole for each in result.answers] == [1, 1, 1]
        assert result.times.times.tolist() == pytest.approx([0.1, 0.2, 0.3])
        assert [member.rounds for member in fleet.values()] == [1, 1, 1]

    def test_repeated_round_forgets_answers(self) -> None:
        ours, fleet = pending("a", "b"), members()
        ours.receive("a", self.masked("a"))
        ours.begin_again()
        assert all(map(ours.can_ask, NAMES))
        assert ours.close(fleet, {}).missed == (0, 1)


def test_unexpected_reports_are_not_counted() -> None:
    ours = pending("a")
    assert ours.expects("a", 5)
    assert not ours.expects("a", 4)
    assert not ours.expects("b", 5)
    ours.receive("a", answer("a"))
    assert not ours.expects("a", 5)


def test_replaced_node_missed_nothing() -> None:
    ours, fleet = pending(*NAMES), members()
    ours.fail("b", "going down")
    ours.replace("b", "d")
    ours.receive("a", answer("a"))
    ours.receive("c", answer("c"))
    assert ours.close(fleet, {}).missed == ()
    assert ours.failures == {}


class TestSecondAnswers:
    """A restarted node has new noise: its second answer to a round is paid for."""

    def restarted(self, *paid: bool) -> tuple[PendingRound[str], list[bool]]:
        """A round in which a and b were asked and have left; `paid` are the replies."""
        replies = list(paid)
        ours: PendingRound[str] = PendingRound(
            BROADCAST, 2, 10.0, 20.0, pay_again=lambda: replies.pop(0)
        )
        for name in ("a", "b"):
            assert ours.can_ask(name, "first")
            ours.ask(name, "first")
            ours.withdraw(name)
        return ours, replies

    def test_same_process_pays_nothing(self) -> None:
        ours, replies = self.restarted(True)
        assert ours.can_ask("a", "first")
        assert replies == [True]

    def test_new_process_pays_once(self) -> None:
        ours, replies = self.restarted(True, True)
        assert ours.can_ask("a", "second")
        assert ours.can_ask("a", "second")
        ours.ask("a", "second")
        assert len(replies) == 1
        ours.withdraw("a")
        assert ours.can_ask("a", "third")
        assert replies == []

    def test_one_payment_covers_all_nodes(self) -> None:
        """Nodes have different samples, so the largest cost of one of them counts."""
        ours, replies = self.restarted(True)
        for name in ("a", "b"):
            assert ours.can_ask(name, "second")
            ours.ask(name, "second")
        assert replies == []

    def test_unknown_process_counts_as_new(self) -> None:
        ours, replies = self.restarted(True)
        assert ours.can_ask("a", "")
        assert replies == []

    def test_refusal_reveals_nothing(self) -> None:
        ours, replies = self.restarted(True)
        ours.fail("a", "it has no memory", silent=True)
        assert ours.can_ask("a", "second")
        assert replies == [True]

    def test_unpaid_node_is_not_asked(self) -> None:
        ours, _ = self.restarted(False)
        assert not ours.can_ask("a", "second")

    def test_payment_follows_replaced_node(self) -> None:
        ours, replies = self.restarted(True)
        ours.replace("a", "c")
        assert ours.can_ask("c", "")
        assert replies == []

    def test_run_is_charged_for_them(self) -> None:
        """The budget is kept: the last answer that would exceed it is not requested."""
        run = sample_aggregator({"time": 1e3, "privacy": 4.0})
        paid: list[float] = []
        broadcast = run.start()
        assert isinstance(broadcast, SampleNormRound)
        second = SecondAnswers(run, broadcast, lambda number, rho: paid.append(rho))
        possible = 0
        while second.pay():
            possible += 1
        assert paid == [broadcast.rho] * possible == [broadcast.rho] * second.count
        total = float(run.ledger.budget.array[1])
        assert possible == int(total / broadcast.rho) - 1 > 0
        before = run.ledger.spent[1]
        run.charge(second.costs)
        assert run.ledger.spent[1] - before == pytest.approx(possible * broadcast.rho)

    def test_noise_of_aggregator_is_free(self) -> None:
        """If the aggregator adds the noise, a second answer of a node reveals nothing."""
        run = private_aggregator({"time": 1e3, "privacy": 4.0}, 5, 5)
        second = SecondAnswers(run, run.start(), lambda number, rho: pytest.fail("paid"))
        assert second.pay()
        assert second.count == 0


class TestClose:
    def test_counts_answers(self) -> None:
        ours, fleet = pending(*NAMES), members()
        for name in ("c", "a"):
            ours.receive(name, answer(name))
        collected = ours.close(fleet, {})
        assert [each.nodes.tolist() for each in collected.answers] == [[0], [2]]
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

    def test_restarted_process_has_no_memory(self) -> None:
        ours, fleet = pending("a", "b"), members()
        for name in ("a", "b"):
            ours.receive(name, answer(name))
        ours.close(fleet, {"a": "process of a", "b": "another"})
        assert (fleet["a"].base_round, fleet["b"].base_round) == (5, 4)
        assert fleet["b"].rounds == 1

    def test_reports_not_finite_are_excluded(self) -> None:
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

    def test_diverged_majority_excludes_finite_report(self) -> None:
        """A single finite report may come from the node that caused the divergence."""
        ours = pending("a", "b", "c")
        ours.receive("a", answer("a", float("nan")))
        ours.receive("b", answer("b"))
        ours.receive("c", answer("c", float("inf")))
        collected = ours.close(members(), {})
        assert [each.nodes.tolist() for each in collected.answers] == [[0], [2]]
        assert collected.not_finite == (1,)

    def test_all_count_if_none_finite(self) -> None:
        ours, fleet = pending("a", "b"), members()
        for name in ("a", "b"):
            ours.receive(name, answer(name, float("inf")))
        collected = ours.close(fleet, {})
        assert (len(collected.answers), collected.not_finite, collected.enough) == (
            2,
            (),
            True,
        )


def answer_of_node(number: int, w: float) -> Answer:
    losses = np.full(1, 0.5)
    one = train_report(
        np.full((1, BROADCAST.w.size), w, np.float32),
        sizes=np.array([10 + number]),
        nodes=np.array([number]),
        round=5,
        losses=losses,
        best_losses=losses,
    )
    return Answer(one, node_costs(0.1, 1.0))


class TestSummedReports:
    """Reports that are added up on arrival."""

    def test_summed_vectors_are_released(self) -> None:
        ours: PendingRound[str] = PendingRound(BROADCAST, 1, needs_reports=False)
        references = []
        for number, held in enumerate([1, 1, 2, 1, 2, 2, 3, 1]):
            ours.ask(str(number))
            one = answer_of_node(number, 0.5)
            references.append(weakref.ref(one.report.vectors["w"]))
            ours.receive(str(number), one)
            del one
            assert ours.vectors == held
        assert [ref() for ref in references] == [None] * 8

    @pytest.mark.parametrize("broken", ["", "b", "abc"])
    def test_sums_keep_same_bits(self, broken: str) -> None:
        """With none, some, or all reports not finite."""
        result = []
        for needs_reports in (True, False):
            fleet, ours = members(), pending()
            ours.needs_reports = needs_reports
            for name in ("c", "a", "b"):
                ours.ask(name)
                number = NAMES.index(name)
                ours.receive(
                    name,
                    answer_of_node(
                        number, float("nan") if name in broken else 0.1 * (1 + number)
                    ),
                )
            aggregator = make()
            aggregator.start()
            collected = ours.close(fleet, {})
            report = collected.reports
            if not needs_reports:
                for each in collected.answers:
                    assert isinstance(each, Answer)
                    assert not each.report.vectors
                assert isinstance(report, Sums)
            aggregator.state = updated(aggregator.state, round=5)
            after = aggregator.receive(report, ONE)
            result.append(
                bits([after, aggregator.last, collected.not_finite, collected.missed])
            )
        assert result[0] == result[1]


ACTIONS = st.tuples(
    st.sampled_from(["ask", "receive", "fail", "withdraw", "forget"]),
    st.sampled_from(NAMES),
)


@given(st.lists(ACTIONS, max_size=30))
def test_no_node_counts_twice(actions: list[tuple[str, str]]) -> None:
    """Every asked node has answered, owes a report, or has missed the round. No other node
    is counted.
    """
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
            ours.replace(name, "another")
        assert not ours.awaited & ours.answers.keys()
        assert ours.awaited <= ours.asked
    collected = ours.close(fleet, {})
    numbers = [int(each.nodes[0]) for each in collected.answers]
    assert sorted([*numbers, *collected.missed]) == sorted(
        NAMES.index(name) for name in ours.asked
    )
    assert sum(member.rounds + member.missed for member in fleet.values()) == len(
        ours.asked
    )


AGGREGATOR_COSTS = {"time": 9.0, "cpu": 0.7}
EVALUATING_NODES = [
    replace(
        node_costs(0.1, 1.0, cpu=(0.2, 2.0)),
        evaluation={"time": Reading(0, 3.0), "cpu": Reading(0, 1.5)},
    ),
    replace(
        node_costs(0.3, 1.0, cpu=(0.2, 2.0)),
        evaluation={"time": Reading(0, 0.5), "cpu": Reading(0, 0.25)},
    ),
    node_costs(0.2, 1.0, cpu=(0.2, 2.0)),
]


def collected_from(nodes: list[Usage], tally_bytes: int = 0) -> CollectedRound:
    answers: list[MemberAnswer] = [
        Answer(answer("a").report, usage, tally_bytes=tally_bytes if index == 0 else 0)
        for index, usage in enumerate(nodes)
    ]
    return CollectedRound(answers, (), (), enough=True)


def test_evaluation_is_charged_separately() -> None:
    """Time is the maximum over nodes, CPU time is the sum."""
    collected = collected_from(EVALUATING_NODES, 300)
    training, evaluation = collected.usage(4, AGGREGATOR_COSTS, 1000)
    assert evaluation is not None
    assert (training.seconds, evaluation.seconds) == (6.0, 3.0)
    assert (training.wire_bytes, evaluation.wire_bytes) == (700, 300)
    assert training.readings["cpu"].whole == pytest.approx(0.7 + 3 * 2.0)
    assert evaluation.readings["cpu"].whole == pytest.approx(1.75)
    assert evaluation.step_seconds == 0
    assert (training.nodes, evaluation.nodes) == (3, 2)


def test_own_node_cpu_counts_once() -> None:
    """The aggregator's counters include its CPU time."""
    collected = collected_from([replace(EVALUATING_NODES[1], here=True)], 10)
    training, _ = collected.usage(1, AGGREGATOR_COSTS, 100)
    assert training.readings["cpu"].whole == pytest.approx(0.7 - 0.25)


def test_rounds_without_evaluation() -> None:
    training, evaluation = collected_from([EVALUATING_NODES[2]]).usage(
        1, AGGREGATOR_COSTS, 100
    )
    assert evaluation is None
    assert training.seconds == 9.0


def test_evaluation_is_capped_by_round() -> None:
    training, evaluation = collected_from([EVALUATING_NODES[0]]).usage(
        1, {"time": 2.0, "cpu": 0.1}, 100
    )
    assert evaluation is not None
    assert (training.seconds, evaluation.seconds) == (0.0, 2.0)
