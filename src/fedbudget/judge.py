"""Looks at the w of a run's rounds: on test samples now and then, and whether a target is reached; says when the run
ends before its budget is spent, and which w it gives where that is not w^f.

Rules here:
- The w that is looked at is the one that a round began with, and the round's record has what was seen. A w that reached
  a target is the run's result, so that the result reaches it too.
- Test samples are looked at where a share of 1 / `evaluations` of the budget was spent since the last time, and in the
  final round. Where something hangs on it, a target or which w is kept, it is four times as often, and at the beginning
  oftener still: a target that is easily reached is not waited for by the measure of a large budget.
- A loss on a mini-batch that comes to the target is confirmed on all training samples, as often at most. Where these
  are with the nodes, targets.py says what is enough.
- What is judged follows from the records, so that a run that goes on is judged as if it had never stopped; the w that
  was best on test samples is in a file of the run's folder.
- Whatever is asked for and cannot be judged is refused before the run begins.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedbudget.arrays import Float32
from fedbudget.data.shards import Table
from fedbudget.errors import UserError, unknown
from fedbudget.launch.prepared import PreparedRun
from fedbudget.models.base import Model, loss_over
from fedbudget.protocol.aggregator import Round
from fedbudget.protocol.messages import Broadcast
from fedbudget.runs.kept import KeptModel
from fedbudget.runs.record import RoundRecord
from fedbudget.targets import NOISE, MetricTarget, has_stalled, well_below

_MORE_OFTEN = 4
_EARLY = 10  # of so many points' distance, the share of what is spent; it is the shorter one in a budget's first tenth


@dataclass(frozen=True)
class HeldOutFigures:
    """What a w is worth on test samples; nothing, where it was not looked at."""

    accuracy: float | None = None
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Model, w: Float32, test: Table, *, metrics: bool) -> "HeldOutFigures":
        """
        Args:
          metrics: whether the model's own are wanted.
        """
        loss = loss_over(model, w, test)
        return cls(
            model.accuracy(w, test),
            loss if math.isfinite(loss) else None,
            model.metrics(w, test) if metrics else {},
        )


class Judge:
    """Of one run.

    Attributes:
      best: the w that was best on test samples, where that is to be kept.
      at_target: the w that has reached a target, if one has.
    """

    def __init__(self, prepared: PreparedRun) -> None:
        settings = prepared.settings
        self.best: KeptModel | None = None
        self.at_target: KeptModel | None = None
        self._prepared = prepared
        self._keeps_best = settings.keep == "best-on-test"
        if self._keeps_best and prepared.test is None:
            raise UserError("`keep` best-on-test needs test samples, and there are none")
        self._often = self._keeps_best or bool(settings.until)
        self._points = settings.evaluations * (_MORE_OFTEN if self._often else 1)
        self._next_look = self._next_confirmation = 0.0
        self._targets = settings.targets()
        self._own_metrics = any(target.rises is None for target in self._targets)
        self._w0 = prepared.model.initial(settings.seed)
        self._first = self._figures(self._w0)
        self._targets = tuple(map(self._require_ahead, self._targets))
        self._plateau_of = "accuracy" if any(target.metric == "accuracy" for target in self._targets) else "loss"

    @property
    def kept(self) -> KeptModel | None:
        """The w to give in place of w^f, if there is one."""
        return self.at_target or self.best

    def resume(self, earlier: Sequence[RoundRecord], folder: Path) -> None:
        """Goes on after these rounds of a run."""
        limits = self._prepared.budget.limits
        looked = [each for each in earlier if each.test_loss is not None or each.accuracy is not None]
        if looked:
            share = max(looked[-1].spent[name] / limit for name, limit in limits.items())
            self._next_look = self._after(share)
        self.best = KeptModel.load(folder) if self._keeps_best else None

    def due(self, share: float) -> bool:
        """Whether it is time to look at test samples, when this share of the budget is spent."""
        return share >= self._next_look

    def look(self, round_: Round, broadcast: Broadcast) -> HeldOutFigures:
        """The figures of the w that the round began with, if it is time for them."""
        share = round_.ledger.share
        if self._prepared.test is None or not (self.due(share) or broadcast.tau == 0):
            return HeldOutFigures()
        self._next_look = self._after(share)
        return self._first if round_.round == 1 else self._figures(broadcast.w)

    def verdict(self, rounds: Sequence[RoundRecord], figures: HeldOutFigures, round_: Round, w: Float32) -> str | None:
        """Why the run ends now, `target` or `plateau`; None where it goes on.

        Args:
          rounds: the records so far, with that of this round.
          figures: of w.
          w: that the round began with.
        """
        record, patience = rounds[-1], self._prepared.settings.patience
        for target in self._targets:
            value = self._loss(target, rounds, round_, w) if target.metric == "loss" else _figure(target, figures)
            if value is not None and target.reached_by(value):
                self.at_target = KeptModel(record.round, w.copy(), value if target.metric == "loss" else record.loss)
                return "target"
        if self._keeps_best and figures.loss is not None:
            rank = (0.0 if figures.accuracy is None else -figures.accuracy, figures.loss)
            if self.best is None or rank < self.best.rank:
                self.best = KeptModel(record.round, w.copy(), record.loss, rank)
        if patience is None:
            return None
        last = rounds[-2 * patience :]
        losses = [None if each.accuracy is None else 1 - each.accuracy for each in last]
        stalled = has_stalled(losses if self._plateau_of == "accuracy" else [each.loss for each in last], patience)
        return "plateau" if stalled else None

    def reached_by(self, loss: float, accuracy: float | None, metrics: Mapping[str, float]) -> dict[str, bool]:
        """Whether a w with these figures, of training loss and on test samples, has reached each target."""
        figures = HeldOutFigures(accuracy, None, metrics)
        values = {each: loss if each.metric == "loss" else _figure(each, figures) for each in self._targets}
        return {str(each): value is not None and each.reached_by(value) for each, value in values.items()}

    def _after(self, share: float) -> float:
        """The next point to look at, in shares of the budget."""
        point = (int(share * self._points) + 1) / self._points
        return min(point, share * (1 + _EARLY / self._points)) if self._often else point

    def _figures(self, w: Float32) -> HeldOutFigures:
        test = self._prepared.test
        if test is None:
            return HeldOutFigures()
        return HeldOutFigures.of(self._prepared.model, w, test, metrics=self._own_metrics)

    def _loss(self, target: MetricTarget, rounds: Sequence[RoundRecord], round_: Round, w: Float32) -> float | None:
        """The training loss as far as it is known well enough to judge by."""
        train, share = self._prepared.train, round_.ledger.share
        if train is None:
            return well_below(target.value, [each.loss for each in rounds[-NOISE:]])
        if not target.reached_by(round_.loss) or share < self._next_confirmation:
            return None
        self._next_confirmation = self._after(share)
        return loss_over(self._prepared.model, w, train)

    def _require_ahead(self, target: MetricTarget) -> MetricTarget:
        """The target with the way to it; refuses one that cannot be evaluated, or that w(0) has reached already."""
        prepared = self._prepared
        if target.metric == "loss":
            first = math.inf if prepared.train is None else loss_over(prepared.model, self._w0, prepared.train)
        elif prepared.test is None:
            raise UserError(f"`until` {target} needs test samples, and there are none")
        elif target.metric == "accuracy" and self._first.accuracy is None:
            raise UserError(f"`until` {target}: {prepared.model.name} has no accuracy")
        elif target.metric not in ("accuracy", *self._first.metrics):
            raise unknown("metric of `until`", target.metric, ["accuracy", "loss", *self._first.metrics])
        else:
            first = _figure(target, self._first) or 0.0
        if math.isnan(first):
            raise UserError(f"`until` {target} cannot be judged: for w(0), {target.metric} is not a number")
        target = target.from_side_of(first)
        if target.reached_by(first):
            raise UserError(
                f"`until` {target} is reached before anything is trained: for w(0), {target.metric} is {first:.4g}"
            )
        return target


def _figure(target: MetricTarget, figures: HeldOutFigures) -> float | None:
    return figures.accuracy if target.metric == "accuracy" else figures.metrics.get(target.metric)
