"""`python -m benchmarks against FOLDER`: this checkout and another one, side by side.

Both run the same workloads through the public API, in processes of their own that take
turns. A row shows the median and the best rate of each, and the ratios of both. Workloads:

    in process   W1 (workload.py): node-steps per second, for 5, 50 and 500 nodes
    gRPC         rounds per second with 784 parameters, for 5 and 50 nodes on loopback

Use it before and after a change: `git worktree add ../before REVISION` makes the folder.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

TURNS = 7
FEATURES = 784
WARM_UP = 20  # rounds over gRPC that are not measured
IN_PROCESS = ((5, False), (50, False), (500, False), (5, True), (50, True), (500, True))
OVER_GRPC = (5, 50)


def compare(other: Path) -> list[dict[str, Any]]:
    """Measure both checkouts.

    Args:
      other: root folder of the other checkout.

    Returns: one row per workload.
    """
    here = Path(__file__).parents[1]
    rows = []
    for workload in workloads():
        rates: dict[Path, list[float]] = {here: [], other: []}
        for turn in range(TURNS):
            order = [here, other] if turn % 2 else [other, here]
            for checkout in order:
                rates[checkout].append(_measure(checkout, workload))
        row = dict(workload)
        for name, summary in (("median", statistics.median), ("best", max)):
            this = summary(rates[here])
            that = summary(rates[other])
            row[name] = {"this": this, "other": that, "ratio": this / that}
        rows.append(row)
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main(arguments: Sequence[str]) -> None:
    """Run `compare` for the folder given on the command line."""
    if len(arguments) != 1 or not (Path(arguments[0]) / "src" / "fedbudget").is_dir():
        sys.exit(
            "usage: python -m benchmarks against FOLDER (the root of another checkout)"
        )
    compare(Path(arguments[0]).resolve())


def workloads() -> list[dict[str, Any]]:
    """All workloads, as arguments of the child process."""
    simulated = [
        {"engine": "in process", "nodes": n, "full": full} for n, full in IN_PROCESS
    ]
    networked = [{"engine": "gRPC", "nodes": n} for n in OVER_GRPC]
    return [*simulated, *networked]


def _measure(checkout: Path, workload: dict[str, Any]) -> float:
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    command = [sys.executable, __file__, json.dumps(workload)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, check=True
        )
    return float(done.stdout.split()[-1])


# Code of the child process. It uses public names only, so that it runs on other versions.


def _rate(workload: dict[str, Any]) -> float:
    if workload["engine"] == "gRPC":
        return _grpc_rounds(workload["nodes"])
    return _node_steps(workload["nodes"], full=workload["full"])


def _node_steps(nodes: int, *, full: bool) -> float:
    import fedbudget

    rng = np.random.default_rng(0)
    samples = 60_000
    x = rng.integers(1, 256, (samples, FEATURES), dtype=np.uint8)
    x[rng.random(x.shape, dtype=np.float32) < 0.8] = 0
    y = rng.integers(0, 2, samples)
    shards = [(x[part], y[part]) for part in np.array_split(np.arange(samples), nodes)]
    rounds = 10 if full else max(60, 20_000 // nodes)
    walls: list[float] = []

    def note(record: Any) -> None:
        walls.append(time.perf_counter())

    fedbudget.train(
        model="svm",
        shards=shards,
        method="paper",
        tau=10,
        batch_size="full" if full else 100,
        step_size=0.01,
        standardise=False,
        budget="time=1000h",
        rounds=rounds,
        evaluations=1,
        callbacks=[note],
    )
    measured = walls[1:rounds]
    return nodes * 10 * (len(measured) - 1) / (measured[-1] - measured[0])


def _grpc_rounds(nodes: int) -> float:
    import fedbudget

    rng = np.random.default_rng(0)
    rounds = WARM_UP + (300 if nodes < 10 else 100)
    walls: list[float] = []
    x = rng.random((20, FEATURES), dtype=np.float32)
    y = np.arange(20) % 2

    def note(record: Any) -> None:
        walls.append(time.perf_counter())

    port = _free_port()

    def attend(number: int) -> None:
        fedbudget.join(
            f"127.0.0.1:{port}", data=(x, y), name=f"node-{number}", min_batch=1, quiet=True
        )

    threads = [
        threading.Thread(target=attend, args=(n,), daemon=True) for n in range(nodes)
    ]
    for thread in threads:
        thread.start()
    with tempfile.TemporaryDirectory() as folder:
        fedbudget.serve(
            f"127.0.0.1:{port}",
            model="svm",
            nodes=nodes,
            method="paper",
            tau=1,
            batch_size=2,
            step_size=0.01,
            budget="time=1000h",
            rounds=rounds,
            evaluations=1,
            out=Path(folder) / "run",
            callbacks=[note],
            quiet=True,
        )
    measured = walls[WARM_UP:rounds]
    return (len(measured) - 1) / (measured[-1] - measured[0])


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    print(_rate(json.loads(sys.argv[1])))
