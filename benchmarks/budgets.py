"""`python -m benchmarks budgets`: budget overshoot and rest of runs with random
settings.

- Run `n` of a seed has its own random generator, so that its settings stay the same
  between versions. `--only n` repeats it alone.
- An additional 10 % of runs use `--method paper`, which has the paper's stop rule. They
  are counted separately.
- Budgets are given in seconds. For other resources, they are the approximate amount
  used in that time.
- With several resources, overshoot and rest refer to the resource with the largest
  spent share.
- All runs are written to a JSON file with their settings, to investigate outliers.
"""

import json
import math
from argparse import ArgumentParser, BooleanOptionalAction
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn import datasets as sklearn_datasets

import fedbudget
from fedbudget.data.dataset import Dataset, Part
from fedbudget.settings.settings import Settings

RESULTS = Path(__file__).parent / "results"
NODES, WATTS, MONEY_PER_SECOND = (
    5,
    5.0,
    5 * 0.1 / 3600,
)  # five nodes, default declared powers
ROUND_SECONDS = 0.3  # for a round of a few updates with the prototype's aggregation
TASKS = {
    "svm": ("digits", "breast_cancer"),
    "softmax": ("digits", "breast_cancer", "wine", "iris"),
    "linear": ("diabetes",),
    "kmeans": ("digits", "breast_cancer", "wine", "iris"),
    "mlp": ("wine", "iris"),
}
RESOURCES = (("time",), ("time", "energy"), ("time", "bytes"), ("bytes",), ("money",))
SMALL_LOSS = 0.01
FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)
_CONSOLE = Console(width=120)

Run = dict[str, Any]


def drawn_settings(
    number: int, seed: int, *, paper: bool = False, measured: bool = False
) -> Run:
    """Draw the arguments of `fedbudget.train`, and the budget in seconds."""
    rng = np.random.default_rng([seed, number, paper])
    model = str(rng.choice(list(TASKS), p=[0.3, 0.25, 0.18, 0.23, 0.04]))
    dataset = str(rng.choice(TASKS[model]))
    case, alpha = int(rng.integers(0, 5)), _log_uniform(rng, 0.3, 10)
    tau = ("adaptive", "adaptive", "adaptive", 1, 10, 100)[int(rng.integers(0, 6))]
    seconds, factor = _log_uniform(rng, 3, 60), _log_uniform(rng, 0.1, 10)
    resources = RESOURCES[int(rng.integers(0, len(RESOURCES)))]
    shares = [float(rng.uniform(0.6, 1.4)) if name != "time" else 1.0 for name in resources]
    if measured:
        resources, shares, seconds, factor = ("time",), [1.0], 2.0, 1.0
    settings: Run = {
        "model": model,
        "dataset": dataset,
        "partition": f"case:{case}" if case else f"dirichlet:{alpha:.3g}",
        "method": "paper" if paper else Settings().method,
        "tau": tau,
        "batch_size": "full" if rng.random() < 0.4 else min(100, _smallest_shard(dataset)),
        "budget": [
            _limit(name, share * seconds, model, dataset)
            for name, share in zip(resources, shares, strict=True)
        ],
        "costs": "measured" if measured else "simulated",
        "seed": int(rng.integers(0, 10_000)),
    }
    if not measured:
        settings["aggregation_factor"] = factor
    if settings["batch_size"] != "full" and not case:
        settings["partition"] = "case:1"  # a shard may be smaller than a mini-batch
    return {
        "number": number,
        "seconds": seconds,
        "resources": "+".join(resources),
        "settings": settings,
    }


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))


def _limit(resource: str, seconds: float, model: str, dataset: str) -> str:
    """Return the amount of a resource used in about that many seconds."""
    amounts = {
        "time": (seconds, "s"),
        "energy": (seconds * WATTS * NODES, "J"),
        "bytes": (
            seconds / ROUND_SECONDS * 2 * NODES * (4 * _parameters(model, dataset) + 150),
            "B",
        ),
        "money": (seconds * MONEY_PER_SECOND, ""),
    }
    amount, unit = amounts[resource]
    return f"{resource}={amount:.6g}{unit}"


def _parameters(model: str, dataset: str) -> int:
    features, classes = (
        small_dataset(dataset).features,
        max(1, len(small_dataset(dataset).classes)),
    )
    return {
        "kmeans": 4 * features,
        "softmax": classes * features,
        "mlp": 64 * features,
    }.get(model, features)


def _smallest_shard(dataset: str) -> int:
    """Return the approximate size of the smallest shard of Case 2."""
    return max(5, len(small_dataset(dataset).train) // (4 * NODES))


@cache
def small_dataset(name: str) -> Dataset:
    """Load a dataset of scikit-learn, with all samples for training."""
    found = getattr(sklearn_datasets, f"load_{name}")()
    classes = tuple(map(str, getattr(found, "target_names", ())))
    labels = found.target.astype(np.int64) if classes else None
    dataset = Dataset(
        name, Part(found.data, labels, found.target.astype(np.float64)), classes=classes
    )
    if name == "digits":
        part = Part((found.data * 16).clip(0, 255).astype(np.uint8), labels)
        return Dataset(name, part, classes=classes, scale=1 / 255, parity=True)
    return dataset.standardised()


def make_run(run: Run) -> Run:
    """Return the run and its result; `refused` holds the error of a refused run."""
    options = {**run["settings"], "dataset": small_dataset(run["settings"]["dataset"])}
    try:
        result = fedbudget.train(nodes=NODES, evaluations=1, **options)
    except fedbudget.UserError as error:
        if "too small" not in str(error):
            raise
        return {**run, "refused": str(error)}
    last = result.rounds[-1]
    spent = {name: result.spent[name] / limit for name, limit in result.budget.items()}
    judged = last.tau == 0
    return {
        **run,
        "spent": dict(result.spent),
        "share": max(spent.values()),
        "stopped_by": result.stopped_by,
        "judged": judged,
        "returned_last": judged and not last.loss > last.best_loss,
        "rounds": len(result.rounds),
        "average_tau": result.average_tau,
        "last_taus": [record.tau for record in result.rounds[-5:]],
        "loss": result.loss if math.isfinite(result.loss) else None,
    }


def main(arguments: Sequence[str]) -> None:
    """Make the runs, print the table and write the file."""
    parser = ArgumentParser(prog="python -m benchmarks budgets", description=__doc__)
    parser.add_argument(
        "--runs",
        type=int,
        help="number of runs, without those of --method paper [1000; measured: 100]",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="N", help="run N alone")
    parser.add_argument(
        "--paper",
        action=BooleanOptionalAction,
        default=True,
        help="add 10 %% of runs with --method paper",
    )
    parser.add_argument(
        "--measured", action="store_true", help="runs of 2 s with measured costs"
    )
    parser.add_argument(
        "--out", type=Path, help="output file [benchmarks/results/budgets.json]"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="earlier file, to compare losses",
    )
    asked = parser.parse_args(arguments)
    count = asked.runs or (100 if asked.measured else 1000)
    numbers = range(count) if asked.only is None else [asked.only]
    plan = [
        drawn_settings(number, asked.seed, measured=asked.measured) for number in numbers
    ]
    if asked.paper and asked.only is None and not asked.measured:
        plan += [
            drawn_settings(number, asked.seed, paper=True) for number in range(count // 10)
        ]
    if asked.measured:
        make_run(plan[0])  # compiles kernels
    runs = [make_run(run) for run in track(plan, "runs", console=Console(stderr=True))]
    if asked.only is not None:
        _CONSOLE.print_json(data=runs[0])
        return
    out: Path = (
        asked.out or RESULTS / f"budgets{'-measured' if asked.measured else ''}.json"
    )
    out.parent.mkdir(exist_ok=True)
    out.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
    _CONSOLE.print(
        table(runs, f"{len(runs)} runs of seed {asked.seed}; all runs are in {out}")
    )
    if asked.against is not None:
        _CONSOLE.print(_compare_losses(runs, json.loads(asked.against.read_text())))


def table(runs: Sequence[Run], title: str) -> Table:
    """Return rows for all budgeted runs, for subsets, and for `--method paper`."""
    shown = Table(title=title, title_justify="left", box=None)
    headings = (
        "runs",
        "refused",
        "over",
        "mean",
        "largest",
        "unused",
        "not judged",
        "w^f instead",
    )
    for heading in ("", *headings):
        shown.add_column(heading, justify="right" if heading else "left")
    for name, part in _parts(runs):
        shown.add_row(name, *_figures(part))
    return shown


def _parts(runs: Sequence[Run]) -> Iterator[tuple[str, list[Run]]]:
    own = [run for run in runs if run["settings"]["method"] != "paper"]
    yield "all", own
    yield "15 s and longer", [run for run in own if run["seconds"] >= 15]
    yield "shorter", [run for run in own if run["seconds"] < 15]
    yield from _by(own, "", lambda run: run["resources"])
    yield from _by(own, "tau ", lambda run: str(run["settings"]["tau"]))
    yield from _by(own, "", lambda run: run["settings"]["model"])
    yield from _by(
        own, "whole shards: ", lambda run: str(run["settings"]["batch_size"] == "full")
    )
    for low, high in pairwise(FACTORS):
        yield (
            f"factor {low:g} to {high:g}",
            [run for run in own if low <= _factor(run) < high],
        )
        long = [run for run in own if low <= _factor(run) < high and run["seconds"] >= 15]
        yield "  of these, 15 s and longer", long
    yield "paper", [run for run in runs if run["settings"]["method"] == "paper"]


def _by(
    runs: Sequence[Run], label: str, key: Callable[[Run], str]
) -> Iterator[tuple[str, list[Run]]]:
    for value in sorted(set(map(key, runs))):
        yield f"{label}{value}", [run for run in runs if key(run) == value]


def _factor(run: Run) -> float:
    return float(run["settings"].get("aggregation_factor", math.nan))


def _figures(runs: Sequence[Run]) -> list[str]:
    """Return the cells of a row, in percent of the budget.

    Overshoot covers runs over budget; unused covers all completed runs.
    """
    made = [run for run in runs if "refused" not in run]
    if not made:
        return [str(len(runs)), str(len(runs))]
    over = [100 * (run["share"] - 1) for run in made if run["share"] > 1]
    unused = [100 * max(0.0, 1 - run["share"]) for run in made]
    return [
        str(len(runs)),
        str(len(runs) - len(made)),
        f"{100 * len(over) / len(made):.1f}%",
        f"{np.mean(over):.2f}%" if over else "-",
        f"{max(over):.2f}%" if over else "-",
        f"{np.mean(unused):.2f}%",
        str(sum(not run["judged"] for run in made)),
        str(sum(not run["returned_last"] for run in made)),
    ]


def _compare_losses(runs: Sequence[Run], earlier: Sequence[Run]) -> str:
    """Compare losses of the same settings with an earlier file.

    `SMALL_LOSS` is added to both, because ratios near 0 are meaningless.
    """
    before = {json.dumps(run["settings"]): run for run in earlier}
    pairs = [
        (run.get("loss"), before.get(json.dumps(run["settings"]), {}).get("loss"))
        for run in runs
    ]
    ratios = [
        math.log((now + SMALL_LOSS) / (then + SMALL_LOSS))
        for now, then in pairs
        if now and then
    ]
    if not ratios:
        return "that file has no run with the same settings"
    worse = sum(ratio > 1e-3 for ratio in ratios)
    return (
        f"losses of {len(ratios)} runs with the same settings, relative to the file:"
        f" geometric mean {math.exp(np.mean(ratios)):.4f},"
        f" median {math.exp(np.median(ratios)):.4f};"
        f" {worse} higher by more than 0.1%"
    )
