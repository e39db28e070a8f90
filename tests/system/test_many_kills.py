"""Many kills -9 of an aggregator at random moments, also while its run ends.

    python -m system.test_many_kills FOLDER KILLS [FIRST]

prints a line for each run: its kills, and how many of these came after the last round.
"""

import random
import signal
import socket
import sys
import time
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbudget import train
from fedbudget.result import Result
from fedbudget.runs.folder import CHECKPOINT, MODEL, ROUNDS, Run
from fedbudget.runs.summary import SUMMARY
from support.forked import fork
from support.processes import (
    cli_options,
    records,
    sample_shards,
    summary,
    wait_until,
    without_wall,
)

NODES = 2
ROUNDS_OF_RUN = 60
SETTINGS: dict[str, Any] = {
    "model": "softmax",
    "costs": "simulated",
    "budget": "time=1000s",
    "rounds": ROUNDS_OF_RUN,
    "spend_all": True,
    "tau_max": 5,
    "seed": 3,
}
AT_END = (MODEL, SUMMARY, "plot.png", "the process")
"""After which of these a run is killed at its end."""


def lines_of(run: Path) -> int:
    file = run / ROUNDS
    return file.read_bytes().count(b"\n") if file.exists() else 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        return int(opened.getsockname()[1])


def killed_run(folder: Path, chance: random.Random, kills: int) -> tuple[int, int]:
    """Make a run whose aggregator is killed again and again.

    Returns: the number of kills, and of those after the last round.
    """
    port = free_port()
    run = folder / "run"
    for node, (x, y) in enumerate(sample_shards(NODES), 1):
        np.savez(folder / f"n{node}.npz", x=x, y=y)
    join = ["join", f"127.0.0.1:{port}", "--seeded-batches"]
    nodes = [
        fork(folder, "nodes.log", *join, "--data", f"n{each}.npz", "--name", f"n{each}")
        for each in range(1, NODES + 1)
    ]
    serve = ["serve", f"127.0.0.1:{port}"]
    new = [*serve, "--nodes", str(NODES), "--out", "run", *cli_options(**SETTINGS)]
    done = 0
    late = 0
    while done < kills:
        resumes = (run / CHECKPOINT).exists()
        how = [*serve, "--resume", "run"] if resumes else new
        aggregator = fork(folder, "aggregator.log", *how)
        before = lines_of(run)
        last = done == kills - 1
        wanted = ROUNDS_OF_RUN + 1 if last else before + chance.randint(1, 12)
        end = chance.choice(AT_END)
        known = (run / end).stat().st_mtime_ns if (run / end).exists() else 0
        wait_for_lines(run, wanted, aggregator)
        if last:
            wait_for_end(run / end, known, aggregator)
        time.sleep(chance.choice([0.0, chance.uniform(0, 0.02)]))
        finished = lines_of(run) > ROUNDS_OF_RUN
        assert aggregator.is_alive() or finished, (folder / "aggregator.log").read_text()
        aggregator.kill()
        aggregator.join()
        if aggregator.exitcode == -signal.SIGKILL:
            done += 1
            late += finished
        if has_ended(run):
            break
    if not has_ended(run):
        aggregator = fork(folder, "aggregator.log", *serve, "--resume", "run")
        aggregator.join()
        assert aggregator.exitcode == 0, (folder / "aggregator.log").read_text()
    for each in nodes:
        if aggregator.exitcode == -signal.SIGKILL:
            each.terminate()  # it may not have heard that the run is over
        each.join()
        assert each.exitcode == 0, (folder / "nodes.log").read_text()
    return done, late


def wait_for_lines(run: Path, wanted: int, aggregator: BaseProcess) -> None:
    """Wait for a number of records, or until the process has ended."""
    wait_until(lambda: lines_of(run) >= wanted or not aggregator.is_alive())


def wait_for_end(file: Path, known: int, aggregator: BaseProcess) -> None:
    """Wait until a file is written, or until the process has ended."""
    wait_until(
        lambda: (
            not aggregator.is_alive()
            or (file.is_file() and file.stat().st_mtime_ns != known)
        )
    )


def has_ended(run: Path) -> bool:
    return (run / SUMMARY).exists() and summary(run)["status"] == "finished"


def assert_same(run: Path, whole: Result) -> None:
    found = Run.open(run)
    assert without_wall(records(run)) == without_wall(whole.rounds)
    assert found.model().w.tobytes() == whole.w.tobytes()
    assert found.summary is not None
    assert found.summary["spent"] == dict(whole.spent)


def kill_many(root: Path, kills: int, first: int = 0) -> None:
    """Make runs until their aggregators were killed so many times.

    Args:
      first: number of the first run, from which the moments of its kills follow.
    """
    whole = train(shards=sample_shards(NODES), **SETTINGS)
    done = 0
    for number in count(first):
        if done >= kills:
            return
        folder = root / str(number)
        folder.mkdir()
        of_run, late = killed_run(folder, random.Random(number), min(10, kills - done))
        assert_same(folder / "run", whole)
        done += of_run
        print(
            f"run {number}: killed {of_run} times, {late} after its last round", flush=True
        )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_hundred_kills(tmp_path: Path) -> None:
    """Records and model are those of a run without a kill, to the bit."""
    kill_many(tmp_path, 100)


if __name__ == "__main__":
    kill_many(Path(sys.argv[1]), *map(int, sys.argv[2:]))
