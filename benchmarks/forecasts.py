"""`python -m benchmarks forecasts`: coverage and error of forecasts.

    python -m benchmarks forecasts
    python -m benchmarks forecasts --tasks softmax,mlp --methods accelerated --seconds 5,60

- Each run makes two forecasts: of its end when half of its budget is spent, and of 50 %
  more budget at its end. The run then continues with that budget, and both forecasts
  are compared with the results: with the validation loss, and with the training loss of
  methods without validation.
- Forecasts were developed on earlier runs of the tasks of `DEVELOPED` and checked on
  earlier runs of the others. The seeds here are new. docs/research/forecasts.md
  describes which data each choice used.
- Runs without a forecast are counted separately.
"""

import json
import math
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import fedbudget
from benchmarks.budgets import RESULTS, small_dataset
from fedbudget.forecasts.forecast import Forecast, Forecaster, Interval

TASKS: dict[str, dict[str, Any]] = {
    "svm, digits": {"model": "svm", "dataset": "digits"},
    "softmax, digits": {"model": "softmax", "dataset": "digits"},
    "linear, diabetes, mini-batch 32": {
        "model": "linear",
        "dataset": "diabetes",
        "batch_size": 32,
    },
    "kmeans, wine, whole shards": {
        "model": "kmeans",
        "dataset": "wine",
        "batch_size": "full",
    },
    "svm, breast cancer, whole shards": {
        "model": "svm",
        "dataset": "breast_cancer",
        "batch_size": "full",
    },
    "softmax, iris, mini-batch 10": {
        "model": "softmax",
        "dataset": "iris",
        "batch_size": 10,
    },
    "mlp, digits": {"model": "mlp", "dataset": "digits"},
    "svm, digits, whole shards": {
        "model": "svm",
        "dataset": "digits",
        "batch_size": "full",
    },
    "softmax, digits, mini-batch 10": {
        "model": "softmax",
        "dataset": "digits",
        "batch_size": 10,
    },
    "softmax, breast cancer, mini-batch 32": {
        "model": "softmax",
        "dataset": "breast_cancer",
        "batch_size": 32,
    },
    "softmax, wine, whole shards": {
        "model": "softmax",
        "dataset": "wine",
        "batch_size": "full",
    },
    "linear, diabetes, whole shards": {
        "model": "linear",
        "dataset": "diabetes",
        "batch_size": "full",
    },
    "kmeans, digits": {"model": "kmeans", "dataset": "digits", "clusters": 10},
    "mlp, breast cancer": {"model": "mlp", "dataset": "breast_cancer"},
    "mlp, wine, mini-batch 10": {"model": "mlp", "dataset": "wine", "batch_size": 10},
}
DEVELOPED = list(TASKS)[:6]
BUDGETS = (5, 10, 15, 30)  # seconds
MORE = 0.5
METHODS = ("frugal", "paper", "accelerated")
_CONSOLE = Console(width=120)

Row = dict[str, Any]


def plan(
    seed: int,
    tasks: Sequence[str] = (),
    methods: Sequence[str] = METHODS,
    seconds: Sequence[float] = (),
) -> Iterator[Row]:
    """Return the runs: tasks, cases and methods, with varying budgets.

    Args:
      seed: seed of the first task.
      tasks: beginnings of the names of tasks; all tasks by default.
      methods: names of methods.
      seconds: budgets of every run; by default, each run has one of `BUDGETS`.
    """
    for number, task in enumerate(TASKS):
        if tasks and not task.startswith(tuple(tasks)):
            continue
        for case in (1, 2, 3, 4):
            for turn, method in enumerate(methods):
                one = BUDGETS[(number + case + 2 * turn + seed) % len(BUDGETS)]
                for budget in seconds or (one,):
                    yield {
                        "task": task,
                        "case": case,
                        "method": method,
                        "seconds": budget,
                        "seed": seed + 10 * number,
                    }


def make_run(row: Row, folder: Path) -> list[Row]:
    """Return both forecasts of a run with the results."""
    options = dict(TASKS[row["task"]])
    if options["dataset"] != "digits":  # loaded by name, with its test samples
        options["dataset"] = small_dataset(options["dataset"])
    out = folder / "-".join(map(str, row.values())).replace(" ", "")
    settings = {name: row[name] for name in ("case", "method", "seed")}
    first = fedbudget.train(
        **options,
        **settings,
        budget=f"time={row['seconds']:g}s",
        costs="simulated",
        out=out,
    )
    half = [record for record in first.rounds if record.spent["time"] <= row["seconds"] / 2]
    to_the_end = Forecaster(half, first.budget).at(first.budget)
    extended = fedbudget.forecast(
        first, budget=f"time=+{MORE * row['seconds']:g}s"
    ).budgets[0]
    again: dict[str, Any] = {
        "resume": out,
        "budget": f"time=+{MORE * row['seconds']:g}s",
    }
    if options["dataset"] != "digits":
        again["dataset"] = options["dataset"]
    second = fedbudget.train(**again)
    return [
        {
            **row,
            "asked": "end, at half",
            **_compared(to_the_end, first),
            "rounds": len(half),
            "stopped_by": first.stopped_by,
        },
        {
            **row,
            "asked": "half as much again",
            **_compared(extended, second),
            "rounds": len(first.rounds),
            "stopped_by": first.stopped_by,
        },
    ]


def _compared(forecast: Forecast, result: fedbudget.Result) -> Row:
    def ends(interval: Interval | None) -> list[float] | None:
        return None if interval is None else [interval.low, interval.median, interval.high]

    loss = result.validation_loss if forecast.validated else result.loss
    came = {"loss": loss, "accuracy": result.accuracy}
    return {
        "came": came,
        "loss": ends(forecast.loss),
        "accuracy": ends(forecast.accuracy),
        "reason": forecast.reason,
    }


def main(arguments: Sequence[str]) -> None:
    """Make the runs, print the tables and write the file."""
    parser = ArgumentParser(prog="python -m benchmarks forecasts", description=__doc__)
    parser.add_argument("--seed", type=int, default=2000)
    parser.add_argument("--tasks", type=_names, default=[], help="beginnings of names")
    parser.add_argument("--methods", type=_names, default=METHODS)
    parser.add_argument("--seconds", type=_seconds, default=[], help="such as 5,60")
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS / "forecasts.json",
        help="output file",
    )
    asked = parser.parse_args(arguments)
    runs = list(plan(asked.seed, asked.tasks, asked.methods, asked.seconds))
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row
            for run in track(runs, "runs", console=Console(stderr=True))
            for row in make_run(run, Path(folder))
        ]
    asked.out.parent.mkdir(exist_ok=True)
    asked.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    _CONSOLE.print(table(rows, f"{len(runs)} runs; all forecasts are in {asked.out}"))
    _CONSOLE.print(missed(rows))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _seconds(text: str) -> list[float]:
    return [float(name) for name in _names(text)]


def table(rows: Sequence[Row], title: str) -> Table:
    """Return coverage and width of the intervals, and the error of the median."""
    shown = Table(title=title, title_justify="left", box=None)
    for heading in (
        "",
        "",
        "forecasts",
        "not known",
        "within",
        "below",
        "above",
        "width",
        "off by",
    ):
        shown.add_column(heading, justify="right" if heading else "left")
    parts: dict[str, Callable[[Row], bool]] = {
        "all": lambda row: True,
        "developed on": lambda row: row["task"] in DEVELOPED,
        "checked on": lambda row: row["task"] not in DEVELOPED,
        **{method: _by_method(method) for method in dict.fromkeys(_column(rows, "method"))},
        **{
            f"{model}, {seconds:g} s": _by_model(model, seconds)
            for model in dict.fromkeys(map(_model, rows))
            for seconds in sorted(set(_column(rows, "seconds")))
        },
        "ended by validation": lambda row: row["stopped_by"] == "validation",
    }
    for asked in dict.fromkeys(row["asked"] for row in rows):
        for figure in ("loss", "accuracy"):
            for name, belongs in parts.items():
                part = [row for row in rows if row["asked"] == asked and belongs(row)]
                part = [row for row in part if row["came"][figure] is not None]
                shown.add_row(f"{figure}: {asked}", name, *_figures(part, figure))
    return shown


def _column(rows: Sequence[Row], name: str) -> list[Any]:
    return [row[name] for row in rows]


def _model(row: Row) -> str:
    return str(TASKS[row["task"]]["model"])


def _by_method(method: str) -> Callable[[Row], bool]:
    return lambda row: bool(row["method"] == method)


def _by_model(model: str, seconds: float) -> Callable[[Row], bool]:
    return lambda row: _model(row) == model and row["seconds"] == seconds


def _figures(rows: Sequence[Row], figure: str) -> tuple[str, ...]:
    known = [row for row in rows if row[figure] is not None]
    if not known:
        return ("0", str(len(rows)))
    sides = [side(row, figure) for row in known]
    shares = [f"{sides.count(side_) / len(sides):.0%}" for side_ in (0, -1, 1)]
    scale = [abs(row["came"][figure]) if figure == "loss" else 1.0 for row in known]
    widths = [
        (row[figure][2] - row[figure][0]) / size
        for row, size in zip(known, scale, strict=True)
    ]
    errors = [
        abs(row[figure][1] - row["came"][figure]) / size
        for row, size in zip(known, scale, strict=True)
    ]
    sizes = [f"{np.median(values):.1%}" for values in (widths, errors)]
    return (str(len(known)), str(len(rows) - len(known)), *shares, *sizes)


def side(row: Row, figure: str) -> int:
    """Return 0 for a result within the interval, -1 below it, 1 above it.

    Values that agree in four digits count as within.
    """
    low, _, high = row[figure]
    came, digits = row["came"][figure], 5e-5 * abs(row["came"][figure])
    if not math.isfinite(came):
        return 1
    return -1 if came < low - digits else 1 if came > high + digits else 0


def missed(rows: Sequence[Row]) -> Table:
    """List the loss forecasts whose interval missed the result."""
    shown = Table(title="Losses outside their interval", title_justify="left", box=None)
    for heading in (
        "task",
        "case",
        "method",
        "s",
        "rounds",
        "asked",
        "low",
        "median",
        "high",
        "came",
    ):
        shown.add_column(
            heading,
            justify="left" if heading in ("task", "method", "asked") else "right",
        )
    for row in rows:
        if row["loss"] is not None and side(row, "loss"):
            numbers = [f"{value:.4g}" for value in (*row["loss"], row["came"]["loss"])]
            about = [
                str(row[name])
                for name in ("task", "case", "method", "seconds", "rounds", "asked")
            ]
            shown.add_row(*about, *numbers)
    return shown
