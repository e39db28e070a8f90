"""Processes of the real command line, with all that they have said, ended when the test is.

    with commands(tmp_path) as start:
        aggregator = start.serve("--nodes", "2", "--rounds", "5")
        node = start.join(aggregator.port, "--dataset", "digits", "--shard", "1/2",
        name="one") node.wait_for("joined") node.send(signal.SIGKILL)

A test waits for what it wants to see, never for a time.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedbudget.arrays import Float32, Int64
from fedbudget.engines.in_process import InProcessEngine
from fedbudget.launch.inputs import batch_of
from fedbudget.launch.method import build_method
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import simulate
from fedbudget.protocol.fleet import Fleet
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.runs.folder import Run
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.settings import Settings

FEDBUDGET = str(Path(sys.executable).with_name("fedbudget"))
PATIENCE = (
    300.0  # seconds until a test gives up: a busy machine may have to compile kernels first
)

# One thread each: several in every process would only be in each other's way.
_ENVIRONMENT = dict.fromkeys(
    ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
)

# A node that does something else in the middle of a round, after the broadcast and before
# the report.
_PATCHED = """
import os, sys, time
from fedbudget.cli.main import main
from fedbudget.engines.remote.worker import Worker

when, what, answer = int(sys.argv[1]), sys.argv[2], Worker.answer

def patched(worker, request):
    answered = answer(worker, request)
    if request.broadcast.round == when:
        {patch}
    return answered

Worker.answer = patched
main(sys.argv[3:])
"""
_HELD = "while not os.path.exists(what): time.sleep(0.01)"
_FAILING = "os.kill(os.getpid(), int(what))"
_GO = "go"

T = TypeVar("T")


class Command:
    """A process that has started.

    Args:
      command: the program and its arguments.
      folder: where it runs.
      log: the stem of the files that it writes to.
      environment: what is added to ours.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, log: Path, environment: dict[str, str]
    ) -> None:
        self.arguments = [each for each in command if "\n" not in each]
        self._out, self._err = log.with_suffix(".out"), log.with_suffix(".err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **_ENVIRONMENT, **environment},
                start_new_session=True,  # Ctrl-C is for the tests
            )

    @property
    def errors(self) -> str:
        """On standard error, so far."""
        return self._err.read_text()

    @property
    def printed(self) -> str:
        """On standard output, so far."""
        return self._out.read_text()

    @property
    def port(self) -> int:
        """That an aggregator listens on."""
        return int(self.wait_for(r"listening on port (\d+)")[1])

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Until it has said something."""
        return self.wait_until(lambda: re.search(pattern, self.errors))

    def wait_until(self, condition: Callable[[], T | None]) -> T:
        """Until something is so, which must be while this runs."""

        def found() -> T | None:
            over = self.process.poll()
            now = condition()  # after the poll: what was there when it ended is there now
            assert now or over is None, (
                f"it has ended with {over}: {self.errors}{self.printed}"
            )
            return now

        return wait_until(found)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, number: signal.Signals | None = None, patience: float = PATIENCE) -> int:
        """Its exit code, when it has ended: by itself, or from a signal."""
        if number is not None:
            self.send(number)
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end: {self.errors}{self.printed}") from None


class Commands:
    """Starts processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Command] = []
        self._logs = folder / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)

    def run(
        self, *arguments: str, program: Sequence[str] = (FEDBUDGET,), **environment: str
    ) -> Command:
        log = self._logs / str(len(self.started))
        started = Command([*program, *arguments], self.folder, log, environment)
        self.started.append(started)
        return started

    def serve(
        self, *options: str, port: int = 0, program: Sequence[str] = (FEDBUDGET,)
    ) -> Command:
        return self.run("serve", f"127.0.0.1:{port}", *options, program=program)

    def join(self, port: int, *options: str, name: str) -> Command:
        return self.run("join", f"127.0.0.1:{port}", "--name", name, *options)

    def nodes(self, port: int, number: int, *options: str) -> list[Command]:
        """Nodes n1, n2, ..., each with the samples that `made` gives."""
        self.write(number)
        return [
            self.join(port, "--data", f"n{each}.npz", *options, name=f"n{each}")
            for each in range(1, number + 1)
        ]

    def held(self, port: int, node: int, when: int, *options: str) -> Command:
        """One of them that is at work on a round until all are let go."""
        return self.patched(_HELD, [str(when), _GO], port, node, *options)

    def let_go(self) -> None:
        (self.folder / _GO).touch()

    def failing(
        self, port: int, node: int, when: int, number: signal.Signals, *options: str
    ) -> Command:
        """One of them that sends itself a signal in the middle of a round."""
        return self.patched(_FAILING, [str(when), str(int(number))], port, node, *options)

    def patched(
        self, patch: str, arguments: Sequence[str], port: int, node: int, *options: str
    ) -> Command:
        program = [sys.executable, "-c", _PATCHED.format(patch=patch), *arguments]
        own = ["--data", f"n{node}.npz", "--name", f"n{node}", *options]
        return self.run("join", f"127.0.0.1:{port}", *own, program=program)

    def write(self, number: int) -> None:
        """The files of these nodes."""
        for each, (x, y) in enumerate(made(number), 1):
            np.savez(self.folder / f"n{each}.npz", x=x, y=y)


def with_absences(
    settings: Settings, overrides: Overrides, present: Sequence[Sequence[int]]
) -> bytes:
    """w of a run in one process, where in each round these nodes are there and the others
    are not.
    """
    plan = simulate(settings, overrides)
    fleets = [
        Fleet(
            plan.model,
            plan.shards.only([node]),
            batch=batch_of(plan.settings),
            seed=settings.seed,
            numbers=[node],
        )
        for node in range(len(plan.shards))
    ]
    assert plan.aggregator is not None
    attendance = (np.isin(range(len(fleets)), there) for there in present)
    return (
        InProcessEngine(plan.aggregator, fleets, plan.meters, attendance)
        .run(observe=lambda *_: None)
        .w.tobytes()
    )


def made(number: int) -> list[tuple[Float32, Int64]]:
    """Samples of nodes that are not alike: three classes, of which each node has more of
    one than of others.
    """
    rng = np.random.default_rng(8)
    centres = rng.normal(size=(3, 6))
    shards = []
    for node in range(number):
        y = np.where(
            rng.random(40 + 10 * node) < 0.6, node % 3, rng.integers(0, 3, 40 + 10 * node)
        )
        y[:3] = [0, 1, 2]
        shards.append(
            (
                (centres[y] + rng.normal(size=(len(y), 6))).astype(np.float32),
                y.astype(np.int64),
            )
        )
    return shards


@contextmanager
def commands(folder: Path) -> Iterator[Commands]:
    """Starts processes in a folder, and ends those that are still there."""
    start = Commands(folder)
    try:
        yield start
    except BaseException:
        for command in start.started:
            print(" ".join(command.arguments), command.errors, command.printed, sep="\n")
        raise
    finally:
        for command in start.started:
            if command.process.poll() is None:
                command.process.kill()  # also one that is stopped
            command.process.wait()


def wait_until(condition: Callable[[], T | None]) -> T:
    """Until something is so; gives what it is."""
    began = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() - began < PATIENCE, "it has not come to pass"
        time.sleep(0.02)
    return found


def checkpoint(run: Path) -> Checkpoint:
    """The last checkpoint of a run, read as its settings say."""
    return Checkpoint.load(run, build_method(Run.open(run).settings))


def records(folder: Path) -> list[RoundRecord]:
    """The whole lines of a run's rounds.jsonl so far."""
    path = folder / "rounds.jsonl"
    if not path.exists():
        return []
    return [RoundRecord.from_json(line) for line in path.read_text().split("\n")[:-1]]


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def but_wall(found: Sequence[RoundRecord]) -> list[dict[str, Any]]:
    """Records as they are whatever the machine is like."""
    return [
        {name: value for name, value in vars(record).items() if name != "wall"}
        for record in found
    ]
