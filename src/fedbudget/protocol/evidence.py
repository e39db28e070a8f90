"""More mini-batches than one to judge by, where mini-batches are small.

A step size that adapts goes by the loss and the smoothness at w(t₀). On a mini-batch of a sample or two both say
little: the loss may be 0 where the next sample's is not, and β̂_i may be that of the flattest sample of all, while η
must suit the steepest. So nodes whose mini-batches have fewer than `ENOUGH` samples look at several, and report the
mean of the losses and the largest β̂_i. Where nodes hold the same data (Case 3), they draw the same samples, and no
other node makes up for it.
"""

from dataclasses import dataclass, replace

import numpy as np

from fedbudget.arrays import Float32, Float64
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards
from fedbudget.models.base import Model
from fedbudget.protocol.norms import squared_norms

ENOUGH = 32

_NOWHERE = np.empty((0, 0), np.float32)  # in place of a w that nobody needs, and that may be large


@dataclass(frozen=True)
class Evidence:
    """What several mini-batches say.

    Args:
      losses, best_losses: mean F_i at w(t₀) and at w^f, [nodes].
      loss_change: mean change of F_i between w(t₀) and other points, [nodes].
      steepest: the largest change of ∇F_i between them, [nodes, parameters].
    """

    losses: Float64
    best_losses: Float64
    loss_change: Float64
    steepest: Float32


def mini_batches(batch: int | None) -> int:
    """How many to look at; 1 is the one that a round begins with anyway."""
    return 1 if batch is None else -(-ENOUGH // batch)


def one_of(indices: BatchIndices, number: int) -> BatchIndices:
    """One of the mini-batches; contiguous like all of them, or the kernels would be compiled a second time."""
    return BatchIndices(np.ascontiguousarray(indices.positions[:, number : number + 1]), indices.group)


def gather(model: Model, shards: Shards, indices: BatchIndices, w: Float32, best: Float32, points: Float32) -> Evidence:
    """Looks at all mini-batches of `indices`.

    Args:
      w, best: [parameters].
      points: where the loss and gradient are compared with those at w, [nodes, parameters].
    """
    losses, best_losses, change = np.zeros((3, len(shards)))
    steepest, size = np.zeros_like(points), np.zeros(len(shards))
    with np.errstate(over="ignore", invalid="ignore"):  # what diverged gives no number, and so no estimate
        for number in range(indices.updates):
            one = one_of(indices, number)
            here = replace(model.descend(w[None], shards, one, 0.0, best), w=_NOWHERE)
            there = replace(model.descend(points, shards, one, 0.0), w=_NOWHERE)
            assert here.best_losses is not None
            losses += here.losses
            best_losses += here.best_losses
            change += np.abs(there.losses - here.losses)
            change_of_gradient = there.gradients - here.gradients
            del here, there
            squares = squared_norms(change_of_gradient)
            steeper = squares > size
            steepest[steeper] = change_of_gradient[steeper]
            size = np.fmax(squares, size)
            del change_of_gradient
    count = indices.updates
    return Evidence(losses / count, best_losses / count, change / count, steepest)
