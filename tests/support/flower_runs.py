"""Runs of both Flower apps on a grid in this process, and on the in-process engine."""

from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

import fedbudget
from fedbudget.flower import aggregate
from fedbudget.result import Result
from support.flower_grid import LocalGrid, partitions, run_config

FIXED: dict[str, Any] = {
    "dataset": "digits",
    "partition": "case:2",
    "seed": 3,
    "tau": 4,
    "rounds": 5,
    "costs": "simulated",
}
FIXED |= {"budget": "time=1000s"}


def run(out: Path, nodes: int = 3, local: LocalGrid | None = None, **more: Any) -> Result:
    config = run_config(**{**FIXED, "nodes": nodes, "out": str(out / "run"), **more})
    return aggregate(
        local or LocalGrid(config, partitions(nodes)),
        Context(7, 1, {}, RecordDict(), config),
        plot=False,
    )


def train_in_process(nodes: int = 3, **more: Any) -> Result:
    """Train with the same settings on the in-process engine."""
    return fedbudget.train(**{**FIXED, "nodes": nodes, **more})


def local(nodes: int = 3, **more: Any) -> LocalGrid:
    return LocalGrid(run_config(**{**FIXED, "nodes": nodes, **more}), partitions(nodes))
