"""W1 with 50 nodes: fedbudget and Flower's simulation.

fedbudget makes a whole run through the public API on the in-process engine, with
records on disk. Flower runs the app of flower_simulation_app.py on its simulation
engine, which starts one Ray actor per core and sends each one message at a time. A
round lasts from one last report to the next, at the aggregator. fedbudget is measured
before and after Flower, and medians over rounds are compared. Both use the same initial
w, shards and mini-batches. The benchmark checks that w is the same after every round.

Flower and Ray keep their files in a temporary folder, send no telemetry and check for
no updates. Their processes end with the measurement, even if it fails.

`python -m benchmarks.flower_simulation NODES ROUNDS FILE` is the process of Flower's
simulation.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders import written
from benchmarks.flower import FlowerFailedError
from benchmarks.workload import dataset, settings
from fedbudget.arrays import Float32
from fedbudget.engines.engine import Engine, Observer
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import simulate
from fedbudget.protocol.state import Outcome, Round

NODES = 50
WARMING_UP = 2  # rounds that are not measured; the first loads the data
OUR_ROUNDS, FLOWER_ROUNDS = 300, 20  # measured in one turn
PATIENCE = 300.0  # seconds for Flower's whole turn


def compare_flower() -> dict[str, Any]:
    """Measure milliseconds per round of fedbudget and Flower.

    If Flower is missing or fails, the row has the reason instead: Flower is optional.
    """
    before, ours = our_turn()
    versions = _versions()
    if isinstance(versions, str):
        return {
            "nodes": NODES,
            "ours_milliseconds": median_milliseconds(before),
            "flower": versions,
        }
    try:
        taken, flowers = _flower_turn()
    except FlowerFailedError as error:
        return {
            "nodes": NODES,
            "ours_milliseconds": median_milliseconds(before),
            "flower": f"{error}",
        }
    after, _ = our_turn()
    np.testing.assert_allclose(flowers, ours[: len(flowers)], rtol=1e-4, atol=1e-6)
    milliseconds = {
        "ours": median_milliseconds(before + after),
        "flower": median_milliseconds(taken),
    }
    return {
        "nodes": NODES,
        "flower": " with ".join(f"{name} {version}" for name, version in versions.items()),
        **{f"{name}_milliseconds": value for name, value in milliseconds.items()},
        "flower_over_ours": milliseconds["flower"] / milliseconds["ours"],
    }


def median_milliseconds(seconds: list[float]) -> float:
    return 1000 * statistics.median(seconds)


def our_turn() -> tuple[list[float], list[Float32]]:
    """Return seconds of the measured rounds, and w after every round."""
    plan = simulate(settings(NODES, WARMING_UP + OUR_ROUNDS), Overrides(dataset=dataset()))
    ended: list[float] = []
    ws: list[Float32] = []

    class Timed(Engine):
        def run(self, *, observe: Observer, **rest: Any) -> Outcome:
            def observe_and_note(round_: Round, w: Float32) -> None:
                observe(round_, w)
                ended.append(time.perf_counter())
                ws.append(w)

            return plan.engine.run(observe=observe_and_note, **rest)

    written(replace(plan, engine=Timed()))()
    # A broadcast has the w of the previous round; the last one requests only a loss.
    return _rounds(ended[:-1]), ws[1:]


def _rounds(ended: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(ended[WARMING_UP - 1 :])]


def _versions() -> dict[str, str] | str:
    """Return the versions of Flower's requirements, or which one is missing."""
    found = {}
    for name in ("flwr", "ray"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            return f"{name} is not installed"
    return found


def _flower_turn() -> tuple[list[float], list[Float32]]:
    """Return the same for Flower.

    Raises:
      FlowerFailedError: Flower failed; the end of its output is on standard error.
    """
    with tempfile.TemporaryDirectory(prefix="flower-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        log, result = folder / "log", folder / "result.npz"
        try:
            _run(folder, log, result)
        except FlowerFailedError:
            print(
                "\n".join(log.read_text(errors="replace").splitlines()[-20:]),
                file=sys.stderr,
            )
            raise
        with np.load(result) as found:
            return _rounds(found["ended"].tolist()), list(found["w"])


def _run(folder: Path, log: Path, result: Path) -> None:
    here = {
        "FLWR_HOME": str(folder),
        "HOME": str(folder),
        "RAY_TMPDIR": str(folder),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [
        sys.executable,
        "-m",
        "benchmarks.flower_simulation",
        str(NODES),
        str(WARMING_UP + FLOWER_ROUNDS),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(result)],
            env={**os.environ, **here},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        raise FlowerFailedError(
            f"Flower's simulation did not finish in {PATIENCE:.0f} seconds"
        ) from None
    finally:
        if (
            process.poll() is None
        ):  # otherwise its number may belong to another process, and Ray has ended
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not result.exists():
        raise FlowerFailedError("Flower's simulation failed")


# Code of the simulation process.


def main(nodes: int, rounds: int, result: Path) -> None:
    from flwr.simulation import run_simulation

    from benchmarks.flower_simulation_app import client, server

    ended: list[float] = []
    ws: list[Float32] = []
    run_simulation(
        server(nodes, rounds, ended, ws),
        client,
        num_supernodes=nodes,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0}
        },  # one actor per core
    )
    np.savez(result, ended=ended, w=ws)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
