"""Node processes protect themselves, and only one aggregator writes to a run."""

import signal
import time
from pathlib import Path

import pytest

from fedbudget.runs.folder import Run
from support.processes import commands, records

OPTIONS = ["--model", "softmax", "--step-size", "0.05", "--budget", "time=1h"]


def test_node_stops_during_long_computation(tmp_path: Path) -> None:
    """The node stops within 10 s in a round of a billion local updates."""
    with commands(tmp_path) as start:
        aggregator = start.serve(
            "--nodes", "1", "--tau", "1000000000", "--out", "run", *OPTIONS
        )
        (node,) = start.nodes(aggregator.port, 1, "--max-tau", "1000000000")
        node.wait_for("joined")
        time.sleep(0.5)  # the node is computing now
        began = time.monotonic()
        assert node.end(signal.SIGTERM, patience=20) == 0
        assert time.monotonic() - began < 10
        assert "leaving; took part in 0 rounds" in node.errors
        aggregator.end(signal.SIGTERM)


@pytest.mark.slow
def test_node_refuses_mini_batches_of_one(tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        aggregator = start.serve(
            "--nodes", "1", "--batch-size", "1", "--rounds", "3", "--out", "run", *OPTIONS
        )
        (node,) = start.nodes(aggregator.port, 1)
        assert node.end() == 1
        assert "mini-batches of 1 samples are requested" in node.errors
        assert "Traceback" not in node.errors
        aggregator.wait_for("n1 at ipv4:127.0.0.1")
        assert "it will not take part: mini-batches of 1 samples" in aggregator.errors
        aggregator.end(signal.SIGTERM)


@pytest.mark.slow
def test_two_aggregators_on_one_folder(tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        first = start.serve(
            "--nodes", "1", "--tau", "2", "--out", "run", "--costs", "simulated", *OPTIONS
        )
        start.nodes(first.port, 1)
        first.wait_until(lambda: len(records(tmp_path / "run")) > 3)
        second = start.serve("--resume", "run")
        assert second.end() == 2
        assert f"is being written to by process {first.process.pid} on " in second.errors
        first.end(signal.SIGKILL)
        third = start.serve("--resume", "run", "--rounds", "2000")
        start.nodes(third.port, 1, "--give-up-after", "10")
        assert third.end() == 0
    found = [record.round for record in Run.open(tmp_path / "run").rounds]
    assert found == list(range(1, 2002))
