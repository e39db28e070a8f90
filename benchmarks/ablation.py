"""`python -m benchmarks ablation`: the default method without one of its parts.

Each part is removed alone, or replaced by the corresponding part of frugal. Tasks are
those of docs/research/decisions.md that need no download, with simulated costs. MNIST
and Fashion-MNIST are included if they are downloaded (`fedbudget data`).
"""

import json
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
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
from benchmarks.budgets import RESULTS, small_dataset
from fedbudget.budget.control import AdaptiveTau
from fedbudget.budget.step_size import AutoStep
from fedbudget.data import load
from fedbudget.data.dataset import Dataset, Part
from fedbudget.launch import simulate
from fedbudget.launch.method import build_method
from fedbudget.launch.prepared import NOTHING, Overrides
from fedbudget.protocol.method import Method
from fedbudget.protocol.update import Accelerate, Average, Motion
from fedbudget.settings.settings import Settings

TASKS: dict[str, dict[str, Any]] = {
    "softmax, Fashion-MNIST": {
        "model": "softmax",
        "dataset": "fashion-mnist",
        "case": 1,
        "batch_size": 32,
    },
    "softmax, MNIST, 20 nodes": {
        "model": "softmax",
        "dataset": "mnist",
        "case": 2,
        "nodes": 20,
        "batch_size": 10,
    },
    "hidden layer, MNIST": {
        "model": "mlp",
        "dataset": "mnist",
        "case": 2,
        "batch_size": 32,
    },
    "softmax, breast cancer": {
        "model": "softmax",
        "dataset": "breast_cancer",
        "partition": "dirichlet:0.1",
        "batch_size": "full",
    },
    "linear, diabetes": {
        "model": "linear",
        "dataset": "diabetes",
        "case": 2,
        "batch_size": "full",
    },
    "SVM, breast cancer, 5 s": {
        "model": "svm",
        "dataset": "breast_cancer",
        "case": 2,
        "nodes": 4,
        "batch_size": 10,
        "budget": "time=5s",
    },
    "K-means, wine, 5 s": {
        "model": "kmeans",
        "dataset": "wine",
        "case": 2,
        "batch_size": 10,
        "clusters": 3,
        "budget": "time=5s",
    },
}
_CONSOLE = Console(width=140)


@dataclass(frozen=True)
class NoRetreat(Accelerate):
    """Continues even if the loss rises."""

    def retreat(self, state: Motion) -> Motion:
        return state


@dataclass(frozen=True)
class NoPace(Accelerate):
    """Keeps its velocity when η changes."""

    def paced(self, state: Motion, ratio: float) -> Motion:
        return state


def _with_update(rule: Accelerate) -> Callable[[Method], Method]:
    """Replace the update rule, except for K-means, whose centres are averaged."""
    return lambda method: (
        method if isinstance(method.update, Average) else replace(method, update=rule)
    )


PARTS: dict[str, Callable[[Method], Method]] = {
    "the default": lambda method: method,
    "τ by G, as frugal": lambda method: replace(
        method, controller=AdaptiveTau(0.0025, leap=True)
    ),
    "η as frugal": lambda method: replace(method, step_size=AutoStep(), one_step=False),
    "the mean as it is": lambda method: replace(method, update=Average()),
    "no gains": _with_update(Accelerate(rise=1.0, fall=1.0)),
    "no momentum": _with_update(Accelerate(momentum=0.0)),
    "motion by the aggregator alone": _with_update(Accelerate(carry=0.0)),
    "no retreat": _with_update(NoRetreat()),
    "motion without η's pace": _with_update(NoPace()),
    "drift corrected wholly or not": lambda method: replace(method, partly=False),
    "no drift correction": lambda method: replace(
        method, correct_drift=False, partly=False
    ),
}


@cache
def dataset(name: str) -> Dataset:
    """Load a dataset; average 28 x 28 images over 2 x 2 pixels, for speed."""
    if name not in ("mnist", "fashion-mnist"):
        return small_dataset(name)
    full = load(name)

    def halved(part: Part) -> Part:
        x = np.asarray(part.x).reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4)).reshape(-1, 196)
        return replace(part, x=x.astype(np.float32))

    return replace(full, train=halved(full.train), test=None, shape=(1, 14, 14), note="")


def make_run(task: str, part: str, seed: int) -> float:
    """Return the final loss of a task without one part."""

    def built(settings: Settings, overrides: Overrides = NOTHING) -> Method:
        return PARTS[part](build_method(settings, overrides))

    options = {"budget": "time=15s", **TASKS[task]}
    with patch.object(simulate, "build_method", built), np.errstate(all="ignore"):
        return fedbudget.train(
            **{**options, "dataset": dataset(options["dataset"])},
            seed=seed,
            costs="simulated",
            evaluations=1,
        ).loss


def main(arguments: Sequence[str]) -> None:
    """Make the runs, print the table and write the file."""
    parser = ArgumentParser(prog="python -m benchmarks ablation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each cell [5]")
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS / "ablation.json",
        help="output file",
    )
    asked = parser.parse_args(arguments)
    cells = [(task, part) for task in TASKS for part in PARTS]
    losses: dict[str, dict[str, list[float]]] = {task: {} for task in TASKS}
    for task, part in track(cells, "cells", console=Console(stderr=True)):
        losses[task][part] = [make_run(task, part, seed) for seed in range(asked.seeds)]
    asked.out.parent.mkdir(exist_ok=True)
    asked.out.write_text(json.dumps(losses, indent=1) + "\n")
    _CONSOLE.print(
        table(losses, f"Loss, {asked.seeds} seeds; all losses are in {asked.out}")
    )


def table(losses: dict[str, dict[str, list[float]]], title: str) -> Table:
    """Return the losses of the default, and the ratio of losses without each part.

    Values are means over seeds, and medians for K-means.
    """
    shown = Table(title=title, title_justify="left", box=None)
    for heading in ("", *losses):
        shown.add_column(heading, justify="right" if heading else "left")
    whole = {
        task: _typical(task, by_part["the default"]) for task, by_part in losses.items()
    }
    shown.add_row("the default", *(f"{loss:.4g}" for loss in whole.values()))
    for part in list(PARTS)[1:]:
        shown.add_row(
            part,
            *(f"{_typical(task, losses[task][part]) / whole[task]:.3f}" for task in losses),
        )
    return shown


def _typical(task: str, values: Sequence[float]) -> float:
    return float(np.median(values) if task.startswith("K-means") else np.mean(values))
