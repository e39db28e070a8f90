"""Reports as a test wants them, without a fleet."""

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.protocol.messages import Broadcast, Report


def w_of(number: float) -> Float32:
    return np.array([number, -number], np.float32)


def report(
    said: Broadcast,
    loss: float,
    w: float = 0.0,
    *,
    best: float | None = None,
    estimates: tuple[float, float, float] | None = None,
) -> Report:
    """Two nodes that agree on everything, but for gradients (±δ, 0) when there are estimates; `best` is F(w^f), by
    default not better than the loss."""
    rho, beta, delta = estimates or (None, None, None)
    return Report(
        round=said.round,
        nodes=np.array([0, 1]),
        sizes=np.array([10, 10]),
        losses=np.full(2, loss),
        best_losses=np.full(2, loss if best is None else best),
        w=None if said.tau == 0 else np.stack([w_of(w)] * 2),
        rho=None if rho is None else np.full(2, rho),
        beta=None if beta is None else np.full(2, beta),
        gradients=None if delta is None else np.array([[delta, 0], [-delta, 0]], np.float32),
    )
