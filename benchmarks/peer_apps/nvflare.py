"""W1 with NVIDIA FLARE: federated averaging of numpy arrays in its simulator.

The simulator uses one thread per core. A client is a script that requests the model,
trains it on its own samples and sends it back. The first client records the arrival of
the next model, which ends a round.
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_apps.common import Work, descend


def client(work: Path, result: Path) -> None:
    """Run a client; with more clients than threads, its process lasts one round."""
    import nvflare.client as flare

    flare.init()
    node = int(flare.get_site_name().rpartition("-")[2]) - 1
    x, y, batches = Work.of_node(work, node)
    while flare.is_running() and (received := flare.receive()) is not None:
        w, number = (
            np.asarray(received.params["numpy_key"], np.float32),
            int(received.current_round),
        )
        if node == 0 and number:
            _tell(result, w)
        if number < len(batches):
            w = descend(w, x, y, batches[number])
        flare.send(
            flare.FLModel(params={"numpy_key": w}, meta={"NUM_STEPS_CURRENT_ROUND": len(y)})
        )


def _tell(result: Path, w: Any) -> None:
    """Append the end time of a round, by the clock of the machine."""
    ended, ws = [time.monotonic()], [w]
    if result.exists():
        with np.load(result) as before:
            ended, ws = [*before["ended"], *ended], [*before["w"], *ws]
    np.savez(result, ended=ended, w=ws)


def main(work: Path, result: Path) -> None:
    from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
    from nvflare.recipe.sim_env import SimEnv

    with np.load(work) as found:
        rounds, nodes, features = (
            len(found["batches"]),
            len(found["rows"]),
            found["x"].shape[1],
        )
    recipe = NumpyFedAvgRecipe(
        name="w1",
        model=np.zeros(features, np.float32).tolist(),
        min_clients=nodes,
        num_rounds=rounds + 1,  # the last one only marks the end of the previous round
        train_script=__file__,
        train_args=f"--client {work} {result}",
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = SimEnv(
            num_clients=nodes, num_threads=os.cpu_count() or 1, workspace_root=folder
        )
        recipe.execute(environment)


if __name__ == "__main__":
    if sys.argv[1] == "--client":
        client(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
