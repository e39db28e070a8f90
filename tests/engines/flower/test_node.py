"""The client app: memory in its context, one message at a time, and refusals."""

from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedbudget.engines.flower import node, records
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.messages import (
    HIDDEN_REASON,
    NodeRefusal,
    RoundRequest,
    Welcome,
)
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.node_limits import BeyondLimits
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError
from fedbudget.flower import client, client_app
from fedbudget.protocol.messages import Broadcast, Report
from support.flower_grid import LocalGrid, serialized
from support.methods import bits
from support.networked import aggregator, node_data, task, without_network
from support.problems import CHEAP

WELCOME = Welcome("a-run", task("frugal", batch=5), (1,))


def data_of_context(context: Context) -> NodeData:
    return node_data(1)


def new_context() -> Context:
    LocalGrid({}, [])  # sets the run of new messages
    return Context(7, 100, {}, RecordDict(), {})


def ask(
    context: Context, broadcast: Broadcast, base_round: int, welcome: Welcome = WELCOME
) -> RecordDict:
    content = records.to_content(wire.pack(welcome))
    packed = wire.pack_broadcast(broadcast, base_round, catch_up=True)
    content.update(records.to_content(packed))
    message = Message(serialized(content), 100, "train")
    context.state = serialized(context.state)
    return serialized(
        node.reply(
            message, context, lambda each: node.NodeSetup(data_of_context(each))
        ).content
    )


def report(content: RecordDict, broadcast: Broadcast) -> Report:
    expected = wire.ExpectedReport.of(broadcast)
    return records.answer(content, expected, np.array([1]), np.array([20])).report


def refusal(content: RecordDict) -> NodeRefusal:
    result: NodeRefusal = wire.read(records.frame(content, "refusal"))
    return result


def broadcasts(rounds: int = 5) -> list[Broadcast]:
    """The broadcasts of a run with this node alone."""
    ours, fleet = aggregator("frugal"), node_data(1).fleet(WELCOME.task, [1])
    broadcast: Any = ours.start()
    result = []
    for _ in range(rounds):
        result.append(broadcast)
        broadcast = ours.receive(fleet.answer(broadcast), CHEAP)
    return result


def test_context_preserves_same_bits() -> None:
    context, fleet = new_context(), node_data(1).fleet(WELCOME.task, [1])
    for broadcast in broadcasts():
        assert bits(
            report(ask(context, broadcast, broadcast.round - 1), broadcast)
        ) == bits(fleet.answer(broadcast))


def test_context_keeps_two_rounds() -> None:
    """Records of other apps stay in the context."""
    context = new_context()
    context.state["of another"] = ConfigRecord({"kept": 1})
    for broadcast in broadcasts():
        ask(context, broadcast, broadcast.round - 1)
    assert list(node.recall(context.state, WELCOME)) == [4, 5]
    assert context.state["of another"] == ConfigRecord({"kept": 1})
    assert len(context.state) == 1 + 1 + 2 * 2


def test_repeated_request_has_same_bits() -> None:
    context, sent = new_context(), broadcasts()
    first = [
        bits(report(ask(context, broadcast, broadcast.round - 1), broadcast))
        for broadcast in sent
    ]
    assert bits(report(ask(context, sent[-1], 4), sent[-1])) == first[-1]


def test_missing_memory_is_reported() -> None:
    context, sent = new_context(), broadcasts()
    for broadcast in sent[:3]:
        ask(context, broadcast, broadcast.round - 1)
    assert refusal(ask(context, sent[4], 4)) == NodeRefusal(
        "this node has no memory of round 4, only of [2, 3]", lost=True
    )
    other = Welcome("another-run", WELCOME.task, (1,))
    assert refusal(ask(context, sent[1], 1, other)) == NodeRefusal(
        "this node has no memory of round 1, only of []", lost=True
    )
    # The request does not change its memory.
    assert list(node.recall(context.state, WELCOME)) == [2, 3]


def test_damaged_memory_counts_as_lost() -> None:
    context, sent = new_context(), broadcasts()
    ask(context, sent[0], 0)
    del context.state["fedbudget-1-arrays"]
    assert refusal(ask(context, sent[1], 1)).lost


def test_warm_up_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert warmed == [1, 2, 3, 4, 5]  # once per process


def test_errors_are_sent_as_replies() -> None:
    context = new_context()
    described = client(Message(RecordDict(), 100, "query.describe"), context)
    assert refusal(described.content).reason.startswith("a node has no data")
    nonsense = client(Message(RecordDict(), 100, "train"), context)
    assert refusal(nonsense.content) == NodeRefusal("a message without welcome")


@pytest.mark.parametrize("error", [UserError, RuntimeError])
def test_private_reasons_stay_at_the_node(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """An error may name values. Flower itself would send the text of any exception."""

    def data(context: Context) -> NodeData:
        raise error("row 7: Ms Smith is not a number")

    LocalGrid({}, [])
    private: dict[str, Any] = {"budget": "time=5s,privacy=4"}
    message = Message(RecordDict(), 100, "query.describe")
    context = Context(7, 100, {}, RecordDict(), private)
    sent = client_app(data)(message, context).content
    assert refusal(sent) == NodeRefusal(HIDDEN_REASON)
    assert "Ms Smith" in caplog.text


def test_private_limits_are_sent() -> None:
    """A reason without anything of the samples."""

    def setup(context: Context) -> node.NodeSetup:
        raise BeyondLimits("too much")

    context = new_context()
    message = Message(RecordDict(), 100, "query.describe")
    sent = node.reply(message, context, setup, private=True).content
    assert refusal(sent) == NodeRefusal("too much")


def test_flower_node_among_direct_nodes() -> None:
    """The other three nodes answer directly, and w has the same bits."""
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
