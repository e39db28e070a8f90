"""Secure aggregation between processes: nodes killed in every phase, killed aggregator."""

import signal
from functools import partial
from pathlib import Path

import pytest

from support.masked_processes import join_killed_at
from support.processes import cli_options, commands, records, summary

OPTIONS = cli_options(
    costs="simulated", budget="time=4s", model="softmax", secure_aggregation=True, seed=2
)


@pytest.mark.slow
def test_nodes_killed_in_every_phase(tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        aggregator = start.serve(
            "--nodes", "6", "--secure-threshold", "0.51", "--out", "run", *OPTIONS
        )
        port = aggregator.port
        start.write(6)
        for node, (what, when) in enumerate(
            [("Group", 3), ("Relay", 5), ("Survivors", 7)], 1
        ):
            join_killed_at(start, port, node, what, when)
        others = [
            start.join(
                port,
                *("--data", f"n{node}.npz", "--secure-aggregation"),
                *("--secure-threshold", "0.51"),
                name=f"n{node}",
            )
            for node in (4, 5, 6)
        ]
        assert aggregator.end() == 0
        assert [node.end() for node in others] == [0, 0, 0]
    found = records(tmp_path / "run")
    assert [each.nodes for each in found[:8]] == [6, 6, 5, 5, 4, 4, 4, 3]
    assert summary(tmp_path / "run")["stopped_by"] == "time"


def has_rounds(run: Path) -> bool:
    return (run / "rounds.jsonl").exists() and len(records(run)) > 3


@pytest.mark.slow
def test_killed_aggregator_resumes_with_same_nodes(tmp_path: Path) -> None:
    ends = []
    for killed in (False, True):
        folder = tmp_path / str(killed)
        folder.mkdir()
        with commands(folder) as start:
            aggregator = start.serve("--nodes", "4", "--out", "run", *OPTIONS)
            port = aggregator.port
            nodes = start.nodes(port, 4, "--secure-aggregation")
            if killed:
                aggregator.wait_until(partial(has_rounds, folder / "run"))
                assert aggregator.end(signal.SIGKILL) == -signal.SIGKILL
                aggregator = start.serve("--resume", "run", port=port)
            assert aggregator.end() == 0
            assert [node.end() for node in nodes] == [0] * 4
        ends.append([each.loss for each in records(folder / "run")])
    assert ends[0] == pytest.approx(ends[1], abs=1e-4)
