"""How the nodes' reports become one: the w that the update rule (update.py) gets as their mean.

A combination rule is a value with one pure function. The weighted mean needs only sums over nodes, which whoever has
many nodes can make by itself (sums.py); any other rule is given every node's w_i, so that these must be here.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from fedbudget.arrays import Float32, Int64
from fedbudget.protocol.tree import add_up


class CombineRule(Protocol):
    """Makes one w of many."""

    @property
    def needs_reports(self) -> bool:
        """Whether it must see every node's w_i; where only sums arrive, as on Ray, such a rule is refused."""

    def combine(self, w: Float32, sizes: Int64, nodes: Int64) -> Float32:
        """What all are combined to, [parameters].

        Args:
          w: w_i(t) of the nodes whose numbers are all finite, at least one, [n, parameters].
          sizes: D_i, [n].
          nodes: their numbers, rising, [n].
        """


@dataclass(frozen=True)
class WeightedMean:
    """Σ D_i w_i / Σ D_i, eq. (5), along the tree of nodes (tree.py)."""

    needs_reports: ClassVar[bool] = False

    def combine(self, w: Float32, sizes: Int64, nodes: Int64) -> Float32:
        return np.asarray(add_up(nodes, sizes.astype(np.float64), w) / float(sizes.sum()), np.float32)
