"""Over random budgets, costs and choices of τ: what an aggregator spends beyond its budget,
and what it leaves.
"""

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float64
from fedbudget.budget.budget import Budget, Costs
from fedbudget.budget.control import ControlInputs, Decision, Reason
from fedbudget.budget.spending import PaperSpending
from fedbudget.budget.step_size import FixedStep
from fedbudget.protocol.aggregator import Aggregator, Outcome
from fedbudget.protocol.messages import Broadcast
from fedbudget.protocol.method import Method
from support.hand_made import report


@dataclass(frozen=True)
class Drawn:
    """A controller that chooses anything."""

    rng: np.random.Generator

    @property
    def estimates(self) -> bool:
        return False

    def first(self) -> Decision:
        return Decision(int(self.rng.integers(1, 30)), Reason.FIXED)

    def next(self, previous: Decision, inputs: ControlInputs) -> Decision:
        return self.first()


NAMES = ("time", "energy", "bytes")


def some_costs(rng: np.random.Generator, resources: int) -> Costs:
    """Some of them 0, as bytes per update are."""
    step, aggregation = rng.exponential(1.0, (2, resources))
    return Costs(step * (rng.random(resources) < 0.8), aggregation + 1e-3)


def a_run(rng: np.random.Generator) -> tuple[Aggregator, Costs]:
    resources = int(rng.integers(1, 4))
    expected = some_costs(rng, resources)
    limits = (
        2 * (expected.step + expected.aggregation) * (1 + rng.exponential(20.0, resources))
    )
    aggregator = Aggregator(
        np.zeros(2, np.float32),
        method=Method(Drawn(rng), FixedStep(0.1), spending=PaperSpending()),
        budget=Budget(dict(zip(NAMES, limits.tolist(), strict=False))),
        expected=expected,
        rounds=int(rng.integers(1, 20)) if rng.random() < 0.2 else None,
    )
    return aggregator, expected


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_resource_is_overspent_by_more_than_costs_rose_after_the_last_decision(
    seed: int,
) -> None:
    """A decision says that a round and the final loss after it fit; only what costs rise
    beyond that can hurt.
    """
    rng = np.random.default_rng(seed)
    aggregator, expected = a_run(rng)
    broadcast: Broadcast | Outcome = aggregator.start()
    decided, beyond = expected, np.zeros_like(expected.step)
    stopping = False
    while isinstance(broadcast, Broadcast):
        at_once = (
            broadcast.tau == 0 and not stopping
        )  # the final loss, which is evaluated even if it does not fit
        if not stopping and not at_once:
            decided, beyond = aggregator.ledger.costs, np.zeros_like(beyond)
        stopping = broadcast.stop
        actual = some_costs(rng, len(beyond))
        free = Costs(np.zeros_like(beyond), np.zeros_like(beyond))
        beyond = beyond + rise(free if at_once else decided, actual, max(1, broadcast.tau))
        broadcast = aggregator.receive(report(broadcast, 1), actual)
    limit = broadcast.ledger.budget.array
    assert (broadcast.ledger.spent <= limit + beyond + 1e-9 * limit).all()
    assert broadcast.stopped_by in (*broadcast.ledger.budget.limits, "rounds")


def rise(estimated: Costs, actual: Costs, updates: int) -> Float64:
    step, aggregation = (
        actual.step - estimated.step,
        actual.aggregation - estimated.aggregation,
    )
    return np.asarray(step * updates + aggregation)


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32 - 1))
def test_with_costs_that_stay_the_budget_is_kept_and_used_up(seed: int) -> None:
    """What is left of the resource that stopped the run would not pay for another update in
    a round of its own.
    """
    aggregator, steady = a_run(np.random.default_rng(seed))
    broadcast: Broadcast | Outcome = aggregator.start()
    while isinstance(broadcast, Broadcast):
        broadcast = aggregator.receive(report(broadcast, 1), steady)
    budget = broadcast.ledger.budget
    left = budget.array - broadcast.ledger.spent
    assert (left >= -1e-9 * budget.array).all()
    if broadcast.stopped_by != "rounds":
        binding = list(budget.limits).index(broadcast.stopped_by)
        one_more = steady.step[binding] + steady.aggregation[binding]
        assert left[binding] <= one_more + 1e-9 * budget.array[binding]
