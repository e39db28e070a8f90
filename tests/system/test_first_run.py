"""The first run on machines that never made one: what has to be compiled is, before the
clock starts.
"""

from pathlib import Path

import numpy as np
import pytest

from fedbudget.models.compiling import COMPILING
from support.processes import Command, Commands, commands, records, summary

LONG = 20.0
"""Times what a round with its τ usually takes: what is beyond goes to something else, as to
a kernel that is compiled in it, which takes a hundred rounds' time and more. A busy machine
makes rounds several times as long, at worst."""


def caches(folder: Path) -> dict[str, float]:
    """When each kernel was written to disk, of all caches in a folder."""
    return {str(path): path.stat().st_mtime for path in folder.rglob("*.nbc")}


@pytest.mark.slow
def test_an_aggregator_and_two_nodes_each_with_an_empty_cache(tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        options = ["--nodes", "2", "--model", "softmax", "--test", "digits", "--out", "run"]
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
    assert (
        max(made.values()) <= (tmp_path / "run" / "config.toml").stat().st_mtime
    )  # before the first round
    assert 0.98 < share_of_rounds(tmp_path / "run") <= 1


@pytest.mark.slow
def test_a_run_in_one_process_with_an_empty_cache(tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        run = cold(
            start,
            "run",
            "--case",
            "2",
            "--costs",
            "measured",
            "--budget",
            "time=5s",
            "--out",
            "run",
        )
        assert run.end(patience=600) == 0
        assert run.errors.count(COMPILING) == 1
        assert run.errors.index(COMPILING) < run.errors.index("round")
    assert (
        max(caches(tmp_path).values()) <= (tmp_path / "run" / "config.toml").stat().st_mtime
    )


def share_of_rounds(run: Path) -> float:
    """Of the time that may be spent, what rounds took by the run's record.

    The rest is what was before the first and between two of them, what rounds took beyond
    what is usual, and what was left at the end."""
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
    """A process of a machine of its own, on which nothing was compiled yet."""
    return start.run(
        *arguments, NUMBA_CACHE_DIR=str(start.folder / f"cache-{len(start.started)}")
    )
