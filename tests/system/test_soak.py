"""Memory of the aggregator and of nodes over thousands of rounds.

    python -m system.test_soak FOLDER ROUNDS [masked]

prints rounds, and the memory of aggregator and nodes in kB, for as many rounds as wanted.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from support.processes import commands

NODES = 3
OPTIONS = ["--model", "softmax", "--costs", "simulated", "--budget", "time=1000000h"]
OPTIONS += ["--tau", "2", "--step-size", "0.01", "--validation", "0", "--out", "run"]
MASKED = "--secure-aggregation"
LIMIT = 0.2  # kB of the aggregator for a round
FLAT = 0.1  # kB of a node for a round


class Memory(NamedTuple):
    """Resident memory in kB after a number of rounds."""

    round: int
    aggregator: int
    nodes: list[int]


def resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def rounds_in(file: Path) -> int:
    """Count the complete lines of a file."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def soak(folder: Path, rounds: int, *, masked: bool) -> Iterator[Memory]:
    """Yield the memory about every second, until the run has this many rounds."""
    options = [MASKED] if masked else []
    with commands(folder) as start:
        wanted = ["--nodes", str(NODES), "--rounds", str(rounds + 1000)]
        aggregator = start.serve(*wanted, *options, *OPTIONS)
        nodes = start.nodes(aggregator.port, NODES, *options)
        done = 0
        while done < rounds:
            time.sleep(1)
            assert aggregator.process.poll() is None, aggregator.errors
            done = rounds_in(folder / "run" / "rounds.jsonl")
            own = resident(aggregator.process.pid)
            yield Memory(done, own, [resident(each.process.pid) for each in nodes])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("rounds", "masked"), [(8000, False), (5000, True)])
def test_memory_does_not_grow(tmp_path: Path, rounds: int, masked: bool) -> None:
    """After the first rounds, in which caches are filled."""
    found = list(soak(tmp_path, rounds, masked=masked))
    first = next(each for each in found if each.round >= rounds / 3)
    last = found[-1]
    more = last.round - first.round
    assert more > rounds / 2
    assert last.aggregator - first.aggregator < LIMIT * more
    for before, after in zip(first.nodes, last.nodes, strict=True):
        assert after - before < FLAT * more


if __name__ == "__main__":
    place = Path(sys.argv[1])
    for number, each in enumerate(
        soak(place, int(sys.argv[2]), masked="masked" in sys.argv[3:])
    ):
        if number % 20 == 0:
            print(each.round, each.aggregator, *each.nodes, flush=True)
