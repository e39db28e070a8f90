"""The rules that decide in a run, as one value, and the choice between two rounds.

Each rule of a `Method` may be your own object. `choose` returns τ for the coming round, and
whether faster nodes make more updates. They do if the method allows it and time is the
scarcest resource: with the same τ for all nodes, a round takes a larger fraction of the
time limit than of any other limit (workload.py).
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.budget.control import ControlInputs, Controller, Decision, Reason
from fedbudget.budget.spending import CarefulSpending, SpendingRule
from fedbudget.budget.step_size import StepSize
from fedbudget.errors import UserError
from fedbudget.protocol.combine import CombineRule, WeightedMean, averages
from fedbudget.protocol.messages import Request
from fedbudget.protocol.privacy import Noise
from fedbudget.protocol.state import AggregatorState
from fedbudget.protocol.update import Average, UpdateRule, moves
from fedbudget.protocol.workload import LEAST_GAIN, STRETCH, DataWorkload, Workload

Delta = Literal["gradient", "parameters"]
"""The quantity that δ is estimated from."""

_State = AggregatorState[Any, Any]


@dataclass(frozen=True)
class PrivateRule:
    """Settings of private rounds (privacy.py).

    Args:
      nodes: number of nodes, a public number.
      noise: source of the noise.
      tau: local updates of every round, if fixed.
      excess: variance of the noise relative to the variance that is paid for; more than 1
        if nodes add the noise, because some may drop out.
      per_sample: whether single samples are protected, by noise of the nodes; then `noise`
        only keeps the account.
    """

    nodes: int
    noise: Noise
    tau: int | None = None
    excess: float = 1.0
    per_sample: bool = False


@dataclass(frozen=True)
class Method:
    """The rules that decide in a run.

    Args:
      controller: chooses τ.
      step_size: chooses η.
      update: moves w by the mean update.
      combine: combines reports into one update.
      correct_drift: whether local updates are corrected for drift (drift.py). If w differs
        from the mean, nodes receive both.
      partly: whether only the persistent part of the correction is applied, instead of all
        or nothing.
      one_step: whether nodes estimate β over one local update, from the first round on
        (estimates.py).
      delta: whether δ is estimated from the nodes' gradients or from their parameters.
      proximal: μ of FedProx, which keeps local updates close to w(t₀) (update.py).
      spending: plans the spending of the budget.
      by_speed: largest number of updates of a node if faster nodes make more; None if all
        make the same number (workload.py).
      by_data: workload in proportion to the nodes' samples (workload.py).
      private: settings of private rounds, if rounds are private.
      sums_only: whether the aggregator only receives sums over nodes; then nodes report δ̂
        of the previous interval.
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

    @property
    def request(self) -> Request:
        """What nodes report."""
        adapts = self.step_size.adapts
        if self.private is not None:
            # A step size of its own would disclose a node's samples.
            per_sample = self.private.per_sample
            return Request(
                one_step=adapts and not per_sample,
                proximal=self.proximal,
                private=True,
                per_sample=per_sample,
            )
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
        """Whether nodes report δ̂ of the previous interval, as part of drift correction.

        Otherwise the aggregator computes δ̂ from the reports of this interval. It cannot if
        it only receives sums, and need not if the controller does not use δ̂.
        """
        later = self.sums_only or not self.controller.estimates
        return self.correct_drift and self.delta == "parameters" and later

    @property
    def needs_reports(self) -> bool:
        """Whether the aggregator needs every report at once; otherwise sums are enough."""
        return (
            (self.private is not None and not self.sums_only)
            or self.combine.needs_reports
            or (self.request.estimate and not self.delta_from_nodes)
        )

    def state_type(self, w: Float32) -> Any:
        """Return the type of the aggregator's state, for reading it from a file."""
        return AggregatorState[type(self.step_size.first()), type(self.update.first(w))]  # type: ignore[misc]


@dataclass(frozen=True)
class Choice:
    """Choice for the coming round.

    Args:
      decision: τ and its reason; with a `Workload`, the length of the round instead of τ.
      workload: updates of each node; None if all make the same number.
    """

    decision: Decision
    workload: Workload | DataWorkload | None = None


def choose(method: Method, state: _State, *, recover: bool) -> Choice:
    """Choose τ for the coming round.

    Args:
      recover: whether the run returns to w^f.
    """
    if recover:
        return Choice(Decision(1, Reason.RECOVERY))
    if not state.step_size.settled:
        return Choice(Decision(1, Reason.START))
    costs = method.spending.costs(state.ledger)
    budget = state.ledger.budget
    inputs = ControlInputs(
        state.estimates, state.step_size.eta, costs.step, costs.aggregation, budget.array
    )
    last = state.decision
    if method.by_data is not None:
        return Choice(method.controller.next(last, inputs), method.by_data)
    if state.work is not None:
        last = replace(last, tau=max(1, round(state.work.effective)))
    decision = method.controller.next(last, inputs)
    workload = _workload(method, state)
    if workload is None or not _time_binds(decision, inputs, list(budget.limits)):
        return Choice(decision)
    return Choice(Decision(workload.length(decision.tau), decision.reason), workload)


def _workload(method: Method, state: _State) -> Workload | None:
    """Return the workload by speed; None if it is not allowed or gains too little."""
    drift = state.drift
    if method.by_speed is None or state.times is None:
        return None
    if drift is None or not drift.coming.correct:
        return None
    stretch = 1.0 if moves(method.update) else STRETCH
    workload = Workload.of(state.times, state.round + 1, method.by_speed, stretch)
    return workload if workload is not None and workload.gain >= LEAST_GAIN else None


def _time_binds(decision: Decision, inputs: ControlInputs, names: list[str]) -> bool:
    """Whether the round takes a larger fraction of the time limit than of any other."""
    fractions = (decision.tau * inputs.c + inputs.b) / inputs.budget
    return names[int(np.argmax(fractions))] == "time"
