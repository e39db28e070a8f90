"""Update rules that others have published, by the names that they are known by.

With Δ = mean - w(t₀), which stands for a step along the negative gradient, all of it per parameter:

    average     w(t) = w(t₀) + Δ                                               FedAvg, McMahan et al., AISTATS 2017
    fedavgm     v ← m v + s Δ,                  w(t) = w(t₀) + v               Hsu et al., 2019
    fedadam     v ← β₂ v + (1-β₂) Δ²                                           Reddi et al., ICLR 2021, Algorithm 2
    fedyogi     v ← v - (1-β₂) Δ² sign(v - Δ²)                                 the same
                m ← β₁ m + (1-β₁) Δ,            w(t) = w(t₀) + s m / (√v + ε)  of both

m starts with 0, and v of the last two with ε², the least that Algorithm 2 allows. There is no correction of the bias
that m and v have at first: Algorithm 2 has none, while some programs that bear its name do. ε is τ in their paper, and
s is η, which here are local updates and the nodes' step size. SCAFFOLD, FedProx and FedNova, which change local
updates, are in drift.py, proximal.py and fednova.py.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.errors import UserError
from fedbudget.protocol.update import Accelerate, Average, ServerMomentum


@dataclass(frozen=True)
class UpdateMoments:
    """What an adaptive rule remembers: running means of Δ and of its square, both [parameters]."""

    m: Float32
    v: Float32


@dataclass(frozen=True)
class _AdaptiveRule(ABC):
    """What FedAdam and FedYogi share."""

    step_size: float = 0.1
    momentum: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("momentum", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 0 and below 1, not {getattr(self, name):g}")
        for name in ("step_size", "epsilon"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} must be a positive number, not {getattr(self, name):g}")

    def first(self, w: Float32) -> UpdateMoments:
        return UpdateMoments(np.zeros_like(w), np.full_like(w, self.epsilon**2))

    def next(self, state: UpdateMoments, w: Float32, mean: Float32) -> tuple[UpdateMoments, Float32]:
        with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverges, and then goes back
            delta = mean - w
            m = np.float32(self.momentum) * state.m + np.float32(1 - self.momentum) * delta
            v = self._second_moment(state.v, np.square(delta))
            scale: Float32 = np.float32(self.step_size) / (np.sqrt(v) + np.float32(self.epsilon))
            return UpdateMoments(m, v), w + scale * m

    @abstractmethod
    def _second_moment(self, v: Float32, square: Float32) -> Float32:
        """The next v, from Δ²."""


@dataclass(frozen=True)
class FedAdam(_AdaptiveRule):
    """Parameters that move little move further, by a running mean of Δ² (Reddi et al., 2021).

    Args:
      step_size: s; about the length of a step of each parameter.
      momentum: β₁, of the running mean of Δ.
      beta2: β₂, of the running mean of Δ².
      epsilon: ε; larger is less adaptive.

    >>> rule, w = FedAdam(step_size=1.0, momentum=0.5, beta2=0.75, epsilon=1.0), np.zeros(1, np.float32)
    >>> rule.next(rule.first(w), w, w + 3)[1].round(3)  # m = 1.5, v = 0.75 + 0.25 * 9 = 3
    array([0.549], dtype=float32)
    """

    def _second_moment(self, v: Float32, square: Float32) -> Float32:
        return np.float32(self.beta2) * v + np.float32(1 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(_AdaptiveRule):
    """As FedAdam, with v that changes by no more than a share of Δ², however large it has become (Reddi et al., 2021).

    Args:
      step_size: s; about the length of a step of each parameter.
      momentum: β₁, of the running mean of Δ.
      beta2: β₂; v changes by 1-β₂ of Δ².
      epsilon: ε; larger is less adaptive.

    >>> rule, w = FedYogi(step_size=1.0, momentum=0.5, beta2=0.75, epsilon=1.0), np.zeros(1, np.float32)
    >>> rule.next(rule.first(w), w, w + 4)[1].round(3)  # m = 2, v = 1 + 0.25 * 16 = 5
    array([0.618], dtype=float32)
    """

    def _second_moment(self, v: Float32, square: Float32) -> Float32:
        change: Float32 = np.float32(1 - self.beta2) * square * np.sign(v - square)
        return v - change


UPDATE_RULES: Mapping[str, type[Any]] = {
    "average": Average,
    "accelerate": Accelerate,
    "fedavgm": ServerMomentum,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
}
"""By the names that settings have; the fields of each are its options."""
