"""The same seed writes the same rounds.jsonl with any number of threads.

Only the wall-clock time differs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

RUNS: dict[str, dict[str, object]] = {
    "adaptive, mini-batches": {"partition": "case:2"},
    "adaptive, whole shards": {"partition": "case:4", "batch_size": "full"},
    "fixed, mini-batches": {"partition": "case:1", "tau": 7, "batch_size": 30},
    "fixed, whole shards": {"partition": "case:3", "tau": 3, "batch_size": "full"},
    "one node, adaptive, mini-batches": {"nodes": 1, "batch_size": 300},
    "one node, fixed, whole shard": {"nodes": 1, "tau": 5, "batch_size": "full"},
    "another seed": {"partition": "case:2", "seed": 1},
    "several budgets": {
        "partition": "case:2",
        "budget": ("time=2s", "bytes=60kB", "energy=1kJ"),
    },
}

SCRIPT = """
import pathlib, sys
from fedbudget import data
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import simulate
from fedbudget.settings.settings import Settings
from fedbudget.launch.execute import execute

digits = data.load("digits")
for number, options in enumerate({options!r}):
    settings = Settings(**{{"model": "svm", "budget": ("time=2s",), **options}})
    plan = simulate(settings, Overrides(dataset=digits))
    execute(plan, out=pathlib.Path(sys.argv[1], str(number)), plot=False)
"""

pytestmark = pytest.mark.xdist_group("determinism")  # all tests share slow runs


def make(folder: Path, threads: int) -> Path:
    """Execute all runs in a process with this number of threads."""
    script = SCRIPT.format(options=list(RUNS.values()))
    environment = {**os.environ, "NUMBA_NUM_THREADS": str(threads)}
    subprocess.run(
        [sys.executable, "-c", script, folder], env=environment, check=True, timeout=300
    )
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    one, two = (
        make(tmp_path_factory.mktemp(f"threads-{threads}"), threads) for threads in (1, 2)
    )
    return one, two


def rounds(folder: Path, name: str) -> bytes:
    written = (folder / str(list(RUNS).index(name)) / "rounds.jsonl").read_bytes()
    without_wall, removed = re.subn(rb'"wall":[0-9.e-]+', b"", written)
    assert removed == written.count(b"\n") > 3
    return without_wall


@pytest.mark.parametrize("name", RUNS)
def test_thread_count_does_not_change_bytes(folders: tuple[Path, Path], name: str) -> None:
    one, two = folders
    assert rounds(one, name) == rounds(two, name)
    number = str(list(RUNS).index(name))
    first, second = (
        (folder / number / "model.safetensors").read_bytes() for folder in folders
    )
    assert first == second


def test_another_seed_changes_the_bytes(folders: tuple[Path, Path]) -> None:
    assert rounds(folders[0], "adaptive, mini-batches") != rounds(
        folders[0], "another seed"
    )


@pytest.mark.slow
def test_cached_kernels_compute_same_bits(tmp_path: Path) -> None:
    """Freshly compiled kernels and kernels loaded from disk agree."""
    code = "import fedbudget; r = fedbudget.train(case=2, nodes=4, budget='time=1s'); "
    code += "print(r.loss.hex(), r.w.tolist())"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    first, second = (
        subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for _ in range(2)
    )
    assert list(tmp_path.rglob("*.nbc"))  # the second run loaded kernels
    assert first == second
