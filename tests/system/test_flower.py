"""Flower's real processes on loopback, deployed and in Flower's simulation."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbudget
from fedbudget.runs.folder import Run
from fedbudget.runs.record import average_tau
from support.flower_processes import Flower, fleet, simulation

PATIENCE = 300.0  # seconds for a run on a busy machine
SOON: dict[str, Any] = {
    "budget": "time=1000s",
    "costs": "simulated",
    "seed": 3,
    "partition": "case:2",
}

pytestmark = pytest.mark.xdist_group("flower")  # one shared fleet


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with two classes for all nodes; its reader imports quickly."""
    rng = np.random.default_rng(8)
    x = rng.normal(size=(300, 12)).astype(np.float32)
    path = tmp_path_factory.mktemp("data") / "two-classes.npz"
    np.savez(path, x=x, y=(x @ rng.normal(size=12) > 0).astype(np.int64))
    return str(path)


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flower]:
    """Three SuperNodes in another order than their partitions."""
    nodes = [f"partition-id={number} num-partitions=3" for number in (2, 0, 1)]
    with fleet(tmp_path_factory.mktemp("flower"), nodes) as started:
        yield started


def same_bits(
    flower: Flower, connection: str, data: str, *, nodes: int, **how: Any
) -> None:
    """Compare w of a Flower run with w of the in-process engine."""
    how = {**SOON, **how, "nodes": nodes, "dataset": data}
    found = (
        flower.run(connection, patience=PATIENCE, min_nodes=nodes, test="", **how).model().w
    )
    assert found.tobytes() == fedbudget.train(**how).w.tobytes()


@pytest.mark.slow
def test_deployed_run_equals_one_process(flower: Flower, data: str) -> None:
    same_bits(
        flower, "loopback", data, nodes=3, method="frugal", step_size=0.05, tau=4, rounds=2
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"method": "paper", "tau": 5},
        {"method": "frugal", "tau": 3},
        {"method": "paper", "model": "softmax"},
    ],
    ids=str,
)
def test_deployed_methods_equal_one_process(
    flower: Flower, data: str, how: dict[str, Any]
) -> None:
    same_bits(flower, "loopback", data, nodes=3, **{"rounds": 5, **how})


@pytest.mark.slow
def test_deployed_time_budget_and_large_tau(flower: Flower, data: str) -> None:
    """Most of a round's seconds are Flower's polling and processes, so τ grows."""
    seconds = 100
    made = flower.run(
        "loopback",
        dataset=data,
        test="",
        nodes=3,
        min_nodes=3,
        method="paper",
        budget=f"time={seconds}s",
        patience=PATIENCE,
    )
    assert made.summary is not None
    assert made.summary["stopped_by"] == "time"
    assert made.summary["spent"]["time"] <= 1.03 * seconds
    assert made.summary["sources"] == {"time": "measured"}
    assert average_tau([record.tau for record in made.rounds if record.tau]) > 5
    assert all(record.b["time"] > 10 * record.c["time"] for record in made.rounds)


@pytest.mark.slow
def test_deployed_run_saves_results_when_stopped(flower: Flower, data: str) -> None:
    how: dict[str, Any] = {
        **SOON,
        "dataset": data,
        "nodes": 3,
        "tau": 4,
        "method": "paper",
        "test": "",
    }
    _, out = flower.begin("loopback", **how)
    flower.wait(
        lambda: (
            (out / "rounds.jsonl").exists()
            and (out / "rounds.jsonl").read_text().count("\n") > 1
        ),
        PATIENCE,
    )
    number = re.findall(r"Successfully started run (\d+)", flower.log)[-1]
    flower.start("flwr", "stop", number, "loopback")
    flower.wait((out / "plot.png").exists, PATIENCE)
    made = Run.open(out)
    assert made.summary is not None
    assert made.summary["status"] == "interrupted"
    assert made.model().w.shape == (12,)


@pytest.mark.slow
def test_deployed_nodes_with_own_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    shards = [
        (rng.normal(size=(size, 6)).astype(np.float32), rng.integers(0, 2, size))
        for size in (30, 40)
    ]
    for number, (x, y) in enumerate(shards):
        np.savez(tmp_path / f"{number}.npz", x=x, y=y)
    with fleet(
        tmp_path, [f"data='{tmp_path / f'{number}.npz'}'" for number in (0, 1)]
    ) as flower:
        how: dict[str, Any] = {
            "model": "softmax",
            "batch_size": "full",
            "step_size": 0.1,
            "tau": 4,
            "rounds": 3,
        }
        made = flower.run(
            "loopback", patience=PATIENCE, nodes=2, min_nodes=2, test="", **SOON, **how
        )
    assert made.settings.dataset == "nodes"
    without = {name: value for name, value in SOON.items() if name != "partition"}
    # Flower assigns the node IDs in any order.
    either = [
        fedbudget.train(shards=order, **without, **how).w.tobytes()
        for order in (shards, shards[::-1])
    ]
    assert made.model().w.tobytes() in either


@pytest.mark.slow
def test_simulated_example_equals_one_process(tmp_path: Path, data: str) -> None:
    with simulation(tmp_path) as flower:
        same_bits(flower, "local", data, nodes=2, method="frugal", tau=4, rounds=6)
        more = ("--federation-config", "num-supernodes=3 client-resources-num-cpus=1")
        made = flower.run("local", *more, nodes=3, budget="time=5s", patience=PATIENCE)
        assert made.summary is not None
        assert made.rounds[0].nodes == 3
        assert made.summary["spent"]["time"] <= 1.03 * 5
        assert made.summary["accuracy"] is not None
        assert made.rounds[-1].best_loss < made.rounds[0].loss
