"""Helpers of golden runs that are not public names of fedbudget."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run_on_flower(folder: Path, options: Mapping[str, Any]) -> Path:
    """Run Flower's simulation and return the folder of the run.

    Args:
      folder: a new folder for all files of Flower.
      options: settings, by the argument names of `fedbudget.train`.
    """
    from support.flower_processes import simulation

    folder.mkdir()
    nodes = options["nodes"]
    with simulation(folder) as flower:
        made = flower.run(
            "local",
            "--federation-config",
            f"num-supernodes={nodes} client-resources-num-cpus=1",
            patience=300.0,
            min_nodes=nodes,
            test="",
            **options,
        )
    return made.path
