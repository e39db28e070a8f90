"""Short custom rules, and a run that uses all of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

import fedbudget
from fedbudget import ControlInputs, Decision
from fedbudget.arrays import Float32, Int64


@dataclass(frozen=True)
class Doubling:
    """Doubles τ in every round, beyond the limit of the built-in controllers."""

    estimates: bool = False

    def first(self) -> Decision:
        return Decision(1, "one to begin with")

    def next(self, previous: Decision, inputs: ControlInputs) -> Decision:
        return Decision(2 * previous.tau, "twice the last")


@dataclass(frozen=True)
class Median:
    """Median of every parameter over nodes."""

    needs_reports: bool = True

    def combine(self, w: Float32, sizes: Int64, nodes: Int64) -> Float32:
        return np.asarray(np.median(w, axis=0), np.float32)


OWN: dict[str, Any] = {
    "controller": Doubling(),
    "update": fedbudget.ServerMomentum(0.5),
    "combine": Median(),
}


def train(**more: Any) -> fedbudget.Result:
    """Train with all custom rules, unless `more` overrides them."""
    settings: dict[str, Any] = {
        "nodes": 3,
        "case": 2,
        "budget": "time=1000s",
        "rounds": 9,
        "step_size": 0.01,
    }
    return fedbudget.train(**{"model": "svm", **settings, **OWN, **more})
