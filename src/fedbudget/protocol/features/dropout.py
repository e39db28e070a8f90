"""Dropout in the second stage of a run (validation.py).

A network overfits if it has many more parameters than there are rows. Dropout sets a random
share of its hidden values to 0 in each local update (Srivastava et al., 2014), and slows
training down, so a network that does not overfit should not have it. So a run begins
without it. When validation shows that the network overfits, the run returns to w^v and
continues with dropout.

The masks depend on the rows of a mini-batch alone, like all random operations of a module.
The features before this one evaluate the same F_i, with dropout, at different w. Validation
evaluates the network without dropout.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from fedbudget.models.base import with_dropout
from fedbudget.protocol.features.feature import (
    Feature,
    FeatureState,
    LocalRound,
    RoundResult,
    register_feature,
)
from fedbudget.protocol.features.validation import Validation, ValidationState
from fedbudget.protocol.messages import PeerError, RoundPart

SHARE = 0.25
"""Share of the hidden values that are set to 0."""


@dataclass(frozen=True)
class DropoutPart(RoundPart):
    """Request to make local updates with dropout.

    Args:
      share: share of the hidden values.
    """

    in_header: ClassVar[bool] = True
    share: float


@dataclass(frozen=True)
class DropoutState(FeatureState):
    """Dropout at the aggregator.

    Args:
      active: whether the coming round has dropout.
    """

    active: bool = False


@register_feature
@dataclass(frozen=True)
class Dropout(Feature):
    """Dropout in the second stage."""

    name: ClassVar[str] = "dropout"
    types: ClassVar[tuple[type, ...]] = (DropoutPart, DropoutState)

    # Nodes.

    def begin(self, local: LocalRound) -> None:
        part = local.broadcast.by_kind.get(DropoutPart)
        if part is None:
            return
        model = with_dropout(local.model, part.share)
        if model is None:
            raise PeerError(f"{local.model.name} has no dropout")
        local.model = model

    # Aggregator.

    def first(self, w: Any) -> DropoutState:
        return DropoutState()

    def message(self, state: DropoutState) -> RoundPart | None:
        return DropoutPart(SHARE) if state.active else None

    def after(self, state: DropoutState, result: RoundResult) -> DropoutState:
        validation = result.states.get(Validation.name)
        again = isinstance(validation, ValidationState) and validation.again
        return state if again == state.active else DropoutState(again)

    def recorded(self, state: DropoutState, result: RoundResult | None) -> dict[str, Any]:
        if result is None or DropoutPart not in result.broadcast.by_kind:
            return {}
        return {"dropout": SHARE}
