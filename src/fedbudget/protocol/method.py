"""How a run is made, as one value: what decides in it, each of which may be the user's own object."""

from dataclasses import dataclass, field
from typing import Any, Literal

from fedbudget.arrays import Float32
from fedbudget.control import Controller
from fedbudget.errors import UserError
from fedbudget.protocol.combine import CombineRule, WeightedMean
from fedbudget.protocol.messages import Request
from fedbudget.protocol.state import AggregatorState
from fedbudget.protocol.update import Average, UpdateRule
from fedbudget.spending import CarefulSpending, SpendingRule
from fedbudget.step_size import StepSize

Delta = Literal["gradient", "parameters"]
"""What δ is estimated from."""


@dataclass(frozen=True)
class Method:
    """What decides in a run.

    Args:
      controller: which τ next.
      step_size: which η next.
      update: how the mean update moves w.
      combine: how reports become one update.
      correct_drift: whether local updates are corrected for drift, see drift.py.
      delta: what δ is estimated from, the nodes' gradients or their parameters.
      spending: how the budget is spent.
    """

    controller: Controller
    step_size: StepSize
    update: UpdateRule = field(default_factory=Average)
    combine: CombineRule = field(default_factory=WeightedMean)
    correct_drift: bool = False
    delta: Delta = "gradient"
    spending: SpendingRule = field(default_factory=CarefulSpending)

    def __post_init__(self) -> None:
        if not self.combine.needs_reports and not isinstance(self.combine, WeightedMean):
            name = type(self.combine).__name__
            raise UserError(f"{name} must say that it needs reports: sums give the weighted mean")
        for rule, plain in ((self.update, Average), (self.combine, WeightedMean)):
            if self.correct_drift and not isinstance(rule, plain):
                # Nodes learn c from w(t₀) and w(t), and are right only where w(t) is the mean of all w_i(t).
                raise UserError(
                    f"drift is corrected only where w becomes the weighted mean, not with {type(rule).__name__}: "
                    "turn drift correction off"
                )

    @property
    def request(self) -> Request:
        """What nodes are asked for."""
        adapts = self.step_size.adapts
        return Request(
            estimate=self.controller.estimates or adapts,
            gradient=self.delta == "gradient",
            curvature=adapts,
            drift=self.correct_drift,
        )

    def state_type(self, w: Float32) -> Any:
        """The type of an aggregator's state, by which it is read from a file."""
        return AggregatorState[type(self.step_size.first()), type(self.update.first(w))]  # type: ignore[misc]
