"""Gradient descent in one place: the paper's baseline (a), with all samples on one node.

Rules: one step after the other, w(t) = w(t-1) - η ∇F(w(t-1)); nothing is sent, so b is 0 whatever a meter says of it,
and all that a step takes is c. The last w is the result and not w^f, because the paper spends nothing on losses here.
A step is made when what the last one cost still fits in what is left, in every resource.

An observer is told of every step as of a round with τ=1 at one node. Its loss is the by-product of the step, on the
step's own samples, and there is no other to compare it with: it is the best loss too.

Every step takes a new mini-batch. Elsewhere the first local update after an aggregation reuses one, for the sake of
the estimates; here there are no aggregations and no estimates.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.budget import Costs, Ledger
from fedbudget.control import Decision, Reason
from fedbudget.data.sampling import Position, Sampler
from fedbudget.data.shards import Shards, Table
from fedbudget.engines.engine import Condition, Engine, Observer, Save
from fedbudget.errors import UserError
from fedbudget.meters.meters import Meters
from fedbudget.models.base import Model
from fedbudget.protocol.aggregator import Outcome, Round
from fedbudget.protocol.messages import Broadcast, Request
from fedbudget.protocol.state import AggregatorState, Phase
from fedbudget.resources.counters import ResourceCounters, Snapshot
from fedbudget.resources.time import CENTRALIZED_SGD, DGD, Gaussian, Profile
from fedbudget.resources.usage import CombinedReading, RoundUsage
from fedbudget.step_size import StepSizeState


@dataclass(frozen=True)
class CentralizedState:
    """What the engine must know to go on: its meters, and where the mini-batches have come to."""

    engine: str
    meters: dict[str, Any]
    position: Position


@dataclass(eq=False)
class CentralizedEngine(Engine):
    """Makes steps in one place.

    Args:
      w: w(0), [parameters].
      eta: step size.
      batch: samples in a mini-batch; None for all of them.
      seed: of the mini-batches.
      ledger: from `open_ledger`.
      rounds: the most steps to make, besides the budget.
    """

    model: Model
    table: Table
    w: Float32
    eta: float
    batch: int | None
    seed: int
    meters: Meters
    ledger: Ledger
    rounds: int | None = None

    def __post_init__(self) -> None:
        self._shards = Shards.whole(self.table)
        self._sampler = Sampler(self._shards.size, self.batch, self.seed)
        self._number = 0

    def run(self, *, observe: Observer, interrupted: Condition = lambda: False, save: Save = lambda: None) -> Outcome:
        now = self.meters.counters().read
        mark = now()
        while (stopped_by := self._stopped_by(interrupted)) is None:
            self._number, began = self._number + 1, self.w
            descent = self.model.descend(began[None], self._shards, self._sampler.round(1, anew=True), self.eta)
            self.w = descent.w[0]
            took = now() - mark
            mark += took
            self.ledger = self.ledger.charge(1, _one_step(self.meters.read(_usage(took))))
            before, loss = now(), float(descent.losses[0])
            observe(*as_round(self._number, began, eta=self.eta, loss=loss, ledger=self.ledger, nodes=1))
            mark += now() - before
        save()
        return Outcome(self.w, stopped_by, self.ledger)

    def _stopped_by(self, interrupted: Condition) -> str | None:
        if not self._number:
            return None
        if not self.ledger.fits(self.ledger.costs.step):  # which is what an evaluation costs too
            return self.ledger.nearest_limit(self.ledger.costs.step)
        if self.rounds is not None and self._number >= self.rounds:
            return "rounds"
        return "interrupted" if interrupted() else None

    def state(self) -> tuple[AggregatorState[StepSizeState, None], CentralizedState]:
        meters, position = self.meters.state(), self._sampler.position
        return as_state(self._number, self.w, self.eta, self.ledger), CentralizedState("in-process", meters, position)

    def recall(self, state: AggregatorState[Any, Any], own: CentralizedState) -> None:
        """Goes on from there, before the first step."""
        self._number, self.w = state.round - 1, state.w
        self.ledger = replace(state.ledger, budget=self.ledger.budget)
        self.meters.restore(own.meters)
        self._sampler.go_to(own.position)


def profile(batch: int | None) -> Profile:
    """The simulated time of a step; the aggregation's is nothing.

    With mini-batches it is the paper's table for centralized SGD. For deterministic descent the paper has none, as it
    never simulated that. The nearest thing it measured is the local update of distributed DGD in Case 3: there too a
    node goes over all of the data, and c is what the slowest node takes, a Raspberry Pi, which is what the paper ran
    the centralized descent on. It may be somewhat too much, because c waits for the slowest of several Raspberry Pis:
    with mini-batches, where the paper has both tables, the distributed c is 1.3 times the centralized.
    """
    return CENTRALIZED_SGD if batch else Profile(DGD[3].step, _NOTHING)


def trial(
    model: Model, table: Table, w: Float32, *, batch: int | None, seed: int, counters: ResourceCounters
) -> RoundUsage:
    """What a step takes here: the quicker of two, after one that does not count because it compiles kernels."""
    shards = Shards.whole(table)
    sampler = Sampler(shards.size, batch, seed)

    def step() -> RoundUsage:
        before = counters.read()
        model.descend(w[None], shards, sampler.round(1, anew=True), 0.0)
        return _usage(counters.read() - before)

    _, *tried = (step() for _ in range(3))
    return min(tried, key=lambda usage: usage.seconds)


def open_ledger(meters: Meters, trial: RoundUsage) -> Ledger:
    """A ledger with nothing spent; refuses a budget that does not cover one step, or that no step uses up."""
    budget, expected = meters.budget, _one_step(meters.expect(trial))
    for resource, limit, cost in zip(budget.resources, budget.array, expected.step, strict=True):
        if limit < cost:
            raise UserError(
                f"budget {resource.name}={resource.format(limit)} is too small: one step of centralized gradient "
                f"descent costs about {resource.format(cost)}"
            )
    if not expected.step.any():
        raise UserError(
            f"centralized gradient descent costs no {' and no '.join(budget.limits)}, so this budget would never be "
            "spent; add a limit of time, for example time=15s"
        )
    return Ledger.open(budget, expected)


def as_round(
    number: int, w: Float32, *, eta: float, loss: float, ledger: Ledger, nodes: int
) -> tuple[Round, Broadcast]:
    """What an observer is told: a round with τ=1 that began at w, and the broadcast that it would have begun with."""
    round_ = Round(
        round=number,
        t=number,
        tau=1,
        reason=Reason.FIXED,
        eta=eta,
        loss=loss,
        best_loss=loss,
        estimates=None,
        kept=(),
        ledger=ledger,
        costs=ledger.costs,
        nodes=nodes,
        left_out=(),
    )
    return round_, Broadcast(number, w, tau=1, eta=eta, request=Request(), best=False, stop=False)


def as_state(number: int, w: Float32, eta: float, ledger: Ledger) -> AggregatorState[StepSizeState, None]:
    """What a checkpoint holds after so many rounds: where an aggregator would be that is about to begin the next."""
    return AggregatorState(
        phase=Phase.ROUND,
        request=Request(),
        w=w,
        best=w,
        decision=Decision(1, Reason.FIXED),
        step_size=StepSizeState(eta),
        update=None,
        ledger=ledger,
        drift=None,
        round=number + 1,
        tau=1,
        t=number,
    )


_NOTHING = Gaussian(0.0, 0.0)


def _usage(took: Snapshot) -> RoundUsage:
    """A step as meters see it: one node, nothing sent, nothing besides the local update."""
    return RoundUsage(1, 1, 0, {name: CombinedReading(value, value, 1) for name, value in took.values.items()})


def _one_step(costs: Costs) -> Costs:
    """Without the aggregation, for which simulated time draws its least number and not 0."""
    return Costs(costs.step, np.zeros_like(costs.aggregation))
