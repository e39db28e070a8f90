"""The same rounds on Flower's deployment engine, if flwr is installed.

The setup uses Flower's defaults on loopback without TLS: a SuperLink with in-memory
state, one SuperNode process per node, and a run started with `flwr run`. The ServerApp
sends w to every node and averages the replies. The ClientApp returns w unchanged. A
round lasts from one last reply to the next, at the ServerApp. Nothing is saved between
rounds, and local work is included.

Flower keeps its files in a temporary folder, sends no telemetry and checks for no
updates. Its processes end with the measurement, even if it fails.
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
from functools import partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

ROUNDS = 6  # measured, after one warm-up round; each takes seconds
PATIENCE = 60.0  # seconds for the SuperLink to listen, for `flwr run`, and for every round

Process: TypeAlias = "subprocess.Popen[bytes]"
Start: TypeAlias = Callable[..., Process]


class FlowerFailedError(Exception):
    """Flower is installed, but its rounds could not be measured."""


def version() -> str | None:
    """Return the version of the installed flwr, or None."""
    try:
        found = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        return None
    return found if _program("flower-superlink").exists() else None


def round_milliseconds(nodes: int, parameters: int) -> float:
    """Return the median over rounds.

    Raises:
      FlowerFailedError: Flower failed; the end of its output is on standard error.
    """
    with tempfile.TemporaryDirectory(prefix="flower-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with _processes(folder) as start:
            try:
                ended = _rounds_ended(folder, nodes, parameters, start)
            except FlowerFailedError:
                print(_end_of(folder / _LOG), file=sys.stderr)
                raise
    return 1000 * statistics.median(after - before for before, after in pairwise(ended))


_LOG = "log"  # of all processes


def _rounds_ended(folder: Path, nodes: int, parameters: int, start: Start) -> list[float]:
    """Return the end time of each round, in seconds of the ServerApp's clock."""
    port, *others = _free_ports(1 + nodes)
    times = folder / "times"
    times.touch()
    _write_app(
        folder,
        port,
        {
            "nodes": nodes,
            "parameters": parameters,
            "rounds": 1 + ROUNDS,
            "times": str(times),
        },
    )

    # Without this option Flower installs the app into a new environment.
    link = start(
        "flower-superlink",
        "--insecure",
        "--disable-runtime-dependency-installation",
        "--port",
        str(port),
    )
    _wait(partial(_listens, port), [link])
    address = f"127.0.0.1:{port}"
    running = [
        start(
            "flower-supernode",
            "--insecure",
            "--superlink",
            address,
            "--port",
            str(other),
        )
        for other in others
    ]
    submitted = start("flwr", "run", str(folder / "app"), "loopback")
    _wait(lambda: submitted.poll() is not None, [link, *running])
    if submitted.returncode != 0:
        raise FlowerFailedError("`flwr run` failed")
    for done in range(1, 2 + ROUNDS):
        _wait(partial(_has_lines, times, done), [link, *running])
    return [float(line) for line in times.read_text().splitlines()]


_APP = """
import time
import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()

@server.main()
def main(grid, context):
    asked = context.run_config
    w = np.zeros(asked["parameters"], np.float32)
    while len(nodes := list(grid.get_node_ids())) < asked["nodes"]:
        time.sleep(0.1)
    for _ in range(asked["rounds"]):
        content = RecordDict({"w": ArrayRecord([w])})
        messages = [Message(content, node, "train") for node in nodes]
        replies = list(grid.send_and_receive(messages))
        ws = [reply.content["w"].to_numpy_ndarrays()[0] for reply in replies]
        w = np.mean(ws, axis=0, dtype=np.float32)
        ended = time.perf_counter()
        assert len(replies) == asked["nodes"]
        with open(asked["times"], "a") as file:
            print(ended, file=file)

@client.train()
def train(message, context):
    return Message(RecordDict({"w": message.content["w"]}), reply_to=message)
"""

_PROJECT = """
[project]
name = "rounds"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "fedbudget"

[tool.flwr.app.components]
serverapp = "rounds:server"
clientapp = "rounds:client"

[tool.flwr.app.config]
"""


def _write_app(folder: Path, port: int, asked: dict[str, int | str]) -> None:
    (folder / "app").mkdir()
    (folder / "app" / "rounds.py").write_text(_APP)
    config = "".join(f"{name} = {json.dumps(value)}\n" for name, value in asked.items())
    (folder / "app" / "pyproject.toml").write_text(_PROJECT + config)
    connection = f'[superlink.loopback]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    (folder / "config.toml").write_text(connection)


@contextmanager
def _processes(folder: Path) -> Iterator[Start]:
    """Yield a starter of Flower's programs; they all end with the block."""
    here = {
        "FLWR_HOME": str(folder),
        "HOME": str(folder),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # Flower's programs start each other by name.
        "PATH": os.pathsep.join([str(_program("flwr").parent), os.environ.get("PATH", "")]),
    }
    started: list[Process] = []

    def start(program: str, *arguments: str) -> Process:
        with (folder / _LOG).open("ab") as output:
            process = subprocess.Popen(
                [str(_program(program)), *arguments],
                cwd=folder,
                env={**os.environ, **here},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        started.append(process)
        return process

    try:
        yield start
    finally:
        for end in (signal.SIGTERM, signal.SIGKILL):
            for process in started:
                if (
                    process.poll() is None
                ):  # otherwise its number may belong to another process
                    os.killpg(process.pid, end)
            # Some have left their process group. No other process has that folder in
            # its environment.
            for stray in _having(f"FLWR_HOME={folder}"):
                with suppress(ProcessLookupError):
                    os.kill(stray, end)
            _gone(folder, started, 5.0)


def _gone(folder: Path, started: Sequence[Process], seconds: float) -> None:
    """Wait until all have ended, up to a time limit."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        running = [process for process in started if process.poll() is None]
        if not running and not _having(f"FLWR_HOME={folder}"):
            return
        time.sleep(0.1)


def _having(variable: str) -> list[int]:
    """Return processes with that text in their environment, if the system shows it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # owned by another user, or just ended
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _wait(there: Callable[[], bool], needed: Sequence[Process]) -> None:
    until = time.monotonic() + PATIENCE
    while not there():
        if any(process.poll() is not None for process in needed):
            raise FlowerFailedError("one of its processes ended")
        if time.monotonic() > until:
            raise FlowerFailedError(f"no result after {PATIENCE:.0f} seconds")
        time.sleep(0.1)


def _has_lines(file: Path, number: int) -> bool:
    return file.read_text().count("\n") >= number


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
    return (
        "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        if log.exists()
        else ""
    )


def _program(name: str) -> Path:
    return Path(sys.executable).with_name(name)
