"""Rules, models and data that golden runs pass to fedbudget as Python objects or files.

Everything here uses public names only. The data are random numbers or the data sets
that scikit-learn bundles, so no run needs a data folder.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits, load_wine

import fedbudget

Vector = NDArray[np.float32]
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class DoublingTau:
    """A controller that doubles τ in every round."""

    estimates: bool = False

    def first(self) -> fedbudget.Decision:
        return fedbudget.Decision(1, "first round")

    def next(
        self, previous: fedbudget.Decision, inputs: fedbudget.ControlInputs
    ) -> fedbudget.Decision:
        return fedbudget.Decision(min(2 * previous.tau, 32), "doubled")


@dataclass(frozen=True)
class ShrinkingStep:
    """A step size that loses a tenth in every round."""

    adapts: bool = False

    def first(self) -> fedbudget.StepSizeState:
        return fedbudget.StepSizeState(0.5)

    def next(
        self, state: fedbudget.StepSizeState, inputs: fedbudget.StepSizeInputs
    ) -> fedbudget.StepSizeState:
        return fedbudget.StepSizeState(0.9 * state.eta)

    def recover(
        self, state: fedbudget.StepSizeState, inputs: fedbudget.StepSizeInputs
    ) -> fedbudget.StepSizeState:
        return fedbudget.StepSizeState(0.5 * state.eta)


@dataclass(frozen=True)
class LastMove:
    """The state of `HeavyBall`."""

    move: Vector


@dataclass(frozen=True)
class HeavyBall:
    """An update rule that repeats 40 % of its last move."""

    def first(self, w: Vector) -> LastMove:
        return LastMove(np.zeros_like(w))

    def next(self, state: LastMove, w: Vector, mean: Vector) -> tuple[LastMove, Vector]:
        move = np.asarray(np.float32(0.4) * state.move + (mean - w), np.float32)
        return LastMove(move), w + move


@dataclass(frozen=True)
class Median:
    """A combination rule: the median over nodes of every parameter."""

    needs_reports: bool = True

    def combine(self, w: Vector, sizes: Numbers, nodes: Numbers) -> Vector:
        return np.asarray(np.median(w, axis=0), np.float32)


def own_rules(folder: Path) -> dict[str, Any]:
    """Return all four rules of this file."""
    return {
        "controller": DoublingTau(),
        "step_size": ShrinkingStep(),
        "update": HeavyBall(),
        "combine": Median(),
    }


def library_rules(folder: Path) -> dict[str, Any]:
    """Return rules of the library as objects with arguments."""
    return {
        "controller": fedbudget.AdaptiveTau(0.05),
        "step_size": fedbudget.FallingStep(0.2, fall=0.4),
        "update": fedbudget.ServerMomentum(0.5, step_size=0.8),
        "combine": fedbudget.WeightedMean(),
    }


def own_controller(folder: Path) -> dict[str, Any]:
    return {"controller": DoublingTau()}


def own_step_size(folder: Path) -> dict[str, Any]:
    return {"step_size": ShrinkingStep()}


def own_update(folder: Path) -> dict[str, Any]:
    return {"update": HeavyBall()}


def own_combination(folder: Path) -> dict[str, Any]:
    return {"combine": Median()}


def logistic(w: Vector, x: Vector, y: Vector) -> tuple[float, Vector]:
    """Mean logistic loss and its gradient for y in {0, 1}."""
    score = x @ w
    probability = 1 / (1 + np.exp(-score))
    loss = float(np.mean(np.logaddexp(0, score) - y * score))
    return loss, np.asarray(x.T @ (probability - y) / len(y), np.float32)


def hospitals(folder: Path) -> dict[str, Any]:
    """A function model, and shards of three sizes."""
    rng = np.random.default_rng(0)

    def patients(number: int, shift: float) -> tuple[Vector, Vector]:
        x = rng.normal(shift, 1.0, (number, 6)).astype(np.float32)
        score = x @ np.array([1, -2, 0.5, 0, 1, -1]) + rng.normal(0, 0.5, number)
        return x, (score > 0).astype(np.float32)

    model = fedbudget.FunctionModel(
        logistic, initial=np.zeros(6), predict=lambda w, x: x @ w > 0
    )
    shards = [patients(120, -0.5), patients(80, 0.0), patients(200, 0.5)]
    return {"model": model, "shards": shards, "test": patients(100, 0.0)}


def large_digits(folder: Path) -> dict[str, Any]:
    """Digits as images of 28 x 28, for networks that need that size."""
    digits = load_digits()
    images = np.kron(digits.images[:300], np.full((3, 3), 15))
    images = np.pad(images, ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
    path = folder / "large-digits.npz"
    np.savez(path, x=images[:, None], y=digits.target[:300].astype(np.int64))
    return {"dataset": str(path)}


def torch_module(folder: Path) -> dict[str, Any]:
    """A PyTorch module with running statistics and dropout."""
    from torch import nn

    class Network(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(
                nn.Flatten(),
                nn.Linear(64, 12),
                nn.BatchNorm1d(12),
                nn.Tanh(),
                nn.Dropout(0.2),
                nn.Linear(12, 10),
            )

    return {"model": Network}


MODEL_FILE = """
from torch import nn


def net():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10)
    )
"""


def model_file(folder: Path) -> dict[str, Any]:
    """A PyTorch module in a Python file."""
    path = folder / "golden_net.py"
    path.write_text(MODEL_FILE)
    return {"model": f"{path}:net"}


def node_files(folder: Path) -> dict[str, Any]:
    """A folder with one .npz file for each of three nodes."""
    path = folder / "nodes"
    path.mkdir()
    write_nodes(path)
    return {"dataset": str(path)}


def write_nodes(folder: Path) -> list[Path]:
    """Write the samples of three nodes with unequal sizes and classes."""
    digits = load_digits()
    x = (digits.data[:400] / 16).astype(np.float32)
    y = digits.target[:400].astype(np.int64)
    parts = (y % 3 == 0, y % 3 == 1, (y % 3 == 2) | (np.arange(400) < 60))
    paths = []
    for number, part in enumerate(parts):
        path = folder / f"node-{number}.npz"
        np.savez(path, x=x[part], y=y[part])
        paths.append(path)
    return paths


def csv_table(folder: Path) -> dict[str, Any]:
    """A table with a category, missing cells and a target of text."""
    wine = load_wine()
    lines = ["number,alcohol,acid,colour,kind"]
    for row, (values, target) in enumerate(zip(wine.data, wine.target, strict=True)):
        acid = "" if row % 11 == 0 else f"{values[1]:.2f}"
        colour = ("pale", "ruby", "dark")[int(values[9]) % 3]
        lines.append(f"{row},{values[0]:.2f},{acid},{colour},kind-{target}")
    path = folder / "wine.csv"
    path.write_text("\n".join(lines) + "\n")
    return {"dataset": str(path)}
