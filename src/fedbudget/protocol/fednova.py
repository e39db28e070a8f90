"""FedNova: nodes that make different numbers of updates count alike (Wang et al., NeurIPS 2020).

Where a node passes over its samples so many times in a round, one with more samples makes more updates, and plain
averaging then minimises another loss than F, in which such nodes weigh more. With d_i = (w(t₀) - w_i(t)) / ητ_i, what a
node's updates went along on average, and p_i = D_i / D, FedNova's rule is

    w(t) = w(t₀) - η τ_eff Σ p_i d_i,      τ_eff = Σ p_i τ_i.

Nodes do their part of it, as they do where work is shared by speed (workload.py): each reports w(t₀) - η τ_eff d_i, and
the mean of reports is w(t). Here τ is what the node with the most samples makes, so that it is what a round takes, and
τ_i = τ D_i / max D_j, rounded, at least 1. τ_eff is of all nodes, also where some miss a round. Where all have as many
samples it is FedAvg.
"""

from dataclasses import dataclass

import numpy as np

from fedbudget.protocol.messages import Work


@dataclass(frozen=True)
class DataWorkload:
    """Who makes how many updates, by samples.

    Args:
      sizes: D_i of all nodes, by their numbers.

    >>> DataWorkload((10, 40, 20)).work(8)
    Work(effective=6.0, most=8, updates=(2, 8, 4))
    """

    sizes: tuple[int, ...]

    def work(self, tau: int) -> Work:
        """What all nodes are told."""
        sizes = np.array(self.sizes, np.float64)
        updates = np.maximum(1, np.rint(tau * sizes / sizes.max())).astype(np.int64)
        return Work(float(sizes @ updates / sizes.sum()), int(updates.max()), tuple(updates.tolist()))
