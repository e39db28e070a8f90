"""Run a golden cell and compute its hashes.

`w` is the SHA-256 of the final parameters as float32 bytes. `rounds` is the SHA-256 of
the records in rounds.jsonl. Each record is written as JSON with sorted keys, without

  - `wall`, the wall-clock time,
  - `reason`, a text whose wording may change,
  - fields that are null or empty, so writing or omitting them makes no difference,
  - and, if costs are measured, `c`, `b`, `spent`, `expected_c` and `expected_b`.

The hashes do not depend on the number of threads of numba or BLAS. PyTorch adds in
another order with more threads, so PyTorch runs with one thread here.
"""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fedbudget
from golden import own
from golden.adapters import run_on_flower
from golden.cell import Cell

DROPPED = frozenset({"wall", "reason"})
MEASURED = frozenset({"c", "b", "spent", "expected_c", "expected_b"})
PATIENCE = 300.0  # seconds for a subprocess on a busy machine

_ONE_THREAD = dict.fromkeys(
    ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
)


@dataclass(frozen=True)
class Hashes:
    """The hashes of one run."""

    w: str
    rounds: str


class Interrupted(Exception):
    """Ends a run in the middle."""


def run(cell: Cell, folder: Path) -> Hashes:
    """Run a cell in a new folder `run` below `folder`.

    Args:
      cell: the settings.
      folder: an empty folder. `records.jsonl` in it receives the hashed records.
    """
    out = folder / "run"
    options = {"validation": 0.0, **cell.options}
    if cell.how in ("train", "run", "interrupted", "extended"):
        options = {"costs": "simulated", **options}
    if cell.own is not None:
        options |= cell.own(folder)
    with _quiet_environment(cell):
        w = _run(cell, options, folder, out)
    records = kept_records(out, measured=cell.measured)
    (folder / "records.jsonl").write_text(records)
    parameters = np.ascontiguousarray(w, np.float32).tobytes()
    return Hashes(w=_sha256(parameters), rounds=_sha256(records.encode()))


def kept_records(out: Path, *, measured: bool) -> str:
    """Return the records of a run without the fields that may differ."""
    dropped = DROPPED | MEASURED if measured else DROPPED
    lines = []
    for line in (out / "rounds.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        kept = {
            name: value
            for name, value in record.items()
            if name not in dropped and value not in (None, [], {})
        }
        lines.append(json.dumps(kept, sort_keys=True) + "\n")
    return "".join(lines)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _run(
    cell: Cell, options: dict[str, Any], folder: Path, out: Path
) -> NDArray[np.float32]:
    if cell.how == "train":
        return fedbudget.train(**options, out=out).w
    if cell.how == "interrupted":
        return _interrupted(options, out)
    if cell.how == "extended":
        fedbudget.train(**options, out=out)
        return fedbudget.train(resume=out, budget=cell.more).w
    if cell.how in ("run", "local"):
        _command(cell.how, *_arguments({**options, "out": out}), "--json")
    elif cell.how == "flower":
        out.symlink_to(run_on_flower(folder / "flower", options))
    else:
        _serve(options, folder, out, kill=cell.how == "killed")
    return fedbudget.load(out).w


def _interrupted(options: dict[str, Any], out: Path) -> NDArray[np.float32]:
    """Stop a run after its sixth round and resume it."""

    def stop(record: fedbudget.RoundRecord) -> None:
        if record.round == 3:
            time.sleep(1.1)  # checkpoints are a second apart
        if record.round == 6:
            raise Interrupted

    try:
        fedbudget.train(**options, out=out, callbacks=[stop])
    except Interrupted:
        return fedbudget.train(resume=out).w
    raise AssertionError("the run ended before its sixth round")


def _serve(options: dict[str, Any], folder: Path, out: Path, *, kill: bool) -> None:
    """Run an aggregator and its nodes, each in its own process."""
    address = f"127.0.0.1:{_free_port()}"
    serve = ["serve", address, *_arguments({**options, "out": out})]
    started = [_start(folder, *serve)]
    try:
        for number, path in enumerate(own.write_nodes(folder)):
            join = ["join", address, "--data", str(path), "--name", f"node-{number}"]
            join.append("--seeded-batches")
            started.append(_start(folder, *join))
        if kill:
            _wait_for_rounds(out, started[0])
            started[0].send_signal(signal.SIGKILL)
            started[0].wait(PATIENCE)
            started.append(_start(folder, "serve", address, "--resume", str(out)))
        ended = [process.wait(PATIENCE) for process in started]
        expected = [-signal.SIGKILL if kill else 0] + [0] * (len(ended) - 1)
        log = (folder / "log").read_text(errors="replace")
        assert ended == expected, f"a process failed: {ended}\n{log}"
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()


def _wait_for_rounds(out: Path, aggregator: "subprocess.Popen[bytes]") -> None:
    rounds = out / "rounds.jsonl"
    until = time.monotonic() + PATIENCE
    while not (rounds.exists() and rounds.read_bytes().count(b"\n") >= 3):
        assert aggregator.poll() is None, "the aggregator ended before it was killed"
        assert time.monotonic() < until, f"there are no rounds in {rounds}"
        time.sleep(0.005)


def _start(folder: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "fedbudget", *arguments],
            cwd=folder,
            env={**os.environ, **_ONE_THREAD},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _command(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedbudget", *arguments],
        env={**os.environ, **_ONE_THREAD},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """Convert arguments of `fedbudget.train` to command-line options."""
    arguments = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            values = value if isinstance(value, tuple) else (value,)
            for each in values:
                arguments += [f"--{flag}", str(each)]
    return arguments


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def _quiet_environment(cell: Cell) -> Iterator[None]:
    """Use one PyTorch thread and draw no plots, because a plot takes longer than a run."""
    matplotlib = sys.modules.get("matplotlib")
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    threads = _set_torch_threads(1) if "torch" in cell.needs else None
    try:
        yield
    finally:
        if matplotlib is None:
            del sys.modules["matplotlib"]
        else:
            sys.modules["matplotlib"] = matplotlib
        if threads is not None:
            _set_torch_threads(threads)


def _set_torch_threads(number: int) -> int:
    """Set the number of threads and return the previous one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    return before
