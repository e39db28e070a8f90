"""The first run on a new machine compiles all kernels before the clock starts."""

from pathlib import Path

import numpy as np
import pytest

from fedbudget.models.compiling import COMPILING
from support.processes import Command, Commands, cli_options, commands, records, summary

LONG = 20.0
"""Cap on a round's time, as a multiple of the usual time for its τ.

A kernel that compiles during a round takes more than 100 times the usual time. A busy
machine slows rounds down by a few times at worst."""


def caches(folder: Path) -> dict[str, float]:
    """Modification time of every compiled kernel in a folder."""
    return {str(path): path.stat().st_mtime for path in folder.rglob("*.nbc")}


@pytest.mark.slow
def test_processes_with_empty_caches(tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        options = ["--nodes", "2", "--model", "softmax", "--test", "digits", "--out", "run"]
        options += ["--spend-all"]
        aggregator = cold(start, "serve", "127.0.0.1:0", *options, "--budget", "time=30s")
        port = aggregator.port
        shards = [
            ["--dataset", "digits", "--case", "2", "--shard", f"{node}/2"]
            for node in (1, 2)
        ]
        nodes = [cold(start, "join", f"127.0.0.1:{port}", *shard) for shard in shards]
        ends = [each.end(patience=600) for each in (aggregator, *nodes)]
        assert ends == [0, 0, 0]
        for process in (aggregator, *nodes):
            assert process.errors.count(COMPILING) == 1
        for node in nodes:
            words = node.errors
            assert words.index(COMPILING) < words.index("joined")
            assert "the run is over; took part in" in words.splitlines()[-1]
        assert aggregator.errors.index(COMPILING) < aggregator.errors.index(
            "2 of 2 nodes are ready"
        )
    made = caches(tmp_path)
    assert {Path(path).relative_to(tmp_path).parts[0] for path in made} == {
        "cache-0",
        "cache-1",
        "cache-2",
    }
    # All kernels were compiled before the first round.
    assert max(made.values()) <= (tmp_path / "run" / "config.toml").stat().st_mtime
    assert 0.98 < share_of_rounds(tmp_path / "run") <= 1


@pytest.mark.slow
def test_single_process_with_empty_cache(tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        run = cold(
            start,
            "run",
            *cli_options(case=2, costs="measured", budget="time=5s", out="run"),
        )
        assert run.end(patience=600) == 0
        assert run.errors.count(COMPILING) == 1
        assert run.errors.index(COMPILING) < run.errors.index("round")
    assert (
        max(caches(tmp_path).values()) <= (tmp_path / "run" / "config.toml").stat().st_mtime
    )


def share_of_rounds(run: Path) -> float:
    """Share of the time budget that rounds took, each capped at `LONG` times the usual.

    The rest is the time before and between rounds, the excess of long rounds, and the
    unspent time."""
    rounds = records(run)
    step, rest = (
        np.array([getattr(each, name)["time"] for each in rounds]) for name in ("c", "b")
    )
    updates = np.array([each.tau for each in rounds])
    usual = updates * np.median(step) + np.median(rest)
    share: float = (
        np.minimum(updates * step + rest, LONG * usual).sum()
        / summary(run)["budget"]["time"]
    )
    return share


def cold(start: Commands, *arguments: str) -> Command:
    """Start a process with an empty kernel cache, as on a new machine."""
    return start.run(
        *arguments, NUMBA_CACHE_DIR=str(start.folder / f"cache-{len(start.started)}")
    )
