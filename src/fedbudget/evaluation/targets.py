"""What ends a run before its budget is spent: a metric that has come to its target, or figures that no longer improve.

Rules here:
- Figures in, a verdict out. Who evaluates w, and on which samples, is in judge.py.
- Accuracy and what is like it have to rise to their target, loss and errors to fall. A model's own metric has to come
  to it from the side that w(0) is on, so that nobody has to say whether more of it is better.
- A loss on mini-batches is noisy. Where it is all that is known, because samples are with the nodes, it counts when the
  mean of the last `EVIDENCE` rounds is below the target by `CERTAINTY` standard errors of that mean, and the last one
  is below it too. The noise is taken from the differences between neighbours among the last `NOISE` rounds, which a
  loss that falls hardly inflates; and a loss that falls is below that mean at its end.

When a model began to overfit: from where on its loss on test samples rose while that on training samples still fell.

It is said only where it is clear. Test losses are smoothed over three looks; after their least value there must be
`_LOOKS` more at least, and the last third of these must lie above it by `_TIMES` standard errors, and by a share worth
mentioning. Between the same two stretches the training loss must have fallen by as clear a margin. Noise is taken from
the differences between neighbours, so that neither trend inflates it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fedbudget.errors import UserError
from fedbudget.runs.record import RoundRecord

EVIDENCE = 5
NOISE = 20
CERTAINTY = 2.5
WORTH_MENTIONING = 0.01
"""The share by which a figure must be better to have improved."""

_SHARES = ("accuracy", "balanced_accuracy", "f1", "f1_binary", "auc")
_RISES = {
    **dict.fromkeys((*_SHARES, "r2"), True),
    **dict.fromkeys(("loss", "rmse", "mae"), False),
}


@dataclass(frozen=True)
class MetricTarget:
    """A value that a metric is to come to.

    Args:
      rises: whether it has to rise to it, or to fall; None until that is known of a model's own metric.
    """

    metric: str
    value: float
    rises: bool | None

    @classmethod
    def parse(cls, text: str) -> "MetricTarget":
        """Reads `accuracy=0.95`, `loss=0.3`, or the same of another metric.

        >>> MetricTarget.parse("accuracy = 0.95")
        MetricTarget(metric='accuracy', value=0.95, rises=True)
        """
        metric, _, number = (part.strip() for part in text.partition("="))
        metric = spelled if (spelled := metric.replace("-", "_")) in _RISES else metric
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not metric or not math.isfinite(value):
            raise UserError(
                f"`until` must be a metric and a number, such as accuracy=0.95, not {text!r}"
            )
        if metric in _SHARES and not 0 < value <= 1:
            raise UserError(
                f"`until` {text}: {metric} is a share, such as 0.95, and can be 1 at most"
            )
        if metric == "r2" and value > 1:
            raise UserError(f"`until` {text}: r2 can be 1 at most")
        return cls(metric, value, _RISES.get(metric))

    def from_side_of(self, first: float) -> "MetricTarget":
        """With the way that it has to go known, from what the metric is for w(0)."""
        return self if self.rises is not None else replace(self, rises=first < self.value)

    def reached_by(self, value: float) -> bool:
        """Never by what is no number."""
        return value >= self.value if self.rises else value <= self.value

    def __str__(self) -> str:
        return f"{self.metric}={self.value:g}"


def well_below(target: float, losses: Sequence[float]) -> float | None:
    """The mean of the last losses, if it is surely below a target; None if it is not.

    Args:
      losses: of a run's rounds so far, on mini-batches.

    >>> well_below(0.3, [0.28, 0.29, 0.28, 0.29, 0.28]), well_below(0.3, [0.1, 0.4, 0.1, 0.4, 0.1])
    (0.284, None)
    """
    last = losses[-EVIDENCE:]
    if len(last) < EVIDENCE or not last[-1] <= target:
        return None
    squares = [(after - before) ** 2 for before, after in pairwise(losses[-NOISE:])]
    noise = math.sqrt(sum(squares) / (2 * len(squares)))
    mean = math.fsum(last) / EVIDENCE
    return mean if mean + CERTAINTY * noise / math.sqrt(EVIDENCE) <= target else None


def has_stalled(figures: Sequence[float | None], patience: int) -> bool:
    """Whether the last rounds were, on average, no better than as many before them, by a share worth mentioning.

    Args:
      figures: of a run's rounds so far, the less the better; None where there is none.
      patience: how many rounds.

    >>> has_stalled([4, 3, 2, 1], 2), has_stalled([4, 3, 1, 1, 1, 1], 2), has_stalled([1, 1, 1], 2)
    (False, True, False)
    """
    if len(figures) < 2 * patience:
        return False
    before, after = (
        [value for value in part if value is not None and math.isfinite(value)]
        for part in (figures[-2 * patience : -patience], figures[-patience:])
    )
    if not before or not after:
        return False
    was = math.fsum(before) / len(before)
    return math.fsum(after) / len(after) > was - WORTH_MENTIONING * abs(was)


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
    looked = [
        (at, each.test_loss)
        for at, each in enumerate(records)
        if each.test_loss is not None
    ]
    smooth = [
        sum(loss for _, loss in looked[at - 1 : at + 2]) / 3
        for at in range(1, len(looked) - 1)
    ]
    if not smooth:
        return None
    least = 1 + min(range(len(smooth)), key=smooth.__getitem__)
    after = looked[least + 1 :]
    if len(after) < _LOOKS:
        return None
    late = len(after) // 3
    before = [loss for _, loss in looked[least - 1 : least + 2]]
    rise = _Difference.of(
        before, [loss for _, loss in after[-late:]], noise=[loss for _, loss in after]
    )
    if not (rise.clear and rise.size > _SHARE * smooth[least - 1]):
        return None
    losses = [each.loss for each in records]
    around = losses[looked[least - 1][0] : looked[least + 1][0] + 1]
    fall = _Difference.of(
        losses[after[-late][0] :], around, noise=losses[looked[least][0] :]
    )
    if not fall.clear:
        return None
    return Overfitting(
        records[looked[least][0]].round,
        smooth[least - 1],
        sum(loss for _, loss in after[-late:]) / late,
    )


@dataclass(frozen=True)
class _Difference:
    """Between the means of two stretches, and its standard error."""

    size: float
    error: float

    @classmethod
    def of(
        cls, lower: Sequence[float], higher: Sequence[float], *, noise: Sequence[float]
    ) -> "_Difference":
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
