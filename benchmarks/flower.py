"""The same rounds on Flower's deployed engine, when flwr is installed: how long one takes, from the last reply to the next.

On loopback without TLS: a SuperLink that keeps its state in memory, a SuperNode a node, each a process of its own, and a
run started with `flwr run`, all with Flower's own defaults. Its ServerApp sends w to every node and averages what comes
back; the ClientApp sends w back as it is. Nothing is written to disk between rounds, and local work is not taken off.

All that Flower keeps is in a temporary folder, it sends no telemetry and looks for no updates, and its processes are
ended with the measurement, whatever comes of it.
"""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from itertools import pairwise
from pathlib import Path

ROUNDS, WARMING_UP = 8, 2  # they take seconds each; the first also load the app
PATIENCE = 60.0  # seconds, for the processes to be there, and for every round


class FlowerFailedError(Exception):
    """Flower is installed, but its rounds could not be measured."""


def version() -> str | None:
    """Of the flwr that is installed next to this Python, or None."""
    try:
        found = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        return None
    return found if _program("flower-superlink").exists() else None


def round_milliseconds(nodes: int, parameters: int) -> float:
    """The median over rounds.

    Raises:
      FlowerFailedError: with the end of what its processes have said.
    """
    with tempfile.TemporaryDirectory(prefix="flower-") as name:
        folder = Path(name)
        times, log = folder / "times.json", folder / "log"
        with _processes(folder, log) as start:
            try:
                port, *others = _free_ports(1 + nodes)
                _write_app(folder, port, {"nodes": nodes, "parameters": parameters, "rounds": ROUNDS}, times)
                address = f"127.0.0.1:{port}"
                started = [
                    start("flower-superlink", "--insecure", "--disable-runtime-dependency-installation",
                          "--host", "127.0.0.1", "--port", str(port))
                ]  # fmt: skip
                _wait(lambda: _listens(port), PATIENCE, started)
                for other in others:
                    started.append(
                        start("flower-supernode", "--insecure", "--superlink", address, "--port", str(other))
                    )
                if start("flwr", "run", str(folder / "app"), "loopback").wait(PATIENCE) != 0:
                    raise FlowerFailedError("`flwr run` has failed")
                _wait(times.exists, PATIENCE * (1 + ROUNDS), started)
            except (FlowerFailedError, subprocess.TimeoutExpired) as error:
                raise FlowerFailedError(f"{error}; it said last:\n{_end_of(log)}") from error
        ended = json.loads(times.read_text())
    seconds = [after - before for before, after in pairwise(ended)]
    return 1000 * statistics.median(seconds[WARMING_UP:])


_APP = '''
import json, os, time
import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()

@server.main()
def main(grid, context):
    asked = context.run_config
    w, ended = np.zeros(asked["parameters"], np.float32), []
    while len(nodes := list(grid.get_node_ids())) < asked["nodes"]:
        time.sleep(0.1)
    for _ in range(asked["rounds"] + 1):
        content = RecordDict({"w": ArrayRecord([w])})
        replies = list(grid.send_and_receive([Message(content, node, "train") for node in nodes]))
        w = np.mean([reply.content["w"].to_numpy_ndarrays()[0] for reply in replies], axis=0, dtype=np.float32)
        ended.append(time.perf_counter())
    assert len(replies) == asked["nodes"]
    with open(asked["times"] + ".part", "w") as file:
        json.dump(ended, file)
    os.replace(asked["times"] + ".part", asked["times"])

@client.train()
def train(message, context):
    return Message(RecordDict({"w": message.content["w"]}), reply_to=message)
'''

_PROJECT = """
[project]
name = "rounds"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "nobody"

[tool.flwr.app.components]
serverapp = "rounds:server"
clientapp = "rounds:client"

[tool.flwr.app.config]
"""


def _write_app(folder: Path, port: int, numbers: dict[str, int], times: Path) -> None:
    (folder / "app").mkdir()
    (folder / "app" / "rounds.py").write_text(_APP)
    values = {**numbers, "times": str(times)}
    config = "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
    (folder / "app" / "pyproject.toml").write_text(_PROJECT + config)
    connection = f'[superlink.loopback]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    (folder / "config.toml").write_text(connection)


@contextmanager
def _processes(folder: Path, log: Path) -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Gives what starts one of Flower's programs; all of them, and what they have started, end with the block."""
    here = {
        "FLWR_HOME": str(folder),
        "HOME": str(folder),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # Its programs start one another by their bare names.
        "PATH": os.pathsep.join([str(_program("flwr").parent), os.environ.get("PATH", "")]),
    }
    started: list[subprocess.Popen[bytes]] = []

    def start(program: str, *arguments: str) -> "subprocess.Popen[bytes]":
        with log.open("ab") as said:
            process = subprocess.Popen(
                [str(_program(program)), *arguments],
                cwd=folder,
                env={**os.environ, **here},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        started.append(process)
        return process

    try:
        yield start
    finally:
        for end in (signal.SIGTERM, signal.SIGKILL):
            for process in started:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, end)
            # Some have left the group that they were started in; that folder is in the environment of no other process.
            for stray in _having(f"FLWR_HOME={folder}"):
                with suppress(ProcessLookupError):
                    os.kill(stray, end)
            _gone(folder, started, 5.0)


def _gone(folder: Path, started: Sequence["subprocess.Popen[bytes]"], seconds: float) -> None:
    """Waits until all have ended, but no longer than that."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        running = [process for process in started if process.poll() is None]
        if not running and not _having(f"FLWR_HOME={folder}"):
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


def _wait(there: Callable[[], bool], seconds: float, needed: Sequence["subprocess.Popen[bytes]"]) -> None:
    until = time.monotonic() + seconds
    while not there():
        if any(process.poll() is not None for process in needed):
            raise FlowerFailedError("one of its processes has ended")
        if time.monotonic() > until:
            raise FlowerFailedError(f"nothing came of it in {seconds:.0f} seconds")
        time.sleep(0.1)


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


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:]) if log.exists() else ""


def _program(name: str) -> Path:
    return Path(sys.executable).with_name(name)
