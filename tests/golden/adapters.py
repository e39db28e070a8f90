"""What golden runs use beyond the public names of fedbudget."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run_on_flower(folder: Path, options: Mapping[str, Any]) -> Path:
    """Makes a run in Flower's simulation and returns its folder.

    Args:
      folder: a new folder for everything that Flower writes.
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
