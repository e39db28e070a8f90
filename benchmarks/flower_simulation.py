"""W1 with 50 nodes here and on Flower's own simulation, side by side.

Ours is a whole run by the public path on the in-process engine, its records written to disk. Flower's is the app of
flower_simulation_app.py on its simulation engine, which starts as many Ray actors as there are cores and sends each a
message at a time. A round is from one last report to the next, at the aggregator; ours is measured before and after
Flower's, and medians over rounds are compared. The two have the same start, shards and mini-batches, and must have the
same w after every round: only then was it the same work.

All that Flower and Ray keep is in a temporary folder, they send no telemetry and look for no updates, and their
processes are ended with the measurement, whatever comes of it.

`python -m benchmarks.flower_simulation NODES ROUNDS FILE` is the process that Flower's simulation runs in.
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
from fedbudget.protocol.aggregator import Outcome, Round
from fedbudget.protocol.messages import Broadcast

NODES = 50
WARMING_UP = 2  # rounds at the beginning of each turn that do not count; the first one loads the data
OUR_ROUNDS, FLOWER_ROUNDS = 300, 20  # that count, in one turn
PATIENCE = 300.0  # seconds, for the whole of Flower's turn


def beside_flower() -> dict[str, Any]:
    """Milliseconds a round, ours and Flower's; or only ours, and why: what is optional must not end the benchmark."""
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
    """Seconds of the rounds that count, and w after each round, from the first on."""
    plan = simulate(settings(NODES, WARMING_UP + OUR_ROUNDS), Overrides(dataset=dataset()))
    ended: list[float] = []
    ws: list[Float32] = []

    class Timed(Engine):
        def run(self, *, observe: Observer, **rest: Any) -> Outcome:
            def observe_and_note(round_: Round, broadcast: Broadcast) -> None:
                observe(round_, broadcast)
                ended.append(time.perf_counter())
                ws.append(broadcast.w)

            return plan.engine.run(observe=observe_and_note, **rest)

    written(replace(plan, engine=Timed()))()
    # A broadcast tells the w that the round before has ended with; the last one asks for a loss and for no updates.
    return _rounds(ended[:-1]), ws[1:]


def _rounds(ended: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(ended[WARMING_UP - 1 :])]


def _versions() -> dict[str, str] | str:
    """Of what Flower's simulation needs, or what is missing."""
    found = {}
    for name in ("flwr", "ray"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            return f"{name} is not installed"
    return found


def _flower_turn() -> tuple[list[float], list[Float32]]:
    """The same of Flower.

    Raises:
      FlowerFailedError: and the end of what its processes have said is on standard error.
    """
    with tempfile.TemporaryDirectory(prefix="flower-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        log, told = folder / "log", folder / "told.npz"
        try:
            _run(folder, log, told)
        except FlowerFailedError:
            print(
                "\n".join(log.read_text(errors="replace").splitlines()[-20:]),
                file=sys.stderr,
            )
            raise
        with np.load(told) as found:
            return _rounds(found["ended"].tolist()), list(found["w"])


def _run(folder: Path, log: Path, told: Path) -> None:
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
    with log.open("wb") as said:
        process = subprocess.Popen(
            [*command, str(told)],
            env={**os.environ, **here},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        raise FlowerFailedError(
            f"Flower's simulation has not ended in {PATIENCE:.0f} seconds"
        ) from None
    finally:
        if (
            process.poll() is None
        ):  # else its number may be another's by now, and Ray has ended with it
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not told.exists():
        raise FlowerFailedError("Flower's simulation has failed")


# In the process.


def main(nodes: int, rounds: int, told: Path) -> None:
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
        },  # an actor for every core
    )
    np.savez(told, ended=ended, w=ws)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
