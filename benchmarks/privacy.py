"""`python -m benchmarks privacy`: accuracy of private runs, against all that could have been fixed beforehand.

Softmax regression on digits and MNIST, 15 simulated seconds, δ = 1e-5. Beside the plan there are 18 pairs of τ and a
number of rounds, the best of which is known only afterwards, and what people begin with: τ = 10 and noise of 3. A pair
whose rounds do not fit has as many as do.

With `--threshold 0.9`: the plan alone, with as much noise as there is where nodes add it and nobody drops out.
"""

import json
import math
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
from fedbudget.arrays import Float64
from fedbudget.data import load
from fedbudget.data.dataset import Dataset
from fedbudget.experiments.cells import uninterrupted
from fedbudget.launch.privacy import private_rule
from fedbudget.protocol.method import PrivateRule
from fedbudget.protocol.privacy import Noise
from fedbudget.resources.privacy import rho_of
from fedbudget.secure.graph import needed, sharers

DELTA = 1e-5
EPSILONS = (2.0, 4.0, 8.0)
WITHIN = {2.0: 0.05, 4.0: 0.02, 8.0: 0.02}
"""How far below the best of all pairs the plan may be."""
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
"""How many rounds of τ updates fit."""
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
    """Of a run.

    Args:
      pair: τ, and how many rounds move w; by the plan when not given.
    """
    fixed: Any = (
        {} if pair is None else {"tau": pair[0], "rounds": pair[1] + 1}
    )  # and one that asks for lengths
    options: dict[str, Any] = {**TASKS[task], "dataset": dataset(TASKS[task]["dataset"])}
    result = uninterrupted(
        fedbudget.train(
            model="softmax",
            budget=["time=15s", f"privacy={epsilon:g}"],
            privacy_delta=DELTA,
            seed=seed,
            evaluations=1,
            **options,
            **fixed,
        )
    )
    assert result.accuracy is not None
    assert result.spent["privacy"] <= epsilon
    return result.accuracy


@dataclass(frozen=True)
class MoreNoise:
    """Of a source, so many times as much by its variance."""

    source: Noise
    times: float

    def draw(self, round_: int, rho: float, size: int) -> Float64:
        return math.sqrt(self.times) * self.source.draw(round_, rho, size)


@contextmanager
def noise_at_nodes(threshold: float) -> Iterator[None]:
    """Runs that are made meanwhile have the noise of all nodes, where such a share of them would be enough."""

    def rule_of(*given: Any) -> PrivateRule:
        rule = private_rule(*given)
        excess = rule.nodes / sharers(needed(rule.nodes, threshold))
        return replace(rule, noise=MoreNoise(rule.noise, excess), excess=excess)

    with patch("fedbudget.launch.method.private_rule", rule_of):
        yield


def usual_pair(epsilon: float) -> tuple[int, int]:
    """τ = 10, and as many rounds as noise of 3 allows."""
    return 10, max(1, int(2 * _NOISE**2 * rho_of(epsilon, DELTA)))


def main(arguments: Sequence[str]) -> None:
    """Makes the runs, prints the table, writes the file; runs that the file has already are not made again."""
    parser = ArgumentParser(prog="python -m benchmarks privacy", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each [3]")
    parser.add_argument("--only", default="", help="tasks whose names have this in them")
    parser.add_argument(
        "--epsilon",
        type=float,
        nargs="*",
        default=EPSILONS,
        help="of the runs to make [2 4 8]",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        help="of secure aggregation; the plan's runs with its noise",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS / "privacy.json",
        help="where accuracies are written",
    )
    asked = parser.parse_args(arguments)
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
    """Mean accuracies, with by how much the plan is below the best pair, and an ! where that is too much."""
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
