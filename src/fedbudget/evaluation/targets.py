"""Reasons to stop a run before its budget is spent, and to warn at its end.

Targets: a metric reaches a value (`--until accuracy=0.95`). Accuracy and similar metrics
must rise to the target; loss and errors must fall. A custom metric must reach the target
from the side of its value for w(0).

Plateau: N rounds improve the loss by less than 1 % (`--patience N`).

Overfitting: the test loss rises while the training loss still falls. It is reported only if
it is clear: at least `_MIN_LATER` evaluations follow the lowest smoothed test loss, their
last third is higher by `_CERTAIN` standard errors and by `_MIN_RISE`, and the training loss
fell by as clear a margin.

A loss on mini-batches is noisy. The noise is estimated from differences between successive
rounds, so that a trend does not inflate it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fedbudget.errors import UserError
from fedbudget.runs.record import RoundRecord

EVIDENCE = 5
"""Rounds whose mean loss must be below a target."""

NOISE = 20
"""Rounds that the noise of the loss is estimated from."""

CERTAINTY = 2.5
"""Standard errors by which the mean loss must be below a target."""

MIN_IMPROVEMENT = 0.01
"""Relative improvement below which a run has stalled."""

_MIN_LATER = 6
_CERTAIN = 4.0
_MIN_RISE = 0.02
_SHARES = ("accuracy", "balanced_accuracy", "f1", "f1_binary", "auc")
_RISES = {
    **dict.fromkeys((*_SHARES, "r2"), True),
    **dict.fromkeys(("loss", "rmse", "mae"), False),
}


@dataclass(frozen=True)
class MetricTarget:
    """The metric value at which a run stops.

    Args:
      metric: name of the metric.
      value: target value.
      rises: whether the metric must rise to the target. None for a custom metric until its
        value for w(0) is known.
    """

    metric: str
    value: float
    rises: bool | None

    @classmethod
    def parse(cls, text: str) -> "MetricTarget":
        """Parse `accuracy=0.95`, `loss=0.3` or a target for another metric.

        >>> MetricTarget.parse("accuracy = 0.95")
        MetricTarget(metric='accuracy', value=0.95, rises=True)
        """
        metric, _, number = (part.strip() for part in text.partition("="))
        spelled = metric.replace("-", "_")
        if spelled in _RISES:
            metric = spelled
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not metric or not math.isfinite(value):
            raise UserError(
                f"`until` must be a metric and a number, such as accuracy=0.95: {text!r}"
            )
        if metric in _SHARES and not 0 < value <= 1:
            raise UserError(f"`until` {text}: {metric} must be above 0 and at most 1")
        if metric == "r2" and value > 1:
            raise UserError(f"`until` {text}: r2 is at most 1")
        return cls(metric, value, _RISES.get(metric))

    def from_side_of(self, first: float) -> "MetricTarget":
        """Set the direction from the value of the metric for w(0)."""
        if self.rises is not None:
            return self
        return replace(self, rises=first < self.value)

    def reached_by(self, value: float) -> bool:
        """Return whether a value reaches the target; False for NaN."""
        return value >= self.value if self.rises else value <= self.value

    def __str__(self) -> str:
        return f"{self.metric}={self.value:g}"


def well_below(target: float, losses: Sequence[float]) -> float | None:
    """Return the mean of the last losses if it is certainly below a target, else None.

    The mean of the last `EVIDENCE` losses must be below the target by `CERTAINTY` standard
    errors, and the last loss must be below it too.

    Args:
      target: the loss to reach.
      losses: mini-batch losses of the rounds so far.

    >>> well_below(0.3, [0.28, 0.29, 0.28, 0.29, 0.28])
    0.284
    >>> well_below(0.3, [0.1, 0.4, 0.1, 0.4, 0.1]) is None
    True
    """
    last = losses[-EVIDENCE:]
    if len(last) < EVIDENCE or not last[-1] <= target:
        return None
    noise = math.sqrt(_noise_variance(losses[-NOISE:]))
    mean = math.fsum(last) / EVIDENCE
    return mean if mean + CERTAINTY * noise / math.sqrt(EVIDENCE) <= target else None


def has_stalled(figures: Sequence[float | None], patience: int) -> bool:
    """Return whether the last rounds improved by less than `MIN_IMPROVEMENT`.

    Compares the mean of the last `patience` rounds with the mean of the `patience` rounds
    before them.

    Args:
      figures: values of the rounds so far, lower is better; None for rounds without a
        value.
      patience: number of rounds.

    >>> has_stalled([4, 3, 2, 1], 2), has_stalled([4, 3, 1, 1, 1, 1], 2)
    (False, True)
    """
    if len(figures) < 2 * patience:
        return False
    before = _finite(figures[-2 * patience : -patience])
    after = _finite(figures[-patience:])
    if not before or not after:
        return False
    was = math.fsum(before) / len(before)
    return math.fsum(after) / len(after) > was - MIN_IMPROVEMENT * abs(was)


@dataclass(frozen=True)
class Overfitting:
    """When a model began to overfit.

    Args:
      round: the round that started with the lowest test loss.
      test_loss: the test loss of that round.
      final_test_loss: the test loss at the end.
    """

    round: int
    test_loss: float
    final_test_loss: float

    def __str__(self) -> str:
        return (
            f"overfitting since round {self.round}: "
            f"the test loss rose from {self.test_loss:.4g} to {self.final_test_loss:.4g} "
            "while the training loss fell"
        )


def overfitting(records: Sequence[RoundRecord]) -> Overfitting | None:
    """Return when the model of a run began to overfit, or None if that is not clear."""
    evaluated = [at for at, each in enumerate(records) if each.test_loss is not None]
    tests = [each.test_loss for each in records if each.test_loss is not None]
    smooth = [sum(tests[at - 1 : at + 2]) / 3 for at in range(1, len(tests) - 1)]
    if not smooth:
        return None
    lowest = 1 + min(range(len(smooth)), key=smooth.__getitem__)
    later = tests[lowest + 1 :]
    if len(later) < _MIN_LATER:
        return None
    late = later[-(len(later) // 3) :]
    rise = _clear_rise(tests[lowest - 1 : lowest + 2], late, later)
    if not rise or rise <= _MIN_RISE * smooth[lowest - 1]:
        return None
    losses = [each.loss for each in records]
    around = losses[evaluated[lowest - 1] : evaluated[lowest + 1] + 1]
    last = losses[evaluated[-len(late)] :]
    if not _clear_rise(last, around, losses[evaluated[lowest] :]):
        return None
    first = records[evaluated[lowest]].round
    return Overfitting(first, smooth[lowest - 1], sum(late) / len(late))


def _clear_rise(
    lower: Sequence[float], higher: Sequence[float], noise: Sequence[float]
) -> float:
    """Return the difference of two means; 0 if it is within its standard error."""
    size = sum(higher) / len(higher) - sum(lower) / len(lower)
    share = 1 / len(lower) + 1 / len(higher)
    error = math.sqrt(_noise_variance(noise) * share)
    return size if size > _CERTAIN * error else 0.0


def _noise_variance(values: Sequence[float]) -> float:
    """Variance of the noise, from differences between neighbours."""
    squares = [(after - before) ** 2 for before, after in pairwise(values)]
    return sum(squares) / (2 * len(squares))


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]
