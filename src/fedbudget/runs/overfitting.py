"""When a model began to overfit: from where on its loss on test samples rose while that on training samples still fell.

It is said only where it is clear. Test losses are smoothed over three looks; after their least value there must be
`_LOOKS` more at least, and the last third of these must lie above it by `_TIMES` standard errors, and by a share worth
mentioning. Between the same two stretches the training loss must have fallen by as clear a margin. Noise is taken from
the differences between neighbours, so that neither trend inflates it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fedbudget.runs.record import RoundRecord

_LOOKS = 6
_TIMES = 4.0
_SHARE = 0.02


@dataclass(frozen=True)
class Overfitting:
    """Where it began.

    Args:
      round: the one that began with the least test loss.
      test_loss, final_test_loss: there, and at the end.
    """

    round: int
    test_loss: float
    final_test_loss: float

    def __str__(self) -> str:
        return (
            f"overfitting since round {self.round}: there the test loss was {self.test_loss:.4g}, and at the end "
            f"{self.final_test_loss:.4g}, while the training loss still fell"
        )


def overfitting(records: Sequence[RoundRecord]) -> Overfitting | None:
    """When a run's model began to overfit; None where it did not, or where that is not clear."""
    looked = [(at, each.test_loss) for at, each in enumerate(records) if each.test_loss is not None]
    smooth = [sum(loss for _, loss in looked[at - 1 : at + 2]) / 3 for at in range(1, len(looked) - 1)]
    if not smooth:
        return None
    least = 1 + min(range(len(smooth)), key=smooth.__getitem__)
    after = looked[least + 1 :]
    if len(after) < _LOOKS:
        return None
    late = len(after) // 3
    before = [loss for _, loss in looked[least - 1 : least + 2]]
    rise = _Difference.of(before, [loss for _, loss in after[-late:]], noise=[loss for _, loss in after])
    if not (rise.clear and rise.size > _SHARE * smooth[least - 1]):
        return None
    losses = [each.loss for each in records]
    around = losses[looked[least - 1][0] : looked[least + 1][0] + 1]
    fall = _Difference.of(losses[after[-late][0] :], around, noise=losses[looked[least][0] :])
    if not fall.clear:
        return None
    return Overfitting(
        records[looked[least][0]].round, smooth[least - 1], sum(loss for _, loss in after[-late:]) / late
    )


@dataclass(frozen=True)
class _Difference:
    """Between the means of two stretches, and its standard error."""

    size: float
    error: float

    @classmethod
    def of(cls, lower: Sequence[float], higher: Sequence[float], *, noise: Sequence[float]) -> "_Difference":
        """
        Args:
          noise: what the noise of one value is taken from.
        """
        squares = [(after - before) ** 2 for before, after in pairwise(noise)]
        variance = sum(squares) / (2 * len(squares))
        size = sum(higher) / len(higher) - sum(lower) / len(lower)
        return cls(size, math.sqrt(variance * (1 / len(lower) + 1 / len(higher))))

    @property
    def clear(self) -> bool:
        return self.size > _TIMES * self.error
