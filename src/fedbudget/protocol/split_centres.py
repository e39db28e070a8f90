"""How w of K-means moves: to the mean, and centres that have nothing to do are put where there is something.

The first centres are drawn without a look at samples, which stay with the nodes. So one of them may be the nearest to
nearly all: it moves into their midst, and the others, which have no samples, have a gradient of 0 for good. Then there
is one cluster, however many were asked for. So centres begin few and are split (Linde, Buzo and Gray, 1980):

- After the first round those count that have moved more than half as far as the one that moved furthest; after any
  other, those that have moved at all. Who has counted once counts for good: it may stay because that is right.
- Each of the others is put beside one that has moved, off by a hundredth of that one's way, so that they share its
  samples, and part. One that moves is split once in a round, the one that moved furthest first: so in every round there
  may be twice as many, until there are all. Nobody was nearest to where such a centre was, but perhaps in the first
  round, so that the loss does not rise by it.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float32

_FIRST, _LATER = 0.5, 1e-3
"""Shares of the longest way; what is below the second is rounding."""
_OFF = np.float32(0.01)


@dataclass(frozen=True)
class CentresState:
    """What is known of the centres.

    Args:
      counted: which have had samples, [clusters].
      rounds: how many there were.
    """

    counted: NDArray[np.bool_]
    rounds: int = 0


@dataclass(frozen=True)
class SplitCentres:
    """w is the mean, but for centres that have no samples, see above.

    Args:
      clusters: how many centres there are, one after the other in w.

    >>> rule, w = SplitCentres(2), np.array([0, 9], np.float32)
    >>> rule.next(rule.first(w), w, np.array([1, 9], np.float32))[1]  # the second is put beside the first
    array([1.  , 1.01], dtype=float32)
    """

    clusters: int

    def first(self, w: Float32) -> CentresState:
        return CentresState(np.zeros(self.clusters, bool))

    def restart(self, state: CentresState, w: Float32) -> CentresState:
        """Back at a w that was good: all its centres stay."""
        return replace(state, counted=np.ones(self.clusters, bool))

    def next(self, state: CentresState, w: Float32, mean: Float32) -> tuple[CentresState, Float32]:
        centres = mean.reshape(self.clusters, -1)
        ways = centres - w.reshape(self.clusters, -1)
        lengths = np.linalg.norm(ways, axis=1)
        moving = lengths > (_LATER if state.rounds else _FIRST) * lengths.max()
        state = CentresState(state.counted | moving, state.rounds + 1)
        idle, furthest = np.flatnonzero(~state.counted), np.argsort(-lengths, kind="stable")[: moving.sum()]
        pairs = min(len(idle), len(furthest))
        if pairs == 0:
            return state, mean
        idle, beside = idle[:pairs], furthest[:pairs]
        centres = centres.copy()
        centres[idle] = centres[beside] + _OFF * ways[beside]
        return state, centres.reshape(-1)
