"""Many nodes joined from one machine: no round goes without any of them, and the
aggregator's memory does not grow.

The aggregator is a real process. The nodes are coroutines in two other processes (this
file, run as a script), as 200 processes would take more memory and time to start than the
test has.

FEDBUDGET_MINUTES is how long the long run takes, 10 when it is not set.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedbudget.data.files import from_arrays
from fedbudget.engines.grpc.node import run_node
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.worker import Worker

PROCESSES = 2
FEATURES, SAMPLES = 64, 10
"""Of each node: as many features as the digits have, and little to compute, as it is the
conversation that counts.
"""


@pytest.mark.slow
def test_sixty_nodes_take_part_in_every_round(tmp_path: Path) -> None:
    _memory_over(tmp_path, nodes=60, seconds=6.0)


@pytest.mark.slow
def test_with_two_hundred_nodes_the_memory_of_the_aggregator_is_flat_after_the_first_minute(
    tmp_path: Path,
) -> None:
    seconds = 60 * float(os.environ.get("FEDBUDGET_MINUTES", "10"))
    memory = _memory_over(tmp_path, nodes=200, seconds=seconds)
    print("\nseconds  MB")  # shown with pytest -s
    for second, megabytes in memory[:: max(1, len(memory) // 20)]:
        print(f"{second:7.0f}  {megabytes:.1f}")
    settled = [megabytes for second, megabytes in memory if second >= 60]
    quarter = max(1, len(settled) // 4)
    first, last = np.median(settled[:quarter]), np.median(settled[-quarter:])
    # Records of rounds are kept for the end, 2 kB each: some MB in 10 minutes, of some 150.
    # A tenth is not reached by those, and soon by anything that stays behind of every
    # message.
    assert last < 1.1 * first


def _memory_over(folder: Path, *, nodes: int, seconds: float) -> list[tuple[float, float]]:
    """A run in which nobody misses a round; gives the aggregator's memory in MB by the
    second of the run.
    """
    from support.processes import (
        checkpoint,
        commands,
        records,
        summary,
    )  # not at the top: there are no tests' modules for the script

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
        # Not when the run is over: it is drawn then, which takes memory of its own.
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
    """MB that a process has in memory."""
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
    """Samples of two classes, apart from each other along a direction that is the same for
    all nodes.
    """
    rng = np.random.default_rng(number)
    y = np.arange(SAMPLES) % 2
    x = rng.normal(0, 1, (SAMPLES, FEATURES)) + np.where(y, 0.5, -0.5)[:, None]
    return NodeData(from_arrays([(x, y)], None), [np.arange(SAMPLES)])


if __name__ == "__main__":
    asyncio.run(_attend_all(int(sys.argv[1]), [int(number) for number in sys.argv[2:]]))
