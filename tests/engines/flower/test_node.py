"""A node that is called with one message at a time: what it keeps in its context, and what it says when it cannot."""

from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedbudget.engines.flower import client, node, records
from fedbudget.engines.network.holdings import Holdings
from fedbudget.engines.network.wire import Told, Welcome
from fedbudget.engines.network.work import Work
from fedbudget.protocol.messages import Broadcast, Report
from flower_grid import LocalGrid, carried
from methods import bits
from networked import aggregator, holdings, task, without_network
from problems import CHEAP

WELCOME = Welcome("a-run", task("frugal", batch=5), (1,))


def held(context: Context) -> Holdings:
    return holdings(1)


def new_context() -> Context:
    LocalGrid({}, [])  # says whose messages these are
    return Context(7, 100, {}, RecordDict(), {})


def ask(context: Context, said: Broadcast, stands: int, welcome: Welcome = WELCOME) -> RecordDict:
    content = records.welcome_out(welcome)
    content.update(records.told_out(Told(said, stands), news=True))
    message = Message(carried(content), 100, "train")
    context.state = carried(context.state)
    return carried(node.train(message, context, held).content)


def report(content: RecordDict, said: Broadcast) -> Report:
    return records.answer_in(content, said, np.array([1]), np.array([20])).report


def broadcasts(rounds: int = 5) -> list[Broadcast]:
    """Of a run with this node alone."""
    ours, fleet = aggregator("frugal"), holdings(1).fleet(WELCOME.task, [1])
    said: Any = ours.start()
    found = []
    for _ in range(rounds):
        found.append(said)
        said = ours.receive(fleet.answer(said), CHEAP)
    return found


def test_it_goes_on_from_its_context_to_the_bit() -> None:
    context, fleet = new_context(), holdings(1).fleet(WELCOME.task, [1])
    for said in broadcasts():
        assert bits(report(ask(context, said, said.round - 1), said)) == bits(fleet.answer(said))


def test_its_context_has_the_last_two_rounds_and_what_others_have_put_there() -> None:
    context = new_context()
    context.state["of another"] = ConfigRecord({"kept": 1})
    for said in broadcasts():
        ask(context, said, said.round - 1)
    assert list(node.recall(context.state, WELCOME)) == [4, 5]
    assert context.state["of another"] == ConfigRecord({"kept": 1})
    assert len(context.state) == 1 + 1 + 2 * 2


def test_a_round_that_is_asked_for_again_is_the_same() -> None:
    context, all_said = new_context(), broadcasts()
    first = [bits(report(ask(context, said, said.round - 1), said)) for said in all_said]
    assert bits(report(ask(context, all_said[-1], 4), all_said[-1])) == first[-1]


def test_one_that_does_not_remember_says_so() -> None:
    context, all_said = new_context(), broadcasts()
    for said in all_said[:3]:
        ask(context, said, said.round - 1)
    assert records.refusal_in(ask(context, all_said[4], 4)) == (
        "the memory cannot stand after round 4, only after [2, 3]",
        True,
    )
    other = Welcome("another-run", WELCOME.task, (1,))
    assert records.refusal_in(ask(context, all_said[1], 1, other)) == (
        "the memory cannot stand after round 1, only after []",
        True,
    )
    assert list(node.recall(context.state, WELCOME)) == [2, 3]  # what it has is not lost by being asked


def test_a_memory_that_is_damaged_is_lost_and_not_a_crash() -> None:
    context, all_said = new_context(), broadcasts()
    ask(context, all_said[0], 0)
    del context.state["fedbudget-1-arrays"]
    reason = records.refusal_in(ask(context, all_said[1], 1))
    assert reason is not None
    assert reason[1]


def test_an_update_that_warms_up_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[int] = []
    really = Work.warm_up

    def warm_up(self: Work, told: Told) -> None:
        warmed.append(told.said.round)
        really(self, told)

    monkeypatch.setattr(Work, "warm_up", warm_up)
    context, fleet = new_context(), holdings(1).fleet(WELCOME.task, [1])
    for said in broadcasts():
        node._warm.clear()  # as in a new process
        assert bits(report(ask(context, said, said.round - 1), said)) == bits(fleet.answer(said))
    assert warmed == [1, 2, 3, 4, 5]
    ask(context, said, 4)
    assert warmed == [1, 2, 3, 4, 5]  # a process that lasts does so once


def test_what_flower_would_not_know_how_to_answer_is_an_answer() -> None:
    context = new_context()
    described = client(Message(RecordDict(), 100, "query.describe"), context)
    reason = records.refusal_in(described.content)
    assert reason is not None
    assert reason[0].startswith("a node has no data")
    nonsense = client(Message(RecordDict(), 100, "train"), context)
    assert records.refusal_in(nonsense.content) == ("a message without welcome", False)


def test_one_node_in_a_run_of_four_is_as_without_flower() -> None:
    """The other three answer directly."""
    ours, context = aggregator("frugal"), new_context()
    others = {number: holdings(number).fleet(task("frugal", batch=5), [number]) for number in (0, 2, 3)}
    said, told = ours.start(), []
    for _ in range(5):
        told.append(said.w)
        reports = [fleet.answer(said) for fleet in others.values()]
        reports.append(report(ask(context, said, said.round - 1), said))
        following = ours.receive(Report.merge(reports), CHEAP)
        assert isinstance(following, Broadcast)
        said = following
    assert bits([*told, said.w]) == bits(without_network([range(4)] * 5, batch=5))
