"""Where a run will end, what more budget would buy, and what a target would cost: all from its records.

Rules here:
- What is forecast is what the run will return: the loss of w^f, and its accuracy on the test samples. Both with an
  interval that holds with a chance of `LEVEL`. Where nothing can be known there is a reason in words instead.
- The curve (curve.py) is that of F(w^f), whose noise is that of mini-batches. Progress is measured along two axes: what
  was spent of the resource that is nearest to its limit, and work, Σ τη. The others go along with what a round costs.
- η that falls at the end of a budget costs no progress: what is lost by smaller steps is gained by the noise and
  the swinging that go away with them. So a run's own budget is as long as it is, and η counts as if it had not fallen.
  A run that goes on after its fall has had that gain, and makes smaller steps once more: how much less work that is for
  what is spent is known from the first fall.
- A forecast is made only over a ratio that can be tested on the run's own rounds (curve.py says how).

A run's forecast for whoever watches it: the end of its budget while it goes on, half as much again after it.

It is made anew when there are new rounds, but never takes more than a hundredth of the time.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedbudget.arrays import Float64
from fedbudget.budget.budget import Budget
from fedbudget.budget.step_size import AutoStep
from fedbudget.errors import UserError
from fedbudget.evaluation.targets import MetricTarget
from fedbudget.forecasts.curve import (
    FEWEST,
    LEVEL,
    Curve,
    forecast_interval,
    furthest_ratio,
)
from fedbudget.runs.folder import Run
from fedbudget.runs.record import RoundRecord, json_value

ROUNDS = 2 * FEWEST
"""The fewest rounds, or evaluations of accuracy, that a forecast is made from."""

MORE = (0.1, 0.5, 1.0)
"""Shares of the budget that a finished run could be given besides, when nothing else is asked."""

_GRID = 40  # budgets that are looked at to find what a target costs
_FIGURES = ("loss", "accuracy")
_FALL = (
    AutoStep().fall
)  # over this share of a budget, at its end, η falls where it is not fixed


@dataclass(frozen=True)
class Interval:
    """A figure that is not known yet; from `low` to `high` with a chance of 80 %.

    Args:
      high: infinite where no end is known.
    """

    median: float
    low: float
    high: float

    def to_json(self) -> dict[str, float | None]:
        return {name: json_value(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class Forecast:
    """What a budget buys.

    Args:
      budget: the limits.
      spent: what will be spent of each when the first of them is reached.
      loss, accuracy: at its end; None where it cannot be known.
      reason: why it cannot, of the loss.
    """

    budget: Mapping[str, float]
    spent: Mapping[str, float]
    loss: Interval | None
    accuracy: Interval | None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        figures = {
            name: None if (own := getattr(self, name)) is None else own.to_json()
            for name in _FIGURES
        }
        return {
            "budget": dict(self.budget),
            "spent": dict(self.spent),
            **figures,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class TargetCost:
    """What it costs to come to a value of the loss or the accuracy.

    Args:
      budget: the limit that is needed of each resource; None where it cannot be known.
      reason: why it cannot, or that the target is reached already.
    """

    figure: str
    value: float
    budget: Mapping[str, Interval] | None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        budget = (
            None
            if self.budget is None
            else {name: each.to_json() for name, each in self.budget.items()}
        )
        return {**asdict(self), "budget": budget}


@dataclass(frozen=True)
class ForecastReport:
    """Answers to what was asked of a run.

    Args:
      chance: that a value is within its interval.
      limits, spent: the run's own.
      loss, accuracy: where it is: of the result where it has ended, else as last seen.
      budgets: what each budget buys.
      targets: what each target costs.
    """

    chance: float
    limits: Mapping[str, float]
    spent: Mapping[str, float]
    loss: float | None
    accuracy: float | None
    budgets: tuple[Forecast, ...]
    targets: tuple[TargetCost, ...]

    def to_json(self) -> dict[str, Any]:
        answers = {
            name: [each.to_json() for each in getattr(self, name)]
            for name in ("budgets", "targets")
        }
        own = {name: dict(getattr(self, name)) for name in ("limits", "spent")}
        return {
            "chance": self.chance,
            **own,
            "loss": self.loss,
            "accuracy": self.accuracy,
            **answers,
        }


class RunResult(Protocol):
    """What is needed of a run that has ended; `fedbudget.train` gives it."""

    @property
    def rounds(self) -> Sequence[RoundRecord]: ...

    @property
    def budget(self) -> Mapping[str, float]: ...

    @property
    def loss(self) -> float: ...

    @property
    def accuracy(self) -> float | None: ...


def forecast(
    run: str | Path | RunResult,
    *,
    budget: str | Sequence[str] = (),
    until: str | Sequence[str] = (),
) -> ForecastReport:
    """What more budget would buy, and what a target would cost; does what `fedbudget forecast` does.

    Args:
      run: the folder of a run, finished or not, or the result of one.
      budget: `time=+10min` for so much more than the run had, `time=20min` for so much in all; several limits make one
        budget. When neither this nor `until` is given, the rest of an unfinished run's budget, or a tenth, half and
        as much again for a finished one.
      until: `loss=0.25` or `accuracy=0.9`, or several.

    >>> from fedbudget import train
    >>> result = train(model="softmax", dataset="digits", case=1, budget="time=15s")
    >>> more = forecast(result, budget="time=+5s").budgets[0]
    >>> more.loss.low < more.loss.median < result.loss
    True
    """
    budget, until = (
        (given,) if isinstance(given, str) else given for given in (budget, until)
    )
    forecaster = _forecaster(run)
    limits = Budget(forecaster.limits)
    budgets = [limits.extended(budget).limits] if budget else []
    if not budget and not until:
        ended = forecaster.known is not None
        budgets = [
            {name: limit * (1 + more) for name, limit in limits.limits.items()}
            for more in (MORE if ended else ())
        ]
        budgets = budgets or [limits.limits]
    targets = [MetricTarget.parse(text) for text in until]
    if unknown := [target.metric for target in targets if target.metric not in _FIGURES]:
        raise UserError(
            f"`until`: of {unknown[0]} no forecast can be made, but of loss and accuracy"
        )
    return ForecastReport(
        chance=LEVEL,
        limits=forecaster.limits,
        spent=forecaster.spent,
        **forecaster.now,
        budgets=tuple(forecaster.at(each) for each in budgets),
        targets=tuple(forecaster.cost(target.metric, target.value) for target in targets),
    )


def _forecaster(run: str | Path | RunResult) -> "Forecaster":
    if not isinstance(run, str | Path):
        return Forecaster(
            run.rounds, run.budget, {"loss": run.loss, "accuracy": run.accuracy}
        )
    opened = Run.open(Path(run))
    return Forecaster(opened.rounds, opened.settings.limits().limits, opened.summary)


class Forecaster:
    """A run's curves, and what follows from them.

    Args:
      records: of all rounds so far.
      limits: the run's budget.
      known: the `loss` and the `accuracy` of its result, where it has ended.
    """

    def __init__(
        self,
        records: Sequence[RoundRecord],
        limits: Mapping[str, float],
        known: Mapping[str, Any] | None = None,
    ) -> None:
        self.limits = dict(limits)
        self.known = (
            None
            if known is None
            else {name: json_value(known.get(name)) for name in _FIGURES}
        )
        self.spent = dict(records[-1].spent) if records else dict.fromkeys(limits, 0.0)
        self._private = any(record.private is not None for record in records)
        self._records = [record for record in records if math.isfinite(record.best_loss)]

    @property
    def now(self) -> dict[str, float | None]:
        """Loss and accuracy: of the result, or as last seen."""
        evaluated = [
            record.accuracy for record in self._records if record.accuracy is not None
        ]
        last = {
            "loss": self._records[-1].best_loss if self._records else None,
            "accuracy": evaluated[-1] if evaluated else None,
        }
        return last if self.known is None else self.known

    def at(self, limits: Mapping[str, float]) -> Forecast:
        """What a budget buys, which may be the run's own or another."""
        if reason := self._unknown("loss"):
            return Forecast(limits, self.spent, None, None, reason)
        rounds = min(
            (
                (limit - self.spent[name]) / cost
                for name, limit in limits.items()
                if (cost := self._per_round[name]) > 0
            ),
            default=0.0,
        )
        if rounds <= 0:
            return Forecast(
                limits, self.spent, None, None, "no more than that was spent already"
            )
        spent = {
            name: amount + rounds * self._per_round[name]
            for name, amount in self.spent.items()
        }
        ratio = spent[self._resource] / self.spent[self._resource]
        figures = {}
        for figure in _FIGURES:
            ends = (
                None if self._unknown(figure) else self._interval(figure, np.array([ratio]))
            )
            figures[figure] = (
                None
                if ends is None
                else Interval(*(float(ends[row, 0]) for row in (1, 0, 2)))
            )
        reason = "" if figures["loss"] else self._too_far(ratio)
        return Forecast(limits, spent, figures["loss"], figures["accuracy"], reason)

    def cost(self, figure: str, value: float) -> TargetCost:
        """What a target costs, of every resource.

        Args:
          figure: `loss` or `accuracy`.
        """
        if reason := self._unknown(figure):
            return TargetCost(figure, value, None, reason)
        now = self.now[figure]
        assert now is not None
        if (now <= value) if figure == "loss" else (now >= value):
            return TargetCost(figure, value, None, f"it is reached already, with {now:.4g}")
        furthest = furthest_ratio(self._curves[figure])
        end = max(furthest, 1.01)
        first = [math.inf] * 3
        for _ in range(
            2
        ):  # the second time what is tested is forecasts over the ratio that it takes
            ratios = np.geomspace(1.001, end, _GRID)
            if (ends := self._interval(figure, ratios)) is None:
                return TargetCost(figure, value, None, self._too_far(2.0))
            good = ends <= value if figure == "loss" else ends[::-1] >= value
            first = [
                float(ratios[np.argmax(row)]) if row.any() else math.inf for row in good
            ]
            if math.isinf(first[1]):
                low, median, high = ends[:, -1]
                reason = f"by {end:.2g} times what was spent, as far as these rounds can tell, {figure} is {median:.4g}"
                return TargetCost(
                    figure, value, None, f"{reason} ({low:.4g} to {high:.4g})"
                )
            end = min(end, max(first[1] ** 2, 1.01))
        needed = {}
        for name, spent in self.spent.items():
            scale = (
                self._per_round[name]
                * self.spent[self._resource]
                / self._per_round[self._resource]
            )
            amounts = [spent + (ratio - 1) * scale for ratio in first]
            needed[name] = Interval(amounts[1], amounts[0], amounts[2])
        return TargetCost(figure, value, needed)

    def _unknown(self, figure: str) -> str:
        """Why nothing can be said; nothing where something can."""
        if self._private:
            return "a private run tells no loss, from which forecasts are made"
        if len(self._records) < ROUNDS:
            return f"{len(self._records)} rounds are over, and {ROUNDS} are needed"
        if not self._records[-1].spent[self._resource] > 0:
            return "nothing was spent"
        if figure not in self._curves:
            return f"{figure} was looked at in fewer than {ROUNDS} rounds"
        values = self._curves[figure].values
        third = len(values) // 3
        if not values[-third:].mean() < values[:third].mean():
            return f"{figure} has not become better so far"
        return ""

    def _too_far(self, ratio: float) -> str:
        furthest = furthest_ratio(self._curves["loss"])
        if ratio > furthest:
            return f"that is {ratio:.2g} times what was spent, and these rounds can tell for {furthest:.2g} times at most"
        return "the curve is not like any that could be continued"

    def _interval(self, figure: str, ratios: Float64) -> Float64 | None:
        """Low end, median and high end when so many times as much is spent as was, [3, ratios]."""
        curve = self._curves[figure]
        now = self.spent[self._resource]
        x = np.array([self._effective(now * ratio) for ratio in ratios])
        known = None if self.known is None else self.known[figure]
        if figure == "loss":
            recent = self._records[-max(3, len(self._records) // 10) :]
            noise = (
                0.0
                if known is None
                else float(np.mean([record.loss - record.best_loss for record in recent]))
            )
            return forecast_interval(
                curve, x, known, max(0.0, noise) if math.isfinite(noise) else 0.0
            )
        known = None if known is None else 1 - known
        noise = float(np.diff(curve.values[-(len(curve) // 2) :]).std()) / math.sqrt(2)
        ends = forecast_interval(curve, x, known, noise)
        return None if ends is None else 1 - ends[::-1]

    def _effective(self, end: float) -> float:
        """Where on its axis a budget ends that leads to `end`: nearer where η has fallen already, and falls again."""
        now = self.spent[self._resource]
        limit = self.limits[self._resource]
        if not self._eta_falls or now <= (1 - _FALL) * limit or end <= limit:
            return end
        x = np.linspace(now, end, 200)
        lost = np.clip(
            2 * (1 - self._work_in_fall) * (1 - np.clip((1 - x / end) / _FALL, 0.0, 1.0)),
            0.0,
            1.0,
        )
        return now + float(np.trapezoid(1 - lost, x))

    @cached_property
    def _work_in_fall(self) -> float:
        """Work for what is spent while η falls, as a share of that before: τ grows meanwhile, so it is above half."""
        spent = np.array([0.0, *(record.spent[self._resource] for record in self._records)])
        work = np.array([each.eta * each.effective_tau for each in self._records])
        share = spent[:-1] / self.limits[self._resource]
        falling = share >= 1 - _FALL
        before = (share < 1 - _FALL) & (share >= 1 - 2 * _FALL)
        rates = [
            work[part].sum() / max(np.diff(spent)[part].sum(), 1e-300)
            for part in (falling, before)
        ]
        return (
            min(1.0, float(rates[0] / rates[1]))
            if min(falling.sum(), before.sum()) > 1 and rates[1] > 0
            else 0.5
        )

    @cached_property
    def _resource(self) -> str:
        """The one that is nearest to its limit."""
        return max(self.limits, key=lambda name: self.spent[name] / self.limits[name])

    @cached_property
    def _per_round(self) -> dict[str, float]:
        """What a round costs of late."""
        before = self._records[-max(2, len(self._records) // 3)]
        rounds = max(1, self._records[-1].round - before.round)
        return {
            name: (spent - before.spent[name]) / rounds
            for name, spent in self._records[-1].spent.items()
        }

    @cached_property
    def _eta_falls(self) -> bool:
        """An η that changes at all is one that falls at the end."""
        etas = [record.eta for record in self._records if record.tau > 0]
        return max(etas) > min(etas) if etas else False

    @cached_property
    def _curves(self) -> dict[str, Curve]:
        """Of F(w^f), and of the share of test samples that are wrong; along work, and along what was spent."""
        records = self._records
        limit = self.limits[self._resource]
        spent = np.array([0.0, *(record.spent[self._resource] for record in records)])
        steps = np.array([record.eta * record.effective_tau for record in records])
        if self._eta_falls:
            steps /= np.clip((1 - spent[:-1] / limit) / _FALL, 0.02, 1.0)
        axes = np.array([np.append(0.0, np.cumsum(steps)), spent])
        losses = np.array([record.best_loss for record in records])
        curves = {
            "loss": Curve(
                axes[:, :-1], losses, axes[:, -1], 0.0 if losses.min() >= 0 else None
            )
        }
        evaluated = [at for at, record in enumerate(records) if record.accuracy is not None]
        if len(evaluated) >= ROUNDS:
            wrong = np.array([1 - (records[at].accuracy or 0.0) for at in evaluated])
            curves["accuracy"] = Curve(axes[:, evaluated], wrong, axes[:, -1])
        return curves


MORE_AFTER_END = 0.5
"""What a run that has ended is given besides, as a share of its budget."""

_SHARE = 0.01  # of the time


class LatestForecast:
    """Keeps the last forecast for as long as it will do."""

    def __init__(self) -> None:
        self._made_for: tuple[int, bool] | None = None
        self._forecast: Forecast | None = None
        self._until = 0.0

    def of(
        self,
        records: Sequence[RoundRecord],
        limits: Mapping[str, float],
        known: Mapping[str, Any] | None = None,
    ) -> Forecast:
        """
        Args:
          known: the `loss` and the `accuracy` of its result, where it has ended.
        """
        began = time.perf_counter()
        ended = known is not None
        if self._forecast is None or (
            self._made_for != (len(records), ended) and (ended or began >= self._until)
        ):
            self._forecast = next_forecast(records, limits, known)
            self._made_for = len(records), ended
            finished = time.perf_counter()
            self._until = finished + (finished - began) / _SHARE
        return self._forecast


def next_forecast(
    records: Sequence[RoundRecord],
    limits: Mapping[str, float],
    known: Mapping[str, Any] | None = None,
) -> Forecast:
    """See `LatestForecast.of`."""
    more = 0.0 if known is None else MORE_AFTER_END
    return Forecaster(records, limits, known).at(
        {name: limit * (1 + more) for name, limit in limits.items()}
    )
