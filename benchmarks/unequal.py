"""`python -m benchmarks unequal`: workload by node speed against the same τ for all
nodes.

The default method runs with simulated costs, with `--workload by-speed` and with
`equal`, on Cases 2 and 4 and a Dirichlet partition. A cell is the geometric mean, over
partitions and seeds, of the ratio of final losses, with the largest ratio of any
partition. MNIST is included if it is downloaded (`fedbudget data`).

With `--network`, runs take 30 s of real time with five processes over gRPC, two of them
four times as fast (`--pace`). The result is the time to the final loss of the same τ
for all nodes. They train on MNIST, with updates of several milliseconds; on digits,
most of the time of an update is overhead. `--delay 0.065` makes aggregations as long as
the prototype's.
"""

import json
import math
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import fedbudget
from benchmarks.budgets import RESULTS
from fedbudget.launch.execute import execute
from fedbudget.launch.local import on_this_machine
from fedbudget.settings.settings import Settings

TASKS: dict[str, dict[str, Any]] = {
    "softmax, digits": {"model": "softmax"},
    "one hidden layer, digits": {"model": "mlp"},
    "SVM, 5,000 of MNIST": {
        "model": "svm",
        "dataset": "mnist",
        "train_samples": 5000,
        "test_samples": 200,
    },
}
SPEEDS: dict[str, dict[str, Any]] = {
    "4,4,1,1,1": {"nodes": 5, "speeds": (4.0, 4.0, 1.0, 1.0, 1.0)},
    "20 log-normal": {"nodes": 20, "speeds": "lognormal:1.0"},
    "1 of 20 slow": {"nodes": 20, "speeds": (*(1.0,) * 19, 0.05)},
}
PARTITIONS = ("case:2", "case:4", "dirichlet:0.1")
SECONDS, WATTS, WALL = 15.0, 5.0, 30.0
PACES = (25.0, 25.0, 100.0, 100.0, 100.0)
_CONSOLE = Console(width=120)

Ratios = dict[str, list[float]]
"""Ratios by partition, one per seed."""


def ratios(task: str, speeds: str, seeds: Sequence[int], resource: str) -> Ratios:
    """Return the loss with workload by speed over the loss with the same τ for all.

    Args:
      resource: The budgeted resource: time, or the energy used in that time.
    """
    given = {**TASKS[task], **SPEEDS[speeds]}
    budget = (
        f"time={SECONDS:g}s"
        if resource == "time"
        else f"energy={SECONDS * WATTS * given['nodes']:g}J"
    )

    def loss(partition: str, seed: int, workload: str) -> float:
        own: Any = {
            **given,
            "partition": partition,
            "seed": seed,
            "workload": workload,
            "budget": budget,
        }
        return fedbudget.train(**own, evaluations=1).loss

    return {
        partition: [
            loss(partition, seed, "by-speed") / loss(partition, seed, "equal")
            for seed in seeds
        ]
        for partition in PARTITIONS
    }


def time_to_loss(seed: int, seconds: float, delay: float) -> float:
    """Return the relative time to the final loss of the same τ for all nodes.

    Runs use whole shards, so that losses cover all samples.
    """
    own: Any = {
        "model": "softmax",
        "partition": "case:2",
        "batch_size": "full",
        "nodes": 5,
    }
    own |= {"dataset": "mnist", "train_samples": 5000, "test_samples": 200}
    rounds = {}
    for workload in ("equal", "by-speed"):
        settings = Settings(
            **own,
            seed=seed,
            workload=workload,
            costs="measured",
            budget=(f"time={seconds:g}s",),
        )
        with on_this_machine(settings, paces=PACES, delay=delay) as prepared:
            rounds[workload] = execute(prepared).rounds
    at_end = rounds["equal"][-1]
    reached = [
        record.spent["time"]
        for record in rounds["by-speed"]
        if record.best_loss <= at_end.best_loss
    ]
    _CONSOLE.print(
        f"seed {seed}: {len(rounds['equal'])} and {len(rounds['by-speed'])} rounds, "
        f"loss {at_end.best_loss:.3g} and {rounds['by-speed'][-1].best_loss:.3g}, "
        f"reached after {min(reached, default=math.inf):.1f} s, "
        f"τ {np.median([record.tau for record in rounds['equal']])} and "
        f"{np.median([record.tau for record in rounds['by-speed']])}",
        soft_wrap=True,
    )
    return min(reached, default=math.inf) / at_end.spent["time"]


def mean_ratio(values: Sequence[float]) -> float:
    return math.exp(float(np.mean(np.log(values))))


def main(arguments: Sequence[str]) -> None:
    parser = ArgumentParser(prog="python -m benchmarks unequal", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--resource", choices=("time", "energy"), default="time")
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--speeds", nargs="*", choices=list(SPEEDS), default=list(SPEEDS))
    parser.add_argument(
        "--out", type=Path, default=None, help="Output file for the ratios, as JSON."
    )
    parser.add_argument(
        "--network", action="store_true", help="Use processes over gRPC and real time."
    )
    parser.add_argument("--seconds", type=float, default=WALL, help="Of these.")
    parser.add_argument(
        "--delay",
        type=float,
        default=0.0,
        help="Extra delay of each message, in seconds.",
    )
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.network:
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        shares = [time_to_loss(seed, options.seconds, options.delay) for seed in seeds]
        _CONSOLE.print(
            "time to the final loss of equal τ, relative to equal τ: "
            f"{np.round(shares, 2).tolist()}",
            soft_wrap=True,
        )
        _CONSOLE.print(f"median {np.median(shares):.2f}")
        return
    found: dict[str, dict[str, Ratios]] = {}
    table = Table(
        "",
        *options.speeds,
        title=f"loss by speed / loss with equal τ, {options.resource}",
    )
    for task in options.tasks:
        cells = []
        for speeds in options.speeds:
            cell = ratios(task, speeds, range(options.seeds), options.resource)
            found.setdefault(task, {})[speeds] = cell
            worst = max(mean_ratio(values) for values in cell.values())
            all_ratios = [ratio for values in cell.values() for ratio in values]
            cells.append(f"{mean_ratio(all_ratios):.2f} ({worst:.2f})")
            _CONSOLE.print(f"{task}, {speeds}: {cells[-1]}", soft_wrap=True)
        table.add_row(task, *cells)
    _CONSOLE.print(table)
    out = options.out or RESULTS / f"unequal-{options.resource}.json"
    out.write_text(json.dumps(found, indent=1) + "\n")
