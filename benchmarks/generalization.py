"""Held-out loss of trained models over growing budgets, against tuned rivals.

    FEDBUDGET_DATA=FOLDER python -m benchmarks.generalization --out FILE.jsonl
    python -m benchmarks.generalization --tasks digits --models mlp --set validation=0
    python -m benchmarks.generalization --methods centralized,tuned --out FILE.jsonl
    python -m benchmarks.generalization --summarise FILE.jsonl

A cell is one task (natural_tasks.py), model, budget, seed and method, and one line of JSON.
Losses are those of the returned model on rows that no method trains or chooses with: the
cross-entropy of classes, the squared error of `mlp` for a real target, and half of it of
`linear`. Cells with figures in FILE.jsonl are skipped, so use a new file when the code of
fedbudget has changed. Methods:

- `default` is `fedbudget.train` with its default settings and simulated costs, plus those
  of `--set`. A name of the setting `method`, such as `paper` or `frugal`, selects that
  method.
- `centralized` trains on the pooled rows of all nodes. It has no budget, so it is one cell
  per seed. `mlp` uses Adam and early stopping, with the learning rate chosen by 15 % of the
  rows. `softmax` and `linear` use scikit-learn, with the penalty chosen by 3-fold
  cross-validation.
- `tuned` is the best of 20 runs of FedAvg and FedAdam with fixed τ and step size. Each node
  holds out 15 % of its training rows, and the run with the lowest loss on them is chosen.
  Each run has the whole budget, so tuning itself is free.

The summary has three ratios of held-out losses, with a `!` where one is too large:

- `growth` is the largest ratio of the loss at a budget to the loss at any smaller budget:
  of means over seeds, and of the worst single seed (limit 1.02).
- `centralized` is the ratio to `centralized` at the largest budget (limit 1.05).
- `rival` is the largest ratio over budgets to the best other federated method at the same
  budget (limit 1.05).

Set OMP_NUM_THREADS=1 with `--jobs`.
"""

import argparse
import copy
import json
import math
import multiprocessing
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import KFold
from torch.nn import functional as F

import fedbudget
from benchmarks.natural_tasks import TASKS, Shard, Task, hold_out, load, pooled
from fedbudget.arrays import Float32, Float64, Samples
from fedbudget.errors import UserError
from fedbudget.models.torch.networks import mlp
from fedbudget.result import Result
from fedbudget.runs.record import json_value

Predict = Callable[[Float32], Float64]
"""Features [rows, features] to scores of classes or one number, [rows, outputs]."""

Line = dict[str, Any]
"""The figures of one cell."""

MOST_GROWTH = 1.02
MOST_OVER_CENTRALIZED = 1.05
MOST_OVER_RIVAL = 1.05

_VALIDATION = 0.15
"""Share of the training rows by which rivals are tuned."""

_LEARNING_RATES = (1e-2, 3e-3, 1e-3)
_BATCH = 64
_MOST_STEPS = 50_000
_FEWEST_STEPS = 1000
"""Fewest steps of Adam. It stops after twice the steps of its best model."""

_FOLDS = 3
_INVERSE_PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""C of logistic regression."""

_PENALTIES = (1e-2, 1.0, 1e2, 1e3, 1e4)
"""Alpha of ridge regression."""

_UNSEEN = 1e-6
"""Probability of a class without training rows in logistic regression."""

_GRID: tuple[Mapping[str, Any], ...] = (
    *(
        {"update": "average", "tau": tau, "step_size": step}
        for tau in (1, 10, 30)
        for step in (0.01, 0.03, 0.1, 0.3)
    ),
    *(
        {"update": "fedadam", "tau": tau, "step_size": step, "server_step_size": server}
        for tau in (10, 30)
        for step in (0.03, 0.1)
        for server in (0.01, 0.03)
    ),
)
"""Settings of the runs of `tuned`."""


@dataclass(frozen=True)
class Cell:
    """What one line measures.

    Args:
      task: a key of `TASKS`.
      model: `mlp`, `softmax` or `linear`.
      budget: seconds of simulated time; None for a method without a budget.
      seed: of the data and of the run.
      method: see above.
      settings: further settings of `fedbudget.train`.
      folder: the data folder; FEDBUDGET_DATA by default.
    """

    task: str
    model: str
    budget: float | None
    seed: int
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def key(self) -> str:
        """Everything that distinguishes the cell in a file."""
        return json.dumps(self.to_json(), sort_keys=True)

    def to_json(self) -> Line:
        """Return the fields for a line, without the folder."""
        return {name: getattr(self, name) for name in _KEY}


_KEY = tuple(each.name for each in fields(Cell) if each.name != "folder")


def run_cell(cell: Cell) -> Line:
    """Run one cell.

    Args:
      cell: what to run.

    Returns:
      its line; with `error` instead of figures if fedbudget refuses the run.
    """
    task = load(cell.task, cell.seed, cell.folder)
    began = time.perf_counter()
    try:
        if cell.method == "centralized":
            figures = _centralized(task, cell)
        elif cell.method == "tuned":
            figures = _tuned(task, cell)
        else:
            figures = _federated(task, cell)
    except UserError as error:
        figures = {"error": str(error)}
    return {**cell.to_json(), **figures, "wall": round(time.perf_counter() - began, 2)}


def _federated(task: Task, cell: Cell) -> Line:
    options = dict(cell.settings)
    if cell.method != "default":
        options["method"] = cell.method
    result = _train(task, cell, task.train, options)
    return {**_held_out(task, cell.model, _predict(result)), **_about(result)}


def _tuned(task: Task, cell: Cell) -> Line:
    """Choose the best cell of the grid by validation rows of its own."""
    train, held = hold_out(task.train, _VALIDATION, cell.seed)
    validation = pooled(held)
    best: Result | None = None
    best_loss = math.inf
    chosen: Mapping[str, Any] = {}
    for settings in _GRID:
        options = {"method": "paper", **settings}
        if "validation" in fedbudget.Settings.__dataclass_fields__:
            options["validation"] = 0
        result = _train(task, cell, train, options)
        loss = _loss(cell.model, _predict(result)(validation[0]), validation[1])
        if best is None or loss < best_loss:
            best = result
            best_loss = loss
            chosen = settings
    assert best is not None
    figures = _held_out(task, cell.model, _predict(best))
    return {
        **figures,
        **_about(best),
        "validation": json_value(best_loss),
        "chosen": chosen,
    }


def _train(
    task: Task, cell: Cell, shards: Sequence[Shard], settings: Mapping[str, Any]
) -> Result:
    options: Any = {"classes": task.classes, "costs": "simulated", **settings}
    return fedbudget.train(
        shards=list(shards),
        test=pooled(task.test),
        model=cell.model,
        budget=f"time={cell.budget:g}s",
        seed=cell.seed,
        standardise=False,
        **options,
    )


def _predict(result: Result) -> Predict:
    return lambda x: result.model.outputs(x).astype(np.float64)


def _about(result: Result) -> Line:
    """Return the figures of a federated run itself."""
    validated = [getattr(record, "validation", None) for record in result.rounds]
    losses = [loss for loss in validated if loss is not None and math.isfinite(loss)]
    shares = [result.spent[name] / limit for name, limit in result.budget.items()]
    about: Line = {
        "train_loss": json_value(result.loss),
        "rounds": len(result.rounds),
        "local_updates": result.local_updates,
        "spent": round(max(shares), 4),
        "stopped_by": result.stopped_by,
    }
    if losses:
        about["validation"] = min(losses)
    return about


def _centralized(task: Task, cell: Cell) -> Line:
    if cell.model == "mlp":
        predict, about = _adam(task, cell.seed)
    elif cell.model == "softmax":
        predict, about = _cross_validated(
            task, cell, _INVERSE_PENALTIES, lambda *given: _logistic(task.outputs, *given)
        )
    else:
        predict, about = _cross_validated(task, cell, _PENALTIES, _ridge)
    train = pooled(task.train)
    loss = _loss(cell.model, predict(train[0]), train[1])
    return {
        **_held_out(task, cell.model, predict),
        "train_loss": json_value(loss),
        **about,
    }


def _adam(task: Task, seed: int) -> tuple[Predict, Line]:
    """Train the built-in network with each learning rate, and keep the best model."""
    kept, held = hold_out([pooled(task.train)], _VALIDATION, seed)
    train = _tensors(kept[0])
    validation = _tensors(held[0])
    runs = [_descend(task, train, validation, rate, seed) for rate in _LEARNING_RATES]
    best = min(runs, key=lambda run: run.loss)

    def predict(x: Float32) -> Float64:
        with torch.no_grad():
            return np.asarray(best.network(torch.from_numpy(x)), np.float64)

    about = {"learning_rate": best.rate, "steps": best.step, "validation": best.loss}
    return predict, about


@dataclass(frozen=True)
class _Trained:
    """The network with the lowest validation loss of one learning rate."""

    network: torch.nn.Module
    loss: float
    step: int
    rate: float


def _descend(
    task: Task,
    train: tuple[torch.Tensor, torch.Tensor],
    validation: tuple[torch.Tensor, torch.Tensor],
    rate: float,
    seed: int,
) -> _Trained:
    """Train with Adam until the validation loss has not improved for long.

    Validations are one step apart at first, and later 5 % of the steps so far.
    """
    torch.manual_seed(seed)
    network = mlp(task.features, task.outputs)
    criterion: Any = F.cross_entropy if task.kind == "classes" else F.mse_loss
    optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    x, y = train
    best = _Trained(copy.deepcopy(network), math.inf, 0, rate)
    due = 1
    order = torch.randperm(len(x))
    at = 0
    for step in range(1, _MOST_STEPS + 1):
        if at >= len(x):
            order = torch.randperm(len(x))
            at = 0
        rows = order[at : at + _BATCH]
        at += _BATCH
        optimizer.zero_grad()
        criterion(network(x[rows]), y[rows]).backward()
        optimizer.step()
        if step < due:
            continue
        due = step + max(1, step // 20)
        with torch.no_grad():
            loss = float(criterion(network(validation[0]), validation[1]))
        if loss < best.loss:
            best = _Trained(copy.deepcopy(network), loss, step, rate)
        elif step >= max(_FEWEST_STEPS, 2 * best.step):
            break
    return best


def _tensors(shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features, and class numbers [rows] or numbers [rows, 1]."""
    x, y = shard
    targets = torch.from_numpy(y)
    return torch.from_numpy(x), targets[:, None] if y.dtype.kind == "f" else targets


def _cross_validated(
    task: Task,
    cell: Cell,
    penalties: Sequence[float],
    fit: Callable[[float, Float32, Samples], Predict],
) -> tuple[Predict, Line]:
    """Choose a penalty by cross-validation, and fit it to all training rows."""
    x, y = pooled(task.train)
    losses = []
    for penalty in penalties:
        folds = KFold(_FOLDS, shuffle=True, random_state=cell.seed).split(x)
        of_folds = [
            _loss(cell.model, fit(penalty, x[kept], y[kept])(x[held]), y[held])
            for kept, held in folds
        ]
        losses.append(statistics.mean(of_folds))
    best = int(np.argmin(losses))
    about = {"penalty": penalties[best], "validation": losses[best]}
    return fit(penalties[best], x, y), about


def _logistic(outputs: int, inverse: float, x: Float32, y: Samples) -> Predict:
    """Fit softmax regression; classes without rows have a small fixed probability."""
    fitted = LogisticRegression(C=inverse, max_iter=300).fit(x, y)

    def predict(x: Float32) -> Float64:
        scores = np.full((len(x), outputs), math.log(_UNSEEN))
        scores[:, fitted.classes_] = fitted.predict_log_proba(x)
        return scores

    return predict


def _ridge(penalty: float, x: Float32, y: Samples) -> Predict:
    """Fit linear regression without an intercept, as `linear` has none."""
    fitted = Ridge(alpha=penalty, fit_intercept=False).fit(x, y)
    return lambda x: np.asarray(fitted.predict(x), np.float64)[:, None]


def _held_out(task: Task, model: str, predict: Predict) -> Line:
    """Return loss and score on all held-out rows, and the loss of each node."""
    x, y = pooled(task.test)
    outputs = predict(x)
    if task.kind == "classes":
        score = {"accuracy": float((outputs.argmax(axis=1) == y).mean())}
    else:
        errors = np.square(outputs[:, 0] - y).mean()
        score = {"r2": float(1 - errors / np.square(y - y.mean()).mean())}
    of_nodes = [_loss(model, predict(x), y) for x, y in task.test]
    return {
        "loss": json_value(_loss(model, outputs, y)),
        **{name: json_value(value) for name, value in score.items()},
        "node_losses": [json_value(round(loss, 5)) for loss in of_nodes],
    }


def _loss(model: str, outputs: Float64, y: Samples) -> float:
    """Return the mean loss of outputs, as fedbudget's models define it.

    Args:
      model: name of the model.
      outputs: scores of classes or numbers, [rows, outputs].
      y: class numbers or numbers, [rows].
    """
    if y.dtype.kind == "f":
        factor = 0.5 if model == "linear" else 1.0
        return factor * float(np.square(outputs[:, 0] - y).mean())
    highest = outputs.max(axis=1)
    sums = np.log(np.exp(outputs - highest[:, None]).sum(axis=1)) + highest
    return float((sums - outputs[np.arange(len(y)), y]).mean())


def cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Return all cells of a command, short budgets first."""
    settings = dict(arguments.settings)
    for task in arguments.tasks:
        real = TASKS[task].kind == "real"
        models = [
            "linear" if real and name == "softmax" else name for name in arguments.models
        ]
        for model in models:
            for method in arguments.methods:
                own = {} if method in ("centralized", "tuned") else settings
                budgets = [None] if method == "centralized" else arguments.budgets
                for budget in budgets:
                    for seed in range(arguments.seeds):
                        yield Cell(task, model, budget, seed, method, own, arguments.data)


def run(chosen: Iterable[Cell], out: Path | None, jobs: int) -> bool:
    """Run cells, and print and append the line of each.

    Args:
      chosen: the cells.
      out: file for the lines; cells with figures in it are skipped.
      jobs: number of processes.

    Returns:
      whether all cells have figures.
    """
    lines = read(out) if out is not None and out.exists() else []
    known = {
        json.dumps({name: line[name] for name in _KEY}, sort_keys=True)
        for line in lines
        if "error" not in line
    }
    missing = [cell for cell in chosen if cell.key not in known]
    if jobs == 1:
        return _write(map(run_cell, missing), out)
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return _write(pool.imap_unordered(run_cell, missing), out)


def _write(lines: Iterable[Line], out: Path | None) -> bool:
    complete = True
    for line in lines:
        text = json.dumps(line)
        print(text, flush=True)
        complete = complete and "error" not in line
        if out is not None:
            with out.open("a") as file:
                file.write(text + "\n")
    return complete


def read(path: Path) -> list[Line]:
    """Return the lines of a file."""
    return [json.loads(text) for text in path.read_text().splitlines() if text.strip()]


Losses = dict[float | None, dict[int, float]]
"""Held-out losses of one method by budget and seed."""


def summarise(lines: Iterable[Line]) -> str:
    """Return the table of held-out losses and ratios.

    Args:
      lines: of cells; a failed cell counts as an infinite loss.

    Returns:
      one row per task, model and method, with the number of rows above each limit.
    """
    groups: dict[tuple[str, str], dict[str, Losses]] = {}
    for line in lines:
        loss = line.get("loss")
        methods = groups.setdefault((line["task"], line["model"]), {})
        losses = methods.setdefault(_title(line), {})
        of_seeds = losses.setdefault(line["budget"], {})
        of_seeds[line["seed"]] = math.inf if loss is None else loss
    titles = "task", "model", "method", "growth", "worst", "centralized", "rival", "losses"
    rows: list[tuple[str, ...]] = [titles]
    flagged = [0, 0, 0, 0]
    for (task, model), methods in groups.items():
        for method, losses in methods.items():
            ratios = _ratios(method, methods)
            shown = []
            for number, (ratio, limit) in enumerate(ratios):
                above = ratio is not None and ratio > limit
                flagged[number] += above
                text = "-" if ratio is None else f"{ratio:.3f}"
                shown.append(text + ("!" if above else ""))
            rows.append((task, model, method, *shown, _losses_text(losses)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    counts = (
        f"above the limits: growth {flagged[0]}, worst {flagged[1]}, "
        f"centralized {flagged[2]}, rival {flagged[3]}"
    )
    return "\n".join([*table, counts])


def _title(line: Line) -> str:
    """Return the method with its further settings."""
    settings = [f"{name}={value}" for name, value in line["settings"].items()]
    return " ".join([line["method"], *settings])


def _losses_text(losses: Losses) -> str:
    parts = []
    for budget in sorted(losses, key=lambda budget: budget or 0.0):
        name = "any" if budget is None else f"{budget:g}s"
        of_seeds = list(losses[budget].values())
        parts.append(f"{name} {statistics.fmean(of_seeds):.4f} ({len(of_seeds)})")
    return ", ".join(parts)


def _ratios(
    method: str, methods: Mapping[str, Losses]
) -> tuple[tuple[float | None, float], ...]:
    """Return growth, worst growth, ratio to centralized and to rivals, with limits."""
    losses = methods[method]
    budgets = sorted(budget for budget in losses if budget is not None)
    growth = []
    worst = []
    for position, larger in enumerate(budgets):
        for smaller in budgets[:position]:
            pairs = _common(losses[larger], losses[smaller])
            growth += _mean_ratio(pairs)
            worst += [_ratio(*pair) for pair in pairs]
    centralized = []
    reference = methods.get("centralized", {}).get(None, {})
    if budgets:
        centralized = _mean_ratio(_common(losses[budgets[-1]], reference))
    rival = []
    for budget in budgets:
        others = [
            _mean_ratio(_common(losses[budget], other.get(budget, {})))
            for name, other in methods.items()
            if name.split()[0] not in (method.split()[0], "centralized")
        ]
        rival += [ratio for ratios in others for ratio in ratios]
    return (
        (max(growth, default=None), MOST_GROWTH),
        (max(worst, default=None), MOST_GROWTH),
        (max(centralized, default=None), MOST_OVER_CENTRALIZED),
        (max(rival, default=None), MOST_OVER_RIVAL),
    )


def _common(
    first: Mapping[int, float], second: Mapping[int, float]
) -> list[tuple[float, float]]:
    """Return the losses of seeds that both have."""
    return [(first[seed], second[seed]) for seed in first if seed in second]


def _mean_ratio(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Return the ratio of the mean losses; empty without seeds."""
    if not pairs:
        return []
    numerator = statistics.fmean(first for first, _ in pairs)
    denominator = statistics.fmean(second for _, second in pairs)
    return [_ratio(numerator, denominator)]


def _ratio(numerator: float, denominator: float) -> float:
    if math.isinf(denominator):
        return 1.0 if math.isinf(numerator) else 0.0
    return numerator / denominator


def _setting(text: str) -> tuple[str, Any]:
    """Parse `key=value`, with a value of TOML; other values are texts."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    key = name.strip().replace("-", "_")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _tasks(text: str) -> list[str]:
    names = _names(text)
    for name in names:
        if name not in TASKS:
            raise argparse.ArgumentTypeError(
                f"task {name!r} does not exist; choose from {', '.join(TASKS)}"
            )
    return names


def _budgets(text: str) -> list[float]:
    return sorted(float(name) for name in _names(text))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generalization",
        description="Held-out loss over growing budgets, against tuned rivals.",
    )
    add = parser.add_argument
    add("--tasks", type=_tasks, default=list(TASKS), help="names, separated by commas")
    add("--models", type=_names, default=["softmax", "mlp"], help="softmax, mlp or both")
    add("--budgets", type=_budgets, default=[2.0, 5.0, 15.0, 60.0], help="seconds")
    add("--seeds", type=int, default=3, help="number of seeds")
    add("--methods", type=_names, default=["default"], help="default, centralized, ...")
    add(
        "--set",
        type=_setting,
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="setting of fedbudget's own methods; may be repeated",
    )
    add("--data", type=Path, help="data folder; FEDBUDGET_DATA by default")
    add("--out", type=Path, help="file to which lines are appended")
    add("--jobs", type=int, default=1, help="number of processes")
    add("--summarise", type=Path, metavar="FILE", help="print the summary of a file")
    return parser


def main(given: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
      given: arguments; those of the process by default.

    Returns:
      the exit code: 1 if a cell failed.
    """
    arguments = _parser().parse_args(given)
    try:
        if arguments.summarise is not None:
            print(summarise(read(arguments.summarise)))
            return 0
        return 0 if run(cells(arguments), arguments.out, arguments.jobs) else 1
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
