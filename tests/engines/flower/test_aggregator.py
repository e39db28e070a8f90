"""Whole runs in this process, through both of the real apps and all of Flower's serialisation."""

import json
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedbudget
from fedbudget.data.dataset import Dataset, Part
from fedbudget.engines.flower import client_app, grid, records, server
from fedbudget.engines.flower.aggregator import aggregate
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.errors import UserError, WorkError
from fedbudget.plan import meters_of, prepare
from fedbudget.protocol.aggregator import Outcome
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.resources.usage import RoundUsage
from fedbudget.runs.folder import Run
from fedbudget.settings import Settings
from fedbudget.training import Result
from support.flower_grid import FIRST, LocalGrid, asked, partitions

FIXED: dict[str, Any] = {
    "dataset": "digits",
    "partition": "case:2",
    "seed": 3,
    "tau": 4,
    "rounds": 5,
    "costs": "simulated",
}
FIXED |= {"budget": "time=1000s"}


def run(out: Path, nodes: int = 3, local: LocalGrid | None = None, **more: Any) -> Result:
    config = asked(**{**FIXED, "nodes": nodes, "out": str(out / "run"), **more})
    return aggregate(local or LocalGrid(config, partitions(nodes)), Context(7, 1, {}, RecordDict(), config), plot=False)


def here(nodes: int = 3, **more: Any) -> Result:
    """The same on the in-process engine."""
    return fedbudget.train(**{**FIXED, "nodes": nodes, **more})


def local(nodes: int = 3, **more: Any) -> LocalGrid:
    return LocalGrid(asked(**{**FIXED, "nodes": nodes, **more}), partitions(nodes))


class TestTheSameBits:
    @pytest.mark.parametrize(
        "how",
        [
            {"method": "paper"},
            {"method": "frugal"},
            {"method": "frugal", "batch_size": "full"},
            {"method": "paper", "tau": "adaptive", "budget": "time=3s", "rounds": 12},
            {"method": "frugal", "tau": "adaptive", "budget": "time=3s", "rounds": 12},
            {"method": "paper", "model": "softmax", "drift_correction": True, "delta": "parameters"},
        ],
        ids=str,
    )
    def test_as_in_one_process(self, how: dict[str, Any], tmp_path: Path) -> None:
        found, expected = run(tmp_path, **how), here(**how)
        assert found.w.tobytes() == expected.w.tobytes()
        assert [record.tau for record in found.rounds] == [record.tau for record in expected.rounds]
        assert found.spent == expected.spent

    def test_whatever_order_flower_has_its_nodes_in(self, tmp_path: Path) -> None:
        config = asked(**FIXED, nodes=3)
        found = run(tmp_path, local=LocalGrid(config, partitions(3, [2, 0, 1])))
        assert found.w.tobytes() == here().w.tobytes()

    def test_with_nodes_that_have_files_of_their_own(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(5)
        shards = [(rng.normal(size=(size, 6)).astype(np.float32), rng.integers(0, 2, size)) for size in (30, 40)]
        for number, (x, y) in enumerate(shards):
            np.savez(tmp_path / f"{number}.npz", x=x, y=y)
        how: dict[str, Any] = {"method": "frugal", "model": "softmax", "batch_size": 8}
        config = asked(**{**FIXED, **how, "dataset": "", "partition": "", "nodes": 2})
        files = LocalGrid(config, [{"data": str(tmp_path / f"{number}.npz")} for number in (0, 1)])
        found = run(tmp_path, 2, files, **how, dataset="", partition="")
        rest = {name: value for name, value in FIXED.items() if name not in ("dataset", "partition")}
        expected = fedbudget.train(shards=shards, **rest, **how)
        assert found.w.tobytes() == expected.w.tobytes()

    def test_with_data_that_a_person_makes_in_python(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(5)
        x, y = rng.normal(size=(60, 6)).astype(np.float32), rng.integers(0, 2, 60)
        dataset = Dataset("made", Part(x, y), classes=("no", "yes"))

        def data(context: Context) -> NodeData:
            first = 20 if context.node_config["which"] else 0
            gateway = [np.arange(20, 40), np.arange(40, 60)]
            return NodeData(dataset, gateway if first else [np.arange(20)])

        how: dict[str, Any] = {"method": "frugal", "model": "softmax", "batch_size": 8}
        config = asked(**{**FIXED, **how, "nodes": 2})
        made = LocalGrid(config, [{"which": 0}, {"which": 1}], client_app(data))
        found = run(tmp_path, 2, made, **how)
        rest = {name: value for name, value in FIXED.items() if name not in ("dataset", "partition")}
        expected = fedbudget.train(shards=[(x[at : at + 20], y[at : at + 20]) for at in (0, 20, 40)], **rest, **how)
        assert found.w.tobytes() == expected.w.tobytes()
        assert found.rounds[0].nodes == 3  # one, and a gateway with two


def test_a_run_is_on_disk_and_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = run(tmp_path, test="digits")
    found = Run.open(tmp_path / "run")
    assert found.model().w.tobytes() == result.w.tobytes()
    assert (found.settings.nodes, found.settings.dataset, found.settings.partition) == (3, "digits", "case:2")
    assert [record.round for record in found.rounds] == [1, 2, 3, 4, 5, 6]
    assert found.summary is not None
    assert found.summary["network"]["sent"] > 0
    assert result.accuracy is not None
    assert result.accuracy > 0.5
    assert "stopped by rounds" in caplog.text
    assert str(tmp_path / "run") in caplog.text


def test_the_server_app_makes_the_same_run(tmp_path: Path) -> None:
    config = asked(**FIXED, nodes=3, out=str(tmp_path / "run"))
    server(LocalGrid(config, partitions(3)), Context(7, 1, {}, RecordDict(), config))
    assert Run.open(tmp_path / "run").model().w.tobytes() == here().w.tobytes()
    assert (tmp_path / "run" / "plot.png").exists()


def test_a_budget_in_bytes_is_of_what_messages_carry(tmp_path: Path) -> None:
    result = run(tmp_path, costs="measured", budget="bytes=60kB", rounds=1000)
    network = json.loads((tmp_path / "run" / "summary.json").read_text())["network"]
    assert result.stopped_by == "bytes"
    assert 0.8 * 60e3 < result.spent["bytes"] <= 60e3
    assert result.spent["bytes"] < network["sent"] + network["received"]  # which has what came before the first round


def test_a_budget_in_processors_seconds_is_of_all_nodes(tmp_path: Path) -> None:
    result = run(tmp_path, costs="measured", budget="cpu=1000s")
    assert result.sources == {"cpu": "measured"}
    assert 0 < result.spent["cpu"] < 1000


def test_a_budget_that_is_too_small_for_a_round_is_refused_with_what_one_costs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="budget"):
        run(tmp_path, costs="measured", budget="time=0.001s")


# Nodes that fail.


def failing(node: int, rounds: set[int], error: Exception) -> Any:
    def before(number: int, message: Message) -> None:
        if number == FIRST + node and message.metadata.group_id in {str(each) for each in rounds}:
            raise error

    return before


def test_a_node_that_fails_is_missed_and_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = local()
    ours.before = failing(1, {2, 3}, MemoryError("no memory left"))
    result = run(tmp_path, local=ours)
    assert [record.missed for record in result.rounds] == [(), (1,), (1,), (), (), ()]
    assert [record.nodes for record in result.rounds] == [3, 2, 2, 3, 3, 3]
    assert "round 2, node 1 (Flower's 101): Flower says: <class 'MemoryError'>" in caplog.text


def test_a_round_with_too_few_nodes_is_made_again(tmp_path: Path) -> None:
    """A node that fails once is asked again, and the run is the same as if nothing had happened."""
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


def test_a_run_whose_nodes_all_fail_ends_with_what_they_said_and_keeps_its_model(tmp_path: Path) -> None:
    ours = local()
    ours.before = lambda number, message: failing(number - FIRST, {3}, OSError("disk full"))(number, message)
    with pytest.raises(WorkError, match=r"too few nodes can make round 3: node \d \(Flower's 10\d\): .*disk full"):
        run(tmp_path, local=ours)
    heard = [(node, content.config_records["broadcast"]) for node, kind, content in ours.heard if kind == "train"]
    asked_for = [node for node, broadcast in heard if broadcast["round"] == 3]
    assert sorted(asked_for) == sorted(3 * [FIRST, FIRST + 1, FIRST + 2])
    found = Run.open(tmp_path / "run")
    assert found.summary is not None
    assert found.summary["status"] == "interrupted"
    assert found.model().w.tobytes() == here(rounds=1, tau=4).w.tobytes()  # of two rounds, w(t) of the first is known


@pytest.mark.parametrize("what", ["push_messages", "pull_messages", "get_node_ids"])
def test_a_run_that_flower_ends_keeps_its_model(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "_LOOK_FOR_NODES", 0.0)
    ours = local()
    really = getattr(ours, what)

    def ended(*arguments: Any) -> Any:
        if sum(kind == "train" for _, kind, _ in ours.heard) >= 6:  # two rounds of three
            raise ConnectionError("run is not running")
        return really(*arguments)

    setattr(ours, what, ended)
    with pytest.raises(WorkError, match="Flower carries no more messages of this run: run is not running"):
        run(tmp_path, local=ours)
    found = Run.open(tmp_path / "run")
    assert found.summary is not None
    assert found.summary["status"] == "interrupted"
    assert len(found.rounds) in (1, 2)
    assert found.model().w.shape == (64,)


@pytest.mark.parametrize("method", ["paper", "frugal"])
def test_a_node_that_has_lost_its_memory_says_so_and_goes_on(method: str, tmp_path: Path) -> None:
    ours = local()

    def before(number: int, message: Message) -> None:
        if number == FIRST and message.metadata.group_id == "4":
            ours.contexts[FIRST + 2].state = RecordDict()

    ours.before = before
    result = run(tmp_path, local=ours, method=method)
    assert [record.missed for record in result.rounds] == [(), (), (), (2,), (), ()]
    corrected = [record.corrected for record in result.rounds]
    assert corrected == ([False] * 6 if method == "paper" else [True, True, True, True, False, False])


def test_a_report_that_comes_too_late_is_discarded_and_leaves_no_trace(tmp_path: Path) -> None:
    """The node makes round 2, which is not counted, and goes back to where it stood after round 1."""
    ours, late = local(), {"waits": 0}

    def kept_back(number: int, reply: Message) -> bool:
        if number == FIRST and reply.metadata.group_id == "2":
            late["waits"] += 1
            return ours.heard[-1][2].config_records["broadcast"]["round"] == 2
        return False

    ours.kept_back = kept_back
    result = run(tmp_path, local=ours, method="paper", round_timeout=0.3)
    assert [record.missed for record in result.rounds] == [(), (0,), (), (), (), ()]
    assert [record.nodes for record in result.rounds] == [3, 2, 2, 3, 3, 3]  # it owes a reply when round 3 begins
    assert result.run is not None
    assert json.loads((result.run / "summary.json").read_text())["network"]["late"] == 1
    request = [content for node, kind, content in ours.heard if node == FIRST and kind == "train"]
    heard = [content.config_records["broadcast"] for content in request]
    base_round = [(each["round"], each["stands"]) for each in heard]
    assert base_round == [(1, 0), (2, 1), (4, 1), (5, 4), (6, 5)]
    assert ["best" in content.array_records["vectors"] for content in request] == [False, False, True, False, False]


def test_a_node_that_is_away_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "_LOOK_FOR_NODES", 0.0)
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
            ours.contexts[new] = Context(7, new, config, RecordDict(), ours.contexts[node].run_config)

    return before


@pytest.mark.parametrize("method", ["paper", "frugal"])
def test_a_supernode_that_is_started_anew_is_the_node_it_was_without_its_memory(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grid, "_LOOK_FOR_NODES", 0.0)
    ours = local()
    ours.before = replaced(ours, FIRST + 1, 500, partitions(3)[1], at=2)
    result = run(tmp_path, local=ours, method=method)
    assert [record.nodes for record in result.rounds] == [3, 3, 2, 3, 3, 3]  # in round 3 it is asked what it has
    request = [content.config_records for node, kind, content in ours.heard if node == 500 and kind == "train"]
    assert [(each["broadcast"]["round"], each["broadcast"]["stands"]) for each in request] == [(4, 0), (5, 4), (6, 5)]
    assert records.welcome_in(RecordDict({"welcome": request[0]["welcome"]})).numbers == (1,)
    assert result.rounds[3].corrected is False  # all hear that what it knew of drift is lost
    assert "node 1 (Flower's 500) has joined" in caplog.text


@pytest.mark.parametrize("at", [1, 2, 6])
def test_a_supernode_that_is_started_anew_in_a_round_that_needs_it_makes_that_round(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has failed there under its old number; what it says under that later on is discarded."""
    monkeypatch.setattr(grid, "_LOOK_FOR_NODES", 0.0)
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


def test_a_node_that_comes_later_takes_part_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "_LOOK_FOR_NODES", 0.0)
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
    monkeypatch.setattr(grid, "_LOOK_FOR_NODES", 0.0)
    np.savez(tmp_path / "other.npz", x=np.eye(6, 4), y=np.arange(6) % 2)
    ours = local()
    before = replaced(ours, FIRST, 500, {"data": str(tmp_path / "other.npz")}, at=1)

    def come(number: int, message: Message) -> None:
        before(number, message)
        ours.away.clear()

    ours.before = come
    result = run(tmp_path, local=ours)
    assert all(record.nodes == 3 for record in result.rounds)
    assert caplog.text.count("Flower's node 500 cannot take part: features of shape (4,) here") == 1


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(failed=st.sets(st.tuples(st.integers(1, 2), st.integers(1, 6)), max_size=6))
def test_whatever_nodes_fail_it_is_as_if_they_were_absent(failed: set[tuple[int, int]], tmp_path: Path) -> None:
    """Against fleets that talk to an aggregator directly."""
    ours = local()

    def before(number: int, message: Message) -> None:
        if (number - FIRST, int(message.metadata.group_id or 0)) in failed:
            raise OSError("gone")

    ours.before = before
    found = run(tmp_path / secrets.token_hex(4), local=ours)

    how = Settings(**{**FIXED, "nodes": 3, "budget": (FIXED["budget"],)})
    plan, meters = prepare(how), meters_of(how)
    fleets = [
        Fleet(plan.model, plan.fleet.shards.only([node]), batch=plan.fleet.sampler.batch, seed=3, numbers=[node])
        for node in range(3)
    ]
    assert plan.aggregator is not None
    broadcast: Broadcast | Outcome = plan.aggregator.start()
    while isinstance(broadcast, Broadcast):
        present = [fleets[node] for node in range(3) if (node, broadcast.round) not in failed]
        costs = meters.read(RoundUsage(max(1, broadcast.tau), 3, 0, {}))
        broadcast = plan.aggregator.receive(Report.merge([fleet.answer(broadcast) for fleet in present]), costs)
    assert found.w.tobytes() == broadcast.w.tobytes()


# People's mistakes.


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([{}, {}], "0 of 2 nodes could say what they have, and 2 are needed; Flower's node 100: a node has no data"),
        (
            [{"partition-id": 0, "num-partitions": 2}, {"data": "/no/such.csv"}],
            "1 of 2 nodes could say what they have, and 2 are needed; Flower's node 101: /no/such.csv",
        ),
    ],
)
def test_nodes_without_data_end_the_run_with_one_clear_line(
    nodes: list[Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = asked(**FIXED, nodes=2)
    with pytest.raises(UserError, match=reason):
        run(tmp_path, 2, LocalGrid(config, nodes))
    assert reason in caplog.text


def test_a_node_without_data_is_left_out_where_others_suffice(tmp_path: Path) -> None:
    config = asked(**FIXED, nodes=2)
    mixed = LocalGrid(config, [*partitions(2), {}])
    assert run(tmp_path, 2, mixed).rounds[0].nodes == 2


def test_a_node_that_cannot_load_the_app_is_told_of(tmp_path: Path) -> None:
    ours = local()
    ours.before = lambda number, message: (_ for _ in ()).throw(ImportError("no fedbudget here"))
    with pytest.raises(UserError, match=r"node 100: Flower says: <class 'ImportError'>:<'no fedbudget here'>"):
        run(tmp_path, local=ours)


def test_nodes_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grid, "_LOOK_FOR_NODES", 0.0)
    ours = local()
    looked = [0]
    ids = ours.get_node_ids

    def come_one_by_one() -> Any:
        looked[0] += 1
        return list(ids())[: looked[0] // 2]

    ours.get_node_ids = come_one_by_one  # type: ignore[method-assign]
    assert run(tmp_path, local=ours).rounds[0].nodes == 3
    assert "0 of 3 nodes are here" in caplog.text
    assert "2 of 3 nodes are here" in caplog.text
