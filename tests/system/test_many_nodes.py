"""Many nodes: none misses a round, and the memory of the aggregator does not grow.

The aggregator is a real process. The nodes are coroutines in two other processes (this
file, run as a script), because 200 processes need too much memory and time to start.

FEDBUDGET_MINUTES is the length of the long run; 10 by default.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedbudget.data.files import from_shards
from fedbudget.engines.grpc.node import run_node
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.worker import Worker

PROCESSES = 2
FEATURES, SAMPLES = 64, 10
"""Data of each node: the features of digits, and few samples to compute little."""


@pytest.mark.slow
def test_sixty_nodes_miss_no_round(tmp_path: Path) -> None:
    _memory_over(tmp_path, nodes=60, seconds=6.0)


@pytest.mark.slow
def test_memory_is_flat_with_200_nodes(tmp_path: Path) -> None:
    """The memory of the aggregator does not grow after the first minute."""
    seconds = 60 * float(os.environ.get("FEDBUDGET_MINUTES", "10"))
    memory = _memory_over(tmp_path, nodes=200, seconds=seconds)
    print("\nseconds  MB")  # shown with pytest -s
    for second, megabytes in memory[:: max(1, len(memory) // 20)]:
        print(f"{second:7.0f}  {megabytes:.1f}")
    settled = [megabytes for second, megabytes in memory if second >= 60]
    quarter = max(1, len(settled) // 4)
    first, last = np.median(settled[:quarter]), np.median(settled[-quarter:])
    # The aggregator keeps all records, 2 kB each: a few MB of about 150 in 10 minutes. A
    # leak of every message would exceed 10 % soon.
    assert last < 1.1 * first


def _memory_over(folder: Path, *, nodes: int, seconds: float) -> list[tuple[float, float]]:
    """Run with nodes that never miss a round; return (second, aggregator memory in MB)."""
    # Not at the top: the script cannot import test modules.
    from support.processes import checkpoint, commands, records, summary

    memory: list[tuple[float, float]] = []
    options = "--costs", "measured", "--budget", f"time={seconds:g}s", "--out", "run"
    with commands(folder) as start:
        aggregator = start.serve("--nodes", str(nodes), *options)
        port, program = aggregator.port, (sys.executable, __file__)
        shares = [range(nodes)[process::PROCESSES] for process in range(PROCESSES)]
        together = [
            start.run(str(port), *map(str, share), program=program) for share in shares
        ]
        aggregator.wait_until(lambda: records(folder / "run"))
        began = time.monotonic()
        # Not after the end of the run: plotting needs additional memory.
        while (
            now := time.monotonic() - began
        ) < seconds - 1 and aggregator.process.poll() is None:
            memory.append((now, _resident(aggregator.process.pid)))
            time.sleep(1.0)
        assert [process.end() for process in (aggregator, *together)] == [0] * (
            1 + PROCESSES
        )
    rounds = records(folder / "run")
    print(f"\n{len(rounds)} rounds of {nodes} nodes in {rounds[-1].wall:.1f} s")
    assert [record.round for record in rounds] == list(range(1, len(rounds) + 1))
    assert {(record.nodes, record.missed, record.left_out) for record in rounds} == {
        (nodes, (), ())
    }
    assert checkpoint(folder / "run").engine["counters"]["late"] == 0
    assert summary(folder / "run")["stopped_by"] == "time"
    return memory


def _resident(pid: int) -> float:
    """Resident memory of a process in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


# A process with many nodes.


async def _attend_all(port: int, numbers: list[int]) -> None:
    async with asyncio.TaskGroup() as nodes:
        for number in numbers:
            nodes.create_task(
                run_node(
                    f"127.0.0.1:{port}", Worker(_node_data(number)), name=f"node-{number}"
                )
            )


def _node_data(number: int) -> NodeData:
    """Samples of two classes, separated along the same direction at all nodes."""
    rng = np.random.default_rng(number)
    y = np.arange(SAMPLES) % 2
    x = rng.normal(0, 1, (SAMPLES, FEATURES)) + np.where(y, 0.5, -0.5)[:, None]
    return NodeData(from_shards([(x, y)], None), [np.arange(SAMPLES)])


if __name__ == "__main__":
    asyncio.run(_attend_all(int(sys.argv[1]), [int(number) for number in sys.argv[2:]]))
