"""What a run gave: its figures, its model, and a record of every round."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbudget.arrays import Float32
from fedbudget.evaluation.targets import Overfitting
from fedbudget.runs.record import RoundRecord, update_weighted_tau
from fedbudget.trained.model import TrainedModel


@dataclass(frozen=True)
class Result:
    """What a run gave.

    Args:
      loss: F(w^f) on all training samples; where these are on other machines, as nodes last told it.
      accuracy: on the test samples; None where it has no meaning.
      metrics: further figures on the test samples, by name: those of classes or of real targets, and the model's own.
      to_beat: what is reached there without learning: the accuracy of the most frequent class, or the RMSE of the mean.
      spread: how far nodes are apart in accuracy or RMSE, where test samples are with them: the `worst`, the one that a
        tenth are worse than (`tenth`), the `median`, and how many `nodes` they are.
      average_tau: local updates divided by aggregations.
      aggregations, local_updates: K and T; in one place nothing is aggregated.
      spent, budget, overshoot: per resource.
      sources: how each of these is known: measured, estimated, declared or simulated.
      trial_seconds: what trial rounds took before the clock of the budget started, where anything is measured; it is
        not in `spent`.
      stopped_by: a resource, `rounds`, `target`, `plateau`, `callback` or `interrupted`.
      note: in which way the data were less than the whole dataset, if they were.
      run: the folder, where there is one.
      w: w^f, or the w that was kept in its place, [parameters].
      model: with this w, to be used: `result.model.predict(x)`.
      rounds: a record of each.
      until: the targets, and whether w has reached each.
      kept_round: the round that began with the w that was kept; None where w is w^f.
      privacy_delta: δ at which `spent` has the ε of a private run, by an accountant; then no loss is known.
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
    to_beat: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    privacy_delta: float | None = None

    @property
    def left(self) -> dict[str, float]:
        """What is left of the budget, per resource."""
        return {
            name: max(0.0, limit - self.spent[name]) for name, limit in self.budget.items()
        }

    @property
    def update_weighted_tau(self) -> float:
        """Σ τ² / Σ τ over rounds: the paper's average τ, for its figures."""
        return update_weighted_tau([record.tau for record in self.rounds])

    def to_json(self) -> dict[str, Any]:
        """The figures, without the model and the rounds."""
        optional = (
            "metrics",
            "note",
            "until",
            "kept_round",
            "overfitting",
            "to_beat",
            "spread",
            "privacy_delta",
        )
        left_out = {
            "w",
            "model",
            "rounds",
            *(name for name in optional if not getattr(self, name)),
        }
        figures = {
            name: value for name, value in vars(self).items() if name not in left_out
        }
        figures = {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in figures.items()
        }
        if self.overfitting is not None:
            figures["overfitting"] = vars(self.overfitting)
        loss = self.loss if math.isfinite(self.loss) else None
        run = None if self.run is None else str(self.run)
        return {**figures, "left": self.left, "loss": loss, "run": run}
