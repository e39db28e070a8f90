"""Private runs with real processes: limits of nodes, and a killed aggregator."""

import json
import signal
from pathlib import Path

import pytest

from fedbudget.engines.noise import PAID, paid_in
from fedbudget.resources.privacy import epsilon_of, rho_of
from support.processes import commands, summary

RUN = ("--model", "softmax", "--nodes", "2", "--budget", "time=120s", "--out", "run")
DIGITS = ("--dataset", "digits", "--shard")


@pytest.mark.slow
def test_node_refuses_beyond_its_limit(tmp_path: Path) -> None:
    """A node close to its limit leaves with a reason; the run continues without it."""
    account = tmp_path / "account.json"
    account.write_text(
        json.dumps(
            {"rho": rho_of(3.9, 1e-5), "runs": {"earlier": {"rho": 0.4, "round": 9}}}
        )
    )
    with commands(tmp_path) as start:
        aggregator = start.serve(*RUN, "--budget", "privacy=6", "--rounds", "4")
        limit = ("--privacy-limit", "4", "--privacy-account", str(account))
        limited = start.join(aggregator.port, *DIGITS, "1/2", *limit, name="limited")
        start.join(aggregator.port, *DIGITS, "2/2", name="other")
        assert limited.end() == 1
        assert "--privacy-limit is ε = 4" in limited.errors
        assert aggregator.end() == 0
    assert summary(tmp_path / "run")["spent"]["privacy"] <= 6
    assert rho_of(3.9, 1e-5) <= json.loads(account.read_text())["rho"] < rho_of(4.0, 1e-5)


def assert_paid_when_killed(folder: Path, rounds: int, *options: str) -> None:
    """Kill the aggregator in round 7, after its broadcast, and resume the run to its end.

    Args:
      rounds: number of rounds paid for before the kill.
    """
    run = folder / "run"
    with commands(folder) as start:
        start.write(2)
        aggregator = start.serve(*RUN, *options)
        port = aggregator.port
        start.held(port, 1, 7)
        start.join(port, "--data", "n2.npz", name="n2")
        aggregator.wait_until(
            lambda: (
                (run / PAID).exists()
                and len((run / PAID).read_text().splitlines()) == rounds
            )
        )
        assert aggregator.end(signal.SIGKILL) == -signal.SIGKILL
        died_with = paid_in(run)
        again = start.serve("--resume", "run", port=port)
        start.release_nodes()
        assert again.end() == 0
    assert 0 < died_with < paid_in(run) <= rho_of(4.0, 1e-5)
    assert summary(run)["spent"]["privacy"] <= 4


@pytest.mark.slow
def test_killed_aggregator_paid_for_node_privacy(tmp_path: Path) -> None:
    assert_paid_when_killed(tmp_path, 6, "--budget", "privacy=4")
    assert summary(tmp_path / "run")["stopped_by"] == "privacy"


SAMPLES = ("--budget", "privacy=4", "--privacy-unit", "sample")


@pytest.mark.slow
def test_sample_privacy_needs_a_sample_limit(tmp_path: Path) -> None:
    """A node with a limit for nodes refuses; one with a limit for samples pays for its
    reports.
    """
    path = tmp_path / "account.json"
    limit = ("--privacy-limit", "6", "--privacy-account", str(path))
    with commands(tmp_path) as start:
        aggregator = start.serve(*RUN, *SAMPLES, "--rounds", "5")
        port = aggregator.port
        other_unit = start.join(port, *DIGITS, "1/3", *limit, name="other-unit")
        of_samples = (*limit, "--privacy-unit", "sample")
        start.join(port, *DIGITS, "2/3", *of_samples, name="limited")
        start.join(port, *DIGITS, "3/3", name="third")
        assert other_unit.end() == 1
        assert "protects single samples" in other_unit.errors
        assert aggregator.end() == 0
    spent = summary(tmp_path / "run")["spent"]["privacy"]
    account = json.loads(path.read_text())
    assert account["unit"] == "sample"
    assert 0 < spent <= 4
    assert epsilon_of(account["rho"], 1e-5) == pytest.approx(spent, abs=0.01)


@pytest.mark.slow
def test_killed_aggregator_paid_for_sample_privacy(tmp_path: Path) -> None:
    """The payment includes the seventh round, since nodes have received its broadcast."""
    assert_paid_when_killed(tmp_path, 7, *SAMPLES)
