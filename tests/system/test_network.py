"""Runs over loopback: equal to runs in one process, with all file formats, orderly ends.

Faults are tested in test_faults.py and test_resume.py.
"""

import csv
import os
import signal
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbudget import train
from fedbudget.arrays import Float64
from fedbudget.result import Result
from fedbudget.runs.folder import Run
from fedbudget.runs.record import RoundRecord
from support.processes import (
    cli_options,
    commands,
    records,
    sample_shards,
    summary,
    without_wall,
)

SIMULATED = ["--costs", "simulated", "--budget", "time=4s"]

# Equality with runs in one process.


@pytest.mark.parametrize(
    ("method", "tau", "batch"),
    [
        ("frugal", "adaptive", None),
        ("accelerated", "adaptive", None),
        pytest.param("accelerated", "adaptive", "full", marks=pytest.mark.slow),
        pytest.param("frugal", "adaptive", "full", marks=pytest.mark.slow),
        pytest.param("paper", "adaptive", None, marks=pytest.mark.slow),
        pytest.param("paper", "adaptive", "full", marks=pytest.mark.slow),
        pytest.param("frugal", 5, None, marks=pytest.mark.slow),
        pytest.param("frugal", 5, "full", marks=pytest.mark.slow),
        pytest.param("paper", 5, None, marks=pytest.mark.slow),
        pytest.param("paper", 5, "full", marks=pytest.mark.slow),
    ],
)
def test_simulated_costs_equal_one_process(
    tmp_path: Path, method: str, tau: int | str, batch: str | None
) -> None:
    options: dict[str, Any] = {"method": method, "tau": tau, "rounds": 12}
    options |= {} if batch is None else {"batch_size": batch}
    run = local(tmp_path, *SIMULATED, *cli_options(**options))
    whole = train(dataset="digits", case=2, costs="simulated", budget="time=4s", **options)
    assert without_wall(run.rounds) == without_wall(whole.rounds)
    assert_same_end(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["paper", "frugal"])
@pytest.mark.parametrize("batch", ["full", 64])
def test_measured_costs_do_not_change_w(
    tmp_path: Path, method: str, batch: int | str
) -> None:
    """With a fixed τ, w does not depend on costs."""
    options: dict[str, Any] = {
        "method": method,
        "tau": 7,
        "rounds": 15,
        "batch_size": batch,
        "seed": 4,
        "compress": "none",
        "validation": 0.0,  # measured costs decide which rounds validate
    }
    run = local(
        tmp_path, "--costs", "measured", "--budget", "time=1h", *cli_options(**options)
    )
    whole = train(dataset="digits", case=2, costs="measured", budget="time=1h", **options)
    assert_same_end(run, whole)
    assert without_costs(run.rounds) == without_costs(whole.rounds)


def without_costs(rounds: Sequence[RoundRecord]) -> list[dict[str, Any]]:
    measured = {"c", "b", "spent", "expected_c", "expected_b"}
    return [
        {name: value for name, value in record.items() if name not in measured}
        for record in without_wall(rounds)
    ]


@pytest.mark.slow
def test_records_are_consistent_with_measured_costs(tmp_path: Path) -> None:
    """τ depends on measured times; everything that follows from τ is checked."""
    options = cli_options(model="svm", costs="measured", round_timeout=60)
    options += cli_options(budget=["time=5s", "bytes=100MB"])
    run = local(tmp_path, *options)
    assert [record.round for record in run.rounds] == list(range(1, len(run.rounds) + 1))
    taus = [round(record.effective_tau) for record in run.rounds]
    assert [record.t for record in run.rounds] == np.cumsum(taus).tolist()
    assert all(
        record.nodes == 5 and not record.missed and not record.left_out
        for record in run.rounds
    )
    for name in ("time", "bytes"):
        spent = [record.spent[name] for record in run.rounds]
        assert spent == sorted(spent)
    best = np.minimum.accumulate([record.loss for record in run.rounds])
    assert run.rounds[0].loss == pytest.approx(0.5)  # squared SVM at w = 0
    assert best[-1] < 0.4
    assert run.summary is not None
    assert run.summary["stopped_by"] in ("time", "bytes")
    assert run.summary["sources"] == {"time": "measured", "bytes": "measured"}


def local(folder: Path, *options: str) -> Run:
    with commands(folder) as start:
        command = start.run(
            "local", "--nodes", "5", "--case", "2", "--out", "run", "--json", *options
        )
        assert command.end() == 0
        assert "Traceback" not in command.errors
    return Run.open(folder / "run")


def assert_same_end(run: Run, whole: Result) -> None:
    assert run.model().w.tobytes() == whole.w.tobytes()
    assert run.summary is not None
    assert run.summary["accuracy"] == whole.accuracy
    assert run.summary["local_updates"] == whole.local_updates
    assert run.summary["stopped_by"] == whole.stopped_by


# Nodes with their own files.


def test_csv_files_share_standardization_and_classes(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    height = [rng.normal(170, 8, 50), rng.normal(120, 10, 30)]
    weight = [rng.normal(70, 9, 50), rng.normal(25, 4, 30)]
    kinds = [["adult"] * 25 + ["elder"] * 25, ["child"] * 29 + ["adult"]]
    for node in (0, 1):
        with (tmp_path / f"{node}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["height", "kind", "weight"])
            writer.writerows(zip(height[node], kinds[node], weight[node], strict=True))
    with commands(tmp_path) as start:
        options = cli_options(
            model="softmax", batch_size="full", tau=5, rounds=40, out="run"
        )
        aggregator = start.serve(
            "--nodes",
            "2",
            *options,
            *cli_options(step_size=0.5, costs="simulated", budget="time=1h"),
        )
        nodes = [
            start.join(
                aggregator.port,
                "--data",
                f"{node}.csv",
                "--target",
                "kind",
                name=f"node-{node}",
            )
            for node in (0, 1)
        ]
        assert (aggregator.end(), nodes[0].end(), nodes[1].end()) == (0, 0, 0)
    saved = Run.open(tmp_path / "run").model()
    assert saved.classes == ("adult", "child", "elder")
    x = np.column_stack([np.concatenate(height), np.concatenate(weight)])
    assert saved.standardization is not None
    # A .csv is read as float32.
    np.testing.assert_allclose(saved.standardization.mean, x.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(saved.standardization.deviation, x.std(axis=0), rtol=1e-6)
    y = [saved.classes.index(name) for name in kinds[0] + kinds[1]]
    assert (
        predicted(saved.w, (x - x.mean(axis=0)) / x.std(axis=0))[y.index(1) :].tolist()[:29]
        == [1] * 29
    )


def predicted(w: Any, x: Float64) -> Any:
    """Classes predicted by softmax regression with three classes, [samples]."""
    rows = np.asarray(w, np.float64).reshape(3, -1)
    return (x @ rows[:, :-1].T + rows[:, -1]).argmax(axis=1)


@pytest.mark.slow
def test_npz_files_with_different_classes(tmp_path: Path) -> None:
    shards = [(x[y != node], y[y != node]) for node, (x, y) in enumerate(sample_shards(2))]
    for node, (x, y) in enumerate(shards):
        np.savez(tmp_path / f"{node}.npz", x=x, y=y)
    run = files_run(tmp_path, ["0.npz", "1.npz"])
    whole = train(
        model="softmax", shards=shards, costs="simulated", budget="time=4s", rounds=10
    )
    assert run.model().classes == ("0", "1", "2")
    assert run.model().standardization is None
    assert without_wall(run.rounds) == without_wall(whole.rounds)
    assert run.model().w.tobytes() == whole.w.tobytes()


@pytest.mark.slow
def test_idx_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    for node in (0, 1):
        labels = np.array([node, node + 1, 7, 9] * 6, np.uint8)
        images = (25 * labels[:, None, None] + rng.integers(0, 25, (24, 4, 5))).astype(
            np.uint8
        )
        header = struct.pack(">4B3I", 0, 0, 8, 3, *images.shape)
        (tmp_path / f"{node}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        (tmp_path / f"{node}-labels-idx1-ubyte").write_bytes(
            struct.pack(">4BI", 0, 0, 8, 1, 24) + labels.tobytes()
        )
    run = files_run(tmp_path, ["0-images-idx3-ubyte", "1-images-idx3-ubyte"])
    assert run.model().classes == tuple("0123456789")
    assert run.model().w.shape == (10 * (4 * 5 + 1),)
    assert [record.nodes for record in run.rounds] == [2] * 11
    assert run.rounds[0].loss == pytest.approx(np.log(10))  # equal probabilities at w = 0
    assert run.rounds[-1].best_loss < 2


def files_run(folder: Path, names: list[str]) -> Run:
    with commands(folder) as start:
        aggregator = start.serve(
            *cli_options(nodes=2, model="softmax", rounds=10, out="run"),
            *SIMULATED,
        )
        nodes = [
            start.join(aggregator.port, "--data", name, name=f"node-{number}")
            for number, name in enumerate(names)
        ]
        assert (aggregator.end(), nodes[0].end(), nodes[1].end()) == (0, 0, 0)
    return Run.open(folder / "run")


# Wrong use.


def test_wrong_commands_fail_with_one_line(tmp_path: Path) -> None:
    token, other = (f"{name}-{os.urandom(12).hex()}" for name in ("right", "wrong"))
    with commands(tmp_path) as start:
        start.write(1)
        (tmp_path / "token").write_text(token)
        (tmp_path / "token").chmod(0o600)
        aggregator = start.serve(
            "--token-file", "token", "--model", "softmax", "--out", "run"
        )
        closed = "127.0.0.1:1"
        wrong = {
            start.run("join", closed): (2, "a node needs data"),
            start.run("join", closed, "--shard", "6/5"): (
                2,
                "shards are numbered from 1 to 5",
            ),
            start.run("join", closed, "--shard", "second"): (2, "must be I/N, such as 2/5"),
            start.run("join", closed, "--data", "n2.npz"): (2, "n2.npz does not exist"),
            start.run("join", closed, "--data", "n1.npz", "--give-up-after", "1"): (
                1,
                "could not be reached for 1 seconds",
            ),
            start.run("join", "10.1.2.3:7700", "--data", "n1.npz"): (2, "without TLS"),
            start.run("serve", "0.0.0.0:0"): (2, "without TLS"),
            start.run("serve", f"127.0.0.1:{aggregator.port}"): (
                2,
                "cannot listen on",
            ),
            start.run(
                "join",
                f"127.0.0.1:{aggregator.port}",
                "--data",
                "n1.npz",
                FEDBUDGET_TOKEN=other,
            ): (
                1,
                "has a wrong token or none",
            ),
        }
        for command, (code, reason) in wrong.items():
            assert command.end() == code, command.errors
            assert reason in command.errors.splitlines()[-1]
            assert command.errors.splitlines()[-1].startswith("fedbudget: ")
            assert "Traceback" not in command.errors
        assert "is refused" in aggregator.errors
        assert all(
            secret not in each.errors for secret in (token, other) for each in start.started
        )
        assert aggregator.process.poll() is None
        assert aggregator.end(signal.SIGTERM) == 130  # before the run started
    assert not (tmp_path / "run").exists()


# The end.


def test_node_then_aggregator_are_stopped(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with commands(tmp_path) as start:
        aggregator = start.serve(
            *("--nodes", "2", "--model", "softmax", "--budget", "time=1h", "--out", "run"),
            "--spend-all",
        )
        stays, leaves = start.nodes(aggregator.port, 2)
        aggregator.wait_until(lambda: len(records(run)) >= 5)

        assert leaves.end(signal.SIGINT) == 0
        assert leaves.errors.splitlines()[-1][9:].startswith("n2: leaving; took part in ")
        before = len(records(run))
        aggregator.wait_until(lambda: len(records(run)) >= before + 5)
        assert records(run)[-1].nodes == 1

        assert (aggregator.end(signal.SIGTERM), stays.end()) == (130, 0)
        assert stays.errors.splitlines()[-1][9:].startswith(
            "n1: the aggregator was interrupted; took part in "
        )
        assert "Traceback" not in aggregator.errors + stays.errors + leaves.errors
    found, end = records(run), summary(run)
    assert (end["status"], end["stopped_by"]) == ("interrupted", "interrupted")
    assert end["loss"] == found[-1].best_loss
    assert Run.open(run).model().w.shape == (3 * 7,)
    assert [record.nodes for record in found] == sorted(
        (record.nodes for record in found), reverse=True
    )


@pytest.mark.slow
def test_nodes_fail_if_no_run_starts(tmp_path: Path) -> None:
    """Aggregator and nodes print the reason and end with an error."""
    with commands(tmp_path) as start:
        aggregator = start.serve(
            "--nodes", "2", "--model", "softmax", "--budget", "bytes=10"
        )
        nodes = start.nodes(aggregator.port, 2)
        assert aggregator.end() == 2
        assert [node.end() for node in nodes] == [1, 1]
        for command in (aggregator, *nodes):
            assert "bytes" in command.errors.splitlines()[-1]
