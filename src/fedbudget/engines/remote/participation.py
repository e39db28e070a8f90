"""Which nodes are asked in which round, where only a part of them is in each (`--participation`).

They are drawn as in a simulated run, so that both are the same to the bit; and by the round's number alone, so that a
run that goes on asks whom it would have asked. Nodes that come later than the first are always asked.
"""

from collections.abc import Callable, Iterator

import numpy as np

from fedbudget.arrays import Flags


class Participation:
    """Who is asked.

    Args:
      draw: gives who takes part, from the first round on.
    """

    def __init__(self, draw: Callable[[], Iterator[Flags]]) -> None:
        self._draw = draw
        self._drawn = draw()
        self._rounds = 0  # that were drawn
        self._resting: frozenset[int] = frozenset()

    def resting(self, number: int) -> frozenset[int]:
        """The numbers of nodes that are not asked in this round."""
        if number < self._rounds:
            self._drawn, self._rounds = self._draw(), 0
        while self._rounds < number:
            here, self._rounds = next(self._drawn), self._rounds + 1
            if self._rounds == number:
                self._resting = frozenset(np.flatnonzero(~here).tolist())
        return self._resting
