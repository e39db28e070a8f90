"""How a run is made, as one value: what decides in it, each of which may be the user's own object.

What the aggregator chooses between two rounds: τ by the controller, and whether faster nodes make more updates.

By speed is chosen where it may be, and where time is what there is least of: where with the same τ for all nodes it is
the time of a round that is the largest share of its limit (workload.py).
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
            raise UserError(
                f"{name} must say that it needs reports: sums give the weighted mean"
            )
        if self.correct_drift and not averages(self.combine):
            # Nodes learn c from w(t₀) and what the w_i(t) were combined to: right only where that is their mean.
            raise UserError(
                f"drift is corrected only where reports are averaged, not with {type(self.combine).__name__}: "
                "turn drift correction off"
            )
        if self.by_speed is not None and not self.correct_drift:
            raise UserError(
                "nodes make different numbers of local updates only where drift is corrected"
            )

    @property
    def request(self) -> Request:
        """What nodes are asked for."""
        adapts = self.step_size.adapts
        if self.private is not None:
            per_sample = (
                self.private.per_sample
            )  # in which an η_i by samples of one's own would tell of them
            one_step = adapts and not per_sample
            return Request(
                one_step=one_step,
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


_State = AggregatorState[Any, Any]


@dataclass(frozen=True)
class Choice:
    """For the coming round.

    Args:
      decision: τ, or k where nodes share the round by their speeds, and why.
      workload: how they share it; None where all make the same number of updates.
    """

    decision: Decision
    workload: Workload | DataWorkload | None = None


def choose(method: Method, state: _State, *, recover: bool) -> Choice:
    """The next τ.

    Args:
      recover: whether the run goes back to w^f.
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
    if method.by_data is not None:
        return Choice(method.controller.next(state.decision, inputs), method.by_data)
    decision = method.controller.next(_last(state), inputs)
    workload = _workload(method, state)
    if workload is None or not _time_binds(decision, inputs, list(budget.limits)):
        return Choice(decision)
    return Choice(Decision(workload.length(decision.tau), decision.reason), workload)


def _workload(method: Method, state: _State) -> Workload | None:
    """How nodes would share the coming round; None where they may not, or where it would gain nothing."""
    drift = state.drift
    if (
        method.by_speed is None
        or state.times is None
        or drift is None
        or not drift.coming.correct
    ):
        return None
    stretch = 1.0 if moves(method.update) else STRETCH
    workload = Workload.of(state.times, state.round + 1, method.by_speed, stretch)
    return workload if workload is not None and workload.gain >= LEAST_GAIN else None


def _time_binds(decision: Decision, inputs: ControlInputs, names: list[str]) -> bool:
    """Whether the time of such a round is a larger share of its limit than of any other resource."""
    shares = (decision.tau * inputs.c + inputs.b) / inputs.budget
    return names[int(np.argmax(shares))] == "time"


def _last(state: _State) -> Decision:
    """The last decision, as of the effective node."""
    return (
        state.decision
        if state.work is None
        else replace(state.decision, tau=max(1, round(state.work.effective)))
    )
