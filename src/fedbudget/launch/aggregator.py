"""The aggregator of a run, with a ledger opened, so that a budget which cannot work is refused before it starts."""

from typing import Any

from fedbudget.arrays import Float32
from fedbudget.meters.meters import Meters
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.messages import Broadcast
from fedbudget.protocol.method import Method
from fedbudget.protocol.state import AggregatorState
from fedbudget.protocol.steps import Quantize
from fedbudget.resources.usage import RoundUsage


def build_aggregator(
    method: Method,
    meters: Meters,
    start: tuple[Float32, RoundUsage] | AggregatorState[Any, Any],
    *,
    rounds: int | None,
    quantize: Quantize | None = None,
) -> Aggregator:
    """The aggregator of a run.

    Args:
      start: w(0), [parameters], and a trial round; or the state of the run's aggregator before this one.
      rounds: the most rounds to make, besides the budget.
      quantize: what nodes will hold of a new w; the w itself when left out.
    """
    budget = meters.budget
    if isinstance(start, AggregatorState):
        return Aggregator.resume(start, method=method, budget=budget, rounds=rounds, quantize=quantize)
    w, trial = start
    expected = meters.expect(trial)
    return Aggregator(w, method=method, budget=budget, expected=expected, rounds=rounds, quantize=quantize)


def trial_broadcast(method: Method, w: Float32) -> Broadcast:
    """What a trial round begins with: what the run's first broadcast says."""
    return Broadcast.first(w, method.step_size.first().eta, method.request)
