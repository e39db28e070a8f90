"""Lengths of the nodes' steps, from which FedExP follows (`FedExP` in update.py)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedbudget.arrays import Float64
from fedbudget.protocol.features.feature import (
    MOST_BEYOND,
    Feature,
    LocalRound,
    Reported,
    register_feature,
)
from fedbudget.protocol.sums import norms
from fedbudget.protocol.update import SQUARED_STEP, without_statistics


@register_feature
@dataclass(frozen=True)
class StepLengths(Feature):
    """Every node reports ‖w_i(t) - w(t₀)‖². Diverged nodes do not count."""

    name: ClassVar[str] = "step-lengths"

    def reported(self, first: bool) -> Reported:
        return Reported({SQUARED_STEP: MOST_BEYOND}, optional=True)

    def report(self, local: LocalRound) -> Mapping[str, Float64]:
        assert local.w is not None
        start = without_statistics(local.broadcast.w, local.statistics)
        with np.errstate(over="ignore", invalid="ignore"):  # diverged nodes
            lengths = norms(without_statistics(local.w, local.statistics), start)
            return {SQUARED_STEP: np.square(lengths)}
