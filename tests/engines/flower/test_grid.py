"""Nodes that fail, lose their memory, are late, leave, restart, or join later; through both
apps.
"""

import json
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedbudget.engines.flower import grid, records
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.messages import RoundRequest, Welcome
from fedbudget.errors import WorkError
from fedbudget.launch.inputs import batch_of
from fedbudget.launch.method import build_meters
from fedbudget.launch.simulate import simulate
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.protocol.state import Outcome
from fedbudget.resources.resource import Usage
from fedbudget.runs.folder import Run
from fedbudget.settings.settings import Settings
from support.flower_grid import FIRST, LocalGrid, partitions, run_config
from support.flower_runs import FIXED, local, run, train_in_process


def welcome_in(content: RecordDict) -> Welcome:
    welcome: Welcome = wire.read(records.frame(content, "welcome"))
    return welcome


def request_in(content: RecordDict) -> RoundRequest:
    """Return a request whose vectors are not sent as differences."""
    task = welcome_in(content).task
    return records.broadcast(content, task, 1).request(None)


def failing(node: int, rounds: set[int], error: Exception) -> Any:
    def before(number: int, message: Message) -> None:
        if number == FIRST + node and message.metadata.group_id in {
            str(each) for each in rounds
        }:
            raise error

    return before


def test_failed_node_returns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = local()
    ours.before = failing(1, {2, 3}, MemoryError("no memory left"))
    result = run(tmp_path, local=ours)
    assert [record.missed for record in result.rounds] == [(), (1,), (1,), (), (), ()]
    assert [record.nodes for record in result.rounds] == [3, 2, 2, 3, 3, 3]
    assert (
        "round 2, node 1 (Flower's 101): Flower error 2: <class 'MemoryError'>"
        in caplog.text
    )


def test_round_is_repeated_until_enough(tmp_path: Path) -> None:
    """A failed node is asked again, and w has the bits of a run without failures."""
    ours, left = local(min_nodes=3), {2: 1, 4: 2}

    def before(number: int, message: Message) -> None:
        at = int(message.metadata.group_id or 0)
        if number == FIRST and left.get(at, 0):
            left[at] -= 1
            raise OSError("temporary failure")

    ours.before = before
    result = run(tmp_path, local=ours, min_nodes=3)
    assert not any(left.values())
    assert all(record.nodes == 3 for record in result.rounds)
    assert result.w.tobytes() == train_in_process().w.tobytes()


def test_run_stops_if_all_fail(tmp_path: Path) -> None:
    """The error names the failures, and the model is saved."""
    ours = local()
    ours.before = lambda number, message: failing(
        number - FIRST, {3}, OSError("disk full")
    )(number, message)
    with pytest.raises(
        WorkError,
        match=r"too few nodes can make round 3: node \d \(Flower's 10\d\): .*disk full",
    ):
        run(tmp_path, local=ours)
    received = [
        (node, request_in(content))
        for node, kind, content in ours.received
        if kind == "train"
    ]
    asked_for = [node for node, request in received if request.broadcast.round == 3]
    assert sorted(asked_for) == sorted(3 * [FIRST, FIRST + 1, FIRST + 2])
    saved = Run.open(tmp_path / "run")
    assert saved.summary is not None
    assert saved.summary["status"] == "interrupted"
    # After two rounds, only the loss of the w after round 1 is known.
    assert saved.model().w.tobytes() == train_in_process(rounds=1, tau=4).w.tobytes()


@pytest.mark.parametrize("what", ["push_messages", "pull_messages", "get_node_ids"])
def test_run_stopped_by_flower_is_saved(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "_NODES_POLL", 0.0)
    ours = local()
    really = getattr(ours, what)

    def ended(*arguments: Any) -> Any:
        if sum(kind == "train" for _, kind, _ in ours.received) >= 6:  # two rounds of three
            raise ConnectionError("run is not running")
        return really(*arguments)

    setattr(ours, what, ended)
    with pytest.raises(
        WorkError, match="Flower sends no more messages of this run: run is not running"
    ):
        run(tmp_path, local=ours)
    saved = Run.open(tmp_path / "run")
    assert saved.summary is not None
    assert saved.summary["status"] == "interrupted"
    assert len(saved.rounds) in (1, 2)
    assert saved.model().w.shape == (650,)


@pytest.mark.parametrize("method", ["paper", "frugal"])
def test_node_without_memory_continues(method: str, tmp_path: Path) -> None:
    ours = local()

    def before(number: int, message: Message) -> None:
        if number == FIRST and message.metadata.group_id == "4":
            ours.contexts[FIRST + 2].state = RecordDict()

    ours.before = before
    result = run(tmp_path, local=ours, method=method)
    assert [record.missed for record in result.rounds] == [(), (), (), (2,), (), ()]
    corrected = [record.corrected for record in result.rounds]
    assert corrected == (
        [False] * 6 if method == "paper" else [True, True, True, True, False, False]
    )


def test_late_report_leaves_no_trace(tmp_path: Path) -> None:
    """The node makes round 2 too late and resumes from its state after round 1."""
    ours, late = local(), {"waits": 0}

    def withheld(number: int, reply: Message) -> bool:
        if number == FIRST and reply.metadata.group_id == "2":
            late["waits"] += 1
            return request_in(ours.received[-1][2]).broadcast.round == 2
        return False

    ours.withheld = withheld
    result = run(tmp_path, local=ours, method="paper", round_timeout=0.3)
    assert [record.missed for record in result.rounds] == [(), (0,), (), (), (), ()]
    # The node still owes a reply when round 3 begins.
    assert [record.nodes for record in result.rounds] == [3, 2, 2, 3, 3, 3]
    assert result.run is not None
    assert json.loads((result.run / "summary.json").read_text())["network"]["late"] == 1
    received = [
        request_in(content)
        for node, kind, content in ours.received
        if node == FIRST and kind == "train"
    ]
    assert [(each.broadcast.round, each.base_round) for each in received] == [
        (1, 0),
        (2, 1),
        (4, 1),
        (5, 4),
        (6, 5),
    ]
    assert [each.broadcast.catch_up is not None for each in received] == [
        False,
        False,
        True,
        False,
        False,
    ]


def test_absent_node_is_not_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "_NODES_POLL", 0.0)
    ours = local()

    def before(number: int, message: Message) -> None:
        at = int(message.metadata.group_id or 0)
        ours.away = {FIRST + 1} if at in (2, 3) else set()

    ours.before = before
    result = run(tmp_path, local=ours, method="frugal")
    assert [record.nodes for record in result.rounds] == [3, 3, 2, 2, 3, 3]
    assert not any(record.missed for record in result.rounds)


def replaced(ours: LocalGrid, node: int, new: int, config: Any, at: int) -> Any:
    """Restart a node's SuperNode in that round, so Flower assigns it another number."""

    def before(number: int, message: Message) -> None:
        if message.metadata.group_id == str(at) and new not in ours.contexts:
            ours.away.add(node)
            ours.contexts[new] = Context(
                7, new, config, RecordDict(), ours.contexts[node].run_config
            )

    return before


@pytest.mark.parametrize("method", ["paper", "frugal"])
def test_restarted_supernode_keeps_its_number(
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its memory is lost."""
    monkeypatch.setattr(grid, "_NODES_POLL", 0.0)
    ours = local()
    ours.before = replaced(ours, FIRST + 1, 500, partitions(3)[1], at=2)
    result = run(tmp_path, local=ours, method=method)
    # Round 3 requests its description.
    assert [record.nodes for record in result.rounds] == [3, 3, 2, 3, 3, 3]
    received = [
        content for node, kind, content in ours.received if node == 500 and kind == "train"
    ]
    requests = [request_in(content) for content in received]
    assert [(each.broadcast.round, each.base_round) for each in requests] == [
        (4, 0),
        (5, 4),
        (6, 5),
    ]
    assert welcome_in(received[0]).numbers == (1,)
    # Its drift is lost, so no node corrects drift.
    assert result.rounds[3].corrected is False
    assert "node 1 (Flower's 500) has joined" in caplog.text


@pytest.mark.parametrize("at", [1, 2, 6])
def test_restarted_supernode_completes_the_round(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round needs all three nodes. Later replies under the old number are discarded."""
    monkeypatch.setattr(grid, "_NODES_POLL", 0.0)
    ours = local(min_nodes=3)
    anew = replaced(ours, FIRST + 1, 500, partitions(3)[1], at=at)

    def before(number: int, message: Message) -> None:
        anew(number, message)
        if number == FIRST + 1 and message.metadata.group_id == str(at):
            raise OSError("shutting down")

    ours.before = before
    result = run(tmp_path, local=ours, min_nodes=3)
    assert [record.nodes for record in result.rounds] == [3] * 6
    assert not any(record.missed for record in result.rounds)


def test_late_node_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "_NODES_POLL", 0.0)
    ours = LocalGrid(run_config(**FIXED, nodes=2), partitions(3)[:2])
    before = replaced(ours, FIRST, 500, partitions(3)[2], at=1)

    def join_late(number: int, message: Message) -> None:
        before(number, message)
        ours.away.clear()

    ours.before = join_late
    result = run(tmp_path, 2, ours)
    assert [record.nodes for record in result.rounds] == [2, 2, 3, 3, 3, 3]


def test_mismatched_late_node_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grid, "_NODES_POLL", 0.0)
    np.savez(tmp_path / "other.npz", x=np.eye(6, 4), y=np.arange(6) % 2)
    ours = local()
    before = replaced(ours, FIRST, 500, {"data": str(tmp_path / "other.npz")}, at=1)

    def join_late(number: int, message: Message) -> None:
        before(number, message)
        ours.away.clear()

    ours.before = join_late
    result = run(tmp_path, local=ours)
    assert all(record.nodes == 3 for record in result.rounds)
    assert (
        caplog.text.count("Flower's node 500 cannot take part: features of shape (4,) here")
        == 1
    )


@settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(failed=st.sets(st.tuples(st.integers(1, 2), st.integers(1, 6)), max_size=6))
def test_failures_equal_absences(failed: set[tuple[int, int]], tmp_path: Path) -> None:
    """Compared with fleets that an aggregator calls directly.

    Rounds are so long that each validates: measured costs do not decide.
    """
    ours = local(tau=20)

    def before(number: int, message: Message) -> None:
        if (number - FIRST, int(message.metadata.group_id or 0)) in failed:
            raise OSError("gone")

    ours.before = before
    result = run(tmp_path / secrets.token_hex(4), local=ours, tau=20)

    how = Settings(**{**FIXED, "tau": 20, "nodes": 3, "budget": (FIXED["budget"],)})
    plan, meters = simulate(how), build_meters(how)
    assert plan.aggregator is not None
    fleets = [
        Fleet(
            plan.model,
            plan.shards.only([node]),
            batch=batch_of(plan.settings),
            seed=3,
            features=plan.aggregator.method.features,
            numbers=[node],
        )
        for node in range(3)
    ]
    broadcast: Broadcast | Outcome | None = plan.aggregator.pending
    while isinstance(broadcast, Broadcast):
        present = [
            fleets[node] for node in range(3) if (node, broadcast.round) not in failed
        ]
        costs = meters.read(Usage({}, 3, updates=broadcast.steps))
        broadcast = plan.aggregator.receive(
            Report.merge([fleet.answer(broadcast) for fleet in present]), costs
        )
    assert isinstance(broadcast, Outcome)
    assert result.w.tobytes() == broadcast.w.tobytes()
