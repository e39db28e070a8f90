"""The rules that decide in a run, as one value.

Each rule of a `Method` may be your own object. Its features follow from the rules; further
features of your own come last.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from fedbudget.budget.control import Controller
from fedbudget.budget.spending import CarefulSpending, SpendingRule
from fedbudget.budget.step_size import StepSize
from fedbudget.errors import UserError
from fedbudget.protocol.combine import CombineRule, WeightedMean, averages
from fedbudget.protocol.features.drift import DriftCorrection
from fedbudget.protocol.features.dropout import Dropout
from fedbudget.protocol.features.estimates import EstimateSlopes
from fedbudget.protocol.features.feature import Feature, Noise, defining
from fedbudget.protocol.features.local_step import LocalStep, StepLengths
from fedbudget.protocol.features.momentum import Momentum
from fedbudget.protocol.features.proximal import Proximal
from fedbudget.protocol.features.validation import Validation
from fedbudget.protocol.features.workload import STRETCH, DataWorkload, SpeedWorkload
from fedbudget.protocol.update import Average, FedExP, UpdateRule, moves

Delta = Literal["gradient", "parameters"]
"""The quantity that δ is estimated from."""


@dataclass(frozen=True)
class PrivateRule:
    """Settings of private rounds (features/node_privacy.py, features/sample_privacy.py).

    Args:
      nodes: number of nodes, a public number.
      noise: source of the aggregator's noise. If nodes add noise, it only decides whether
        payments are recorded.
      feature: what is protected: `NodePrivacy` or `SamplePrivacy`.
      tau: local updates of every round, if fixed.
      excess: variance of the noise relative to the variance that is paid for; more than 1
        if nodes add the noise, because some may drop out.
    """

    nodes: int
    noise: Noise
    feature: Feature
    tau: int | None = None
    excess: float = 1.0


@dataclass(frozen=True)
class Method:
    """The rules that decide in a run.

    Args:
      controller: chooses τ.
      step_size: chooses η.
      update: moves w by the mean update.
      combine: combines reports into one update.
      correct_drift: whether local updates are corrected for drift.
      partly: whether only the persistent part of the correction is applied, instead of all
        or nothing.
      one_step: whether nodes estimate β over one local update, from the first round on.
      delta: whether δ is estimated from the nodes' gradients or from their parameters.
      proximal: μ of FedProx, which keeps local updates close to w(t₀).
      local_step: how nodes choose the step sizes of their local updates; None if all use η.
      spending: plans the spending of the budget.
      by_speed: largest number of updates of a node if faster nodes make more; None if all
        make the same number.
      by_data: D_i of all nodes, if their workload is in proportion to it.
      validation: how nodes validate w; None if they do not.
      private: settings of private rounds, if rounds are private.
      sums_only: whether the aggregator only receives sums over nodes; then nodes report δ̂
        of the previous interval.
      newton: the feature of Newton's method, if the run solves the model
        (features/newton.py).
      solver: why the run solves or descends, as a sentence; empty if nothing was chosen.
      extra: further features, after the built-in ones.
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
    local_step: LocalStep | None = None
    spending: SpendingRule = field(default_factory=CarefulSpending)
    by_speed: int | None = None
    by_data: tuple[int, ...] | None = None
    validation: Validation | None = None
    private: PrivateRule | None = None
    sums_only: bool = False
    newton: Feature | None = None
    solver: str = ""
    extra: tuple[Feature, ...] = ()

    def __post_init__(self) -> None:
        name = type(self.combine).__name__
        if not self.combine.needs_reports and not isinstance(self.combine, WeightedMean):
            raise UserError(
                f"{name} must set `needs_reports` to True: sums give the weighted mean"
            )
        if self.correct_drift and not averages(self.combine):
            # Nodes compute c from w(t₀) and the combined w_i(t), which must be their mean.
            raise UserError(
                "drift correction requires that reports are averaged, which "
                f"{name} does not: turn drift correction off"
            )
        if self.by_speed is not None and not self.correct_drift:
            raise UserError(
                "different numbers of local updates for each node require drift correction"
            )
        self._require_own_steps()
        names = [feature.name for feature in self.features]
        if len(set(names)) < len(names):
            raise UserError(f"two features have the same name: {', '.join(names)}")

    def _require_own_steps(self) -> None:
        if self.local_step is None:
            return
        features = self.features
        changed = defining(features, "shift") + defining(features, "pull")
        if changed or self.step_size.adapts or self.by_data is not None:
            raise UserError(
                f"local updates with the step sizes of {self.local_step.name} need plain "
                "gradients and a fixed step size: without drift correction, momentum, "
                "`proximal` and other workloads"
            )

    @cached_property
    def features(self) -> tuple[Feature, ...]:
        """All features of the run, in the order of their calls."""
        features: list[Feature] = []
        if self.private is not None:
            features.append(self.private.feature)
        elif self.newton is not None:
            features.append(self.newton)
        else:
            features += self._training_features()
        if self.proximal is not None:
            features.append(Proximal(self.proximal))
        if self.validation is not None:
            features.append(self.validation)
            if self.validation.second_stage:
                features.append(Dropout())
        return (*features, *self.extra)

    def _training_features(self) -> list[Feature]:
        features: list[Feature] = []
        adapts = self.step_size.adapts
        if self.correct_drift:
            features.append(DriftCorrection(self.partly))
        if self.controller.estimates or adapts:
            features.append(
                EstimateSlopes(
                    gradient=self.delta == "gradient",
                    from_nodes=self.delta_from_nodes,
                    curvature=adapts,
                    one_step=adapts and self.one_step,
                )
            )
        if isinstance(self.update, FedExP):
            features.append(StepLengths())
        if self.local_step is not None:
            features.append(self.local_step)
        if moves(self.update):
            features.append(Momentum(self.update.carried))
        if self.by_data is not None:
            features.append(DataWorkload(self.by_data))
        elif self.by_speed is not None:
            # An update rule with momentum finds the right length of a step itself.
            stretch = 1.0 if moves(self.update) else STRETCH
            features.append(SpeedWorkload(self.by_speed, stretch))
        return features

    @property
    def validates(self) -> bool:
        """Whether nodes hold out rows to choose the model."""
        return self.validation is not None and self.private is None

    @property
    def searches_step(self) -> bool:
        """Whether nodes use their own step sizes in the first round."""
        return self.private is None and self.step_size.adapts and self.one_step

    @property
    def delta_from_nodes(self) -> bool:
        """Whether nodes report δ̂ of the previous interval, as part of drift correction.

        Otherwise the aggregator computes δ̂ from the reports of this interval. It cannot if
        it only receives sums, and need not if the controller does not use δ̂.
        """
        later = self.sums_only or not self.controller.estimates
        return self.correct_drift and self.delta == "parameters" and later

    @property
    def needs_reports(self) -> bool:
        """Whether the aggregator needs every report at once; otherwise sums are enough."""
        if self.private is not None:
            return not self.sums_only
        estimates = self.controller.estimates or self.step_size.adapts
        return self.combine.needs_reports or (estimates and not self.delta_from_nodes)
