"""Gradient descent in one place: the paper's baseline (a), with all samples on one node.

Rules: one step after the other, w(t) = w(t-1) - η ∇F(w(t-1)); nothing is sent, so b is 0 whatever a meter says of it,
and all that a step takes is c. The last w is the result and not w^f, because the paper spends nothing on losses here.
A step is made when what the last one cost still fits in what is left, in every resource.

An observer is told of every step as of a round with τ=1 at one node. Its loss is the by-product of the step, on the
step's own samples, and there is no other to compare it with: it is the best loss too.

Every step takes a new mini-batch. Elsewhere the first local update after an aggregation reuses one, for the sake of
the estimates; here there are no aggregations and no estimates.
"""

from dataclasses import dataclass

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.budget import Costs, Ledger
from fedbudget.control import Reason
from fedbudget.data.sampling import Sampler
from fedbudget.data.shards import Shards, Table
from fedbudget.engines.engine import Condition, Engine, Observer, Save
from fedbudget.errors import UserError
from fedbudget.meters.meters import Meters
from fedbudget.models.base import Model
from fedbudget.protocol.aggregator import Outcome, Round
from fedbudget.protocol.messages import Broadcast, Request
from fedbudget.resources.counters import ResourceCounters, Snapshot
from fedbudget.resources.time import CENTRALIZED_SGD, DGD, Gaussian, Profile
from fedbudget.resources.usage import CombinedReading, RoundUsage


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

    def run(self, *, observe: Observer, interrupted: Condition = lambda: False, save: Save = lambda: None) -> Outcome:
        now, w, ledger, shards = self.meters.counters().read, self.w, self.ledger, Shards.whole(self.table)
        sampler = Sampler(shards.size, self.batch, self.seed)
        number, stopped_by = 0, None
        mark = now()
        while stopped_by is None:
            number, began = number + 1, w
            descent = self.model.descend(began[None], shards, sampler.round(1, anew=True), self.eta)
            w = descent.w[0]
            took = now() - mark
            mark += took
            ledger = ledger.charge(1, _one_step(self.meters.read(_usage(took))))
            before = now()
            observe(*as_round(number, began, eta=self.eta, loss=float(descent.losses[0]), ledger=ledger, nodes=1))
            mark += now() - before
            if not ledger.fits(ledger.costs.step):  # which is what an evaluation costs too
                stopped_by = ledger.nearest_limit(ledger.costs.step)
            elif number == self.rounds:
                stopped_by = "rounds"
            elif interrupted():
                stopped_by = "interrupted"
        return Outcome(w, stopped_by, ledger)


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


_NOTHING = Gaussian(0.0, 0.0)


def _usage(took: Snapshot) -> RoundUsage:
    """A step as meters see it: one node, nothing sent, nothing besides the local update."""
    return RoundUsage(1, 1, 0, {name: CombinedReading(value, value, 1) for name, value in took.values.items()})


def _one_step(costs: Costs) -> Costs:
    """Without the aggregation, for which simulated time draws its least number and not 0."""
    return Costs(costs.step, np.zeros_like(costs.aggregation))
