"""Nodes that fail, forget, are late, away, started anew, or come later; through the real
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
from fedbudget.errors import WorkError
from fedbudget.launch.inputs import batch_of
from fedbudget.launch.method import build_meters
from fedbudget.launch.simulate import simulate
from fedbudget.protocol.aggregator import Outcome
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.resources.resource import RoundUsage
from fedbudget.runs.folder import Run
from fedbudget.settings.settings import Settings
from support.flower_grid import FIRST, LocalGrid, asked, partitions
from support.flower_runs import FIXED, here, local, run


def failing(node: int, rounds: set[int], error: Exception) -> Any:
    def before(number: int, message: Message) -> None:
        if number == FIRST + node and message.metadata.group_id in {
            str(each) for each in rounds
        }:
            raise error

    return before


def test_a_node_that_fails_is_missed_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = local()
    ours.before = failing(1, {2, 3}, MemoryError("no memory left"))
    result = run(tmp_path, local=ours)
    assert [record.missed for record in result.rounds] == [(), (1,), (1,), (), (), ()]
    assert [record.nodes for record in result.rounds] == [3, 2, 2, 3, 3, 3]
    assert (
        "round 2, node 1 (Flower's 101): Flower error 2: <class 'MemoryError'>"
        in caplog.text
    )


def test_a_round_with_too_few_nodes_is_made_again(tmp_path: Path) -> None:
    """A node that fails once is asked again, and the run is the same as if nothing had
    happened.
    """
    ours, left = local(min_nodes=3), {2: 1, 4: 2}

    def before(number: int, message: Message) -> None:
        at = int(message.metadata.group_id or 0)
        if number == FIRST and left.get(at, 0):
            left[at] -= 1
            raise OSError("for a moment")

    ours.before = before
    result = run(tmp_path, local=ours, min_nodes=3)
    assert not any(left.values())
    assert all(record.nodes == 3 for record in result.rounds)
    assert result.w.tobytes() == here().w.tobytes()


def test_a_run_whose_nodes_all_fail_ends_with_what_they_said_and_keeps_its_model(
    tmp_path: Path,
) -> None:
    ours = local()
    ours.before = lambda number, message: failing(
        number - FIRST, {3}, OSError("disk full")
    )(number, message)
    with pytest.raises(
        WorkError,
        match=r"too few nodes can make round 3: node \d \(Flower's 10\d\): .*disk full",
    ):
        run(tmp_path, local=ours)
    heard = [
        (node, records.request_in(content))
        for node, kind, content in ours.heard
        if kind == "train"
    ]
    asked_for = [node for node, request in heard if request.broadcast.round == 3]
    assert sorted(asked_for) == sorted(3 * [FIRST, FIRST + 1, FIRST + 2])
    found = Run.open(tmp_path / "run")
    assert found.summary is not None
    assert found.summary["status"] == "interrupted"
    assert (
        found.model().w.tobytes() == here(rounds=1, tau=4).w.tobytes()
    )  # of two rounds, w(t) of the first is known


@pytest.mark.parametrize("what", ["push_messages", "pull_messages", "get_node_ids"])
def test_a_run_that_flower_ends_keeps_its_model(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "_NODES_POLL", 0.0)
    ours = local()
    really = getattr(ours, what)

    def ended(*arguments: Any) -> Any:
        if sum(kind == "train" for _, kind, _ in ours.heard) >= 6:  # two rounds of three
            raise ConnectionError("run is not running")
        return really(*arguments)

    setattr(ours, what, ended)
    with pytest.raises(
        WorkError, match="Flower sends no more messages of this run: run is not running"
    ):
        run(tmp_path, local=ours)
    found = Run.open(tmp_path / "run")
    assert found.summary is not None
    assert found.summary["status"] == "interrupted"
    assert len(found.rounds) in (1, 2)
    assert found.model().w.shape == (650,)


@pytest.mark.parametrize("method", ["paper", "frugal"])
def test_a_node_that_has_lost_its_memory_says_so_and_goes_on(
    method: str, tmp_path: Path
) -> None:
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


def test_a_report_that_comes_too_late_is_discarded_and_leaves_no_trace(
    tmp_path: Path,
) -> None:
    """The node makes round 2, which is not counted, and goes back to where it stood after
    round 1.
    """
    ours, late = local(), {"waits": 0}

    def kept_back(number: int, reply: Message) -> bool:
        if number == FIRST and reply.metadata.group_id == "2":
            late["waits"] += 1
            return records.request_in(ours.heard[-1][2]).broadcast.round == 2
        return False

    ours.kept_back = kept_back
    result = run(tmp_path, local=ours, method="paper", round_timeout=0.3)
    assert [record.missed for record in result.rounds] == [(), (0,), (), (), (), ()]
    assert [record.nodes for record in result.rounds] == [
        3,
        2,
        2,
        3,
        3,
        3,
    ]  # it owes a reply when round 3 begins
    assert result.run is not None
    assert json.loads((result.run / "summary.json").read_text())["network"]["late"] == 1
    heard = [
        records.request_in(content)
        for node, kind, content in ours.heard
        if node == FIRST and kind == "train"
    ]
    assert [(each.broadcast.round, each.base_round) for each in heard] == [
        (1, 0),
        (2, 1),
        (4, 1),
        (5, 4),
        (6, 5),
    ]
    assert [each.broadcast.catch_up is not None for each in heard] == [
        False,
        False,
        True,
        False,
        False,
    ]


def test_a_node_that_is_away_is_not_waited_for(
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
    """In that round a node's SuperNode is started anew, and Flower gives it another number."""

    def before(number: int, message: Message) -> None:
        if message.metadata.group_id == str(at) and new not in ours.contexts:
            ours.away.add(node)
            ours.contexts[new] = Context(
                7, new, config, RecordDict(), ours.contexts[node].run_config
            )

    return before


@pytest.mark.parametrize("method", ["paper", "frugal"])
def test_a_supernode_that_is_started_anew_is_the_node_it_was_without_its_memory(
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(grid, "_NODES_POLL", 0.0)
    ours = local()
    ours.before = replaced(ours, FIRST + 1, 500, partitions(3)[1], at=2)
    result = run(tmp_path, local=ours, method=method)
    assert [record.nodes for record in result.rounds] == [
        3,
        3,
        2,
        3,
        3,
        3,
    ]  # in round 3 it is asked what it has
    heard = [
        content for node, kind, content in ours.heard if node == 500 and kind == "train"
    ]
    requests = [records.request_in(content) for content in heard]
    assert [(each.broadcast.round, each.base_round) for each in requests] == [
        (4, 0),
        (5, 4),
        (6, 5),
    ]
    assert records.welcome_in(heard[0]).numbers == (1,)
    assert (
        result.rounds[3].corrected is False
    )  # all hear that what it knew of drift is lost
    assert "node 1 (Flower's 500) has joined" in caplog.text


@pytest.mark.parametrize("at", [1, 2, 6])
def test_a_supernode_that_is_started_anew_in_a_round_that_needs_it_makes_that_round(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has failed there under its old number; what it says under that later on is
    discarded.
    """
    monkeypatch.setattr(grid, "_NODES_POLL", 0.0)
    ours = local(min_nodes=3)
    anew = replaced(ours, FIRST + 1, 500, partitions(3)[1], at=at)

    def before(number: int, message: Message) -> None:
        anew(number, message)
        if number == FIRST + 1 and message.metadata.group_id == str(at):
            raise OSError("it is going down")

    ours.before = before
    result = run(tmp_path, local=ours, min_nodes=3)
    assert [record.nodes for record in result.rounds] == [3] * 6
    assert not any(record.missed for record in result.rounds)


def test_a_node_that_comes_later_takes_part_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "_NODES_POLL", 0.0)
    ours = LocalGrid(asked(**FIXED, nodes=2), partitions(3)[:2])
    before = replaced(ours, FIRST, 500, partitions(3)[2], at=1)

    def come(number: int, message: Message) -> None:
        before(number, message)
        ours.away.clear()

    ours.before = come
    result = run(tmp_path, 2, ours)
    assert [record.nodes for record in result.rounds] == [2, 2, 3, 3, 3, 3]


def test_a_node_that_comes_later_and_does_not_fit_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grid, "_NODES_POLL", 0.0)
    np.savez(tmp_path / "other.npz", x=np.eye(6, 4), y=np.arange(6) % 2)
    ours = local()
    before = replaced(ours, FIRST, 500, {"data": str(tmp_path / "other.npz")}, at=1)

    def come(number: int, message: Message) -> None:
        before(number, message)
        ours.away.clear()

    ours.before = come
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
def test_whatever_nodes_fail_it_is_as_if_they_were_absent(
    failed: set[tuple[int, int]], tmp_path: Path
) -> None:
    """Against fleets that talk to an aggregator directly."""
    ours = local()

    def before(number: int, message: Message) -> None:
        if (number - FIRST, int(message.metadata.group_id or 0)) in failed:
            raise OSError("gone")

    ours.before = before
    found = run(tmp_path / secrets.token_hex(4), local=ours)

    how = Settings(**{**FIXED, "nodes": 3, "budget": (FIXED["budget"],)})
    plan, meters = simulate(how), build_meters(how)
    fleets = [
        Fleet(
            plan.model,
            plan.shards.only([node]),
            batch=batch_of(plan.settings),
            seed=3,
            numbers=[node],
        )
        for node in range(3)
    ]
    assert plan.aggregator is not None
    broadcast: Broadcast | Outcome | None = plan.aggregator.pending
    while isinstance(broadcast, Broadcast):
        present = [
            fleets[node] for node in range(3) if (node, broadcast.round) not in failed
        ]
        costs = meters.read(RoundUsage(max(1, broadcast.tau), 3, 0, {}))
        broadcast = plan.aggregator.receive(
            Report.merge([fleet.answer(broadcast) for fleet in present]), costs
        )
    assert isinstance(broadcast, Outcome)
    assert found.w.tobytes() == broadcast.w.tobytes()
