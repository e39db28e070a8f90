"""The result of a run: its figures, its model, and a record of every round."""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedbudget.arrays import Float32
from fedbudget.errors import UserError
from fedbudget.evaluation.targets import Overfitting
from fedbudget.protocol.site_figures import SiteFigures
from fedbudget.resources import RESOURCES
from fedbudget.resources.privacy import PrivacyGuarantee
from fedbudget.runs.record import RoundRecord, update_weighted_tau
from fedbudget.runs.text import format_metric, metrics_text
from fedbudget.trained.model import TrainedModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NOT_FIGURES = ("w", "model", "rounds", "personal")
_OPTIONAL = (
    "metrics",
    "note",
    "until",
    "kept_round",
    "kept_mean",
    "overfitting",
    "to_beat",
    "spread",
    "privacy_delta",
    "privacy",
    "validation_loss",
    "validation_start",
    "improved_round",
    "sites",
    "site_report",
    "personal_seconds",
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


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run.

    A notebook shows its figures and its plot.

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
      sources: source of each amount: measured, estimated, declared or simulated. Privacy is
        accounted, or simulated if the noise follows from the seed and hides nothing.
      trial_seconds: duration of trial rounds before the clock of the budget started, if
        anything is measured; not part of `spent`.
      stopped_by: a resource, `rounds`, `target`, `plateau`, `callback`, `interrupted`, or
        `validation` if the validation loss has stopped improving, or `converged` if a model
        was solved.
      note: which part of the dataset was used, if not all.
      run: folder of the run, if any.
      w: w^f, or the parameters kept instead, [parameters].
      model: the trained model with this w: `result.model.predict(x)`.
      rounds: a record of each round.
      until: the targets, and whether w has reached each.
      kept_round: the round that started with w, if validation or test samples chose it;
        None if w is w^f.
      kept_mean: whether w is the mean of the parameters up to that round instead.
      validation_loss, validation_start: loss of w and of w(0) on the rows that nodes held
        out of the training; None without validation.
      improved_round: the round that started with the last w whose validation loss was
        significantly better than all before it.
      sites: validation losses of each node by its name, if they are known.
      site_report: figures of all models at each node by its name, if `personal` was set;
        without nodes that keep theirs.
      personal: the personal model of each node by its name, if nodes are simulated; other
        nodes keep theirs.
      personal_seconds: time that nodes took for personal models, which is not part of the
        budget.
      privacy_delta: δ of the ε in `spent`, for a private run, which reports no loss.
      privacy: guarantee of a private run; None for other runs.
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
    kept_mean: bool = False
    overfitting: Overfitting | None = None
    validation_loss: float | None = None
    validation_start: float | None = None
    improved_round: int | None = None
    sites: Mapping[str, SiteLoss] = field(default_factory=dict)
    site_report: Mapping[str, SiteFigures] = field(default_factory=dict)
    personal: Mapping[str, TrainedModel] = field(
        default_factory=dict, compare=False, repr=False
    )
    personal_seconds: float | None = None
    to_beat: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    privacy_delta: float | None = None
    privacy: PrivacyGuarantee | None = None

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
        majority = self.to_beat.get("accuracy", 0.0)
        if self.accuracy is not None and self.accuracy < majority:
            found.append(
                "the model is worse than no model: its accuracy is "
                f"{self.accuracy:.4f}, and {majority:.4f} if the most common class is "
                "always predicted"
            )
        mean = self.to_beat.get("rmse", math.inf)
        if self.metrics.get("rmse", 0.0) > mean:
            found.append(
                "the model is worse than no model: its RMSE is "
                f"{format_metric('rmse', self.metrics['rmse'])}, and "
                f"{format_metric('rmse', mean)} if the mean is always predicted"
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

    def uninterrupted(self) -> "Result":
        """Return the result; raise `RunInterrupted` if Ctrl-C or SIGTERM ended the run."""
        if self.stopped_by == "interrupted":
            raise RunInterrupted(self)
        return self

    @property
    def title(self) -> str:
        """Model and data in a few words."""
        return f"{self.model.name} on {self.model.samples.name}"

    def __repr__(self) -> str:
        parts = [self.title, self._loss_text]
        if self.accuracy is not None:
            parts.append(f"accuracy {self.accuracy:.4f}")
        spent = ", ".join(self._spent_texts())
        parts += [f"{len(self.rounds)} rounds", f"stopped by {self.stopped_by}", spent]
        return f"<Result: {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        metrics = metrics_text(self.accuracy, self.metrics, self.to_beat)
        rounds = (
            f"{self.aggregations} aggregations, {self.local_updates:,} local updates per "
            f"node, average τ {self.average_tau:.1f}; stopped by {self.stopped_by}"
        )
        lines = [self._loss_text, metrics, rounds, *self._spent_texts(), *self.warnings]
        if self.run is not None:
            lines.append(f"run: {self.run}")
        text = "<br>".join(escape(line) for line in lines if line)
        html = f"<strong>{escape(self.title)}</strong><br>{text}"
        if not self.rounds or find_spec("matplotlib") is None:
            return html
        from fedbudget.runs.plot import plot_run

        picture = base64.b64encode(plot_run(self.rounds, self.budget, title=self.title))
        source = f"data:image/png;base64,{picture.decode()}"
        return f'{html}<br><img alt="plot of the run" width="800" src="{source}">'

    def plot(self) -> "Figure":
        """Return the plot of the run, which a notebook shows; `savefig` writes it.

        It needs matplotlib. The loss, the accuracy, τ, the step size and the spending are
        shown over the budget.
        """
        if not self.rounds:
            raise UserError("the run has no rounds to plot")
        from fedbudget.runs.plot import run_figure

        return run_figure(self.rounds, self.budget, title=self.title)

    def to_pandas(self) -> Any:
        """Return the rounds as a DataFrame with a row per round; it needs pandas.

        Amounts of resources have a column each, such as `spent.time`.
        """
        try:
            import pandas
        except ModuleNotFoundError:
            raise UserError("to_pandas needs pandas: pip install pandas") from None
        return pandas.DataFrame([record.flat() for record in self.rounds])

    @property
    def _loss_text(self) -> str:
        if not math.isfinite(self.loss):
            return "no loss"
        text = f"loss {self.loss:.4f}"
        if self.validation_loss is not None:
            text += f", validation loss {self.validation_loss:.4f}"
        return text

    def _spent_texts(self) -> list[str]:
        shown = []
        for name, limit in self.budget.items():
            show = RESOURCES[name].format
            source = self.sources[name]
            shown.append(f"{name} {show(self.spent[name])} of {show(limit)} ({source})")
        return shown

    def to_json(self) -> dict[str, Any]:
        """Return the figures, without the model and the rounds."""
        figures = {}
        for name, value in vars(self).items():
            if name in _NOT_FIGURES or (name in _OPTIONAL and not value):
                continue
            figures[name] = dict(value) if isinstance(value, Mapping) else value
        if self.overfitting is not None:
            figures["overfitting"] = vars(self.overfitting)
        if self.privacy is not None:
            figures["privacy"] = self.privacy.to_json()
        if self.sites:
            figures["sites"] = {name: site._asdict() for name, site in self.sites.items()}
        if self.site_report:
            report = {name: asdict(site) for name, site in self.site_report.items()}
            figures["site_report"] = report
        if self.warnings:
            figures["warnings"] = list(self.warnings)
        figures["left"] = self.left
        figures["loss"] = self.loss if math.isfinite(self.loss) else None
        figures["run"] = None if self.run is None else str(self.run)
        return figures


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM ended a run, after its results were saved.

    Args:
      result: the result up to the interruption.
    """

    def __init__(self, result: Result) -> None:
        super().__init__("the run was interrupted; its result is in `result`")
        self.result = result
