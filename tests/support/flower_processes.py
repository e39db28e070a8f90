"""Flower's own processes on loopback: a SuperLink, SuperNodes and `flwr run`, ended when
the test is.

    with fleet(folder, ["partition-id=0 num-partitions=2", "partition-id=1
        num-partitions=2"]) as flower: made = flower.run("loopback", tau=5, rounds=3)

All that Flower keeps is in a temporary folder, it sends no telemetry and looks for no
updates. What its processes have said is in `flower.log`."""

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
PATIENCE = 120.0  # seconds, for a machine that has much else to do

Process = subprocess.Popen[bytes]


class Flower:
    """What starts Flower's programs.

    Args:
      folder: for all that they keep.
      environment: of theirs, besides what all need.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._environment = environment
        self.started: list[Process] = []
        self._runs = 0

    def run(
        self, connection: str, *more: str, patience: float = PATIENCE, **settings: Any
    ) -> Run:
        """Makes a run of the example with these settings."""
        running, out = self.begin(connection, *more, **settings)
        self.wait(
            lambda: running.poll() is not None, patience
        )  # it shows what the ServerApp says, until that ends
        assert (out / "plot.png").exists(), (
            f"there is no run:\n{self.log[-5000:]}"
        )  # the last of its files
        return Run.open(out)

    def begin(self, connection: str, *more: str, **settings: Any) -> tuple[Process, Path]:
        """Begins such a run; gives the process that shows it, and its folder."""
        self._runs += 1
        out, config = (
            self.folder / f"run-{self._runs}",
            self.folder / f"run-{self._runs}.toml",
        )
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
                f"nothing came of it in {patience:g} seconds:\n{self.log[-5000:]}"
            )
            time.sleep(0.1)


@contextmanager
def fleet(folder: Path, nodes: Sequence[str]) -> Iterator[Flower]:
    """A SuperLink by the name of loopback, and a SuperNode with each of these
    configurations.
    """
    with processes(folder) as flower:
        port, *others = _free_ports(1 + len(nodes))
        connection = (
            f'[superlink.loopback]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        (folder / "config.toml").write_text(connection)
        # Without the option it would make an environment for the app, from the package
        # index.
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
    """Flower as a newcomer has it: `flwr run` by the name of local starts a SuperLink that
    simulates nodes.
    """
    one, another = _free_ports(2)
    with processes(
        folder,
        FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=str(one),
        FLWR_LOCAL_CONTROL_API_PORT=str(another),
    ) as it:
        yield it


@contextmanager
def processes(folder: Path, **environment: str) -> Iterator[Flower]:
    """What starts Flower's programs; all of them, and what they have started, end with the
    block.
    """
    flower = Flower(folder, environment)
    try:
        yield flower
    finally:
        for end in (signal.SIGTERM, signal.SIGKILL):
            for process in flower.started:
                if process.poll() is None:  # else its number may be another's by now
                    os.killpg(process.pid, end)
            # Some have left the group that they were started in; that folder is in the
            # environment of no other process.
            for stray in _having(f"FLWR_HOME={folder}"):
                with suppress(ProcessLookupError):
                    os.kill(stray, end)
            _gone(flower, 5.0)


def _environment(folder: Path) -> dict[str, str]:
    return {
        "FLWR_HOME": str(folder),
        "HOME": str(folder),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # One thread each: several in every process would only be in each other's way.
        **dict.fromkeys(
            ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
        ),
        # Its programs start one another by their bare names.
        "PATH": os.pathsep.join([str(_program("flwr").parent), os.environ.get("PATH", "")]),
    }


def _gone(flower: Flower, seconds: float) -> None:
    """Waits until all have ended, but no longer than that."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if all(process.poll() is not None for process in flower.started) and not _having(
            f"FLWR_HOME={flower.folder}"
        ):
            return
        time.sleep(0.1)


def _having(variable: str) -> list[int]:
    """Processes with that in their environment, where the system shows it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another's, or it has just ended
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


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
