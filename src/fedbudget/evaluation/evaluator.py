"""Evaluates the models of a run: test metrics, targets, and which model is returned.

Rules:
- A round is evaluated for the w that it started with, and its record holds the metrics. A w
  that reaches a target is the result of the run. If validation reaches a target loss, the
  result is the model that validation chose.
- Test samples are used after every 1 / `evaluations` of the budget and in the final round
  (points.py), four times as often if a target or the kept model depends on them. Test
  samples at nodes are evaluated by the engine; their results arrive with the round.
- A mini-batch loss that reaches a target is confirmed on all training samples, at most as
  often. If these are at the nodes, targets.py states the required evidence.
- Every decision follows from the records, so a resumed run continues as if it had not
  stopped. The best model on test samples is stored in the run folder (kept.py).
- No node alone reaches a target: a metric on test samples of nodes counts only if three
  nodes have some, and if it reaches the target also without each one of them.
- A target that cannot be evaluated is refused before the run starts.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.errors import UserError, unknown
from fedbudget.evaluation.kept import KeptModel
from fedbudget.evaluation.metrics import Tally, metric_names, spread, totals_without_one
from fedbudget.evaluation.points import NodeEvaluation
from fedbudget.evaluation.targets import NOISE, MetricTarget, has_stalled, well_below
from fedbudget.launch.prepared import PreparedRun, evaluation_points
from fedbudget.protocol.outliers import FEWEST
from fedbudget.protocol.state import Round
from fedbudget.runs.record import RoundRecord

_LOG = logging.getLogger("fedbudget.network")


@dataclass(frozen=True)
class HeldOutMetrics:
    """Metrics of a model on test samples; empty if it was not evaluated."""

    accuracy: float | None = None
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    to_beat: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def over_nodes(cls, tallies: Sequence[Tally]) -> "HeldOutMetrics":
        """Combine the tallies of nodes."""
        total = Tally.total(tallies)
        metrics = cls.from_tally(total, total.metrics().get("accuracy"))
        return replace(metrics, spread=spread(tallies))

    @classmethod
    def from_tally(cls, tally: Tally, accuracy: float | None) -> "HeldOutMetrics":
        metrics = tally.metrics()
        metrics.pop("accuracy", None)
        loss = tally.loss if math.isfinite(tally.loss) else None
        return cls(accuracy, loss, metrics, tally.to_beat())

    def value(self, metric: str) -> float | None:
        """Return the metric of this name, or None if it is not known."""
        return self.accuracy if metric == "accuracy" else self.metrics.get(metric)


class Evaluator:
    """Evaluates one run.

    Attributes:
      best: the best w on test samples, if the run keeps it.
      target_reached: whether a target ended the run.
      at_target: the w that reached it, unless validation chooses the result.
    """

    def __init__(self, prepared: PreparedRun) -> None:
        settings = prepared.settings
        self.best: KeptModel | None = None
        self.target_reached = False
        self.at_target: KeptModel | None = None
        self._prepared = prepared
        self._keeps_best = settings.keep == "best-on-test"
        if self._keeps_best and prepared.test is None and not prepared.nodes_test:
            raise UserError("`keep` best-on-test needs test samples, and there are none")
        self._points = evaluation_points(settings)
        self._confirmations = self._points
        self._tellers: Sequence[Tally] = ()  # latest tally of each node
        self._warned = False
        self._node_metrics: list[tuple[Float32, HeldOutMetrics]] = []
        self._w0 = prepared.model.initial(settings.seed)
        self._first = self._evaluate(self._w0)
        self._latest = self._w0, self._first
        self._targets = tuple(map(self._require_ahead, settings.targets()))

    @property
    def kept(self) -> KeptModel | None:
        """The model to return instead of w^f, if there is one."""
        return self.at_target if self.target_reached else self.best

    def resume(self, earlier: Sequence[RoundRecord], folder: Path) -> None:
        """Continue after the rounds of an earlier process."""
        limits = self._prepared.budget.limits
        for record in reversed(earlier):
            if record.test_loss is not None or record.accuracy is not None:
                share = max(record.spent[name] / limit for name, limit in limits.items())
                self._points = self._points.after(share)
                break
        self.best = KeptModel.load(folder) if self._keeps_best else None

    def due(self, share: float) -> bool:
        """Return whether an evaluation is due after this share of the budget."""
        return self._points.due(share)

    def evaluate_if_due(self, round_: Round, w: Float32) -> HeldOutMetrics:
        """Return the metrics of the w that a round started with; empty if none are due."""
        if self._prepared.nodes_test:
            return self._from_nodes(round_.evaluation, w)
        share = round_.ledger.share
        due = self._points.due(share) or round_.tau == 0
        if self._prepared.test is None or not due:
            return HeldOutMetrics()
        self._points = self._points.after(share)
        if round_.round > 1:
            self._latest = w, self._evaluate(w)
            return self._latest[1]
        return self._first

    def stop_reason(
        self,
        rounds: Sequence[RoundRecord],
        metrics: HeldOutMetrics,
        round_: Round,
        w: Float32,
    ) -> str | None:
        """Return why the run ends now, `target` or `plateau`, or None if it continues.

        Args:
          rounds: the records so far, including that of this round.
          metrics: the metrics of w.
          round_: this round.
          w: the parameters that the round started with.
        """
        record = rounds[-1]
        for target in self._targets:
            by_validation = target.metric == "loss" and self._prepared.validates
            if by_validation:
                value = record.validation
            elif target.metric == "loss":
                value = self._training_loss(target, rounds, round_, w)
            else:
                value = metrics.value(target.metric)
            reached = value is not None and target.reached_by(value)
            if reached and target.metric != "loss":
                reached = self._is_confirmed(target)
            if value is not None and reached:
                self.target_reached = True
                if not by_validation:
                    loss = value if target.metric == "loss" else record.loss
                    self.at_target = KeptModel(record.round, w.copy(), loss)
                return "target"
        if self._keeps_best and metrics.loss is not None:
            rank = (0.0 if metrics.accuracy is None else -metrics.accuracy, metrics.loss)
            if self.best is None or rank < self.best.rank:
                self.best = KeptModel(record.round, w.copy(), record.loss, rank)
        patience = self._prepared.settings.patience
        if patience is None or not self._has_stalled(rounds, patience):
            return None
        return "plateau"

    def final(self, w: Float32) -> HeldOutMetrics:
        """Return the metrics of the result; empty if the nodes did not evaluate it."""
        if not self._prepared.nodes_test:
            known, metrics = self._latest  # the last w, which often is the result
            return metrics if np.array_equal(known, w) else self._evaluate(w)
        for known, metrics in self._node_metrics:
            if np.array_equal(known, w):
                return metrics
        return HeldOutMetrics()

    def reached_by(self, loss: float, metrics: HeldOutMetrics) -> dict[str, bool]:
        """Return for each target whether a model with these values reaches it."""
        reached = {}
        for target in self._targets:
            value = loss if target.metric == "loss" else metrics.value(target.metric)
            reached[str(target)] = value is not None and target.reached_by(value)
        return reached

    def _is_confirmed(self, target: MetricTarget) -> bool:
        """Return whether a target is reached without the test samples of any one node.

        Nodes on other machines may send false counts. With secure aggregation only their
        sum is known.
        """
        if not self._prepared.nodes_test or self._prepared.sums is not None:
            return True
        if len(self._tellers) < FEWEST:
            if not self._warned:
                _LOG.warning(
                    "%s does not end the run: it needs test samples at %d or more nodes",
                    target,
                    FEWEST,
                )
            self._warned = True
            return False
        for rest in totals_without_one(self._tellers):
            value = HeldOutMetrics.over_nodes([rest]).value(target.metric)
            if value is None or not target.reached_by(value):
                return False
        return True

    def _evaluate(self, w: Float32) -> HeldOutMetrics:
        model = self._prepared.model
        test = self._prepared.test
        if test is None:
            return HeldOutMetrics()
        tally = Tally.of(model, w, test, self._prepared.dataset.standardization)
        return HeldOutMetrics.from_tally(tally, model.accuracy(w, test))

    def _from_nodes(self, evaluation: NodeEvaluation | None, w: Float32) -> HeldOutMetrics:
        """Return the metrics that arrived from nodes, and remember them for `final`."""
        if evaluation is None:
            return HeldOutMetrics()
        self._tellers = evaluation.nodes
        metrics = HeldOutMetrics.over_nodes(evaluation.nodes)
        known = [(w, metrics)]
        if self.best is not None:
            known += [
                each for each in self._node_metrics if np.array_equal(each[0], self.best.w)
            ]
        if evaluation.best_w is not None:
            best = HeldOutMetrics.over_nodes(evaluation.best)
            known.append((evaluation.best_w, best))
        self._node_metrics = known
        self._targets = tuple(_with_direction(each, metrics) for each in self._targets)
        return metrics

    def _training_loss(
        self, target: MetricTarget, rounds: Sequence[RoundRecord], round_: Round, w: Float32
    ) -> float | None:
        """Return the training loss if it is known well enough to compare, else None."""
        if self._prepared.train is None:
            return well_below(target.value, [each.loss for each in rounds[-NOISE:]])
        share = round_.ledger.share
        if not target.reached_by(round_.loss) or not self._confirmations.due(share):
            return None
        self._confirmations = self._confirmations.after(share)
        return self._prepared.training_loss(w)

    def _has_stalled(self, rounds: Sequence[RoundRecord], patience: int) -> bool:
        last = rounds[-2 * patience :]
        if any(target.metric == "accuracy" for target in self._targets):
            errors = [None if each.accuracy is None else 1 - each.accuracy for each in last]
            return has_stalled(errors, patience)
        if self._prepared.validates:
            return has_stalled([each.validation for each in last], patience)
        return has_stalled([each.loss for each in last], patience)

    def _require_ahead(self, target: MetricTarget) -> MetricTarget:
        """Return the target with its direction.

        Refuses a target that cannot be evaluated, or that w(0) reaches already.
        """
        prepared = self._prepared
        if target.metric != "loss" and prepared.nodes_test:
            names = metric_names(prepared.model, classes=bool(prepared.dataset.classes))
            if target.metric not in names:
                raise unknown("metric of `until`", target.metric, ["loss", *names])
            return target
        first = self._first_value(target)
        if math.isnan(first):
            raise UserError(
                f"`until` {target} cannot be used: {target.metric} of w(0) is not a number"
            )
        target = target.from_side_of(first)
        if target.reached_by(first):
            raise UserError(
                f"`until` {target} is reached before training: {target.metric} of w(0) is "
                f"{first:.4g}"
            )
        return target

    def _first_value(self, target: MetricTarget) -> float:
        """Return the value of a target's metric for w(0); infinite if it is not known."""
        prepared = self._prepared
        if target.metric == "loss":
            known = prepared.training_loss(self._w0)
            return math.inf if known is None else known
        if prepared.test is None:
            raise UserError(f"`until` {target} needs test samples, and there are none")
        if target.metric == "accuracy" and self._first.accuracy is None:
            raise UserError(f"`until` {target}: {prepared.model.name} has no accuracy")
        if target.metric not in ("accuracy", *self._first.metrics):
            accuracy = [] if self._first.accuracy is None else ["accuracy"]
            names = ["loss", *accuracy, *self._first.metrics]
            raise unknown("metric of `until`", target.metric, names)
        return self._first.value(target.metric) or 0.0


def _with_direction(target: MetricTarget, metrics: HeldOutMetrics) -> MetricTarget:
    """Set the direction of a target for a custom metric once a value of it is known."""
    value = metrics.value(target.metric)
    return target if value is None else target.from_side_of(value)
