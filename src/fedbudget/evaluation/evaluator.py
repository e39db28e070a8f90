"""Looks at the w of a run's rounds: on test samples now and then, and whether a target is reached; says when the run
ends before its budget is spent, and which w it gives where that is not w^f.

Rules here:
- The w that is looked at is the one that a round began with, and the round's record has what was seen. A w that reached
  a target is the run's result, so that the result reaches it too.
- Test samples are looked at where a share of 1 / `evaluations` of the budget was spent since the last time, and in the
  final round (protocol/evaluation.py). Where something hangs on it, a target or which w is kept, it is four times as
  often. Where test samples are with the nodes, the engine asks for them, and what they say is in the round.
- A loss on a mini-batch that comes to the target is confirmed on all training samples, as often at most. Where these
  are with the nodes, targets.py says what is enough.
- What is judged follows from the records, so that a run that goes on is judged as if it had never stopped; the w that
  was best on test samples is in a file of the run's folder.
- Whatever is asked for and cannot be judged is refused before the run begins.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.data.dataset import Standardization
from fedbudget.data.shards import Table
from fedbudget.errors import UserError, unknown
from fedbudget.evaluation.kept import KeptModel
from fedbudget.evaluation.metrics import Tally, metric_names, spread
from fedbudget.evaluation.points import NodeEvaluation
from fedbudget.evaluation.targets import NOISE, MetricTarget, has_stalled, well_below
from fedbudget.launch.prepared import PreparedRun, evaluation_points
from fedbudget.models.base import Model, loss_over
from fedbudget.protocol.aggregator import Round
from fedbudget.protocol.messages import Broadcast
from fedbudget.runs.record import RoundRecord


@dataclass(frozen=True)
class HeldOutFigures:
    """What a w is worth on test samples; nothing, where it was not looked at."""

    accuracy: float | None = None
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    to_beat: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: Model, w: Float32, test: Table, units: Standardization | None = None
    ) -> "HeldOutFigures":
        """Of samples that are here.

        Args:
          units: how real targets were standardised, if they were.
        """
        return cls.from_tally(Tally.of(model, w, test, units), model.accuracy(w, test))

    @classmethod
    def over_nodes(cls, tallies: Sequence[Tally]) -> "HeldOutFigures":
        """Of samples that are with nodes, from the tally of each."""
        total = Tally.total(tallies)
        return replace(
            cls.from_tally(total, total.metrics().get("accuracy")), spread=spread(tallies)
        )

    @classmethod
    def from_tally(cls, tally: Tally, accuracy: float | None) -> "HeldOutFigures":
        metrics = {
            name: value for name, value in tally.metrics().items() if name != "accuracy"
        }
        return cls(
            accuracy,
            tally.loss if math.isfinite(tally.loss) else None,
            metrics,
            tally.to_beat(),
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
        if self._keeps_best and prepared.test is None and not prepared.nodes_test:
            raise UserError("`keep` best-on-test needs test samples, and there are none")
        self._looks = self._confirmations = evaluation_points(settings)
        self._known: list[tuple[Float32, HeldOutFigures]] = []  # of some w, from nodes
        self._targets = settings.targets()
        self._w0 = prepared.model.initial(settings.seed)
        self._first = self._figures(self._w0)
        self._targets = tuple(map(self._require_ahead, self._targets))
        self._plateau_of = (
            "accuracy"
            if any(target.metric == "accuracy" for target in self._targets)
            else "loss"
        )

    @property
    def kept(self) -> KeptModel | None:
        """The w to give in place of w^f, if there is one."""
        return self.at_target or self.best

    def resume(self, earlier: Sequence[RoundRecord], folder: Path) -> None:
        """Goes on after these rounds of a run."""
        limits = self._prepared.budget.limits
        looked = [
            each
            for each in earlier
            if each.test_loss is not None or each.accuracy is not None
        ]
        if looked:
            share = max(looked[-1].spent[name] / limit for name, limit in limits.items())
            self._looks = self._looks.after(share)
        self.best = KeptModel.load(folder) if self._keeps_best else None

    def due(self, share: float) -> bool:
        """Whether it is time to look at test samples, when this share of the budget is spent."""
        return self._looks.due(share)

    def look(self, round_: Round, broadcast: Broadcast) -> HeldOutFigures:
        """The figures of the w that the round began with, if it is time for them."""
        share = round_.ledger.share
        if self._prepared.nodes_test:
            return self._from_nodes(round_.evaluation, broadcast)
        if self._prepared.test is None or not (self.due(share) or broadcast.tau == 0):
            return HeldOutFigures()
        self._looks = self._looks.after(share)
        return self._first if round_.round == 1 else self._figures(broadcast.w)

    def verdict(
        self,
        rounds: Sequence[RoundRecord],
        figures: HeldOutFigures,
        round_: Round,
        w: Float32,
    ) -> str | None:
        """Why the run ends now, `target` or `plateau`; None where it goes on.

        Args:
          rounds: the records so far, with that of this round.
          figures: of w.
          w: that the round began with.
        """
        record = rounds[-1]
        patience = self._prepared.settings.patience
        for target in self._targets:
            value = (
                self._loss(target, rounds, round_, w)
                if target.metric == "loss"
                else _figure(target, figures)
            )
            if value is not None and target.reached_by(value):
                self.at_target = KeptModel(
                    record.round,
                    w.copy(),
                    value if target.metric == "loss" else record.loss,
                )
                return "target"
        if self._keeps_best and figures.loss is not None:
            rank = (0.0 if figures.accuracy is None else -figures.accuracy, figures.loss)
            if self.best is None or rank < self.best.rank:
                self.best = KeptModel(record.round, w.copy(), record.loss, rank)
        if patience is None:
            return None
        last = rounds[-2 * patience :]
        losses = [None if each.accuracy is None else 1 - each.accuracy for each in last]
        stalled = has_stalled(
            losses if self._plateau_of == "accuracy" else [each.loss for each in last],
            patience,
        )
        return "plateau" if stalled else None

    def final(self, w: Float32) -> HeldOutFigures:
        """The figures of the w that the run gives; nothing where nodes were not asked for that w."""
        if not self._prepared.nodes_test:
            return self._figures(w)
        return next(
            (figures for known, figures in self._known if np.array_equal(known, w)),
            HeldOutFigures(),
        )

    def reached_by(self, loss: float, figures: HeldOutFigures) -> dict[str, bool]:
        """Whether a w with these figures, of training loss and on test samples, has reached each target."""
        values = {
            each: loss if each.metric == "loss" else _figure(each, figures)
            for each in self._targets
        }
        return {
            str(each): value is not None and each.reached_by(value)
            for each, value in values.items()
        }

    def _from_nodes(
        self, evaluation: NodeEvaluation | None, broadcast: Broadcast
    ) -> HeldOutFigures:
        if evaluation is None:
            return HeldOutFigures()
        figures = HeldOutFigures.over_nodes(evaluation.nodes)
        kept = (
            []
            if self.best is None
            else [each for each in self._known if np.array_equal(each[0], self.best.w)]
        )
        self._known = [(broadcast.w, figures), *kept]
        if evaluation.best and broadcast.catch_up is not None:
            self._known.append(
                (broadcast.catch_up.best, HeldOutFigures.over_nodes(evaluation.best))
            )
        self._targets = tuple(
            each
            if each.rises is not None or (value := _figure(each, figures)) is None
            else each.from_side_of(value)
            for each in self._targets
        )
        return figures

    def _figures(self, w: Float32) -> HeldOutFigures:
        test = self._prepared.test
        if test is None:
            return HeldOutFigures()
        return HeldOutFigures.of(
            self._prepared.model, w, test, self._prepared.dataset.standardization
        )

    def _loss(
        self, target: MetricTarget, rounds: Sequence[RoundRecord], round_: Round, w: Float32
    ) -> float | None:
        """The training loss as far as it is known well enough to judge by."""
        train = self._prepared.train
        share = round_.ledger.share
        if train is None:
            return well_below(target.value, [each.loss for each in rounds[-NOISE:]])
        if not target.reached_by(round_.loss) or not self._confirmations.due(share):
            return None
        self._confirmations = self._confirmations.after(share)
        return loss_over(self._prepared.model, w, train)

    def _require_ahead(self, target: MetricTarget) -> MetricTarget:
        """The target with the way to it; refuses one that cannot be evaluated, or that w(0) has reached already."""
        prepared = self._prepared
        if target.metric == "loss":
            first = (
                math.inf
                if prepared.train is None
                else loss_over(prepared.model, self._w0, prepared.train)
            )
        elif prepared.nodes_test:
            names = metric_names(prepared.model, classes=bool(prepared.dataset.classes))
            if target.metric not in names:
                raise unknown("metric of `until`", target.metric, ["loss", *names])
            return target
        elif prepared.test is None:
            raise UserError(f"`until` {target} needs test samples, and there are none")
        elif target.metric == "accuracy" and self._first.accuracy is None:
            raise UserError(f"`until` {target}: {prepared.model.name} has no accuracy")
        elif target.metric not in ("accuracy", *self._first.metrics):
            accuracy = [] if self._first.accuracy is None else ["accuracy"]
            raise unknown(
                "metric of `until`",
                target.metric,
                ["loss", *accuracy, *self._first.metrics],
            )
        else:
            first = _figure(target, self._first) or 0.0
        if math.isnan(first):
            raise UserError(
                f"`until` {target} cannot be judged: for w(0), {target.metric} is not a number"
            )
        target = target.from_side_of(first)
        if target.reached_by(first):
            raise UserError(
                f"`until` {target} is reached before anything is trained: for w(0), {target.metric} is {first:.4g}"
            )
        return target


def _figure(target: MetricTarget, figures: HeldOutFigures) -> float | None:
    return (
        figures.accuracy
        if target.metric == "accuracy"
        else figures.metrics.get(target.metric)
    )
