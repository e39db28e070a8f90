"""Linear regression over nodes with known constants of the paper's analysis."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedbudget.arrays import Float64, Int64
from support.problems import (
    LocalGradient,
    Trajectory,
    algorithm_1,
    linear_gradient,
    linear_loss,
    unequal_parts,
)


@dataclass(frozen=True)
class Regression:
    """Linear regression over unequal shards: convex, with exact constants."""

    x: Float64
    y: Float64
    parts: Sequence[Int64]

    @classmethod
    def random(cls, seed: int, *, spread: float) -> "Regression":
        """Shards whose features and targets differ by `spread` from node to node."""
        rng = np.random.default_rng(seed)
        nodes, features = int(rng.integers(2, 5)), int(rng.integers(1, 5))
        samples = 20 * nodes
        parts = unequal_parts(samples, nodes, seed)
        x = rng.normal(size=(samples, features))
        y = x @ rng.normal(size=features) + 0.1 * rng.normal(size=samples)
        for part in parts:
            x[part] += spread * rng.normal(size=features)
            y[part] += spread * rng.normal()
        return cls(x, y, parts)

    @property
    def sizes(self) -> list[int]:
        return [len(part) for part in self.parts]

    @property
    def local(self) -> list[LocalGradient]:
        """∇F_i."""
        return [
            partial(linear_gradient, x=self.x[p], y=self.y[p], regularization=0.0)
            for p in self.parts
        ]

    def gradient(self, w: Float64) -> Float64:
        return linear_gradient(w, self.x, self.y, 0.0)

    def excess(self, w: Float64) -> float:
        """F(w) - F(w*)."""
        return linear_loss(w, self.x, self.y, 0.0) - linear_loss(
            self.best, self.x, self.y, 0.0
        )

    @property
    def best(self) -> Float64:
        """w*."""
        return np.asarray(np.linalg.lstsq(self.x, self.y, rcond=None)[0], dtype=np.float64)

    @property
    def beta(self) -> float:
        """The largest curvature of any F_i."""
        return max(
            float(np.linalg.eigvalsh(self.x[p].T @ self.x[p] / len(p))[-1])
            for p in self.parts
        )

    def delta(self, points: Float64) -> float:
        """Σ D_i δ_i / D, where δ_i is the largest ‖∇F_i - ∇F‖ at any of the points.

        The proof needs only the points v_[k].
        """
        apart = [
            max(float(np.linalg.norm(local(v) - self.gradient(v))) for v in points)
            for local in self.local
        ]
        return float(np.dot(self.sizes, apart) / sum(self.sizes))

    def rho(self, points: Float64) -> float:
        """Largest slope of F within the ball around w* that contains the points."""
        radius = float(np.linalg.norm(points - self.best, axis=1).max())
        return radius * float(np.linalg.eigvalsh(self.x.T @ self.x / len(self.x))[-1])

    def descend(self, tau: int, rounds: int, eta: float) -> Trajectory:
        start = np.full(self.x.shape[1], 1.5)
        return algorithm_1(self.local, self.sizes, start, tau=tau, rounds=rounds, eta=eta)
