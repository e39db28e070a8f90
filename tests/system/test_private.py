"""Private runs with real processes: a node's own limit, and an aggregator that is killed."""

import json
import signal
from pathlib import Path

import pytest

from fedbudget.engines.noise import PAID, paid_in
from fedbudget.resources.privacy import epsilon_of, rho_of
from support.processes import commands, summary

RUN = ("--model", "softmax", "--nodes", "2", "--budget", "time=120s", "--out", "run")


@pytest.mark.slow
def test_a_node_refuses_beyond_its_limit(tmp_path: Path) -> None:
    """One that has told much already: the run goes on without it, and it says why."""
    told = tmp_path / "told.json"
    told.write_text(
        json.dumps(
            {"rho": rho_of(3.9, 1e-5), "runs": {"earlier": {"rho": 0.4, "round": 9}}}
        )
    )
    with commands(tmp_path) as start:
        aggregator = start.serve(*RUN, "--budget", "privacy=6", "--rounds", "4")
        limited = ("--privacy-limit", "4", "--privacy-account", str(told))
        careful = start.join(
            aggregator.port,
            "--dataset",
            "digits",
            "--shard",
            "1/2",
            *limited,
            name="careful",
        )
        start.join(aggregator.port, "--dataset", "digits", "--shard", "2/2", name="other")
        assert careful.end() == 1
        assert "--privacy-limit is ε = 4" in careful.errors
        assert aggregator.end() == 0
    assert summary(tmp_path / "run")["spent"]["privacy"] <= 6
    assert rho_of(3.9, 1e-5) <= json.loads(told.read_text())["rho"] < rho_of(4.0, 1e-5)


def assert_paid_when_killed(folder: Path, rounds: int, *options: str) -> None:
    """The aggregator dies in round 7, which nodes have been asked for, and goes on to the
    end.

    Args:
      rounds: that were paid for by then.
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
        start.let_go()
        assert again.end() == 0
    assert 0 < died_with < paid_in(run) <= rho_of(4.0, 1e-5)
    assert summary(run)["spent"]["privacy"] <= 4


@pytest.mark.slow
def test_a_killed_aggregator_has_paid_for_what_it_made_known(tmp_path: Path) -> None:
    assert_paid_when_killed(tmp_path, 6, "--budget", "privacy=4")
    assert summary(tmp_path / "run")["stopped_by"] == "privacy"


SAMPLES = ("--budget", "privacy=4", "--privacy-unit", "sample")


@pytest.mark.slow
def test_nodes_that_protect_samples_keep_a_limit_of_samples(tmp_path: Path) -> None:
    """One whose limit is of nodes refuses; one whose limit is of samples pays for what it
    has told.
    """
    told = tmp_path / "told.json"
    limited = ("--privacy-limit", "6", "--privacy-account", str(told))
    with commands(tmp_path) as start:
        aggregator = start.serve(*RUN, *SAMPLES, "--rounds", "5")
        other_unit = start.join(
            aggregator.port,
            "--dataset",
            "digits",
            "--shard",
            "1/3",
            *limited,
            name="other-unit",
        )
        of_samples = (*limited, "--privacy-unit", "sample")
        start.join(
            aggregator.port,
            "--dataset",
            "digits",
            "--shard",
            "2/3",
            *of_samples,
            name="careful",
        )
        start.join(aggregator.port, "--dataset", "digits", "--shard", "3/3", name="third")
        assert other_unit.end() == 1
        assert "protects single samples" in other_unit.errors
        assert aggregator.end() == 0
    spent = summary(tmp_path / "run")["spent"]["privacy"]
    account = json.loads(told.read_text())
    assert account["unit"] == "sample"
    assert 0 < spent <= 4
    assert epsilon_of(account["rho"], 1e-5) == pytest.approx(spent, abs=0.01)


@pytest.mark.slow
def test_a_killed_aggregator_has_paid_for_what_it_asked_of_samples(tmp_path: Path) -> None:
    """Of the seventh round too."""
    assert_paid_when_killed(tmp_path, 7, *SAMPLES)
