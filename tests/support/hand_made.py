"""An aggregator and hand-made reports, without a fleet."""

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float32, Float64
from fedbudget.budget.budget import Budget, Costs
from fedbudget.budget.control import Controller, FixedTau
from fedbudget.budget.spending import PaperSpending, SpendingRule
from fedbudget.budget.step_size import FixedStep, StepSize
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.feature import Quantize, report_layout
from fedbudget.protocol.messages import (
    Broadcast,
    FinalRound,
    LossReport,
    Report,
    TrainReport,
    TrainRound,
)
from fedbudget.protocol.method import Method
from fedbudget.protocol.state import Outcome, Round
from support.problems import costs

ONE = costs([1], [1])
"""A local update takes 1 s, the rest of a round 1 s."""
FIRST = TrainRound(
    round=1,
    w=np.zeros(2, np.float32),
    report=report_layout((), True),
    tau=3,
    eta=0.1,
    effective=3,
)
"""The first broadcast of the aggregators of `make`."""

R = TypeVar("R", bound=Report)


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


def as_train(answer: Broadcast | Outcome) -> TrainRound:
    assert isinstance(answer, TrainRound)
    return answer


def as_final(answer: Broadcast | Outcome) -> FinalRound:
    assert isinstance(answer, FinalRound)
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
) -> LossReport:
    """A report of two nodes with equal values, with all that the broadcast asks for.

    Optional numbers are NaN, and other numbers of features 0.

    Args:
      best: F(w^f); the loss if None.
      estimates: ρ, β and δ; the nodes' gradients are (±δ, 0). NaN if they are requested
        and not given.
    """
    rho, beta, delta = estimates or (np.nan, np.nan, np.nan)
    known = {
        "losses": loss,
        "best_losses": loss if best is None else best,
        "rho": rho,
        "beta": beta,
    }
    numbers: dict[str, Float64] = {
        name: np.full(2, known.get(name, 0.0)) for name in broadcast.report.numbers
    }
    vectors: dict[str, Float32] = {
        "w": np.stack([w_of(w)] * 2),
        "gradients": np.array([[delta, 0], [-delta, 0]], np.float32),
    }
    kind = TrainReport if isinstance(broadcast, TrainRound) else LossReport
    return kind(
        round=broadcast.round,
        nodes=np.array([0, 1]),
        sizes=np.array([10, 10]),
        numbers=numbers,
        vectors={name: vectors[name] for name in broadcast.report.vectors},
    )


def with_values(report: R, **values: NDArray[Any]) -> R:
    """Replace or add arrays of a report; names that are no vectors there are numbers."""
    vectors = {name: values.pop(name, array) for name, array in report.vectors.items()}
    return replace(report, numbers={**report.numbers, **values}, vectors=vectors)


def without(report: R, name: str) -> R:
    """Remove an array from a report."""
    return replace(
        report,
        numbers={each: array for each, array in report.numbers.items() if each != name},
        vectors={each: array for each, array in report.vectors.items() if each != name},
    )


def train_report(
    w: Float32,
    *,
    sizes: NDArray[Any] | None = None,
    nodes: NDArray[Any] | None = None,
    round: int = 1,
    **numbers: Float64,
) -> TrainReport:
    """A report of any nodes; losses are 1 by default.

    Args:
      w: w_i, [n, parameters].
      sizes: D_i, 1 by default.
      nodes: numbers of the nodes, 0..n-1 by default.
      numbers: numbers by name.
    """
    ones = np.ones(len(w))
    return TrainReport(
        round=round,
        nodes=np.arange(len(w)) if nodes is None else nodes,
        sizes=np.ones(len(w), np.int64) if sizes is None else sizes,
        numbers={"losses": ones, "best_losses": ones, **numbers},
        vectors={"w": w},
    )
