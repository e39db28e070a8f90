"""Runs with a grid in this process, through both of the real apps; and the same on the
in-process engine.
"""

from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

import fedbudget
from fedbudget.flower import aggregate
from fedbudget.result import Result
from support.flower_grid import LocalGrid, asked, partitions

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
    config = asked(**{**FIXED, "nodes": nodes, "out": str(out / "run"), **more})
    return aggregate(
        local or LocalGrid(config, partitions(nodes)),
        Context(7, 1, {}, RecordDict(), config),
        plot=False,
    )


def here(nodes: int = 3, **more: Any) -> Result:
    """The same on the in-process engine."""
    return fedbudget.train(**{**FIXED, "nodes": nodes, **more})


def local(nodes: int = 3, **more: Any) -> LocalGrid:
    return LocalGrid(asked(**{**FIXED, "nodes": nodes, **more}), partitions(nodes))
