"""Private runs with secure aggregation: nodes killed in every phase, killed aggregator."""

import json
import signal
from pathlib import Path

import pytest

from fedbudget.engines.noise import PAID, paid_in
from fedbudget.resources.privacy import epsilon_of, rho_of
from support.masked_processes import join_killed_at
from support.processes import cli_options, commands, records, summary

OPTIONS = cli_options(
    costs="simulated", model="softmax", secure_aggregation=True, out="run"
)
BUDGETS = ["--budget", "time=20s", "--budget", "privacy=6"]


def recorded_rho(run: Path) -> float:
    """ρ of all recorded rounds."""
    return sum(each.private["rho"] for each in records(run) if each.private is not None)


@pytest.mark.slow
def test_nodes_killed_in_every_phase(tmp_path: Path) -> None:
    """Rounds continue with the other nodes, ε is never exceeded, and the account of a node
    covers all its answers.
    """
    account = tmp_path / "account.json"
    with commands(tmp_path) as start:
        aggregator = start.serve(
            "--nodes", "6", "--secure-threshold", "0.51", *OPTIONS, *BUDGETS
        )
        port = aggregator.port
        start.write(6)
        for node, (what, when) in enumerate(
            [("Group", 3), ("Relay", 5), ("Survivors", 7)], 1
        ):
            join_killed_at(start, port, node, what, when)
        limited = ("--privacy-limit", "6.5", "--privacy-account", str(account))
        masked = ("--secure-aggregation", "--secure-threshold", "0.51")
        others = [start.join(port, "--data", "n4.npz", *masked, *limited, name="n4")]
        others += [
            start.join(port, "--data", f"n{node}.npz", *masked, name=f"n{node}")
            for node in (5, 6)
        ]
        assert aggregator.end() == 0
        assert [node.end() for node in others] == [0, 0, 0]
    run = tmp_path / "run"
    assert [each.nodes for each in records(run)[:8]] == [6, 6, 5, 5, 4, 4, 4, 3]
    assert summary(run)["stopped_by"] == "privacy"
    assert summary(run)["spent"]["privacy"] <= 6
    assert summary(run)["spent"]["privacy"] == pytest.approx(
        epsilon_of(recorded_rho(run), 1e-5), abs=1e-3
    )
    assert paid_in(run) == pytest.approx(recorded_rho(run), rel=1e-9)
    assert json.loads(account.read_text())["rho"] >= recorded_rho(run) * (1 - 1e-9)


@pytest.mark.slow
def test_killed_aggregator_paid_for_opened_rounds(tmp_path: Path) -> None:
    """It resumes with the same nodes, which repeat their answers to a finished round."""
    run = tmp_path / "run"
    with commands(tmp_path) as start:
        aggregator = start.serve("--nodes", "4", *OPTIONS, *BUDGETS)
        port = aggregator.port
        nodes = start.nodes(port, 4, "--secure-aggregation")
        aggregator.wait_until(
            lambda: (
                (run / PAID).exists() and len((run / PAID).read_text().splitlines()) >= 4
            )
        )
        assert aggregator.end(signal.SIGKILL) == -signal.SIGKILL
        died_with = paid_in(run)
        again = start.serve("--resume", "run", port=port)
        assert again.end() == 0
        assert [node.end() for node in nodes] == [0] * 4
    assert 0 < died_with < paid_in(run) <= rho_of(6.0, 1e-5)
    assert recorded_rho(run) <= paid_in(run) * (1 + 1e-9)
    assert summary(run)["spent"]["privacy"] <= 6
    assert summary(run)["stopped_by"] == "privacy"
