"""Flower's processes on loopback: a SuperLink, SuperNodes and `flwr run`.

    nodes = ["partition-id=0 num-partitions=2", "partition-id=1 num-partitions=2"]
    with fleet(folder, nodes) as flower:
        run = flower.run("loopback", tau=5, rounds=3)

All processes end with the test. Flower's files are in a temporary folder; telemetry and
update checks are off. `flower.log` is the output of all processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedbudget.runs.folder import Run

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
PATIENCE = 120.0  # seconds; long enough for a busy machine

Process = subprocess.Popen[bytes]


class Flower:
    """Starts Flower's programs.

    Args:
      folder: folder for all their files.
      environment: additional environment variables.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._environment = environment
        self.started: list[Process] = []
        self._runs = 0

    def run(
        self, connection: str, *more: str, patience: float = PATIENCE, **settings: Any
    ) -> Run:
        """Run the example with these settings to its end."""
        running, out = self.begin(connection, *more, **settings)
        self.wait(lambda: running.poll() is not None, patience)
        # The plot is the last file that a run writes.
        assert (out / "plot.png").exists(), f"the run failed:\n{self.log[-5000:]}"
        return Run.open(out)

    def begin(self, connection: str, *more: str, **settings: Any) -> tuple[Process, Path]:
        """Start a run; return the process that streams its log, and the run's folder."""
        self._runs += 1
        out = self.folder / f"run-{self._runs}"
        config = self.folder / f"run-{self._runs}.toml"
        given = {
            "out": str(out),
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }
        config.write_text(
            "".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items())
        )
        command = [
            "run",
            str(EXAMPLE),
            connection,
            "--run-config",
            str(config),
            "--stream",
            *more,
        ]
        return self.start("flwr", *command), out

    def start(self, program: str, *arguments: str) -> Process:
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [str(_program(program)), *arguments],
                cwd=self.folder,
                env={**os.environ, **_environment(self.folder), **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def wait(self, there: Callable[[], bool], patience: float) -> None:
        until = time.monotonic() + patience
        while not there():
            assert time.monotonic() < until, (
                f"timeout after {patience:g} seconds:\n{self.log[-5000:]}"
            )
            time.sleep(0.1)


@contextmanager
def fleet(folder: Path, nodes: Sequence[str]) -> Iterator[Flower]:
    """Start a SuperLink named loopback, and a SuperNode for each configuration."""
    with processes(folder) as flower:
        port, *others = _free_ports(1 + len(nodes))
        connection = (
            f'[superlink.loopback]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        (folder / "config.toml").write_text(connection)
        # Without this option Flower installs the app's dependencies from the package index.
        flower.start(
            "flower-superlink",
            "--insecure",
            "--disable-runtime-dependency-installation",
            "--port",
            str(port),
        )
        flower.wait(lambda: _listens(port), PATIENCE)
        for other, config in zip(others, nodes, strict=True):
            link = f"127.0.0.1:{port}"
            options = ["--superlink", link, "--port", str(other), "--node-config", config]
            flower.start("flower-supernode", "--insecure", *options)
        yield flower


@contextmanager
def simulation(folder: Path) -> Iterator[Flower]:
    """Flower's default: `flwr run . local` starts a SuperLink that simulates nodes."""
    one, another = _free_ports(2)
    with processes(
        folder,
        FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=str(one),
        FLWR_LOCAL_CONTROL_API_PORT=str(another),
    ) as it:
        yield it


@contextmanager
def processes(folder: Path, **environment: str) -> Iterator[Flower]:
    """Start Flower's programs; end them and their children with the block."""
    flower = Flower(folder, environment)
    try:
        yield flower
    finally:
        for end in (signal.SIGTERM, signal.SIGKILL):
            for process in flower.started:
                if process.poll() is None:  # otherwise the pid may have been reused
                    os.killpg(process.pid, end)
            # Some have left their process group. No other process has this folder in its
            # environment.
            for stray in _with_variable(f"FLWR_HOME={folder}"):
                with suppress(ProcessLookupError):
                    os.kill(stray, end)
            _wait_for_end(flower, 5.0)


def _environment(folder: Path) -> dict[str, str]:
    return {
        "FLWR_HOME": str(folder),
        "HOME": str(folder),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # One thread per process: more would compete for the cores.
        **dict.fromkeys(
            ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
        ),
        # Flower's programs start each other by name.
        "PATH": os.pathsep.join([str(_program("flwr").parent), os.environ.get("PATH", "")]),
    }


def _wait_for_end(flower: Flower, seconds: float) -> None:
    """Wait until all processes have ended, at most for `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended = all(process.poll() is not None for process in flower.started)
        if ended and not _with_variable(f"FLWR_HOME={flower.folder}"):
            return
        time.sleep(0.1)


def _with_variable(variable: str) -> list[int]:
    """Pids of processes with this variable in their environment, if /proc shows it."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's process, or it has just ended
            if variable.encode() in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
    return pids


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_ports(number: int) -> list[int]:
    probes = [socket.socket() for _ in range(number)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _program(name: str) -> Path:
    return Path(sys.executable).with_name(name)
