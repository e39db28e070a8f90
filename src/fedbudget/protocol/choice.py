"""What the aggregator chooses between two rounds: τ by the controller, and whether faster nodes make more updates.

By speed is chosen where it may be, and where time is what there is least of: where with the same τ for all nodes it is
the time of a round that is the largest share of its limit (workload.py).
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedbudget.control import ControlInputs, Decision, Reason
from fedbudget.protocol.fednova import DataWorkload
from fedbudget.protocol.method import Method
from fedbudget.protocol.state import AggregatorState
from fedbudget.protocol.update import moves
from fedbudget.protocol.workload import LEAST_GAIN, STRETCH, Workload

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
    costs, budget = method.spending.costs(state.ledger), state.ledger.budget
    inputs = ControlInputs(state.estimates, state.step_size.eta, costs.step, costs.aggregation, budget.array)
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
    if method.by_speed is None or state.times is None or drift is None or not drift.coming.correct:
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
    return state.decision if state.work is None else replace(state.decision, tau=max(1, round(state.work.effective)))
