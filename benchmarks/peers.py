"""`python -m benchmarks peers`: W1 with 50 nodes on simulations of several frameworks.

Each framework is installed once, into its own environment below .venv-peers. If it
cannot be installed or fails, it is left out with the reason. The apps (peer_apps) are
carefully written. They use the same initial w, shards and mini-batches, in memory as
float32, and the benchmark checks that w is the same after every round. A round lasts
from one end to the next. fedbudget is measured before and after each framework, and
medians are compared. Flower's simulation is measured as in `python -m benchmarks
simulation`, in this environment.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import venv
from argparse import ArgumentParser
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import flower_simulation
from benchmarks.flower_simulation import (
    NODES,
    WARMING_UP,
    median_milliseconds,
    our_turn,
)
from benchmarks.workload import TAU, dataset, settings
from fedbudget.data.sampling import Sampler
from fedbudget.launch.inputs import batch_of
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import simulate

ROUNDS = 20
"""Measured rounds of a framework."""
PATIENCE = 900.0  # seconds for all rounds of a framework

PEERS = {
    "pfl_research": ("pfl-research", ["pfl>=0.6,<0.7"]),
    "fedjax": (
        "FedJAX",  # no longer maintained; needs old versions of JAX and others
        [
            "fedjax==0.0.17",
            "jax<0.4.26",
            "jaxlib<0.4.26",
            "numpy<2",
            "scipy<1.13",
            "optax<0.2.3",
            "chex<0.1.87",
            "dm-haiku<0.0.13",
        ],
    ),
    "nvflare": ("NVIDIA FLARE", ["nvflare>=2.9,<2.10"]),
}
"""Title and requirements of each framework, by the name of its app."""

_FEW = {"nvflare": 3}
"""Measured rounds of frameworks whose rounds take minutes."""

_HERE = Path(__file__).parent
_ENVIRONMENTS = _HERE.parent / ".venv-peers"
_CONSOLE = Console(width=140)


def main(arguments: Sequence[str]) -> None:
    parser = ArgumentParser(
        prog="python -m benchmarks peers", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "names",
        nargs="*",
        help=f"some of flower, {', '.join(PEERS)}; default: all",
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="measured rounds of each"
    )
    asked = parser.parse_args(arguments)
    path = _HERE / "results" / "peers.json"
    for name in asked.names or ["flower", *PEERS]:
        if name not in ("flower", *PEERS):
            parser.error(f"there is no {name}")
        with _CONSOLE.status(f"measuring {name}"):
            row = compare_flower() if name == "flower" else compare(name, asked.rounds)
        _CONSOLE.print(_line(row), highlight=False, markup=False)
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**before, name: row}, indent=2) + "\n")


def compare_flower() -> dict[str, Any]:
    found = flower_simulation.compare_flower()
    row = {
        "title": "Flower",
        "versions": found["flower"],
        "ours_milliseconds": found["ours_milliseconds"],
    }
    if "flower_milliseconds" not in found:
        return {**row, "left_out": found["flower"]}
    return {
        **row,
        "theirs_milliseconds": found["flower_milliseconds"],
        "ratio": found["flower_over_ours"],
    }


def compare(name: str, rounds: int) -> dict[str, Any]:
    """Measure milliseconds per round of fedbudget and a framework.

    If the framework fails, the row has the reason instead.
    """
    title, needs = PEERS[name]
    before, ours = our_turn()
    row: dict[str, Any] = {
        "title": title,
        "ours_milliseconds": median_milliseconds(before),
    }
    try:
        python = _environment(name, needs)
        ended, ws = _their_turn(
            name, python, WARMING_UP + min(rounds, _FEW.get(name, rounds))
        )
    except PeerFailedError as error:
        return {**row, "left_out": str(error)}
    np.testing.assert_allclose(ws, ours[: len(ws)], rtol=1e-4, atol=1e-6)
    after, _ = our_turn()
    theirs = [later - earlier for earlier, later in pairwise(ended[WARMING_UP - 1 :])]
    if not theirs:
        return {
            **row,
            "left_out": f"only {len(ended)} rounds, {WARMING_UP} of them warm-up",
        }
    milliseconds = median_milliseconds(before + after), median_milliseconds(theirs)
    versions = f"{needs[0].split('>')[0].split('=')[0]} {_version(python, needs[0])}"
    both = {
        "ours_milliseconds": milliseconds[0],
        "theirs_milliseconds": milliseconds[1],
    }
    return {
        **row,
        **both,
        "versions": versions,
        "ratio": milliseconds[1] / milliseconds[0],
        "rounds": len(theirs),
    }


class PeerFailedError(Exception):
    """Another framework could not be installed, or its app failed."""


def _environment(name: str, needs: Sequence[str]) -> Path:
    """Return the Python of its environment; create the environment if it is missing."""
    folder = _ENVIRONMENTS / name
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists() or done.read_text() != "\n".join(needs):
        venv.create(folder, with_pip=True, clear=True)
        installed = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", *needs],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        if installed.returncode:
            raise PeerFailedError(
                f"installation failed: {installed.stderr.strip().splitlines()[-1]}"
            )
        done.write_text("\n".join(needs))
    return python


def _their_turn(name: str, python: Path, rounds: int) -> tuple[list[float], Any]:
    """Return the end time of each round, and w after it."""
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as folder:
        work, result, log = (
            Path(folder) / each for each in ("work.npz", "result.npz", "log")
        )
        _write(work, rounds)
        environment = {**os.environ, "PYTHONPATH": str(_HERE.parent), "HOME": folder}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [python, "-m", f"benchmarks.peer_apps.{name}", work, result],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise PeerFailedError(f"no result after {PATIENCE:.0f} seconds") from None
        finally:
            if process.poll() is None:  # otherwise its number may belong to another process
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if not result.exists():
            print(
                "\n".join(log.read_text(errors="replace").splitlines()[-20:]),
                file=sys.stderr,
            )
            raise PeerFailedError("its app failed")
        with np.load(result) as found:
            return found["ended"].tolist(), found["w"]


def _write(path: Path, rounds: int) -> None:
    """Write the input of an app; see peer_apps/common.py."""
    prepared = simulate(settings(NODES, rounds), Overrides(dataset=dataset()))
    shards = prepared.shards
    sampler = Sampler(shards.size, batch_of(prepared.settings), prepared.settings.seed)
    drawn = [sampler.round(TAU, fresh=True) for _ in range(rounds)]
    batches = [
        [
            [one.of(node, update, int(shards.size[node])) for update in range(TAU)]
            for node in range(NODES)
        ]
        for one in drawn
    ]
    rows = [shards.rows_of(node) for node in range(NODES)]
    np.savez(
        path,
        x=shards.table.x,
        y=shards.table.y,
        rows=np.array(rows),
        batches=np.array(batches),
    )


def _version(python: Path, needed: str) -> str:
    name = needed.split(">")[0].split("=")[0]
    code = f"from importlib import metadata; print(metadata.version({name!r}))"
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def _line(row: dict[str, Any]) -> str:
    ours = f"W1 with {NODES} nodes: {row['ours_milliseconds']:.2f}  ms per round"
    if "left_out" in row:
        return f"{ours}; {row['title']} is left out: {row['left_out']}"
    theirs = f"{row['title']} ({row['versions']}): {row['theirs_milliseconds']:.0f} ms"
    return f"{ours}; {theirs}, {row['ratio']:.1f} times that"
