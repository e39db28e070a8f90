"""A node that is called with one message at a time: what it keeps in its context, and what
it says when it cannot.
"""

from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedbudget.engines.flower import node, records
from fedbudget.engines.remote.messages import RoundRequest, Welcome
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.worker import Worker
from fedbudget.flower import client
from fedbudget.protocol.messages import Broadcast, Report
from support.flower_grid import LocalGrid, carried
from support.methods import bits
from support.networked import aggregator, node_data, task, without_network
from support.problems import CHEAP

WELCOME = Welcome("a-run", task("frugal", batch=5), (1,))


def held(context: Context) -> NodeData:
    return node_data(1)


def new_context() -> Context:
    LocalGrid({}, [])  # says whose messages these are
    return Context(7, 100, {}, RecordDict(), {})


def ask(
    context: Context, broadcast: Broadcast, base_round: int, welcome: Welcome = WELCOME
) -> RecordDict:
    content = records.welcome_out(welcome)
    content.update(records.request_out(RoundRequest(broadcast, base_round), catch_up=True))
    message = Message(carried(content), 100, "train")
    context.state = carried(context.state)
    return carried(
        node.reply(message, context, lambda each: node.NodeSetup(held(each))).content
    )


def report(content: RecordDict, broadcast: Broadcast) -> Report:
    return records.answer_in(content, broadcast, np.array([1]), np.array([20])).report


def broadcasts(rounds: int = 5) -> list[Broadcast]:
    """Of a run with this node alone."""
    ours, fleet = aggregator("frugal"), node_data(1).fleet(WELCOME.task, [1])
    broadcast: Any = ours.start()
    found = []
    for _ in range(rounds):
        found.append(broadcast)
        broadcast = ours.receive(fleet.answer(broadcast), CHEAP)
    return found


def test_it_goes_on_from_its_context_to_the_bit() -> None:
    context, fleet = new_context(), node_data(1).fleet(WELCOME.task, [1])
    for broadcast in broadcasts():
        assert bits(
            report(ask(context, broadcast, broadcast.round - 1), broadcast)
        ) == bits(fleet.answer(broadcast))


def test_its_context_has_the_last_two_rounds_and_what_others_have_put_there() -> None:
    context = new_context()
    context.state["of another"] = ConfigRecord({"kept": 1})
    for broadcast in broadcasts():
        ask(context, broadcast, broadcast.round - 1)
    assert list(node.recall(context.state, WELCOME)) == [4, 5]
    assert context.state["of another"] == ConfigRecord({"kept": 1})
    assert len(context.state) == 1 + 1 + 2 * 2


def test_a_round_that_is_asked_for_again_is_the_same() -> None:
    context, all_said = new_context(), broadcasts()
    first = [
        bits(report(ask(context, broadcast, broadcast.round - 1), broadcast))
        for broadcast in all_said
    ]
    assert bits(report(ask(context, all_said[-1], 4), all_said[-1])) == first[-1]


def test_one_that_does_not_remember_says_so() -> None:
    context, all_said = new_context(), broadcasts()
    for broadcast in all_said[:3]:
        ask(context, broadcast, broadcast.round - 1)
    assert records.refusal_in(ask(context, all_said[4], 4)) == (
        "this node has no memory of round 4, only of [2, 3]",
        True,
    )
    other = Welcome("another-run", WELCOME.task, (1,))
    assert records.refusal_in(ask(context, all_said[1], 1, other)) == (
        "this node has no memory of round 1, only of []",
        True,
    )
    assert list(node.recall(context.state, WELCOME)) == [
        2,
        3,
    ]  # what it has is not lost by being asked


def test_a_memory_that_is_damaged_is_lost_and_not_a_crash() -> None:
    context, all_said = new_context(), broadcasts()
    ask(context, all_said[0], 0)
    del context.state["fedbudget-1-arrays"]
    reason = records.refusal_in(ask(context, all_said[1], 1))
    assert reason is not None
    assert reason[1]


def test_an_update_that_warms_up_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[int] = []
    really = Worker.warm_up

    def warm_up(self: Worker, request: RoundRequest) -> None:
        warmed.append(request.broadcast.round)
        really(self, request)

    monkeypatch.setattr(Worker, "warm_up", warm_up)
    context, fleet = new_context(), node_data(1).fleet(WELCOME.task, [1])
    for broadcast in broadcasts():
        node._warm.clear()  # as in a new process
        assert bits(
            report(ask(context, broadcast, broadcast.round - 1), broadcast)
        ) == bits(fleet.answer(broadcast))
    assert warmed == [1, 2, 3, 4, 5]
    ask(context, broadcast, 4)
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
    others = {
        number: node_data(number).fleet(task("frugal", batch=5), [number])
        for number in (0, 2, 3)
    }
    broadcast, request = ours.start(), []
    for _ in range(5):
        request.append(broadcast.w)
        reports = [fleet.answer(broadcast) for fleet in others.values()]
        reports.append(report(ask(context, broadcast, broadcast.round - 1), broadcast))
        following = ours.receive(Report.merge(reports), CHEAP)
        assert isinstance(following, Broadcast)
        broadcast = following
    assert bits([*request, broadcast.w]) == bits(without_network([range(4)] * 5, batch=5))
