"""`python -m benchmarks privacy`: accuracy of private runs with planned and fixed
settings.

The tasks are softmax regression on digits and MNIST, 15 simulated seconds, δ = 1e-5.
The automatic plan is compared with 18 pairs of τ and a number of rounds, whose best is
found in hindsight, and with a common choice: τ = 10 and a noise multiplier of 3. If the
rounds of a pair do not fit into the budget, it makes fewer.

With `--threshold 0.9`, only the plan is measured, with the noise that nodes add if none
drops out. With `--audit`, white-box attacks are made instead (privacy_audit.py).
"""

import json
import math
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import fedbudget
from benchmarks.budgets import RESULTS
from benchmarks.privacy_audit import audit
from fedbudget.arrays import Float64
from fedbudget.data import load
from fedbudget.data.dataset import Dataset
from fedbudget.launch.privacy import private_rule
from fedbudget.protocol.features.feature import Noise
from fedbudget.protocol.method import PrivateRule
from fedbudget.resources.privacy import rho_of
from fedbudget.secure.graph import needed, sharers

DELTA = 1e-5
EPSILONS = (2.0, 4.0, 8.0)
WITHIN = {2.0: 0.05, 4.0: 0.02, 8.0: 0.02}
"""Allowed gap between the plan and the best pair."""
TASKS: dict[str, dict[str, Any]] = {
    f"{name}, {nodes} nodes, {words}": {
        "dataset": name,
        "nodes": nodes,
        "partition": partition,
        **more,
    }
    for name, nodes, more in (
        ("digits", 200, {}),
        ("digits", 100, {}),
        ("mnist", 200, {"batch_size": 10}),
    )
    for words, partition in (("uniform", "case:1"), ("Dirichlet 0.3", "dirichlet:0.3"))
}
_FIT = {5: 75, 15: 45, 50: 19}
"""Number of rounds of τ updates that fit."""
PAIRS = [
    (tau, min(rounds, most))
    for tau, most in _FIT.items()
    for rounds in (3, 6, 12, 25, 50, 75)
]
_NOISE = 3.0
_CONSOLE = Console(width=140)


@cache
def dataset(name: str) -> Dataset:
    return load(name)


def accuracy(
    task: str, epsilon: float, seed: int, pair: tuple[int, int] | None = None
) -> float:
    """Return the accuracy of a run.

    Args:
      pair: τ and the number of rounds that move w; None for the automatic plan.
    """
    fixed: Any = (
        {} if pair is None else {"tau": pair[0], "rounds": pair[1] + 1}
    )  # plus one that requests norms of updates
    options: dict[str, Any] = {
        **TASKS[task],
        "dataset": dataset(TASKS[task]["dataset"]),
    }
    result = fedbudget.train(
        model="softmax",
        budget=["time=15s", f"privacy={epsilon:g}"],
        privacy_delta=DELTA,
        costs="simulated",
        seed=seed,
        evaluations=1,
        **options,
        **fixed,
    )
    assert result.accuracy is not None
    assert result.spent["privacy"] <= epsilon
    return result.accuracy


@dataclass(frozen=True)
class MoreNoise:
    """Noise of a source with its variance multiplied by a factor."""

    source: Noise
    times: float

    def draw(self, round_: int, size: int) -> Float64:
        return math.sqrt(self.times) * self.source.draw(round_, size)


@contextmanager
def noise_at_nodes(threshold: float) -> Iterator[None]:
    """Add noise of all nodes to runs planned for a share of nodes."""

    def rule_of(*given: Any) -> PrivateRule:
        rule = private_rule(*given)
        excess = rule.nodes / sharers(needed(rule.nodes, threshold))
        return replace(rule, noise=MoreNoise(rule.noise, excess), excess=excess)

    with patch("fedbudget.launch.method.private_rule", rule_of):
        yield


def usual_pair(epsilon: float) -> tuple[int, int]:
    """Return τ = 10 and the number of rounds that a noise multiplier of 3 allows."""
    return 10, max(1, int(2 * _NOISE**2 * rho_of(epsilon, DELTA)))


def main(arguments: Sequence[str]) -> None:
    """Make the runs that the file lacks, print the table and write the file."""
    parser = ArgumentParser(prog="python -m benchmarks privacy", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each cell [3]")
    parser.add_argument(
        "--only", default="", help="only tasks whose names contain this text"
    )
    parser.add_argument(
        "--epsilon",
        type=float,
        nargs="*",
        default=EPSILONS,
        help="values of ε [2 4 8]",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        help="threshold of secure aggregation; measures only the plan",
    )
    parser.add_argument(
        "--audit",
        type=float,
        nargs="?",
        const=1.0,
        metavar="SHARE",
        help="attack private runs; a share of all pairs of runs [1]",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS / "privacy.json",
        help="output file",
    )
    asked = parser.parse_args(arguments)
    if asked.audit is not None:
        sys.exit(0 if audit(tuple(asked.epsilon), asked.audit) else 1)
    found: dict[str, list[float]] = (
        json.loads(asked.out.read_text()) if asked.out.exists() else {}
    )
    tasks = [task for task in TASKS if asked.only in task]
    if asked.threshold is not None:
        for task in tasks:
            for epsilon in asked.epsilon:
                with noise_at_nodes(asked.threshold):
                    mean = np.mean(
                        [accuracy(task, epsilon, seed) for seed in range(asked.seeds)]
                    )
                _CONSOLE.print(
                    f"{task}, ε = {epsilon:g}, threshold {asked.threshold:.3g}: {mean:.3f}"
                )
        return
    cells = [
        (task, epsilon, pair)
        for task in tasks
        for epsilon in asked.epsilon
        for pair in (None, usual_pair(epsilon), *PAIRS)
    ]
    for task, epsilon, pair in track(cells, "cells", console=Console(stderr=True)):
        known = found.setdefault(key(task, epsilon, pair), [])
        known += [
            accuracy(task, epsilon, seed, pair) for seed in range(len(known), asked.seeds)
        ]
        asked.out.parent.mkdir(exist_ok=True)
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    _CONSOLE.print(table(found))


def key(task: str, epsilon: float, pair: tuple[int, int] | None) -> str:
    how = "plan" if pair is None else f"tau {pair[0]}, {pair[1]} rounds"
    return f"{task}; {epsilon:g}; {how}"


def table(found: dict[str, list[float]]) -> Table:
    """Return mean accuracies, and the gap between the plan and the best pair.

    An ! marks gaps that are too large.
    """
    shown = Table(title="Accuracy of private runs", title_justify="left", box=None)
    for heading in (
        "",
        "ε",
        "plan",
        "best pair",
        "its τ, rounds",
        "τ = 10, σ = 3",
        "below",
    ):
        shown.add_column(heading, justify="right" if heading else "left")
    for task in TASKS:
        for epsilon in EPSILONS:
            if (
                key(task, epsilon, None) not in found
                or key(task, epsilon, PAIRS[-1]) not in found
            ):
                continue
            plan, usual = (
                float(np.mean(found[key(task, epsilon, pair)]))
                for pair in (None, usual_pair(epsilon))
            )
            pairs = {
                pair: float(np.mean(found[key(task, epsilon, pair)])) for pair in PAIRS
            }
            best = max(pairs, key=lambda pair: pairs[pair])
            below = pairs[best] - plan
            miss = "!" if below > WITHIN[epsilon] or plan <= usual else ""
            numbers = [f"{each:.3f}" for each in (plan, pairs[best], usual, below)]
            shown.add_row(
                task,
                f"{epsilon:g}",
                *numbers[:2],
                f"{best[0]}, {best[1]}",
                *numbers[2:],
                miss,
            )
    return shown
