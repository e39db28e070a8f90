"""FedProx: local updates stay close to w(t₀) (Li et al., MLSys 2020).

A node descends on F_i(w) + μ/2 ‖w - w(t₀)‖² instead of F_i(w):

    w ← w - η (∇F_i(w) + s_i + μ (w - w(t₀)))

with s_i the other additions to its gradient. Reported losses and gradients are those of F_i
itself: they are taken at w(t₀), at which the last term is 0.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.protocol.features.feature import Feature, LocalRound, register_feature
from fedbudget.protocol.update import with_statistics_of


@register_feature
@dataclass(frozen=True)
class Proximal(Feature):
    """FedProx.

    Args:
      mu: μ, the strength of the term.
    """

    name: ClassVar[str] = "proximal"
    mu: float

    def pull(self, local: LocalRound, w: Float32) -> Float32:
        start = local.broadcast.w
        with np.errstate(over="ignore", invalid="ignore"):  # diverged nodes
            alike = with_statistics_of(start, w, local.statistics)
            return np.float32(self.mu) * (alike - start)
