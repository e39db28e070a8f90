"""The result of a run: its figures, its model, and a record of every round."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedbudget.arrays import Float32
from fedbudget.evaluation.targets import Overfitting
from fedbudget.runs.record import RoundRecord, update_weighted_tau
from fedbudget.trained.model import TrainedModel

_NOT_FIGURES = ("w", "model", "rounds")
_OPTIONAL = (
    "metrics",
    "note",
    "until",
    "kept_round",
    "overfitting",
    "to_beat",
    "spread",
    "privacy_delta",
    "validation_loss",
    "validation_start",
    "improved_round",
    "sites",
)
"""Figures that `to_json` omits if they are empty."""


class SiteLoss(NamedTuple):
    """Validation loss of a model at one node.

    Args:
      start: loss of w(0); None if it is not known.
      loss: loss of the result.
    """

    start: float | None
    loss: float

    @property
    def harmed(self) -> bool:
        """Whether the model is worse for this node than w(0)."""
        return self.start is not None and self.loss > self.start


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Args:
      loss: F(w^f) on all training samples; with remote nodes, their latest report.
      accuracy: on the test samples; None if the model has none.
      metrics: further figures on the test samples, by name: of classes or of real targets,
        and those that the model defines.
      to_beat: the figure of a trivial model: the accuracy of always predicting the most
        frequent class, or the RMSE of predicting the mean.
      spread: accuracy or RMSE over nodes that hold test samples: `worst`, `tenth` (the
        tenth percentile), `median`, and the number of `nodes`.
      average_tau: local updates divided by aggregations.
      aggregations, local_updates: K and T; centralized descent has no aggregations.
      spent, budget, overshoot: per resource.
      sources: source of each amount: measured, estimated, declared or simulated.
      trial_seconds: duration of trial rounds before the clock of the budget started, if
        anything is measured; not part of `spent`.
      stopped_by: a resource, `rounds`, `target`, `plateau`, `callback`, `interrupted`, or
        `validation` if the validation loss has stopped improving.
      note: which part of the dataset was used, if not all.
      run: folder of the run, if any.
      w: w^f, or the parameters kept instead, [parameters].
      model: the trained model with this w: `result.model.predict(x)`.
      rounds: a record of each round.
      until: the targets, and whether w has reached each.
      kept_round: the round that started with w, if validation or test samples chose it;
        None if w is w^f.
      validation_loss, validation_start: loss of w and of w(0) on the rows that nodes held
        out of the training; None without validation.
      improved_round: the round that started with the last w whose validation loss was
        significantly better than all before it.
      sites: validation losses of each node by its name, if they are known.
      privacy_delta: δ of the ε in `spent`, for a private run, which reports no loss.
      overfitting: when the model began to overfit, if it clearly did.
    """

    loss: float
    accuracy: float | None
    metrics: Mapping[str, float]
    average_tau: float
    aggregations: int
    local_updates: int
    spent: Mapping[str, float]
    budget: Mapping[str, float]
    overshoot: Mapping[str, float]
    sources: Mapping[str, str]
    trial_seconds: float
    stopped_by: str
    note: str
    run: Path | None
    w: Float32
    model: TrainedModel = field(compare=False, repr=False)
    rounds: Sequence[RoundRecord]
    until: Mapping[str, bool] = field(default_factory=dict)
    kept_round: int | None = None
    overfitting: Overfitting | None = None
    validation_loss: float | None = None
    validation_start: float | None = None
    improved_round: int | None = None
    sites: Mapping[str, SiteLoss] = field(default_factory=dict)
    to_beat: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    privacy_delta: float | None = None

    @property
    def left(self) -> dict[str, float]:
        """Unspent part of the budget, per resource."""
        return {
            name: max(0.0, limit - self.spent[name]) for name, limit in self.budget.items()
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with the model, each a sentence; empty if nothing is."""
        found = []
        first = self.validation_start
        loss = self.validation_loss
        if loss is not None and first is not None and not loss < first:
            found.append(
                "training did not help: no parameters have a lower validation loss than "
                f"the initial ones, {first:.4g}"
            )
        for name, site in self.sites.items():
            if site.harmed:
                found.append(
                    f"the model is worse than untrained for {name}: its validation loss is "
                    f"{site.loss:.4g}, and {site.start:.4g} with the initial parameters"
                )
        return tuple(found)

    @property
    def update_weighted_tau(self) -> float:
        """Σ τ² / Σ τ over rounds, the average τ of the paper's figures."""
        return update_weighted_tau([record.tau for record in self.rounds])

    def to_json(self) -> dict[str, Any]:
        """Return the figures, without the model and the rounds."""
        figures = {}
        for name, value in vars(self).items():
            if name in _NOT_FIGURES or (name in _OPTIONAL and not value):
                continue
            figures[name] = dict(value) if isinstance(value, Mapping) else value
        if self.overfitting is not None:
            figures["overfitting"] = vars(self.overfitting)
        if self.sites:
            figures["sites"] = {name: site._asdict() for name, site in self.sites.items()}
        figures["left"] = self.left
        figures["loss"] = self.loss if math.isfinite(self.loss) else None
        figures["run"] = None if self.run is None else str(self.run)
        return figures
