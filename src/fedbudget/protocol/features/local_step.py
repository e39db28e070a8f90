"""Published rules for local updates, without a knob.

Nodes choose step sizes themselves, or report the lengths of their steps, from which FedExP
follows (`FedExP` in update.py).

A node moves by w ← w - η_k g_k, with g_k = ∇F_i(w) on the k-th mini-batch, and its own η_k
in place of η.

**Δ-SGD** (Kim et al., ICLR 2024). The local curvature limits the step. In every round it
starts with η₀ = 0.2 and θ₀ = 1; then, with w' and g' one update before:

    η_k = min(√(1 + δ θ) η, ‖w - w'‖ / ‖g(w) - g(w')‖),  θ ← η_k / η

Both gradients are taken on the same mini-batch, so an update computes two. The first term
alone holds in the first update, and where w and w' or their gradients are equal. δ is 0.02,
the default of the authors' code; their factor γ/2 is 1.

**DoG** (Ivgi, Hinder and Carmon, ICML 2023). The distance travelled so far sets the step:

    η_k = c max_(j ≤ k) ‖w_j - w_0‖ / √(Σ_(j ≤ k) ‖g_j‖² + 1e-8),  c = 1

w_0 is the first w that the node received. In its first update, the distance is
1e-6 (1 + ‖w_0‖). Distance and sum continue over rounds. In each round the aggregator's mean
replaces w, and no w is averaged over updates, which the authors recommend.

The η of a round is η₀ of Δ-SGD and c of DoG. Running statistics do not count in norms.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from fedbudget.arrays import Float32, Float64, require_shape
from fedbudget.data.sampling import BatchIndices
from fedbudget.models.base import Descent
from fedbudget.protocol.features.estimates import one_of
from fedbudget.protocol.features.feature import (
    MOST_BEYOND,
    Feature,
    LocalRound,
    NodeMemory,
    Reported,
    register_feature,
)
from fedbudget.protocol.sums import norms
from fedbudget.protocol.update import SQUARED_STEP, without_statistics

_START = 1e-6  # first distance of DoG, relative to 1 + ‖w_0‖
_SMALL = 1e-8  # in the sum of DoG

StepSizes = Callable[[BatchIndices, Float32, Float32], Float64]
"""Return η_k of every node, [n], from the mini-batches, w and g, [n, parameters] each."""


class LocalStep(Feature):
    """Local updates with step sizes of the nodes' own."""

    eta: ClassVar[float]
    """η of the rounds, unless the settings have another."""

    @abstractmethod
    def step_sizes(self, local: LocalRound) -> StepSizes:
        """Return the function that chooses the step sizes of a round."""

    def descend(self, local: LocalRound) -> Descent:
        broadcast = local.broadcast
        indices = local.indices
        asked = None
        if local.best_known is None and local.best is not broadcast.w:
            asked = local.best
        step_sizes = self.step_sizes(local)
        first: Descent | None = None
        w = np.repeat(broadcast.w[None], len(local.numbers), axis=0)
        for number in range(indices.updates):
            one = one_of(indices, number)
            best = None if number else asked
            here = local.model.descend(w, local.shards, one, 0.0, best)
            first = first or here
            with np.errstate(over="ignore", invalid="ignore"):  # diverged nodes
                eta = step_sizes(one, w, here.gradients).astype(np.float32)
                w = here.w - eta[:, None] * here.gradients
        assert first is not None
        return replace(first, w=w)


@register_feature
@dataclass(frozen=True)
class DeltaSgd(LocalStep):
    """Δ-SGD.

    Args:
      growth: δ; the step size may grow by √(1 + δ θ) per update.
    """

    name: ClassVar[str] = "delta-sgd"
    eta: ClassVar[float] = 0.2
    growth: float = 0.02

    def step_sizes(self, local: LocalRound) -> StepSizes:
        before: Float32 | None = None
        eta = np.full(len(local.numbers), local.eta, np.float64)
        theta = np.ones_like(eta)

        def chosen(one: BatchIndices, w: Float32, gradients: Float32) -> Float64:
            nonlocal before, eta, theta
            after = np.sqrt(1 + self.growth * theta) * eta
            if before is not None:
                there = local.model.descend(before, local.shards, one, 0.0).gradients
                way = _norms(w, before, local.statistics)
                change = _norms(gradients, there, local.statistics)
                known = (way > 0) & (change > 0)
                limit = np.divide(way, change, out=np.full_like(way, np.inf), where=known)
                after = np.minimum(after, limit)
            theta = after / eta
            eta = after
            before = w
            return eta

        return chosen


@dataclass(frozen=True)
class Distance(NodeMemory):
    """The way of n nodes so far.

    Args:
      origin: w_0, [parameters].
      largest: largest distance from it, [n].
      squares: sum of all ‖g‖², [n].
    """

    origin: Float32
    largest: Float64
    squares: Float64

    def require_shapes(self, nodes: int, parameters: int, held_out: Any) -> None:
        require_shape(self.origin, parameters)
        require_shape(self.largest, nodes)
        require_shape(self.squares, nodes)

    @classmethod
    def first(cls, w: Float32, nodes: int, statistics: int) -> "Distance":
        """Return the state at the first w, [parameters]."""
        length = _norms(w[None], np.zeros_like(w), statistics)[0]
        return cls(w, np.full(nodes, _START * (1 + length)), np.full(nodes, _SMALL))


@register_feature
@dataclass(frozen=True)
class DistanceOverGradients(LocalStep):
    """DoG."""

    name: ClassVar[str] = "dog"
    types: ClassVar[tuple[type, ...]] = (Distance,)
    eta: ClassVar[float] = 1.0

    def step_sizes(self, local: LocalRound) -> StepSizes:
        nodes = len(local.numbers)
        statistics = local.statistics
        known = local.memories.get(self.name)
        if not isinstance(known, Distance):
            known = Distance.first(local.broadcast.w, nodes, statistics)
            local.memories[self.name] = known

        def chosen(one: BatchIndices, w: Float32, gradients: Float32) -> Float64:
            memory: Distance = local.memories[self.name]
            way = _norms(w, memory.origin, statistics)
            largest = np.maximum(memory.largest, way)
            square = np.square(_norms(gradients, np.zeros_like(memory.origin), statistics))
            squares = memory.squares + square
            local.memories[self.name] = Distance(memory.origin, largest, squares)
            return np.asarray(local.eta * largest / np.sqrt(squares))

        return chosen


def _norms(values: Float32, center: Float32, statistics: int) -> Float64:
    """Return the distance of each row from its center, without statistics, [n]."""
    difference = without_statistics(values, statistics) - without_statistics(
        center, statistics
    )
    return norms(difference, np.zeros_like(difference[0]))


@register_feature
@dataclass(frozen=True)
class StepLengths(Feature):
    """Every node reports ‖w_i(t) - w(t₀)‖². Diverged nodes do not count."""

    name: ClassVar[str] = "step-lengths"

    def reported(self, first: bool) -> Reported:
        return Reported({SQUARED_STEP: MOST_BEYOND}, optional=True)

    def report(self, local: LocalRound) -> Mapping[str, Float64]:
        assert local.w is not None
        with np.errstate(over="ignore", invalid="ignore"):  # diverged nodes
            lengths = _norms(local.w, local.broadcast.w, local.statistics)
            return {SQUARED_STEP: np.square(lengths)}


LOCAL_STEPS: Mapping[str, type[LocalStep]] = {
    kind.name: kind for kind in (DeltaSgd, DistanceOverGradients)
}
"""Step size rules of nodes by the names in settings."""
