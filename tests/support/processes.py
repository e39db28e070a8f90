"""Processes of the real command line and their output; they end with the test.

    with commands(tmp_path) as start:
        aggregator = start.serve("--nodes", "2", "--rounds", "5")
        node = start.join(aggregator.port, "--dataset", "digits", name="one")
        node.wait_for("joined")
        node.send(signal.SIGKILL)

Tests wait for conditions, not for a fixed time.
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
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedbudget.arrays import Float32, Int64
from fedbudget.engines.engine import RoundEngine
from fedbudget.engines.in_process import InProcessNodes
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
PATIENCE = 300.0  # seconds; a busy machine may have to compile kernels first

# One thread per process: more would compete for the cores.
_ENVIRONMENT = dict.fromkeys(
    ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
)

# A node that runs a patch during a round, after the broadcast and before the report.
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
    """A started process.

    Args:
      command: the program and its arguments.
      folder: working directory.
      log: path of the output files, without suffix.
      environment: additional environment variables.
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
                start_new_session=True,  # Ctrl-C stops only the tests
            )

    @property
    def errors(self) -> str:
        """Standard error so far."""
        return self._err.read_text()

    @property
    def printed(self) -> str:
        """Standard output so far."""
        return self._out.read_text()

    @property
    def port(self) -> int:
        """The port on which an aggregator listens."""
        return int(self.wait_for(r"listening on port (\d+)")[1])

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until standard error matches a pattern."""
        return self.wait_until(lambda: re.search(pattern, self.errors))

    def wait_until(self, condition: Callable[[], T | None]) -> T:
        """Wait until a condition holds; fail if the process ends first."""

        def check() -> T | None:
            code = self.process.poll()
            value = condition()  # after the poll, so that the last output is included
            assert value or code is None, (
                f"the process ended with {code}: {self.errors}{self.printed}"
            )
            return value

        return wait_until(check)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, number: signal.Signals | None = None, patience: float = PATIENCE) -> int:
        """Send a signal if one is given, wait for the end, and return the exit code."""
        if number is not None:
            self.send(number)
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the process does not end: {self.errors}{self.printed}"
            ) from None


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
        """Start a node whose mini-batches are those of a run in one process."""
        own = ["--name", name, "--seeded-batches"]
        return self.run("join", f"127.0.0.1:{port}", *own, *options)

    def nodes(self, port: int, number: int, *options: str) -> list[Command]:
        """Start nodes n1, n2, ... with the samples of `sample_shards`."""
        self.write(number)
        return [
            self.join(port, "--data", f"n{each}.npz", *options, name=f"n{each}")
            for each in range(1, number + 1)
        ]

    def held(self, port: int, node: int, when: int, *options: str) -> Command:
        """Start a node that blocks in round `when` until `release_nodes`."""
        return self.patched(_HELD, [str(when), _GO], port, node, *options)

    def release_nodes(self) -> None:
        (self.folder / _GO).touch()

    def failing(
        self, port: int, node: int, when: int, number: signal.Signals, *options: str
    ) -> Command:
        """Start a node that sends itself a signal in round `when`."""
        return self.patched(_FAILING, [str(when), str(int(number))], port, node, *options)

    def patched(
        self, patch: str, arguments: Sequence[str], port: int, node: int, *options: str
    ) -> Command:
        program = [sys.executable, "-c", _PATCHED.format(patch=patch), *arguments]
        own = ["--data", f"n{node}.npz", "--name", f"n{node}", "--seeded-batches", *options]
        return self.run("join", f"127.0.0.1:{port}", *own, program=program)

    def write(self, number: int) -> None:
        """Write the data files of nodes n1, n2, ..."""
        for each, (x, y) in enumerate(sample_shards(number), 1):
            np.savez(self.folder / f"n{each}.npz", x=x, y=y)


def cli_options(**settings: Any) -> list[str]:
    """Command line options for these settings.

    True is an option without a value; a list repeats the option.
    """
    options: list[str] = []
    for name, value in settings.items():
        option = f"--{name.replace('_', '-')}"
        for each in value if isinstance(value, list) else [value]:
            options += [option] if each is True else [option, str(each)]
    return options


def train_with_absences(
    settings: Settings, overrides: Overrides, present: Sequence[Sequence[int]]
) -> bytes:
    """Return w of a run in one process.

    Args:
      present: the nodes that take part in each round.
    """
    plan = simulate(settings, overrides)
    assert plan.aggregator is not None
    fleets = [
        Fleet(
            plan.model,
            plan.shards.only([node]),
            batch=batch_of(plan.settings),
            seed=settings.seed,
            features=plan.aggregator.method.features,
            numbers=[node],
        )
        for node in range(len(plan.shards))
    ]
    attendance = (np.isin(range(len(fleets)), nodes) for nodes in present)
    nodes = InProcessNodes(fleets, plan.meters.counters(), attendance)
    engine = RoundEngine(plan.aggregator, nodes, plan.meters)
    return engine.run(observe=lambda *_: None).w.tobytes()


def sample_shards(number: int) -> list[tuple[Float32, Int64]]:
    """Samples of three classes for each node; each node has one frequent class."""
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
    """Start processes in a folder; kill those that still run at the end."""
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
                command.process.kill()  # also ends a stopped process
            command.process.wait()


def wait_until(condition: Callable[[], T | None]) -> T:
    """Wait until a condition holds; return its value."""
    began = time.monotonic()
    while not (value := condition()):
        assert time.monotonic() - began < PATIENCE, "timeout"
        time.sleep(0.02)
    return value


def checkpoint(run: Path) -> Checkpoint:
    """The last checkpoint of a run."""
    return Checkpoint.load(run, build_method(Run.open(run).settings))


def records(folder: Path) -> list[RoundRecord]:
    """Records of a run so far: the complete lines of rounds.jsonl."""
    path = folder / "rounds.jsonl"
    if not path.exists():
        return []
    return [RoundRecord.from_json(line) for line in path.read_text().split("\n")[:-1]]


def summary(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def without_wall(rounds: Sequence[RoundRecord]) -> list[dict[str, Any]]:
    """Records without the wall-clock time, which depends on the machine."""
    names = [each.name for each in fields(RoundRecord) if each.name != "wall"]
    return [{name: getattr(record, name) for name in names} for record in rounds]
