"""Members that keep all others waiting: they are asked in fewer rounds.

A member is slow in a round if it answers after more than `_TIMES` the median of all
members, and more than `_SECONDS`, or misses the round's deadline. After `_ROUNDS` slow
rounds in a row it rests for `_FIRST_REST` rounds. It is then asked once. If it is slow
again, it rests twice as long, at most `_LONGEST_REST` rounds. A quick answer ends this.

So a member that is slow on purpose, but meets every deadline, cannot slow down a whole run,
and the data of a member with a slow machine count from time to time. Only the aggregator's
clock decides, not what members report.
"""

import logging
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fedbudget.protocol.outliers import FEWEST

_LOG = logging.getLogger("fedbudget.network")

_TIMES = 10.0
_SECONDS = 1.0
_ROUNDS = 5
_FIRST_REST = 10
_LONGEST_REST = 160


@dataclass
class _Pace:
    """Of one member: its slow rounds in a row, its last rest, and the round after it."""

    slow: int = 0
    rest: int = 0
    until: int = 0


class SlowNodes:
    """Chooses the members that rest."""

    def __init__(self) -> None:
        self._paces: dict[int, _Pace] = {}

    def resting(self, number: int) -> frozenset[int]:
        """First nodes of the members that are not asked in round `number`."""
        return frozenset(node for node, pace in self._paces.items() if number < pace.until)

    def add(
        self, number: int, waited: Mapping[int, float], missed: Collection[int]
    ) -> None:
        """Add a round.

        Args:
          number: of the round.
          waited: seconds until the answer of each member, by the number of its first node.
          missed: numbers of nodes that were asked and did not answer in time.
        """
        if len(waited) + len(missed) < FEWEST or len(missed) >= len(waited):
            return
        limit = max(_SECONDS, _TIMES * statistics.median(waited.values()))
        slow = {node for node, seconds in waited.items() if seconds > limit} | {*missed}
        for node in waited.keys() - slow:
            self._paces.pop(node, None)
        for node in sorted(slow):
            pace = self._paces.setdefault(node, _Pace())
            pace.slow += 1
            if pace.slow < _ROUNDS:
                continue
            if not pace.rest:
                _LOG.warning(
                    "node %d kept the others waiting for %d rounds in a row; it is asked "
                    "less often from now on (a round timeout asks all nodes every time)",
                    node,
                    _ROUNDS,
                )
            pace.rest = min(_LONGEST_REST, 2 * pace.rest or _FIRST_REST)
            pace.until = number + 1 + pace.rest
