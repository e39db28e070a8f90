"""`python -m benchmarks normalization`: batch against group normalization.

A small residual network is trained on nodes with different samples (Fashion-MNIST,
Dirichlet 0.5). Running statistics are sent with the parameters, or stay on the nodes.
All runs have the same budget of simulated time, samples and mini-batches. Each takes a
minute on one core.
"""

import json
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fedbudget
from fedbudget.models import TorchModel

RESULTS = Path(__file__).parent / "results"
_CONSOLE = Console()

Normalization = Callable[[int], nn.Module]

KINDS: dict[str, tuple[Normalization, dict[str, Any]]] = {
    "group": (partial(nn.GroupNorm, 4), {}),
    "batch": (nn.BatchNorm2d, {}),
    "batch, local": (nn.BatchNorm2d, {"statistics": "local"}),
}


class Residual(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, channels: int, norm: Normalization) -> None:
        super().__init__()
        self.change = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            norm(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            norm(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.change(x))


def residual_network(norm: Normalization) -> nn.Module:
    """Return a network for grey images, with 28,410 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
        norm(16),
        nn.ReLU(),
        Residual(16, norm),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        norm(32),
        nn.ReLU(),
        Residual(32, norm),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def run(kind: str, seed: int, budget: str) -> dict[str, Any]:
    norm, options = KINDS[kind]
    model, began = (
        TorchModel(partial(residual_network, norm), **options),
        time.perf_counter(),
    )
    result = fedbudget.train(
        model=model,
        dataset="fashion-mnist",
        partition="dirichlet:0.5",
        nodes=5,
        batch_size=50,
        train_samples=10_000,
        test_samples=2_000,
        budget=budget,
        costs="simulated",
        seed=seed,
    )
    return {
        "normalization": kind,
        "seed": seed,
        "accuracy": result.accuracy,
        "loss": result.loss,
        "local_updates": result.local_updates,
        "numbers_sent": model.parameters,
        "statistics": model.statistics,
        "seconds": round(time.perf_counter() - began),
    }


def main(arguments: Sequence[str]) -> None:
    """Make the runs, print the table and write the file."""
    parser = ArgumentParser(prog="python -m benchmarks normalization", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", default="time=10s", help="seconds of simulated time")
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS / "normalization.json",
        help="output file",
    )
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [run(kind, seed, asked.budget) for seed in range(asked.seeds) for kind in KINDS]
    asked.out.parent.mkdir(exist_ok=True)
    asked.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    shown = Table(
        title=f"{asked.budget}; all runs are in {asked.out}",
        title_justify="left",
        box=None,
    )
    for heading in (
        "normalization",
        "numbers sent",
        "accuracy of each seed",
        "mean",
        "mean loss",
    ):
        shown.add_column(heading, justify="left" if heading == "normalization" else "right")
    for kind in KINDS:
        own = [row for row in rows if row["normalization"] == kind]
        accuracies, losses = (
            [row["accuracy"] for row in own],
            [row["loss"] for row in own],
        )
        each = " ".join(f"{accuracy:.3f}" for accuracy in accuracies)
        mean, loss = sum(accuracies) / len(own), sum(losses) / len(own)
        shown.add_row(
            kind, f"{own[0]['numbers_sent']:,}", each, f"{mean:.3f}", f"{loss:.3f}"
        )
    _CONSOLE.print(shown)
