"""`python -m benchmarks guard`: is a round still near its limits? A report in seconds.

    in process    rounds of W1 as a fraction of the bare kernel's speed, for mini-batches
                  and whole shards, and milliseconds per round beside the kernel
    over gRPC     rounds as a fraction of the rate of a bare echo of the same messages

In process, the clock counts processor time, and kernels use one thread. Other programs
change these ratios less than those of seconds, but they still slow down memory: repeat the
report on a busy machine. Ratios over gRPC mean nothing there. Rounds are
measured from one record to the next, without the start and the end of the run. Use
`speed` and `rounds` for the numbers of docs/research/performance.md.
"""

import statistics
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numba
from rich.console import Console
from rich.table import Table

from benchmarks import contenders, rounds
from benchmarks.measure import take_turns
from benchmarks.workload import NODES, dataset, settings
from fedbudget.launch.execute import execute
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import simulate

_AIMS = {
    False: {5: 0.75, 50: 0.85, 500: 0.92},
    True: {5: 0.95, 50: 0.95, 500: 0.95},
}
"""Aims of the fraction, for mini-batches and for whole shards."""
_ROUNDS = {False: {5: 300, 50: 40, 500: 12}, True: {5: 5, 50: 10, 500: 10}}
_CASES = (rounds.Case(5, 784, 60), rounds.Case(50, 784, 20))
_ECHO_AIM = 0.6
_TURNS = 3  # the best one counts
_CONSOLE = Console()


def main(arguments: Sequence[str]) -> None:
    """Measure and print; options as on the command line."""
    parser = ArgumentParser(prog="python -m benchmarks guard")
    parser.add_argument("--nodes", type=int, nargs="+", choices=NODES, default=NODES)
    parser.add_argument("--no-network", action="store_true", help="only in process")
    given = parser.parse_args(arguments)
    numba.set_num_threads(1)
    table = Table(title="In process", title_justify="left", box=None)
    for heading in ("batch", "nodes", "ms beside the kernel", "of bare kernel", "aim"):
        table.add_column(heading, justify="right")
    for full in (False, True):
        for nodes in given.nodes:
            ours, bare = round_seconds(nodes, _ROUNDS[full][nodes], full=full)
            table.add_row(
                "full" if full else "100",
                str(nodes),
                f"{1000 * (ours - bare):.2f}",
                f"{bare / ours:.2f}",
                f"{_AIMS[full][nodes]:.2f}",
            )
    _CONSOLE.print(table)
    if given.no_network:
        return
    table = Table(title="\nOver gRPC", title_justify="left", box=None)
    for heading in ("nodes", "ms per round", "ms of the echo", "of bare echo", "aim"):
        table.add_column(heading, justify="right")
    for row in rounds.plain_round_trips(_CASES):
        table.add_row(
            str(row["nodes"]),
            f"{row['ours_milliseconds']:.1f}",
            f"{row['bare_milliseconds']:.1f}",
            f"{row['ours_over_bare']:.2f}",
            f"{_ECHO_AIM:.2f}",
        )
    _CONSOLE.print(table)


def round_seconds(nodes: int, count: int, *, full: bool) -> tuple[float, float]:
    """Return processor seconds of a round of W1, and of the bare kernel in it.

    Args:
      nodes: number of nodes.
      count: rounds to measure.
      full: whether to use whole shards instead of mini-batches.
    """
    ours = min(_mean_round(nodes, count, full) for _ in range(_TURNS))
    bare = take_turns(
        {"bare": contenders.bare_kernel(nodes, count, full=full)}, _TURNS, time.process_time
    )
    return ours, bare["bare"] / count


def _mean_round(nodes: int, count: int, full: bool) -> float:
    plan = simulate(settings(nodes, count + 2, full=full), Overrides(dataset=dataset()))
    ended: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        execute(
            plan,
            out=Path(folder) / "run",
            callbacks=[lambda record: ended.append(time.process_time())],
            plot=False,
        )
    # Without the first round, and the final one, which makes no updates.
    return statistics.fmean(after - before for before, after in pairwise(ended[:-1]))
