"""An aggregator and hand-made reports, without a fleet."""

from typing import Any

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.budget.budget import Budget, Costs
from fedbudget.budget.control import Controller, FixedTau
from fedbudget.budget.spending import PaperSpending, SpendingRule
from fedbudget.budget.step_size import FixedStep, StepSize
from fedbudget.protocol.aggregator import Aggregator, Outcome, Round
from fedbudget.protocol.messages import Broadcast, Report, Request
from fedbudget.protocol.method import Method
from fedbudget.protocol.state import Quantize
from support.problems import costs

ONE = costs([1], [1])
"""A local update takes 1 s, the rest of a round 1 s."""
FIRST = Broadcast(1, np.zeros(2, np.float32), 3, 0.1, Request(), False, False)
"""The first broadcast of the aggregators of `make`."""


def make(
    seconds: float = 1000.0,
    *,
    controller: Controller | None = None,
    rounds: int | None = None,
    expected: Costs = ONE,
    step_size: StepSize | None = None,
    quantize: Quantize | None = None,
    spending: SpendingRule = PaperSpending(),  # noqa: B008 (a value)
    **method: Any,
) -> Aggregator:
    """An aggregator with two parameters, w(0) = (0, 0), and the paper's spending rule.

    Args:
      method: other fields of `Method`.
    """
    return Aggregator(
        np.zeros(2, np.float32),
        method=Method(
            controller or FixedTau(3),
            step_size or FixedStep(0.1),
            spending=spending,
            **method,
        ),
        budget=Budget({"time": seconds}),
        expected=expected,
        rounds=rounds,
        quantize=quantize,
    )


def make_started(seconds: float = 1000.0) -> Aggregator:
    """An aggregator that has sent `FIRST`."""
    aggregator = make(seconds)
    aggregator.start()
    return aggregator


def as_broadcast(answer: Broadcast | Outcome) -> Broadcast:
    assert isinstance(answer, Broadcast)
    return answer


def as_outcome(answer: Broadcast | Outcome) -> Outcome:
    assert isinstance(answer, Outcome)
    return answer


def last(aggregator: Aggregator) -> Round:
    assert aggregator.last is not None
    return aggregator.last


def w_of(number: float) -> Float32:
    return np.array([number, -number], np.float32)


def report(
    broadcast: Broadcast,
    loss: float,
    w: float = 0.0,
    *,
    best: float | None = None,
    estimates: tuple[float, float, float] | None = None,
) -> Report:
    """A report of two nodes with equal values.

    Args:
      best: F(w^f); the loss if None.
      estimates: ρ, β and δ; the nodes' gradients are (±δ, 0). NaN if they are requested
        and not given.
    """
    asked = {"rho", "gradients"} & broadcast.report_fields
    rho, beta, delta = estimates or (
        (np.nan, np.nan, np.nan if "gradients" in asked else None) if asked else [None] * 3
    )
    return Report(
        round=broadcast.round,
        nodes=np.array([0, 1]),
        sizes=np.array([10, 10]),
        losses=np.full(2, loss),
        best_losses=np.full(2, loss if best is None else best),
        w=None if broadcast.tau == 0 else np.stack([w_of(w)] * 2),
        rho=None if rho is None else np.full(2, rho),
        beta=None if beta is None else np.full(2, beta),
        gradients=None
        if delta is None
        else np.array([[delta, 0], [-delta, 0]], np.float32),
    )
