"""`python -m benchmarks settings`: the default method with random settings.

- Digits with features scaled by 0.01 to 100, four models, 2 to 50 nodes of equal and
  unequal sizes, mini-batches of 1 to 200 samples or whole shards, 3 to 60 s,
  aggregations 0.1 to 10 times as long as the prototype's.
- Each run is compared with `--method paper`, and with ten local updates at η = 0.01. If
  a run is worse than both, adaptation did harm.
- A run must not return a model with a higher validation loss than the best it evaluated,
  and must warn if its validation loss is not below that of w(0).
- Setting `n` of a seed has its own random generator: `--only n` repeats it alone.
"""

import json
import math
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import fedbudget
from benchmarks.budgets import RESULTS
from fedbudget.data import load
from fedbudget.data.dataset import Dataset
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import simulate
from fedbudget.models.base import loss_over
from fedbudget.settings.settings import Settings

OTHERS: dict[str, dict[str, Any]] = {
    "paper": {"method": "paper"},
    "tau 10, eta 0.01": {"method": "paper", "tau": 10, "step_size": 0.01},
}
_CONSOLE = Console(width=120)

Row = dict[str, Any]


def drawn(number: int, seed: int) -> tuple[dict[str, Any], Dataset]:
    """Draw the arguments of `fedbudget.train` for one setting."""
    rng = np.random.default_rng([seed, number])
    digits = load("digits")
    scaled = replace(digits, scale=digits.scale * 10 ** rng.uniform(-2, 2))
    nodes, batch = (
        int(rng.integers(2, 51)),
        round(math.exp(rng.uniform(0, math.log(200)))),
    )
    options: dict[str, Any] = {
        "model": str(
            rng.choice(
                ["svm", "softmax", "kmeans", "linear", "mlp"],
                p=[0.23, 0.23, 0.23, 0.23, 0.08],
            )
        ),
        "partition": ("case:1", "case:2", "case:3", "case:4", "dirichlet:0.5")[
            int(rng.integers(0, 5))
        ],
        "nodes": nodes,
        "batch_size": "full",
        "budget": f"time={math.exp(rng.uniform(math.log(3), math.log(60))):.1f}s",
        "aggregation_factor": float(math.exp(rng.uniform(math.log(0.1), math.log(10)))),
        "seed": int(rng.integers(1000)),
    }
    shards = simulate(
        Settings(**{**options, "budget": ("time=60s",)}), Overrides(dataset=scaled)
    ).shards
    if rng.random() < 0.8:
        options["batch_size"] = min(batch, int(shards.size.min()))
    return options, scaled


def make_run(number: int, seed: int) -> Row:
    """Return first and last loss of the default, and last losses of the others."""
    options, dataset = drawn(number, seed)
    row: Row = {"number": number, "settings": options}
    try:
        plan = simulate(
            Settings(**{**options, "budget": (options["budget"],)}),
            Overrides(dataset=dataset),
        )
        row["first"] = loss_over(
            plan.model, plan.model.initial(options["seed"]), plan.train
        )
        for name, changes in {"default": {}, **OTHERS}.items():
            with np.errstate(all="ignore"):  # overflow warnings of diverging runs
                result = fedbudget.train(
                    dataset=dataset, evaluations=1, **{**options, **changes}
                )
            row[name] = result.loss if math.isfinite(result.loss) else 1e300
            row[f"{name}: rounds"] = result.aggregations
            row[f"{name}: faults"] = faults(result)
    except fedbudget.UserError as error:
        if "too small" not in str(error):
            raise
        return {**row, "refused": str(error)}
    return row


def faults(result: fedbudget.Result) -> list[str]:
    """Return what is wrong with the choice of the model by validation."""
    if result.validation_loss is None:
        return []
    found = []
    known = [record.validation for record in result.rounds if record.validation is not None]
    if result.validation_loss > min(known) * (1 + 1e-6):
        found.append("worse than the best evaluated")
    assert result.validation_start is not None
    if not result.validation_loss < result.validation_start and not result.warnings:
        found.append("not better than w(0), without a warning")
    return found


def excess(row: Row) -> float:
    """Return the relative excess of the default's loss over the worse other loss.

    A negative value means that the default is better.
    """
    return float(row["default"] / max(row[name] for name in OTHERS) - 1)


def main(arguments: Sequence[str]) -> None:
    """Make the runs, print the tables and write the file."""
    parser = ArgumentParser(prog="python -m benchmarks settings", description=__doc__)
    parser.add_argument("--runs", type=int, default=300, help="number of settings [300]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="N", help="only setting N")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "settings.json", help="output file"
    )
    asked = parser.parse_args(arguments)
    numbers = range(asked.runs) if asked.only is None else [asked.only]
    rows = [
        make_run(number, asked.seed)
        for number in track(numbers, "settings", console=Console(stderr=True))
    ]
    if asked.only is not None:
        _CONSOLE.print_json(data=rows[0])
        return
    asked.out.parent.mkdir(exist_ok=True)
    asked.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    _CONSOLE.print(
        table(
            rows,
            f"{len(rows)} settings of seed {asked.seed}; all runs are in {asked.out}",
        )
    )
    _CONSOLE.print(odd(rows))


def table(rows: Sequence[Row], title: str) -> Table:
    """Count runs of the default that end badly.

    A bad run ends above its first loss, or is worse than both others by more than 2 %.
    """
    shown = Table(title=title, title_justify="left", box=None)
    for heading in (
        "",
        "settings",
        "refused",
        "above the start",
        "worse than both by 2 %",
        "better than both",
        "faults of validation",
    ):
        shown.add_column(heading, justify="right" if heading else "left")
    models = sorted({row["settings"]["model"] for row in rows})
    for name in ("all", *models):
        part = [row for row in rows if name in ("all", row["settings"]["model"])]
        made = [row for row in part if "refused" not in row]
        above = sum(row["default"] > row["first"] for row in made)
        worse = sum(excess(row) > 0.02 for row in made)
        better = sum(row["default"] < min(row[other] for other in OTHERS) for row in made)
        faulty = sum(bool(row["default: faults"]) for row in made)
        counts = (len(part), len(part) - len(made), above, worse, better, faulty)
        shown.add_row(name, *map(str, counts))
    return shown


def odd(rows: Sequence[Row]) -> Table:
    """List the settings with a bad result of the default."""
    shown = Table(
        title="Above the start, or worse than both", title_justify="left", box=None
    )
    for heading in (
        "n",
        "model",
        "partition",
        "nodes",
        "batch",
        "budget",
        "rounds",
        "first",
        "default",
        *OTHERS,
    ):
        shown.add_column(heading, justify="right")
    for row in rows:
        if "refused" in row or (excess(row) <= 0.02 and row["default"] <= row["first"]):
            continue
        options = row["settings"]
        chosen = (
            options[name]
            for name in ("model", "partition", "nodes", "batch_size", "budget")
        )
        losses = (f"{row[name]:.4g}" for name in ("first", "default", *OTHERS))
        shown.add_row(
            str(row["number"]), *map(str, chosen), str(row["default: rounds"]), *losses
        )
    return shown
