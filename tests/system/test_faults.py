"""Faults of nodes and disks: nodes are killed, hang, join late or return; disks fill up.

Nodes fail during a round, after the broadcast and before the report, always at the same
point."""

import re
import signal
from pathlib import Path

import pytest

from fedbudget import Settings, train
from fedbudget.data.files import from_shards
from fedbudget.launch.prepared import Overrides
from fedbudget.runs.folder import SPARE, Run
from support.processes import (
    checkpoint,
    cli_options,
    commands,
    records,
    sample_shards,
    summary,
    train_with_absences,
)
from support.small_disk import fill, small_disk

OPTIONS = cli_options(
    model="softmax",
    tau=5,
    costs="simulated",
    budget="time=1000000s",
    seed=3,
    validation=0,
)


def test_killed_nodes_leave_one(tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        start.write(3)
        options = ["--nodes", "3", "--method", "paper", "--rounds", "10", "--out", "run"]
        aggregator = start.serve(*options, *OPTIONS)
        stays, *others = (
            start.join(aggregator.port, "--data", "n1.npz", name="n1"),
            start.failing(aggregator.port, 2, 4, signal.SIGKILL),
            start.failing(aggregator.port, 3, 7, signal.SIGKILL),
        )
        assert aggregator.end() == 0
        assert stays.end() == 0
        assert [node.end() for node in others] == [-signal.SIGKILL, -signal.SIGKILL]
        assert re.findall(r"(n\d) has left", aggregator.errors) == ["n2", "n3"]
    run = Run.open(tmp_path / "run")
    assert [record.nodes for record in run.rounds] == [3, 3, 3, 2, 2, 2, 1, 1, 1, 1, 1]
    assert {record.round: record.missed for record in run.rounds if record.missed} == {
        4: (1,),
        7: (2,),
    }
    assert run.summary is not None
    assert (run.summary["status"], run.summary["stopped_by"]) == ("finished", "rounds")
    assert run.model().w.tobytes() == without_network(
        [[0, 1, 2]] * 3 + [[0, 2]] * 3 + [[0]] * 5
    )


def without_network(present: list[list[int]]) -> bytes:
    settings = Settings(
        model="softmax",
        method="paper",
        tau=5,
        rounds=10,
        budget=("time=1000000s",),
        seed=3,
        partition="files",
    )
    return train_with_absences(
        settings, Overrides(dataset=from_shards(sample_shards(3), None)), present
    )


def test_hanging_late_duplicate_and_returning_nodes(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def has_round_with(nodes: int, after: int) -> int:
        """Number of the first later round with `nodes` nodes, or 0."""
        return next(
            (
                each.round
                for each in records(run)
                if each.round > after and each.nodes == nodes
            ),
            0,
        )

    with commands(tmp_path) as start:
        start.write(3)
        aggregator = start.serve(
            "--nodes", "2", "--round-timeout", "3", "--out", "run", *OPTIONS
        )
        port = aggregator.port
        # The pace limits the number of rounds.
        first = start.join(port, "--data", "n1.npz", "--pace", "3", name="n1")
        hangs = start.failing(port, 2, 5, signal.SIGSTOP)
        alone = aggregator.wait_until(lambda: has_round_with(1, 5))
        assert counter(run, "late") == 0

        late = start.join(port, "--data", "n3.npz", name="n3")
        twice = start.join(port, "--data", "n1.npz", name="n1")
        joined = aggregator.wait_until(lambda: has_round_with(2, alone))
        assert twice.end() == 1
        assert twice.errors.splitlines()[-1:] == [
            f"fedbudget: 127.0.0.1:{port} refused n1: there is a node with the name n1 "
            "already; names must be unique"
        ]

        hangs.send(signal.SIGCONT)
        all_there = aggregator.wait_until(lambda: has_round_with(3, joined))
        aggregator.wait_until(lambda: counter(run, "late") == 1)

        assert late.end(signal.SIGKILL) == -signal.SIGKILL
        gone = aggregator.wait_until(lambda: has_round_with(2, all_there))
        again = start.join(port, "--data", "n3.npz", name="n3")
        aggregator.wait_until(lambda: has_round_with(3, gone))
        assert aggregator.end(signal.SIGTERM) == 130
        assert [node.end() for node in (first, hangs, again)] == [0, 0, 0]

    found = records(run)
    assert [record.round for record in found] == list(range(1, len(found) + 1))
    assert [record.nodes for record in found[:4]] == [2, 2, 2, 2]
    assert (found[4].nodes, found[4].missed) == (1, (1,))
    assert [record.nodes for record in found[5 : joined - 1]] == [1] * (joined - 6)
    assert not any(record.missed for record in found if record.nodes == 3)
    members = checkpoint(run).engine["members"]
    assert {name: member["numbers"] for name, member in members.items()} == {
        "n1": [0],
        "n2": [1],
        "n3": [2],
    }


def counter(run: Path, name: str) -> int:
    return int(checkpoint(run).engine["counters"][name])


@pytest.mark.slow
def test_too_few_nodes_until_budget_ends(tmp_path: Path) -> None:
    """Time passes while the aggregator waits for nodes."""
    run = tmp_path / "run"
    # With mini-batches, the best loss is not the minimum of the recorded losses.
    options = ["--model", "softmax", "--tau", "5", "--batch-size", "full"]
    options += ["--budget", "time=6s", "--out", "run"]
    with commands(tmp_path) as start:
        aggregator = start.serve("--nodes", "2", "--min-nodes", "2", *options)
        nodes = start.nodes(aggregator.port, 2, "--pace", "10")
        aggregator.wait_until(lambda: len(records(run)) >= 3)
        for node in nodes:
            assert node.end(signal.SIGKILL) == -signal.SIGKILL
        made_until_then = len(records(run))
        assert aggregator.end() == 0
    found, end = records(run), summary(run)
    assert len(found) <= made_until_then + 1
    assert all(record.nodes == 2 for record in found)
    assert (end["status"], end["stopped_by"], end["budget"]) == (
        "finished",
        "time",
        {"time": 6.0},
    )
    # Some time is reserved for closing the round.
    assert end["spent"]["time"] > 0.9 * 6 > found[-1].spent["time"]
    assert end["loss"] == found[-1].best_loss == min(record.loss for record in found)
    assert Run.open(run).model().w.shape == (3 * 7,)


@pytest.mark.slow
def test_aggregator_waits_for_minimum_of_nodes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with commands(tmp_path) as start:
        start.write(3)
        aggregator = start.serve(
            "--nodes", "2", "--min-nodes", "2", "--rounds", "12", "--out", "run", *OPTIONS
        )
        stays = start.join(aggregator.port, "--data", "n1.npz", name="n1")
        killed = start.failing(aggregator.port, 2, 6, signal.SIGKILL)
        assert killed.end() == -signal.SIGKILL
        aggregator.wait_for("n2 has left\n.* a round waits for nodes: 1 here, 2 needed")
        other = start.join(aggregator.port, "--data", "n3.npz", name="n3")
        aggregator.wait_for("n3 has joined: 60 samples")
        assert aggregator.end() == 0
        assert [node.end() for node in (stays, other)] == [0, 0]
    found = records(run)
    assert [record.nodes for record in found] == [2] * 13
    assert {record.round: record.missed for record in found if record.missed} == {6: (1,)}


@pytest.mark.slow
def test_spare_space_outlasts_a_full_disk(tmp_path: Path) -> None:
    """Other programs fill the disk; the run releases its reserved space and finishes."""
    with small_disk(tmp_path / "disk", 8 << 20) as disk, commands(tmp_path) as start:
        run = disk / "run"
        aggregator = start.serve(
            "--nodes", "1", "--rounds", "30", "--out", str(run), *OPTIONS
        )
        start.write(1)
        node = start.held(aggregator.port, 1, 20)
        aggregator.wait_until(lambda: len(records(run)) == 19)
        fill(disk)
        start.release_nodes()
        assert (aggregator.end(), node.end()) == (0, 0)
        assert [record.round for record in records(run)] == list(range(1, 32))
        assert not (run / SPARE).exists()


@pytest.mark.slow
def test_full_disk_ends_and_run_resumes(tmp_path: Path) -> None:
    """The error is one line; the run resumes to the same bits when there is space."""
    with small_disk(tmp_path / "disk", 8 << 20) as disk, commands(tmp_path) as start:
        run = disk / "run"
        aggregator = start.serve(
            "--nodes", "1", "--rounds", "30", "--out", str(run), *OPTIONS
        )
        port = aggregator.port
        start.write(1)
        node = start.held(port, 1, 20)
        aggregator.wait_until(lambda: len(records(run)) == 19)
        (run / SPARE).unlink()  # removes the reserved space as well
        fill(disk)
        start.release_nodes()
        assert aggregator.end() == 1
        assert aggregator.errors.splitlines()[-1].startswith("fedbudget: ")
        assert "No space left on device" in aggregator.errors.splitlines()[-1]
        assert "Traceback" not in aggregator.errors
        before = records(run)
        assert (len(before), checkpoint(run).state.round) == (19, 20)
        assert not (run / "summary.json").exists()
        node.wait_for("not connected")
        assert node.process.poll() is None

        (disk / "filler").unlink()
        aggregator = start.serve("--resume", str(run), port=port)
        assert aggregator.end() == 0
        assert node.end() == 0
        assert records(run)[: len(before)] == before
        assert [record.round for record in records(run)] == list(range(1, 32))
        whole = train(
            model="softmax",
            shards=sample_shards(1),
            tau=5,
            budget="time=1000000s",
            rounds=30,
            seed=3,
        )
        assert Run.open(run).model().w.tobytes() == whole.w.tobytes()
