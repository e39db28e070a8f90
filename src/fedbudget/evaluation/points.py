"""When a w is evaluated on test samples: at so many points of a run, and at most as often as the budget bears.

What nodes evaluate costs time and bytes of the budget. It is charged besides rounds, so that it is not taken for what a
round costs, and a share of `SHARE` of the budget goes to it at most, but for the final round: room for that is kept
from the start (spending.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fedbudget.arrays import Float64
from fedbudget.budget.budget import Ledger
from fedbudget.evaluation.metrics import Tally

SHARE = 0.05

_EARLY = 10  # of so many points' distance, the share of what is spent; it is the shorter one in a budget's first tenth


@dataclass(frozen=True)
class EvaluationPoints:
    """Of a run.

    Args:
      points: how many, at most.
      often: whether something hangs on it, such as a target: then it is oftener at the beginning, so that one which is
        easily reached is not waited for by the measure of a large budget.
      next: the share of the budget from which on it is time.
    """

    points: int
    often: bool = False
    next: float = 0.0

    def due(self, share: float) -> bool:
        """Whether it is time, when this share of the budget is spent."""
        return share >= self.next

    def after(self, share: float, cost: float = 0.0) -> "EvaluationPoints":
        """The same once it was done.

        Args:
          cost: what share of the budget that took.
        """
        point = (int(share * self.points) + 1) / self.points
        point = min(point, share * (1 + _EARLY / self.points)) if self.often else point
        return EvaluationPoints(self.points, self.often, max(point, share + cost / SHARE))


@dataclass(frozen=True)
class NodeEvaluation:
    """What nodes' test samples say of a round's w.

    Args:
      nodes: a tally of each that has some.
      best: the same of w^f, as it was when the round began; in the final round only.
    """

    nodes: Sequence[Tally]
    best: Sequence[Tally] = ()


def share_of(amount: Float64, ledger: Ledger) -> float:
    """The largest share over resources, of an amount [M]."""
    return float((amount / ledger.budget.array).max())
