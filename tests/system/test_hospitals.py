"""Three hospitals over TLS: no honest one is silenced or named as an outlier."""

from pathlib import Path

import numpy as np
import pytest

import fedbudget
from support.hospitals import COLUMNS, LOWEST_LOSS, read_hospital, write_hospitals
from support.processes import Commands, commands

TABLES = ["--target", "outcome"]
NAMED = ("reported", "do not count", "were shortened")
"""Parts of the warnings about nodes."""


def train_over_tls(start: Commands, sites: Path, out: str, budget: str) -> str:
    """Train with three nodes, and return the aggregator's log."""
    secured = ["--cert", "certs/aggregator.pem", "--key", "certs/aggregator.key"]
    options = ["--nodes", "3", "--model", "softmax", "--budget", budget, "--out", out]
    aggregator = start.serve(*options, *TABLES, *secured)
    joining = ["--ca", "certs/ca.pem", *TABLES]
    nodes = [
        start.join(
            aggregator.port, "--data", f"{sites.name}/{site}.csv", *joining, name=site
        )
        for site in COLUMNS
    ]
    assert aggregator.end() == 0
    assert [node.end() for node in nodes] == [0, 0, 0]
    return aggregator.errors


def site_losses(run: Path, sites: Path) -> dict[str, float]:
    """Return the mean training loss of a run's model at each hospital."""
    model = fedbudget.load(run)
    losses = {}
    for site in COLUMNS:
        rows, outcomes = read_hospital(sites, site)
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        known = [model.classes.index(outcome) for outcome in outcomes]
        chances = model.predict_proba(columns)[np.arange(len(rows)), known]
        losses[site] = float(-np.log(np.maximum(chances, 1e-30)).mean())
    return losses


def assert_fair(run: Path, sites: Path, log: str) -> None:
    """Check the loss at all hospitals, and that the log names none."""
    losses = site_losses(run, sites)
    sizes = [len(read_hospital(sites, site)[1]) for site in losses]
    assert np.average(list(losses.values()), weights=sizes) < 0.25, losses
    assert losses["gamma"] < 0.3, losses
    assert not [line for line in log.splitlines() if any(part in line for part in NAMED)]


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    return write_hospitals(tmp_path / "sites")


def test_no_hospital_is_harmed(sites: Path) -> None:
    """When gamma's rising loss counted as the median, 6 of 8 such runs ended above 0.25,
    most of them with a loss of 24 at gamma.
    """
    with commands(sites.parent) as start:
        assert start.run("certs", "certs").end() == 0
        log = train_over_tls(start, sites, "run", "time=5s")
    assert_fair(sites.parent / "run", sites, log)


@pytest.mark.slow
def test_no_hospital_is_harmed_in_thirty_runs(sites: Path) -> None:
    with commands(sites.parent) as start:
        assert start.run("certs", "certs").end() == 0
        for number in range(30):
            log = train_over_tls(start, sites, f"run-{number}", "time=15s")
            assert_fair(sites.parent / f"run-{number}", sites, log)


def test_simulation_agrees(sites: Path) -> None:
    """In one process the same tables give the lowest loss."""
    result = fedbudget.train(
        dataset=str(sites),
        target="outcome",
        model="softmax",
        budget="time=200s",
        costs="simulated",
        test_share=0,
        batch_size="full",
        validation=0,
    )
    assert result.loss == pytest.approx(LOWEST_LOSS, abs=0.005)
