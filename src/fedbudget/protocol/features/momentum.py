"""Momentum at nodes: local updates repeat a part of the last step of w.

An update rule with momentum (update.py, `MovingRule`) moves w further than the mean of the
nodes. Nodes apply a share m of that step themselves, spread over their updates, so that
gradients are evaluated close to the coming w. With v the w before w(t₀):

    start      w(t₀) + m (w(t₀) - v)            the nodes' gradients lead away from here
    motion     (w(t₀) - start) / ητ             is added to the gradient of every update

The aggregator subtracts the nodes' momentum before the update rule moves w (aggregator.py).
Formulas about an interval start from `start` instead of w(t₀) (drift.py). A round that uses
up the budget is followed by no momentum: the run ends at the mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from fedbudget.arrays import Float32, require_shape
from fedbudget.models.base import Model
from fedbudget.protocol.features.feature import (
    Feature,
    FeatureState,
    FleetState,
    LocalRound,
    NodeMemory,
    RoundResult,
    register_feature,
)
from fedbudget.protocol.messages import FinalRound, PeerError, RoundPart, TrainRound
from fedbudget.protocol.update import with_statistics_of


@dataclass(frozen=True)
class MomentumPart(RoundPart):
    """m, the share of the last step of w that nodes repeat."""

    in_header: ClassVar[bool] = True
    share: float


@dataclass(frozen=True)
class MomentumCatchUp(RoundPart):
    """The w before w(t₀), [parameters]."""

    before: Float32


@dataclass(frozen=True)
class MomentumState(FeatureState):
    """Momentum at the aggregator.

    Args:
      before: the w broadcast before w, [parameters].
      share: m.
    """

    before: Float32
    share: float

    @property
    def sent_vectors(self) -> tuple[Float32, ...]:
        return (self.before,)

    def require_possible(self, w: Float32) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"momentum is {self.share}")
        if self.before.shape != w.shape or not np.isfinite(self.before).all():
            raise ValueError("the w before the last is not finite, or has another length")


@dataclass(frozen=True)
class MomentumMemory(NodeMemory):
    """The w before w(t₀), from which `start` follows, [parameters]."""

    before: Float32

    def require_shapes(self, nodes: int, parameters: int, held_out: Any) -> None:
        require_shape(self.before, parameters)


@register_feature
@dataclass(frozen=True)
class Momentum(Feature):
    """Momentum at nodes.

    Args:
      carried: m while η does not change; at most 1.
    """

    name: ClassVar[str] = "momentum"
    types: ClassVar[tuple[type, ...]] = (
        MomentumPart,
        MomentumCatchUp,
        MomentumState,
        MomentumMemory,
    )
    carried: float

    # Nodes.

    def begin(self, local: LocalRound) -> None:
        local.memories.pop(self.name, None)
        part = local.broadcast.by_kind.get(MomentumPart)
        if part is None:
            return
        last = local.last
        if last is None or local.missed:
            before = self._missed(local)
        elif isinstance(last.broadcast, FinalRound) and last.start is not None:
            local.start = last.start  # the run was extended after its final round
            return
        else:
            before = last.broadcast.w
        local.memories[self.name] = MomentumMemory(before)
        w = local.broadcast.w
        local.start = extrapolated(w, before, part.share, local.statistics)

    def _missed(self, local: LocalRound) -> Float32:
        """Return the previous w of nodes that missed a round."""
        catch_up = local.broadcast.catch_up
        missed = None if catch_up is None else catch_up.part(MomentumCatchUp)
        if missed is None:
            number = local.broadcast.round
            raise PeerError(
                f"round {number} has momentum, and this node lacks the previous w"
            )
        return missed.before

    def common(self, local: LocalRound) -> Sequence[Float32]:
        memory: MomentumMemory | None = local.memories.get(self.name)
        if memory is not None:
            return (memory.before,)
        return () if local.start is local.broadcast.w else (local.start,)

    def shift(self, local: LocalRound) -> Float32 | None:
        broadcast = local.broadcast
        if local.start is broadcast.w or not isinstance(broadcast, TrainRound):
            return None
        way = broadcast.w - local.start
        if local.counts is None:
            spans = np.atleast_1d(np.float32(local.eta * broadcast.tau))
        else:
            spans = np.float32(local.eta) * local.counts.astype(np.float32)
        return np.asarray(way / spans[:, None])

    def compact(self, state: FleetState) -> FleetState:
        return replace(state, start=None) if self.name in state.memories else state

    def expand(self, state: FleetState, model: Model) -> FleetState:
        memory = state.memories.get(self.name)
        part = state.broadcast.by_kind.get(MomentumPart)
        if not isinstance(memory, MomentumMemory) or part is None:
            return state
        start = state.start
        if start is None:
            w = state.broadcast.w
            start = extrapolated(w, memory.before, part.share, model.statistics)
        others = {name: each for name, each in state.memories.items() if each is not memory}
        return replace(state, start=start, memories=others)

    # Aggregator.

    def message(self, state: MomentumState | None) -> RoundPart | None:
        return None if state is None else MomentumPart(state.share)

    def catch_up(self, state: MomentumState | None) -> RoundPart | None:
        return None if state is None else MomentumCatchUp(state.before)

    def start(
        self, state: MomentumState | None, w: Float32, statistics: int
    ) -> Float32 | None:
        if state is None:
            return None
        return extrapolated(w, state.before, state.share, statistics)

    def after(
        self, state: MomentumState | None, result: RoundResult
    ) -> MomentumState | None:
        share = result.slowdown * self.carried
        if result.recover or result.last or not share:
            return None
        return MomentumState(result.broadcast.w, share)

    def recovered(self, state: MomentumState | None) -> None:
        return None


def extrapolated(w: Float32, before: Float32, share: float, statistics: int) -> Float32:
    """Extrapolate w along its last step, [parameters].

    Args:
      w: [parameters].
      before: the w before the last step, [parameters].
      share: share of the step to repeat.
      statistics: number of running statistics at the end of w; they stay as they are.
    """
    further = w + np.float32(share) * (w - before)
    return with_statistics_of(w, further, statistics) if statistics else further
