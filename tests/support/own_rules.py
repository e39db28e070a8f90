"""Rules of one's own, each in a few lines, and a run that has all of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

import fedbudget
from fedbudget import ControlInputs, Decision
from fedbudget.arrays import Float32, Int64


@dataclass(frozen=True)
class Doubling:
    """Twice as many local updates in every round; more than settings would let the built-in
    one make.
    """

    estimates: bool = False

    def first(self) -> Decision:
        return Decision(1, "one to begin with")

    def next(self, previous: Decision, inputs: ControlInputs) -> Decision:
        return Decision(2 * previous.tau, "twice the last")


@dataclass(frozen=True)
class Median:
    """Of every parameter the median over nodes."""

    needs_reports: bool = True

    def combine(self, w: Float32, sizes: Int64, nodes: Int64) -> Float32:
        return np.asarray(np.median(w, axis=0), np.float32)


OWN: dict[str, Any] = {
    "controller": Doubling(),
    "update": fedbudget.ServerMomentum(0.5),
    "combine": Median(),
}


def train(**more: Any) -> fedbudget.Result:
    """A run with all of them, unless others are given."""
    asked: dict[str, Any] = {
        "nodes": 3,
        "case": 2,
        "budget": "time=1000s",
        "rounds": 9,
        "step_size": 0.01,
    }
    return fedbudget.train(**{"model": "svm", **asked, **OWN, **more})
