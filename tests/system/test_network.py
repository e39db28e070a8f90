"""Runs over a real network stack, on this machine: the same as in one process, from files
of all kinds, ended in order.

What goes wrong on the way is in test_faults.py and test_resume.py.
"""

import csv
import os
import signal
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbudget import train
from fedbudget.arrays import Float64
from fedbudget.result import Result
from fedbudget.runs.folder import Run
from support.processes import but_wall, commands, made, records, summary

SIMULATED = ["--costs", "simulated", "--budget", "time=4s"]

# The same as in one process.


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
def test_with_simulated_costs_all_is_the_same_as_in_one_process(
    tmp_path: Path, method: str, tau: int | str, batch: str | None
) -> None:
    options: dict[str, Any] = {"method": method, "tau": tau, "rounds": 12}
    options |= {} if batch is None else {"batch_size": batch}
    run = local(tmp_path, *SIMULATED, *as_options(options))
    whole = train(dataset="digits", case=2, costs="simulated", budget="time=4s", **options)
    assert but_wall(run.rounds) == but_wall(whole.rounds)
    assert_same_end(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["paper", "frugal"])
@pytest.mark.parametrize("batch", ["full", 64])
def test_with_a_fixed_tau_measured_costs_change_nothing_in_w(
    tmp_path: Path, method: str, batch: int | str
) -> None:
    options: dict[str, Any] = {
        "method": method,
        "tau": 7,
        "rounds": 15,
        "batch_size": batch,
        "seed": 4,
        "compress": "none",
    }
    run = local(
        tmp_path, "--costs", "measured", "--budget", "time=1h", *as_options(options)
    )
    whole = train(dataset="digits", case=2, costs="measured", budget="time=1h", **options)
    assert_same_end(run, whole)
    apart = {"wall", "c", "b", "spent"}
    for ours, theirs in zip(run.rounds, whole.rounds, strict=True):
        assert {name: value for name, value in vars(ours).items() if name not in apart} == {
            name: value for name, value in vars(theirs).items() if name not in apart
        }


@pytest.mark.slow
def test_adaptive_with_measured_costs_its_rounds_go_together(tmp_path: Path) -> None:
    """τ follows from what rounds took, and is another each time; all that follows from τ
    can be told from it.
    """
    run = local(
        tmp_path, "--costs", "measured", "--budget", "time=5s", "--budget", "bytes=100MB"
    )
    assert [record.round for record in run.rounds] == list(range(1, len(run.rounds) + 1))
    assert [record.t for record in run.rounds] == np.cumsum(
        [record.tau for record in run.rounds]
    ).tolist()
    assert all(
        record.nodes == 5 and not record.missed and not record.left_out
        for record in run.rounds
    )
    for name in ("time", "bytes"):
        spent = [record.spent[name] for record in run.rounds]
        assert spent == sorted(spent)
    best = np.minimum.accumulate([record.loss for record in run.rounds])
    assert run.rounds[0].loss == pytest.approx(0.5)  # of the squared SVM at w = 0
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


def as_options(options: dict[str, Any]) -> list[str]:
    return [
        text
        for name, value in options.items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]


def assert_same_end(run: Run, whole: Result) -> None:
    assert run.model().w.tobytes() == whole.w.tobytes()
    assert run.summary is not None
    assert run.summary["accuracy"] == whole.accuracy
    assert run.summary["local_updates"] == whole.local_updates
    assert run.summary["stopped_by"] == whole.stopped_by


# Nodes with files of their own.


def test_csv_files_are_standardised_together_and_classes_are_those_of_all(
    tmp_path: Path,
) -> None:
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
        options = [
            "--model",
            "softmax",
            "--batch-size",
            "full",
            "--tau",
            "5",
            "--rounds",
            "40",
            "--out",
            "run",
        ]
        aggregator = start.serve(
            "--nodes",
            "2",
            *options,
            "--step-size",
            "0.5",
            "--costs",
            "simulated",
            "--budget",
            "time=1h",
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
    """The class that softmax gives each sample: a row of weights and a bias for each class."""
    rows = np.asarray(w, np.float64).reshape(3, -1)
    return (x @ rows[:, :-1].T + rows[:, -1]).argmax(axis=1)


@pytest.mark.slow
def test_npz_files_with_classes_that_only_one_node_has(tmp_path: Path) -> None:
    shards = [(x[y != node], y[y != node]) for node, (x, y) in enumerate(made(2))]
    for node, (x, y) in enumerate(shards):
        np.savez(tmp_path / f"{node}.npz", x=x, y=y)
    run = files_run(tmp_path, ["0.npz", "1.npz"])
    whole = train(
        model="softmax", shards=shards, costs="simulated", budget="time=4s", rounds=10
    )
    assert run.model().classes == ("0", "1", "2")
    assert run.model().standardization is None
    assert but_wall(run.rounds) == but_wall(whole.rounds)
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
    assert run.rounds[0].loss == pytest.approx(np.log(10))  # all classes alike, at w = 0
    assert run.rounds[-1].best_loss < 2


def files_run(folder: Path, names: list[str]) -> Run:
    with commands(folder) as start:
        aggregator = start.serve(
            "--nodes",
            "2",
            "--model",
            "softmax",
            "--rounds",
            "10",
            "--out",
            "run",
            *SIMULATED,
        )
        nodes = [
            start.join(aggregator.port, "--data", name, name=f"node-{number}")
            for number, name in enumerate(names)
        ]
        assert (aggregator.end(), nodes[0].end(), nodes[1].end()) == (0, 0, 0)
    return Run.open(folder / "run")


# Wrong use.


def test_what_cannot_be_is_refused_in_a_line(tmp_path: Path) -> None:
    token, other = (f"{name}-{os.urandom(12).hex()}" for name in ("right", "wrong"))
    with commands(tmp_path) as start:
        start.write(1)
        (tmp_path / "token").write_text(token)
        (tmp_path / "token").chmod(0o600)
        aggregator = start.serve(
            "--token-file", "token", "--model", "softmax", "--out", "run"
        )
        nobody = "127.0.0.1:1"
        wrong = {
            start.run("join", nobody): (2, "a node needs data"),
            start.run("join", nobody, "--shard", "6/5"): (
                2,
                "shards are numbered from 1 to 5",
            ),
            start.run("join", nobody, "--shard", "second"): (2, "must be I/N, such as 2/5"),
            start.run("join", nobody, "--data", "n2.npz"): (2, "n2.npz does not exist"),
            start.run("join", nobody, "--data", "n1.npz", "--give-up-after", "1"): (
                1,
                "could not be reached for 1 seconds",
            ),
            start.run("join", "10.1.2.3:7700", "--data", "n1.npz"): (2, "without TLS"),
            start.run("serve", "0.0.0.0:0"): (2, "without TLS"),
            start.run("serve", f"127.0.0.1:{aggregator.port}"): (
                2,
                "cannot be listened on",
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
        assert aggregator.end(signal.SIGTERM) == 130  # there was no run yet
    assert not (tmp_path / "run").exists()


# The end.


def test_a_node_and_then_the_aggregator_are_told_to_stop(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with commands(tmp_path) as start:
        aggregator = start.serve(
            "--nodes", "2", "--model", "softmax", "--budget", "time=1h", "--out", "run"
        )
        stays, leaves = start.nodes(aggregator.port, 2)
        aggregator.wait_until(lambda: len(records(run)) >= 5)

        assert leaves.end(signal.SIGINT) == 0
        assert leaves.errors.splitlines()[-1].startswith("n2: leaving; took part in ")
        before = len(records(run))
        aggregator.wait_until(lambda: len(records(run)) >= before + 5)
        assert records(run)[-1].nodes == 1

        assert (aggregator.end(signal.SIGTERM), stays.end()) == (0, 0)
        assert stays.errors.splitlines()[-1].startswith(
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
def test_where_no_run_begins_nodes_have_failed_too(tmp_path: Path) -> None:
    """All three say why, and none ends as if there had been a run."""
    with commands(tmp_path) as start:
        aggregator = start.serve(
            "--nodes", "2", "--model", "softmax", "--budget", "bytes=10"
        )
        nodes = start.nodes(aggregator.port, 2)
        assert aggregator.end() == 2
        assert [node.end() for node in nodes] == [1, 1]
        for command in (aggregator, *nodes):
            assert "bytes" in command.errors.splitlines()[-1]
