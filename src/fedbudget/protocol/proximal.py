"""FedProx: local updates that are held near where they started (Li et al., MLSys 2020).

A node descends on F_i(w) + μ/2 ‖w - w(t₀)‖² in place of F_i(w), so that an update is

    w ← w - η (∇F_i(w) + s_i + μ (w - w(t₀)))

with s_i whatever else is added to its gradients. The pull changes with every update, while a model adds the same to all
of a round's: so updates are asked for one at a time, each for all nodes at once. Losses and gradients that a round
tells of are those of F_i itself; at w(t₀), where they are taken, the pull is 0.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.data.sampling import BatchIndices
from fedbudget.models.base import Descent
from fedbudget.protocol.evidence import one_of
from fedbudget.protocol.statistics import with_statistics_of

OneUpdate = Callable[[Float32, BatchIndices, Float32 | None, bool], Descent]
"""One update of all nodes, from their w and a mini-batch, with what is added to gradients; whether it is the first."""


def descend_near(
    update: OneUpdate, w: Float32, indices: BatchIndices, proximal: float, shift: Float32 | None, statistics: int
) -> Descent:
    """The updates of a round.

    Args:
      w: w(t₀), [parameters].
      proximal: μ.
      shift: what else is added to gradients, [nodes, parameters].
      statistics: how many of w's last numbers are running statistics, which nothing pulls at.
    """
    first = last = update(w[None], one_of(indices, 0), shift, True)
    for number in range(1, indices.updates):
        with np.errstate(over="ignore", invalid="ignore"):  # of a node that diverged
            pull = np.float32(proximal) * (with_statistics_of(w, last.w, statistics) - w)
        fresh = update(last.w, one_of(indices, number), pull if shift is None else pull + shift, False)
        makes = indices.updates_of > number
        last = fresh if makes.all() else replace(fresh, w=np.where(makes[:, None], fresh.w, last.w))
    return replace(first, w=last.w)
