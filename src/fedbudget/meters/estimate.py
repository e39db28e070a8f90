"""What the next round is thought to cost, where costs are measured.

One slow moment of a machine or a network is not the new normal: near the end of a budget it would stop a run early. So
c and b, of each resource by itself, are thought to be the median of the last rounds. A single odd round changes
nothing; a change that lasts is followed after three.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from fedbudget.budget import Costs

WINDOW = 5
"""How many of the last rounds count."""


class CostEstimator:
    """Remembers what the last rounds cost.

    >>> estimator = CostEstimator()
    >>> for seconds in (1.0, 9.0, 2.0):
    ...     estimate = estimator.update(Costs(np.array([seconds]), np.array([0.0])))
    >>> estimate.step.tolist()
    [2.0]
    """

    def __init__(self) -> None:
        self._rounds: deque[Costs] = deque(maxlen=WINDOW)

    def update(self, costs: Costs) -> Costs:
        """ĉ and b̂, after a round that cost this."""
        self._rounds.append(costs)
        middle = (len(self._rounds) - 1) // 2  # of two, the smaller, or the second round alone could be the slow moment
        return Costs(
            np.sort([past.step for past in self._rounds], axis=0)[middle],
            np.sort([past.aggregation for past in self._rounds], axis=0)[middle],
        )

    def state(self) -> list[list[list[float]]]:
        """What is remembered, as plain lists: for every round c and b."""
        return [[past.step.tolist(), past.aggregation.tolist()] for past in self._rounds]

    def restore(self, state: Sequence[Sequence[Sequence[float]]]) -> None:
        """Goes on from there."""
        self._rounds.clear()
        self._rounds.extend(Costs(np.array(step, float), np.array(aggregation, float)) for step, aggregation in state)
