"""`python -m benchmarks slow-line`: effect of `--compress auto` on slow and fast lines.

Five node processes run over gRPC, each with its own line of limited bandwidth. Runs
take some seconds of real time, once with `--compress none` and once with `auto`. They
use whole shards, so that losses cover all samples. The benchmark measures the time to
several losses, and the time of `auto` to the final loss of `none`.
"""

import math
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from rich.console import Console

from fedbudget.engines.grpc.server import AggregatorServer
from fedbudget.engines.grpc.tokens import TOKEN_VARIABLE
from fedbudget.launch.execute import execute
from fedbudget.launch.serve import serving
from fedbudget.result import Result
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.network import ListenOptions
from fedbudget.settings.settings import Settings

NODES = 5
LOSSES = (0.1, 0.01, 0.001)
_PART = 512  # bytes per write
_SAMPLES = 1400  # samples to train on
_CONSOLE = Console(width=120)


def slow_line(port: int, bits: float) -> int:
    """Forward a new port to another one with limited bandwidth."""
    listening = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            one, _ = listening.accept()
            other = socket.create_connection(("127.0.0.1", port))
            for ends in ((one, other), (other, one)):
                threading.Thread(target=_carry, args=(*ends, bits / 8), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listening.getsockname()[1])


def _carry(one: socket.socket, other: socket.socket, rate: float) -> None:
    """Forward bytes in one direction, delayed as on a line of this rate."""
    free = time.monotonic()  # the time at which the line is free again
    with suppress(OSError):
        for end in (one, other):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := one.recv(_PART):
            free = max(free, time.monotonic()) + len(data) / rate
            time.sleep(max(0.0, free - time.monotonic()))
            other.sendall(data)
    with suppress(OSError):
        other.shutdown(socket.SHUT_WR)


def run(compress: Any, bits: float, seconds: float, seed: int, dataset: str) -> Result:
    own: Any = {
        "model": "softmax",
        "partition": "case:2",
        "batch_size": "full",
        "nodes": NODES,
        "costs": "measured",
    }
    # The nodes are trusted: skip the checks of reported values.
    settings = Settings(
        **own,
        seed=seed,
        compress=compress,
        budget=(f"time={seconds:g}s",),
        combine="mean",
    )
    processes: list[subprocess.Popen[bytes]] = []

    def opened(server: AggregatorServer) -> None:
        for number in range(1, NODES + 1):
            port = slow_line(server.port, bits) if bits < math.inf else server.port
            command = [
                sys.executable,
                "-m",
                "fedbudget",
                "join",
                f"127.0.0.1:{port}",
                "--quiet",
            ]
            command += [
                "--dataset",
                dataset,
                "--partition",
                "case:2",
                "--shard",
                f"{number}/{NODES}",
            ]
            command += ["--train-samples", str(_SAMPLES)]
            command += ["--seed", str(seed), "--model", "softmax"]
            threads = dict.fromkeys(
                ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
            )
            processes.append(subprocess.Popen(command, env={**os.environ, **threads}))

    os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(24)
    try:
        with serving(
            settings,
            ListenOptions("127.0.0.1:0"),
            interrupted=lambda: False,
            opened=opened,
        ) as prepared:
            return execute(prepared)
    finally:
        for process in processes:
            process.wait(30)


def share_of_time(bits: float, seconds: float, seed: int, dataset: str) -> float:
    """Return the time of `auto` to the final loss of `none`, relative to `none`."""
    none, auto = (
        run(compress, bits, seconds, seed, dataset).rounds for compress in ("none", "auto")
    )
    end = none[-1]
    there = reached(auto, end.best_loss)
    soon = ", ".join(
        f"{loss:g} after {reached(none, loss):.1f} and {reached(auto, loss):.1f} s"
        for loss in LOSSES
    )
    _CONSOLE.print(
        f"seed {seed}: {len(none)} and {len(auto)} rounds, "
        f"loss {end.best_loss:.3g} and {auto[-1].best_loss:.3g}, "
        f"reached after {there:.1f} s; {soon}",
        soft_wrap=True,
    )
    return there / end.spent["time"]


def reached(rounds: Sequence[RoundRecord], loss: float) -> float:
    """Return the seconds until a run reaches this loss."""
    return min(
        (each.spent["time"] for each in rounds if each.best_loss <= loss),
        default=math.inf,
    )


def main(arguments: Sequence[str]) -> None:
    parser = ArgumentParser(prog="python -m benchmarks slow-line", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--bits",
        type=float,
        default=1e6,
        help="Bits per second of each line; inf for no limit.",
    )
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument(
        "--dataset",
        default="digits",
        help="Dataset: digits (650 parameters), mnist-small (1,970), mnist (7,850).",
    )
    options = parser.parse_args(arguments)
    shares = [
        share_of_time(options.bits, options.seconds, seed, options.dataset)
        for seed in range(options.seeds)
    ]
    _CONSOLE.print(
        "time of auto to the final loss of none, relative to none: "
        f"{np.round(shares, 2).tolist()}",
        soft_wrap=True,
    )
    _CONSOLE.print(f"median {np.median(shares):.2f}")
