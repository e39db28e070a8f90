"""How the mean update moves w: the aggregator's own step, after local updates have been averaged.

An update rule is a value and a pure step, as a controller is (control.py). Its state is whatever it must remember from
round to round: None, or a frozen dataclass of numbers and arrays, which is saved with the aggregator's.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.errors import UserError


class UpdateRule(Protocol):
    """Moves w, round by round."""

    def first(self, w: Float32) -> Any:
        """The state to begin with, and after the run went back to w^f.

        Args:
          w: where the run is, [parameters].
        """

    def next(self, state: Any, w: Float32, mean: Float32) -> tuple[Any, Float32]:
        """The next state, and w of the next round.

        Args:
          w: w(t₀), from which the round started, [parameters].
          mean: what the nodes' w_i(t) were combined to, [parameters].
        """


@dataclass(frozen=True)
class Average:
    """w is the mean itself, eq. (5)."""

    def first(self, w: Float32) -> None:
        return None

    def next(self, state: None, w: Float32, mean: Float32) -> tuple[None, Float32]:
        return None, mean


@dataclass(frozen=True)
class Velocity:
    """What a rule with momentum remembers: the steps so far, [parameters]."""

    v: Float32


@dataclass(frozen=True)
class ServerMomentum:
    """v ← m v + s (mean - w(t₀)), w(t) ← w(t₀) + v (FedAvgM, Hsu et al., 2019); m = 0 and s = 1 is the average.

    Args:
      momentum: m, how much of the last step is made again.
      step_size: s, of the aggregator.

    >>> rule, w = ServerMomentum(0.5), np.zeros(1, np.float32)
    >>> state, w = rule.next(rule.first(w), w, w + 1)
    >>> rule.next(state, w, w + 1)[1]
    array([2.5], dtype=float32)
    """

    momentum: float = 0.9
    step_size: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise UserError(f"momentum must be at least 0 and below 1, not {self.momentum:g}")
        if not 0 < self.step_size < math.inf:
            raise UserError(f"step_size must be a positive number, not {self.step_size:g}")

    def first(self, w: Float32) -> Velocity:
        return Velocity(np.zeros_like(w))

    def next(self, state: Velocity, w: Float32, mean: Float32) -> tuple[Velocity, Float32]:
        v = np.float32(self.momentum) * state.v + np.float32(self.step_size) * (mean - w)
        return Velocity(v), w + v
