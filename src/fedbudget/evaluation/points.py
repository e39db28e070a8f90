"""When to evaluate a model on test samples.

Evaluations at nodes cost time and bytes of the budget. The ledger charges them separately,
so that they do not count as the cost of a round. They take at most `SHARE` of the budget.
The final round is the exception: its cost is reserved from the start (budget/spending.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedbudget.arrays import Float32, Float64
from fedbudget.budget.budget import Ledger
from fedbudget.evaluation.metrics import Tally

SHARE = 0.05
"""Largest share of the budget that evaluations may use."""

_EARLY = 10
"""With `often`, evaluations are at most `_EARLY / points` of the spent share apart."""


@dataclass(frozen=True)
class EvaluationPoints:
    """Schedule of the evaluations of a run.

    Args:
      points: largest number of evaluations, evenly spread over the budget.
      often: evaluate more often at the beginning. Used if a target or the choice of the
        model depends on it, so that an easy target is noticed early in a large budget.
      next: share of the budget after which the next evaluation is due.
    """

    points: int
    often: bool = False
    next: float = 0.0

    def due(self, share: float) -> bool:
        """Return whether an evaluation is due after this share of the budget."""
        return share >= self.next

    def after(self, share: float, cost: float = 0.0) -> "EvaluationPoints":
        """Return the schedule after an evaluation.

        Args:
          share: share of the budget that is spent.
          cost: share of the budget that the evaluation cost.
        """
        point = (int(share * self.points) + 1) / self.points
        if self.often:
            point = min(point, share * (1 + _EARLY / self.points))
        return replace(self, next=max(point, share + cost / SHARE))


@dataclass(frozen=True)
class NodeEvaluation:
    """Results on the test samples of the nodes.

    Args:
      nodes: one tally for each node with test samples, for the w of the round.
      best: the same for w^f as of the start of the round; in the final round only.
      best_w: that w^f, [parameters].
    """

    nodes: Sequence[Tally]
    best: Sequence[Tally] = ()
    best_w: Float32 | None = None


def share_of(amount: Float64, ledger: Ledger) -> float:
    """Return an amount [M] as a share of the budget, for the scarcest resource."""
    return float((amount / ledger.budget.array).max())
