"""Forecasts from a run's records: the result at a budget, and the cost of a target.

- The forecast is of the run's result: its loss, and its accuracy on test samples. The loss
  is the validation loss if validation chooses the result, else the training loss. Both
  have an interval with probability `LEVEL`. If a forecast is impossible, a reason replaces
  it.
- The curve (curve.py) of a run with validation is V(w^v), the lowest validation loss so
  far. It is known without noise, because the same rows choose the result, and it never
  rises. Without validation, the curve is F(w^f), with the noise of mini-batches.
- A run that ended because validation stopped improving has the forecast that nothing
  improves. The low end of its interval is that of the curve, as far as it can be tested.
- Progress has two axes: the spending of the resource nearest to its limit, and the work
  Σ τη. Other resources follow from the cost of a round.
- The fall of η at the end of a budget costs no progress. Smaller steps lose as much as
  the vanishing noise and oscillation gain. So η counts as if it had not fallen.
- A run that resumes after the fall has had that gain, and its η falls a second time. The
  first fall shows how much less work a budget buys meanwhile.
- A forecast covers only a ratio that the run's own rounds can test.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from fedbudget.arrays import Float64
from fedbudget.budget.budget import Budget
from fedbudget.budget.step_size import AutoStep
from fedbudget.errors import UserError
from fedbudget.evaluation.targets import MetricTarget
from fedbudget.forecasts.curve import (
    LEVEL,
    MIN_POINTS,
    Curve,
    forecast_interval,
    furthest_ratio,
)
from fedbudget.runs.folder import Run
from fedbudget.runs.record import RoundRecord, json_value

MIN_ROUNDS = 2 * MIN_POINTS
"""Rounds, or evaluations of the accuracy, that a forecast needs."""

EXTENSIONS = (0.1, 0.5, 1.0)
"""Default extensions of a finished run's budget, as fractions of it."""

EXTENSION_SHOWN = 0.5
"""Extension for the forecast that views show after the end of a run."""

_TIME_SHARE = 0.01  # fraction of the time that repeated forecasts may take
_GRID = 40  # budgets to evaluate when searching for the cost of a target
_FIGURES = ("loss", "accuracy")
_RESULT = (*_FIGURES, "validation_loss", "stopped_by")
_TESTABLE = 0.999  # of the largest ratio, for rounding
_FALL = AutoStep().fall  # fraction of a budget, at its end, over which η falls


class _JsonRecord:
    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; infinity becomes null."""
        values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return values


@dataclass(frozen=True)
class Interval(_JsonRecord):
    """A forecast value, between `low` and `high` with a probability of 80 %.

    Args:
      median: median of the forecast.
      low: low end of the interval.
      high: high end of the interval; infinite if unknown.
    """

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Forecast(_JsonRecord):
    """Forecast result of a budget.

    Args:
      budget: limits by resource.
      spent: spending by resource when the first limit is reached.
      loss, accuracy: forecast at that point; None if it is impossible.
      reason: why the loss cannot be forecast.
      validated: whether the loss is the validation loss.
    """

    budget: Mapping[str, float]
    spent: Mapping[str, float]
    loss: Interval | None
    accuracy: Interval | None
    reason: str = ""
    validated: bool = False


@dataclass(frozen=True)
class TargetCost(_JsonRecord):
    """Forecast cost of reaching a loss or an accuracy.

    Args:
      figure: `loss` or `accuracy`.
      value: the target.
      budget: limit that each resource needs; None if it cannot be forecast.
      reason: why not, or that the target is already reached.
    """

    figure: str
    value: float
    budget: Mapping[str, Interval] | None
    reason: str = ""


@dataclass(frozen=True)
class ForecastReport(_JsonRecord):
    """Forecasts for one run.

    Args:
      chance: probability that a value is within its interval.
      limits, spent: the run's budget and spending.
      loss, accuracy: those of the result, or the latest ones of an unfinished run.
      budgets: forecast result of each budget.
      targets: forecast cost of each target.
      validated: whether losses are validation losses.
    """

    chance: float
    limits: Mapping[str, float]
    spent: Mapping[str, float]
    loss: float | None
    accuracy: float | None
    budgets: tuple[Forecast, ...]
    targets: tuple[TargetCost, ...]
    validated: bool = False


class RunResult(Protocol):
    """The part of a finished run that a forecast needs; `fedbudget.train` returns one."""

    @property
    def rounds(self) -> Sequence[RoundRecord]: ...

    @property
    def budget(self) -> Mapping[str, float]: ...

    @property
    def loss(self) -> float: ...

    @property
    def accuracy(self) -> float | None: ...

    @property
    def validation_loss(self) -> float | None: ...

    @property
    def stopped_by(self) -> str: ...


def forecast(
    run: str | Path | RunResult,
    *,
    budget: str | Sequence[str] = (),
    until: str | Sequence[str] = (),
) -> ForecastReport:
    """Forecast the result of a larger budget, and the cost of a target.

    The command line has the same as `fedbudget forecast`.

    Args:
      run: the folder of a run, finished or not, or the result of one.
      budget: `time=+10min` to extend the run's budget, `time=20min` for the total. Several
        limits form one budget. Without `budget` and `until`, the forecast is for the rest
        of an unfinished run's budget, or for a finished run's budget plus 10 %, 50 % and
        100 %.
      until: `loss=0.25` or `accuracy=0.9`, or several targets.

    Returns:
      The forecasts, each with an 80 % interval or a reason why it is impossible.

    >>> from fedbudget import train
    >>> result = train(model="softmax", dataset="digits", case=1, budget="time=15s")
    >>> more = forecast(result, budget="time=+5s").budgets[0]
    >>> more.loss.low < more.loss.median < result.validation_loss
    True
    """
    budget = (budget,) if isinstance(budget, str) else budget
    until = (until,) if isinstance(until, str) else until
    targets = [MetricTarget.parse(text) for text in until]
    for target in targets:
        if target.metric not in _FIGURES:
            raise UserError(
                f"`until`: {target.metric} cannot be forecast; use loss or accuracy"
            )
    if isinstance(run, str | Path):
        opened = Run.open(Path(run))
        limits = opened.settings.limits().limits
        forecaster = Forecaster(opened.rounds, limits, opened.summary)
    else:
        result = {name: getattr(run, name) for name in _RESULT}
        forecaster = Forecaster(run.rounds, run.budget, result)
    budgets = []
    if budget:
        budgets = [forecaster.at(Budget(forecaster.limits).extended(budget).limits)]
    elif not until:
        extensions = (0.0,) if forecaster.result is None else EXTENSIONS
        budgets = [forecaster.extended(more) for more in extensions]
    return ForecastReport(
        chance=LEVEL,
        limits=forecaster.limits,
        spent=forecaster.spent,
        **forecaster.now,
        budgets=tuple(budgets),
        targets=tuple(forecaster.cost(target.metric, target.value) for target in targets),
        validated=forecaster.validated,
    )


def next_forecast(
    records: Sequence[RoundRecord],
    limits: Mapping[str, float],
    result: Mapping[str, Any] | None = None,
) -> Forecast:
    """Return the forecast that views show: for the budget, or for 50 % more after its end.

    Args:
      records: records of all rounds so far.
      limits: the run's budget.
      result: `loss`, `accuracy`, `validation_loss` and `stopped_by` of the result; None for
        an unfinished run.
    """
    more = 0.0 if result is None else EXTENSION_SHOWN
    return Forecaster(records, limits, result).extended(more)


class LatestForecast:
    """Caches `next_forecast`; new forecasts take at most 1 % of the time."""

    def __init__(self) -> None:
        self._made_for: tuple[int, bool] | None = None
        self._forecast: Forecast | None = None
        self._until = 0.0

    def of(
        self,
        records: Sequence[RoundRecord],
        limits: Mapping[str, float],
        result: Mapping[str, Any] | None = None,
    ) -> Forecast:
        """Return the latest forecast; see `next_forecast` for the arguments."""
        start = time.perf_counter()
        ended = result is not None
        new = self._made_for != (len(records), ended)
        if self._forecast is None or (new and (ended or start >= self._until)):
            self._forecast = next_forecast(records, limits, result)
            self._made_for = (len(records), ended)
            end = time.perf_counter()
            self._until = end + (end - start) / _TIME_SHARE
        return self._forecast


class Forecaster:
    """The curves of a run, and forecasts from them.

    Args:
      records: records of all rounds so far.
      limits: the run's budget.
      result: `loss`, `accuracy`, `validation_loss` and `stopped_by` of the result; None for
        an unfinished run.
    """

    def __init__(
        self,
        records: Sequence[RoundRecord],
        limits: Mapping[str, float],
        result: Mapping[str, Any] | None = None,
    ) -> None:
        self.limits = dict(limits)
        self.result: dict[str, float | None] | None = None
        self.validated = any(each.validation_best is not None for each in records)
        self._stalled = False
        self._converged = False
        if result is not None:
            self.result = {name: json_value(result.get(name)) for name in _FIGURES}
            validation = json_value(result.get("validation_loss"))
            self.validated = self.validated and validation is not None
            stopped_by = result.get("stopped_by")
            self._converged = stopped_by == "converged"
            self._stalled = self.validated and stopped_by == "validation"
            if self.validated:
                self.result["loss"] = validation
        self.spent = dict(records[-1].spent) if records else dict.fromkeys(limits, 0.0)
        self._private = any(record.private is not None for record in records)
        self._records = [record for record in records if math.isfinite(record.best_loss)]

    @property
    def now(self) -> dict[str, float | None]:
        """Loss and accuracy of the result, or the latest ones."""
        if self.result is not None:
            return self.result
        accuracies = [record.accuracy for record in self._records]
        evaluated = [accuracy for accuracy in accuracies if accuracy is not None]
        losses = [self._loss(record) for record in self._records]
        known = [loss for loss in losses if loss is not None]
        return {
            "loss": known[-1] if known else None,
            "accuracy": evaluated[-1] if evaluated else None,
        }

    def at(self, limits: Mapping[str, float]) -> Forecast:
        """Return the forecast for a budget."""
        if reason := self._obstacle("loss"):
            return self._none(limits, reason)
        affordable = [
            (limit - self.spent[name]) / self._per_round[name]
            for name, limit in limits.items()
            if self._per_round[name] > 0
        ]
        rounds = min(affordable, default=0.0)
        if rounds <= 0:
            return self._none(limits, "this budget is already spent")
        spent = {
            name: amount + rounds * self._per_round[name]
            for name, amount in self.spent.items()
        }
        ratio = spent[self._resource] / self.spent[self._resource]
        figures: list[Interval | None] = []
        for figure in _FIGURES:
            ends = None
            if not self._obstacle(figure):
                ends = self._interval(figure, np.array([ratio]))
            figures.append(None if ends is None else _interval(ends[:, 0].tolist()))
        loss, accuracy = figures
        reason = "" if loss else self._too_far("loss", ratio)
        return Forecast(limits, spent, loss, accuracy, reason, self.validated)

    def _none(self, limits: Mapping[str, float], reason: str) -> Forecast:
        return Forecast(limits, self.spent, None, None, reason, self.validated)

    def extended(self, share: float) -> Forecast:
        """Return the forecast for the run's budget and this share of it more."""
        return self.at({name: limit * (1 + share) for name, limit in self.limits.items()})

    def cost(self, figure: str, value: float) -> TargetCost:
        """Return the cost of a target in every resource.

        Args:
          figure: `loss` or `accuracy`.
          value: the target.
        """
        if reason := self._obstacle(figure):
            return TargetCost(figure, value, None, reason)
        now = self.now[figure]
        assert now is not None
        if (now <= value) if figure == "loss" else (now >= value):
            reason = f"already reached: {figure} is {now:.4g}"
            return TargetCost(figure, value, None, reason)
        end = max(furthest_ratio(self._curves[figure]), 1.01)
        first = [math.inf] * 3
        for _ in range(2):  # the second pass tests forecasts over the ratio of the first
            ratios = np.geomspace(1.001, end, _GRID)
            ends = self._interval(figure, ratios)
            if ends is None:
                return TargetCost(figure, value, None, self._too_far(figure, 2.0))
            good = ends <= value if figure == "loss" else ends[::-1] >= value
            first = [
                float(ratios[np.argmax(row)]) if row.any() else math.inf for row in good
            ]
            if math.isinf(first[1]):
                low, median, high = ends[:, -1]
                reason = (
                    f"at {end:.2g} times the present spending, as far as these rounds "
                    f"allow a forecast, {figure} is {median:.4g} ({low:.4g} to {high:.4g})"
                )
                return TargetCost(figure, value, None, reason)
            end = min(end, max(first[1] ** 2, 1.01))
        needed = {}
        for name, spent in self.spent.items():
            share = self._per_round[name] / self._per_round[self._resource]
            scale = share * self.spent[self._resource]
            needed[name] = _interval([spent + (ratio - 1) * scale for ratio in first])
        return TargetCost(figure, value, needed)

    def _obstacle(self, figure: str) -> str:
        """Return why the figure cannot be forecast; empty if it can."""
        if self._private:
            return "a private run publishes no loss, and forecasts need it"
        if len(self._records) < MIN_ROUNDS:
            return f"{len(self._records)} rounds are complete; {MIN_ROUNDS} are needed"
        shown = f"validation {figure}" if figure == "loss" and self.validated else figure
        if not self._records[-1].spent[self._resource] > 0:
            return "nothing was spent"
        if figure not in self._curves:
            return f"{shown} was evaluated in fewer than {MIN_ROUNDS} rounds"
        values = self._curves[figure].values
        third = len(values) // 3
        if not values[-third:].mean() < values[:third].mean():
            return f"{shown} has not improved so far"
        return ""

    def _too_far(self, figure: str, ratio: float) -> str:
        furthest = furthest_ratio(self._curves[figure])
        if ratio > furthest:
            return (
                f"this budget is {ratio:.2g} times the present spending; these rounds "
                f"allow a forecast up to {furthest:.2g} times"
            )
        return "no shape fits the curve"

    def _interval(self, figure: str, ratios: Float64) -> Float64 | None:
        """Return low end, median and high end at multiples of the spending, [3, ratios]."""
        curve = self._curves[figure]
        now = self.spent[self._resource]
        if figure == "loss" and self._stalled:
            ratios = np.minimum(ratios, _TESTABLE * furthest_ratio(curve))
        x = np.array([self._effective(now * ratio) for ratio in ratios])
        known = None if self.result is None else self.result[figure]
        if self._converged and known is not None:  # more budget changes nothing
            return np.full((3, len(x)), known)
        if figure == "loss" and self.validated:
            known = float(curve.values[-1]) if known is None else known
            ends = forecast_interval(curve, x, known)
            if ends is not None and self._stalled:
                ends[1:] = known
            return ends
        if figure == "loss":
            noise = 0.0
            if known is not None:
                recent = self._records[-max(3, len(self._records) // 10) :]
                gap = np.mean([record.loss - record.best_loss for record in recent])
                noise = max(0.0, float(gap)) if math.isfinite(gap) else 0.0
            return forecast_interval(curve, x, known, noise)
        known = None if known is None else 1 - known
        noise = float(np.diff(curve.values[-(len(curve) // 2) :]).std()) / math.sqrt(2)
        ends = forecast_interval(curve, x, known, noise)
        return None if ends is None else 1 - ends[::-1]

    def _loss(self, record: RoundRecord) -> float | None:
        """Return the loss of the best parameters so far; None if it is not known."""
        return record.validation_best if self.validated else record.best_loss

    def _effective(self, end: float) -> float:
        """Return the position on the axis of a budget that ends at `end`.

        It is smaller than `end` if η has fallen already and will fall again.
        """
        now = self.spent[self._resource]
        limit = self.limits[self._resource]
        if not self._eta_falls or now <= (1 - _FALL) * limit or end <= limit:
            return end
        x = np.linspace(now, end, 200)
        fallen = 1 - np.clip((1 - x / end) / _FALL, 0.0, 1.0)
        lost = np.clip(2 * (1 - self._work_in_fall) * fallen, 0.0, 1.0)
        return now + float(np.trapezoid(1 - lost, x))

    @cached_property
    def _work_in_fall(self) -> float:
        """Work per spending while η falls, relative to before.

        τ grows meanwhile, so it is more than a half.
        """
        spent = self._spending
        share = spent[:-1] / self.limits[self._resource]
        falling = share >= 1 - _FALL
        before = (share < 1 - _FALL) & (share >= 1 - 2 * _FALL)
        if min(falling.sum(), before.sum()) <= 1:
            return 0.5
        costs = np.diff(spent)
        during, earlier = (
            float(self._work[part].sum() / max(costs[part].sum(), 1e-300))
            for part in (falling, before)
        )
        return min(1.0, during / earlier) if earlier > 0 else 0.5

    @cached_property
    def _resource(self) -> str:
        """The resource that is nearest to its limit."""
        return max(self.limits, key=lambda name: self.spent[name] / self.limits[name])

    @cached_property
    def _per_round(self) -> dict[str, float]:
        """Mean cost of a round over the last third of the rounds."""
        before = self._records[-max(2, len(self._records) // 3)]
        rounds = max(1, self._records[-1].round - before.round)
        return {
            name: (spent - before.spent[name]) / rounds
            for name, spent in self._records[-1].spent.items()
        }

    @cached_property
    def _eta_falls(self) -> bool:
        """Whether η changes: then it falls at the end of the budget."""
        return len({record.eta for record in self._records if record.tau > 0}) > 1

    @cached_property
    def _spending(self) -> Float64:
        """Spending at the start, and after each round."""
        return np.array([0.0, *(each.spent[self._resource] for each in self._records)])

    @cached_property
    def _work(self) -> Float64:
        """Work τη of each round."""
        return np.array([each.eta * each.effective_tau for each in self._records])

    @cached_property
    def _curves(self) -> dict[str, Curve]:
        """F(w^f) and the error rate on test samples, along work and spending."""
        records = self._records
        spent = self._spending
        steps = self._work
        if self._eta_falls:
            left = 1 - spent[:-1] / self.limits[self._resource]
            steps = steps / np.clip(left / _FALL, 0.02, 1.0)
        axes = np.array([np.append(0.0, np.cumsum(steps)), spent])
        known = [(at, self._loss(record)) for at, record in enumerate(records)]
        at_loss = [at for at, loss in known if loss is not None]
        curves = {}
        if len(at_loss) >= MIN_ROUNDS:
            losses = np.array([loss for _, loss in known if loss is not None])
            floor = 0.0 if losses.min() >= 0 else None
            curves["loss"] = Curve(axes[:, at_loss], losses, axes[:, -1], floor)
        evaluated = [at for at, record in enumerate(records) if record.accuracy is not None]
        if len(evaluated) >= MIN_ROUNDS:
            wrong = np.array([1 - (records[at].accuracy or 0.0) for at in evaluated])
            curves["accuracy"] = Curve(axes[:, evaluated], wrong, axes[:, -1])
        return curves


def _interval(ends: Sequence[float]) -> Interval:
    """Return the interval of a low end, a median and a high end."""
    low, median, high = ends
    return Interval(median, low, high)
