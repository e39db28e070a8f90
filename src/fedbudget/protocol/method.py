"""How a run is made, as one value: what decides in it, each of which may be the user's own object."""

from dataclasses import dataclass, field
from typing import Any, Literal

from fedbudget.arrays import Float32
from fedbudget.control import Controller
from fedbudget.errors import UserError
from fedbudget.protocol.combine import CombineRule, WeightedMean, averages
from fedbudget.protocol.fednova import DataWorkload
from fedbudget.protocol.messages import Request
from fedbudget.protocol.privacy import Noise
from fedbudget.protocol.state import AggregatorState
from fedbudget.protocol.update import Average, UpdateRule
from fedbudget.spending import CarefulSpending, SpendingRule
from fedbudget.step_size import StepSize

Delta = Literal["gradient", "parameters"]
"""What δ is estimated from."""


@dataclass(frozen=True)
class PrivateRule:
    """How rounds are private, see privacy.py.

    Args:
      nodes: how many there are, as everyone may know.
      noise: where it comes from.
      tau: the same in every round, where that is fixed.
      excess: how many times as much noise there is, by its variance, as is paid for: where nodes add it, for some may
        drop out.
      per_sample: single samples are protected, by noise of the nodes' own; then `noise` only keeps the account.
    """

    nodes: int
    noise: Noise
    tau: int | None = None
    excess: float = 1.0
    per_sample: bool = False


@dataclass(frozen=True)
class Method:
    """What decides in a run.

    Args:
      controller: which τ next.
      step_size: which η next.
      update: how the mean update moves w.
      combine: how reports become one update.
      correct_drift: whether local updates are corrected for drift, see drift.py. Where w does not become the mean,
        nodes are told both.
      partly: whether as much of the correction is used as lasts, and not all or nothing.
      one_step: whether nodes estimate β over one local update, and from the first round on, see first_step.py.
      delta: what δ is estimated from, the nodes' gradients or their parameters.
      proximal: μ of FedProx, where local updates are held near w(t₀), see proximal.py.
      spending: how the budget is spent.
      by_speed: the most updates that a node makes, where faster ones make more than others; None where all make the
        same number. See workload.py.
      by_data: who makes how many, where nodes make updates in proportion to their samples, see fednova.py.
      private: how rounds are private, where they are.
      sums_only: whether nothing of nodes but sums is ever known; then δ̂ is what nodes say of the interval before.
    """

    controller: Controller
    step_size: StepSize
    update: UpdateRule = field(default_factory=Average)
    combine: CombineRule = field(default_factory=WeightedMean)
    correct_drift: bool = False
    partly: bool = False
    one_step: bool = False
    delta: Delta = "gradient"
    proximal: float | None = None
    spending: SpendingRule = field(default_factory=CarefulSpending)
    by_speed: int | None = None
    by_data: DataWorkload | None = None
    private: PrivateRule | None = None
    sums_only: bool = False

    def __post_init__(self) -> None:
        if not self.combine.needs_reports and not isinstance(self.combine, WeightedMean):
            name = type(self.combine).__name__
            raise UserError(f"{name} must say that it needs reports: sums give the weighted mean")
        if self.correct_drift and not averages(self.combine):
            # Nodes learn c from w(t₀) and what the w_i(t) were combined to: right only where that is their mean.
            raise UserError(
                f"drift is corrected only where reports are averaged, not with {type(self.combine).__name__}: "
                "turn drift correction off"
            )
        if self.by_speed is not None and not self.correct_drift:
            raise UserError("nodes make different numbers of local updates only where drift is corrected")

    @property
    def request(self) -> Request:
        """What nodes are asked for."""
        adapts = self.step_size.adapts
        if self.private is not None:
            per_sample = self.private.per_sample  # in which an η_i by samples of one's own would tell of them
            one_step = adapts and not per_sample
            return Request(one_step=one_step, proximal=self.proximal, private=True, per_sample=per_sample)
        return Request(
            estimate=self.controller.estimates or adapts,
            gradient=self.delta == "gradient",
            curvature=adapts,
            drift=self.correct_drift,
            partly=self.correct_drift and self.partly,
            one_step=adapts and self.one_step,
            proximal=self.proximal,
        )

    @property
    def delta_from_nodes(self) -> bool:
        """Whether δ̂ is what nodes say of the interval before, and not taken from their reports of this one.

        So it is where nobody decides by it, or nothing else is known, and nodes say how far they were apart because
        drift is corrected.
        """
        told_later = self.sums_only or not self.controller.estimates
        return self.correct_drift and self.delta == "parameters" and told_later

    @property
    def needs_reports(self) -> bool:
        """Whether every report must be at hand once all have come; sums are enough otherwise, made as they come."""
        return (
            (self.private is not None and not self.sums_only)
            or self.combine.needs_reports
            or (self.request.estimate and not self.delta_from_nodes)
        )

    def state_type(self, w: Float32) -> Any:
        """The type of an aggregator's state, by which it is read from a file."""
        return AggregatorState[type(self.step_size.first()), type(self.update.first(w))]  # type: ignore[misc]
