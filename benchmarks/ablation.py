"""`python -m benchmarks ablation`: the default method without one of its parts.

Each part is removed alone. A run of the default and a run without the part have the same
seed, data and budget; a figure is the mean over seeds of the logarithm of the ratio of
their losses, with its standard error. Costs are simulated.

- `training`: `validation=0`, and the loss on all training samples.
- `validation`: the default, and the loss on the rows that nodes hold out.

Every finished run is one line of a file. A second call continues from this file.
"""

import json
import math
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import fedbudget
from benchmarks import natural_tasks
from benchmarks.budgets import RESULTS, small_dataset
from fedbudget.budget import step_size
from fedbudget.budget.control import AdaptiveTau, BalancedTau, Decision
from fedbudget.budget.spending import CarefulSpending
from fedbudget.budget.step_size import (
    AutoStep,
    SearchedStep,
    SearchedStepState,
    StepSizeInputs,
)
from fedbudget.data import load
from fedbudget.data.dataset import Dataset
from fedbudget.launch import simulate
from fedbudget.launch.method import build_method
from fedbudget.launch.prepared import NOTHING, Overrides
from fedbudget.protocol import aggregator, stages
from fedbudget.protocol.features import estimates
from fedbudget.protocol.method import Method
from fedbudget.protocol.update import Accelerate, Average, Motion
from fedbudget.settings.settings import Settings

_CONSOLE = Console(width=160)
_MODES: Mapping[str, Mapping[str, Any]] = {"training": {"validation": 0}, "validation": {}}

TASKS: dict[str, dict[str, Any]] = {
    "softmax, Fashion-MNIST": {
        "model": "softmax",
        "dataset": "fashion-mnist-small",
        "partition": "case:1",
        "batch_size": 32,
        "budget": "time=10s",
    },
    "softmax, MNIST, 20 nodes": {
        "model": "softmax",
        "dataset": "mnist-small",
        "partition": "case:2",
        "nodes": 20,
        "batch_size": 10,
        "budget": "time=10s",
    },
    "softmax, breast cancer": {
        "model": "softmax",
        "dataset": "breast_cancer",
        "partition": "dirichlet:0.1",
        "batch_size": "full",
        "budget": "time=15s",
    },
    "linear, diabetes": {
        "model": "linear",
        "dataset": "diabetes",
        "partition": "case:2",
        "batch_size": "full",
        "budget": "time=15s",
    },
    "SVM, breast cancer": {
        "model": "svm",
        "dataset": "breast_cancer",
        "partition": "case:2",
        "nodes": 4,
        "batch_size": 10,
        "budget": "time=5s",
    },
    "K-means, wine": {
        "model": "kmeans",
        "dataset": "wine",
        "partition": "case:2",
        "batch_size": 10,
        "clusters": 3,
        "budget": "time=5s",
    },
    "softmax, heart disease": {"model": "softmax", "natural": "heart-disease"},
    "softmax, TCGA-BRCA": {"model": "softmax", "natural": "tcga-brca"},
    "linear, Beijing air": {"model": "linear", "natural": "beijing-air"},
    "linear, Parkinson's": {"model": "linear", "natural": "parkinsons"},
    "softmax, digits": {
        "model": "softmax",
        "dataset": "digits",
        "partition": "dirichlet:0.5",
        "budget": "time=5s",
    },
    "mlp, MNIST": {
        "model": "mlp",
        "dataset": "mnist-small",
        "partition": "case:2",
        "batch_size": 32,
        "budget": "time=8s",
    },
    "mlp, digits": {
        "model": "mlp",
        "dataset": "digits",
        "partition": "dirichlet:0.5",
        "budget": "time=5s",
    },
    "mlp, diabetes": {
        "model": "mlp",
        "dataset": "diabetes",
        "partition": "case:1",
        "batch_size": 16,
        "budget": "time=5s",
    },
    "mlp, Parkinson's": {"model": "mlp", "natural": "parkinsons", "budget": "time=3s"},
    "five layers, MNIST": {
        "layers": 5,
        "dataset": "mnist-small",
        "partition": "dirichlet:0.5",
        "batch_size": 32,
        "budget": "time=5s",
    },
}


def _same(method: Method) -> Method:
    return method


@dataclass(frozen=True)
class Removal:
    """How a part is removed.

    Args:
      change: the method without the part.
      patches: (object, name of the attribute, its value without the part).
    """

    change: Callable[[Method], Method] = _same
    patches: Sequence[tuple[Any, str, Any]] = field(default_factory=tuple)

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Run the block without the part."""

        def built(settings: Settings, overrides: Overrides = NOTHING, *rest: Any) -> Method:
            return self.change(build_method(settings, overrides, *rest))

        with ExitStack() as stack:
            stack.enter_context(patch.object(simulate, "build_method", built))
            for target, name, value in self.patches:
                stack.enter_context(patch.object(target, name, value))
            yield


def _update(rule: Accelerate) -> Removal:
    """Replace the update rule, except for K-means, whose centres are averaged."""
    return Removal(
        lambda method: (
            replace(method, update=rule)
            if isinstance(method.update, Accelerate)
            else method
        )
    )


def _step(rule: Any) -> Removal:
    return Removal(lambda method: replace(method, step_size=rule))


class NoTrust(Accelerate):
    """Applies the whole mean update in any case."""

    def trust(self, state: Motion, rate: float) -> tuple[Motion, float]:
        return state, 1.0


class FreeGrowth(SearchedStep):
    """Lets η grow after every round."""

    def next(self, state: SearchedStepState, inputs: StepSizeInputs) -> SearchedStepState:
        return super().next(state, replace(inputs, improved=True))


class NoLeast(SearchedStep):
    """Lets η fall below the value from the search."""

    def next(self, state: SearchedStepState, inputs: StepSizeInputs) -> SearchedStepState:
        return replace(super().next(state, inputs), least=1e-30)


class StartOfRound(SearchedStep):
    """Uses the η of the start of a round."""

    def _falling(
        self, state: SearchedStepState, steady: float, inputs: StepSizeInputs
    ) -> SearchedStepState:
        return super()._falling(state, steady, replace(inputs, round_share=0.0))


def _distant_points(self: Any, *arguments: Any) -> Any:
    return _POINTS(replace(self, one_step=False), *arguments)


def _only_if_not_finite(state: Any, sums: Any, *, adapts: bool) -> Any:
    return _RECOVERY(state, sums, adapts=False)


def _as_decided(self: CarefulSpending, ledger: Any, decision: Decision) -> Decision:
    return decision


_POINTS = estimates.EstimateSlopes._points
_RECOVERY = stages.check_recovery

PARTS: dict[str, Removal] = {
    "the default": Removal(),
    "momentum at nodes": _update(Accelerate(carry=0.0)),
    "limit on sudden steepness": _update(NoTrust()),
    "gains": _update(Accelerate(rise=1.0)),
    "momentum": _update(Accelerate(momentum=0.0)),
    "gains and momentum": Removal(lambda method: replace(method, update=Average())),
    "last round at the mean": Removal(
        patches=[
            (module, "was_last", lambda state: False) for module in (stages, aggregator)
        ]
    ),
    "persistent part of drift": Removal(lambda method: replace(method, partly=False)),
    "drift correction": Removal(
        lambda method: replace(method, correct_drift=False, partly=False, by_speed=None)
    ),
    "recovery": Removal(patches=[(aggregator, "check_recovery", _only_if_not_finite)]),
    "β̂ over one step": Removal(
        patches=[(estimates.EstimateSlopes, "_points", _distant_points)]
    ),
    "several mini-batches": Removal(patches=[(estimates, "ENOUGH", 1)]),
    "limit of the first η at 300 updates": Removal(
        patches=[(estimates, "_far_steepness", lambda slopes: np.zeros(slopes.shape[1]))]
    ),
    "power iteration": Removal(patches=[(estimates, "_TURNS", 0)]),
    "own step sizes of steep nodes": Removal(patches=[(estimates, "_LONGEST", 1e9)]),
    "search for the first η": Removal(
        lambda method: replace(method, step_size=AutoStep(), one_step=False)
    ),
    "fall of η": _step(SearchedStep(fall=1e-9)),
    "η in the middle of a round": _step(StartOfRound()),
    "η grows after improvement only": _step(FreeGrowth()),
    "η at most doubles": _step(SearchedStep(growth=1e9)),
    "least η": _step(NoLeast()),
    "deviation of β̂": Removal(patches=[(step_size, "_upper", lambda state, beta: beta)]),
    "mean in β̂ (maximum only)": Removal(
        patches=[(step_size, "_between", lambda inputs: inputs.beta)]
    ),
    "maximum in β̂ (mean only)": Removal(
        patches=[(step_size, "_between", lambda inputs: inputs.mean_beta)]
    ),
    "τ by aggregation cost (G)": Removal(
        lambda method: replace(method, controller=AdaptiveTau(0.0025, leap=True))
    ),
    "ten rounds must fit": Removal(
        lambda method: replace(method, controller=BalancedTau(rounds=1))
    ),
    "longer last rounds": Removal(patches=[(CarefulSpending, "_spread", _as_decided)]),
}
"""Parts by the name of what is removed."""


def _constant(module: Any, name: str, *values: Any) -> dict[str, Removal]:
    named = name.strip("_").lower()
    return {
        f"{named} = {value:g}": Removal(patches=[(module, name, value)]) for value in values
    }


def _rule(kind: type[Any], role: str, name: str, *values: Any) -> dict[str, Removal]:
    """Replace a field of a rule; other methods and models keep their own rules."""

    def changed(value: Any) -> Callable[[Method], Method]:
        def change(method: Method) -> Method:
            rule = getattr(method, role)
            if not isinstance(rule, kind):
                return method
            return replace(method, **{role: replace(rule, **{name: value})})

        return change

    title = f"{kind.__name__}.{name}"
    return {f"{title} = {value:g}": Removal(changed(value)) for value in values}


CONSTANTS: dict[str, Removal] = {
    **_rule(BalancedTau, "controller", "worth", 5.0, 20.0),
    **_rule(BalancedTau, "controller", "rounds", 5, 20),
    **_rule(SearchedStep, "step_size", "growth", 1.5, 4.0),
    **_rule(SearchedStep, "step_size", "fall", 0.175, 0.7),
    **_rule(Accelerate, "update", "momentum", 0.9, 0.975),
    **_rule(Accelerate, "update", "carry", 0.35, 1.0),
    **_rule(Accelerate, "update", "rise", 1.2, 1.8),
    **_rule(Accelerate, "update", "fall", 0.25, 0.75),
    **_rule(Accelerate, "update", "most", 50.0, 200.0),
    **_rule(Accelerate, "update", "growth", 1.25, 2.0),
    **_rule(Accelerate, "update", "memory", 0.8, 0.95),
    **_constant(estimates, "_UPDATES", 150, 600),
    **_constant(estimates, "_BEYOND", 1.5, 6.0),
    **_constant(estimates, "_TURNS", 1, 4),
    **_constant(estimates, "_LONGEST", 1.0, 2.0),
    **_constant(estimates, "ENOUGH", 16, 64),
}
"""Other values of a constant: about half and twice, or as far from 1."""


@cache
def _dataset(name: str) -> Dataset:
    """Load a dataset; its training samples alone."""
    if not name.endswith("-small"):
        return small_dataset(name)
    return replace(load(name), test=None, note="")


def _layers(count: int, inputs: int = 196, classes: int = 10) -> Any:
    """Return layers of 64, with PyTorch's initial weights."""
    from torch import nn

    layers: list[nn.Module] = []
    for _ in range(count):
        layers += [nn.Linear(inputs, 64), nn.ReLU()]
        inputs = 64
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(inputs, classes))


def make_run(task: str, part: str, seed: int, mode: str) -> float:
    """Return the final loss of a task without one part."""
    options = {"budget": "time=5s", **TASKS[task]}
    if "natural" in options:
        found = natural_tasks.load(options.pop("natural"), seed)
        options |= {
            "shards": list(found.train),
            "classes": found.classes,
            "standardise": False,
        }
    else:
        options["dataset"] = _dataset(options["dataset"])
    if "layers" in options:
        options["model"] = _layers(options.pop("layers"))
    with {**PARTS, **CONSTANTS}[part].removed(), np.errstate(all="ignore"):
        result = fedbudget.train(
            **options, **_MODES[mode], seed=seed, costs="simulated", evaluations=1
        )
    loss = result.loss if mode == "training" else result.validation_loss
    assert loss is not None
    return loss


def main(arguments: Sequence[str]) -> None:
    """Make the missing runs, and print the tables."""
    parser = ArgumentParser(prog="python -m benchmarks ablation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each cell [5]")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), metavar="TASK")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), metavar="PART")
    parser.add_argument(
        "--constants", action="store_true", help="other values of constants, not parts"
    )
    parser.add_argument("--modes", nargs="*", default=list(_MODES), choices=_MODES)
    parser.add_argument("--out", type=Path, default=RESULTS / "ablation.jsonl")
    asked = parser.parse_args(arguments)
    asked.out.parent.mkdir(exist_ok=True)
    losses = read(asked.out)
    parts = ["the default", *CONSTANTS] if asked.constants else asked.parts
    cells = [
        (task, part, seed, mode)
        for mode in asked.modes
        for seed in range(asked.seeds)
        for task in asked.tasks
        for part in parts
    ]
    missing = [cell for cell in cells if cell not in losses]
    with asked.out.open("a") as file:
        for cell in track(missing, "runs", console=Console(stderr=True)):
            losses[cell] = make_run(*cell)
            file.write(json.dumps([*cell, losses[cell]]) + "\n")
            file.flush()
    for mode in asked.modes:
        _CONSOLE.print(table(losses, mode, parts[1:], f"Loss over the default's, {mode}"))


Losses = dict[tuple[str, str, int, str], float]
"""Final losses by task, part, seed and mode."""


def read(path: Path) -> Losses:
    """Read the finished runs of a file."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(task, part, seed, mode): loss for task, part, seed, mode, loss in lines}


def change(losses: Losses, task: str, part: str, mode: str) -> tuple[float, float]:
    """Return the mean logarithm of the ratio to the default's loss, and its standard
    error."""
    logs = [
        math.log(max(loss, 1e-12) / max(losses[task, "the default", seed, mode], 1e-12))
        if math.isfinite(loss)
        else math.log(1e6)
        for (named, removed, seed, kind), loss in losses.items()
        if (named, removed, kind) == (task, part, mode)
        and (task, "the default", seed, mode) in losses
    ]
    if len(logs) < 2:
        return math.nan, math.nan
    return float(np.mean(logs)), float(np.std(logs, ddof=1) / math.sqrt(len(logs)))


def table(losses: Losses, mode: str, parts: Sequence[str], title: str) -> Table:
    """Return the ratio of losses for each part, and tasks that lose significantly."""
    tasks = [task for task in TASKS if (task, "the default", 0, mode) in losses]
    shown = Table(title=title, title_justify="left", box=None)
    shown.add_column("without")
    for task in tasks:
        shown.add_column(task, justify="right")
    shown.add_column("beyond 1 s.e.", justify="right")
    for part in parts:
        found = [change(losses, task, part, mode) for task in tasks]
        cells = [
            "" if math.isnan(mean) else f"{math.exp(mean):.3f} ±{error:.3f}"
            for mean, error in found
        ]
        worse = sum(mean > error for mean, error in found)
        shown.add_row(part, *cells, f"{worse}/{len(tasks)}")
    return shown
