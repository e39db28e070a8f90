"""Gradient descent in one place: the paper's baseline (a), with all samples on one node.

Rules: one step after the other, w(t) = w(t-1) - η ∇F(w(t-1)); nothing is sent, so b is 0 whatever a meter says of it,
and all that a step takes is c. The last w is the result and not w^f, because the paper spends nothing on losses here.
A step is made when what the last one cost still fits in what is left, in every resource.

An observer is told of every step as of a round with τ=1 at one node. Its loss is the by-product of the step, on the
step's own samples, and there is no other to compare it with: it is the best loss too.

Every step takes a new mini-batch. Elsewhere the first local update after an aggregation reuses one, for the sake of
the estimates; here there are no aggregations and no estimates.

Asynchronous gradient descent: the paper's baseline in which no node waits for another. Time is simulated.

Every node goes round by itself: it pulls the newest w, computes the gradient of its own F_i there, and pushes it. When
the push of node i arrives, the aggregator makes the step that eqs. (4) and (5) give with τ=1, as far as node i's part
of it goes, and the node pulls again at that instant:

    w ← w - η (D_i / D) ∇F_i(w as node i pulled it)

The gradient is stale: other pushes have moved w in the meantime. N pushes, one of each node, make up one step of η, as
in a synchronous round with τ=1; but a fast node pushes more often than a slow one, so its data weigh more.

How long a cycle takes, from pull to push:

    (c + b) / speed_i        c and b drawn anew for every cycle, the c first

- A synchronous round with τ=1 takes c + b because it waits for its slowest node; so a cycle of that node takes c + b,
  and its speed is 1. A node with speed 4 takes a quarter.
- The whole b is a node's own, and its speed counts there too. An N-th of b for each node, as of a channel that N share,
  would be a second gain over synchronous descent, unless cycles also queued for that channel. And w is a few kilobytes,
  so it is assumed here that an aggregation is mostly handling at the nodes; the paper does not say what b is made of.
- This choice matters. With b the same for all nodes, or with a queue, b (more than c in every profile, and ten times c
  with mini-batches) would bring the nodes close to one pace, and descent would hardly be biased; the paper saw fast
  nodes make many more steps than slow ones.

Rules: pushes are taken in the order of their times, and those of the same time in node order; every draw comes from
the one time meter, in the order of pulls; so a run repeats to the bit. A push that would come after the end of the
budget is not made, except that the first one always is. The last w is the result: nobody knows F(w) here, to choose by.

An observer is told of N pushes as of one round with τ=1, so that t counts local updates per node, on average, as it
does elsewhere; the last round may have fewer. The round's loss is Σ D_i F_i / Σ D_i over its pushes, each F_i on the
mini-batch of its gradient and at the w that the node had pulled. The loss of one w over all nodes is not known to the
aggregator. Nodes overlap, so a round's time cannot be split into c and b: all of it is c.

Mini-batches follow the common rule: the same seed at all nodes, and every node at its own position in its stream. Each
gradient takes a new one, as in centralized.py; with one node the two are the same descent, to the bit.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.budget.budget import Costs, Ledger
from fedbudget.budget.control import Decision, Reason
from fedbudget.budget.step_size import StepSizeState
from fedbudget.data.sampling import Position, Sampler
from fedbudget.data.shards import Shards, Table
from fedbudget.engines.engine import Condition, Engine, Observer, Save
from fedbudget.errors import UserError
from fedbudget.models.base import Model
from fedbudget.protocol.aggregator import Outcome, Round
from fedbudget.protocol.messages import Broadcast, Request
from fedbudget.protocol.state import AggregatorState, Phase
from fedbudget.resources.counters import ResourceCounters, Snapshot
from fedbudget.resources.kinds import CENTRALIZED_SGD, DGD, Gaussian, Profile
from fedbudget.resources.meters import Meters
from fedbudget.resources.resource import CombinedReading, Cost, RoundUsage, TimeMeter
from fedbudget.resources.speeds import require_speeds


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

    def run(
        self,
        *,
        observe: Observer,
        interrupted: Condition = lambda: False,
        save: Save = lambda: None,
    ) -> Outcome:
        now = self.meters.counters().read
        mark = now()
        while (stopped_by := self._stopped_by(interrupted)) is None:
            self._number, began = self._number + 1, self.w
            descent = self.model.descend(
                began[None], self._shards, self._sampler.round(1, anew=True), self.eta
            )
            self.w = descent.w[0]
            took = now() - mark
            mark += took
            self.ledger = self.ledger.charge(1, _one_step(self.meters.read(_usage(took))))
            before = now()
            loss = float(descent.losses[0])
            observe(
                *as_round(
                    self._number,
                    began,
                    eta=self.eta,
                    loss=loss,
                    ledger=self.ledger,
                    nodes=1,
                )
            )
            mark += now() - before
        save()
        return Outcome(self.w, stopped_by, self.ledger)

    def _stopped_by(self, interrupted: Condition) -> str | None:
        if not self._number:
            return None
        if not self.ledger.fits(
            self.ledger.costs.step
        ):  # which is what an evaluation costs too
            return self.ledger.nearest_limit(self.ledger.costs.step)
        if self.rounds is not None and self._number >= self.rounds:
            return "rounds"
        return "interrupted" if interrupted() else None

    def state(self) -> tuple[AggregatorState[StepSizeState, None], CentralizedState]:
        meters = self.meters.state()
        position = self._sampler.position
        return as_state(self._number, self.w, self.eta, self.ledger), CentralizedState(
            "in-process", meters, position
        )

    def recall(self, state: AggregatorState[Any, Any], own: CentralizedState) -> None:
        """Goes on from there, before the first step."""
        self._number = state.round - 1
        self.w = state.w
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
    model: Model,
    table: Table,
    w: Float32,
    *,
    batch: int | None,
    seed: int,
    counters: ResourceCounters,
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


def open_centralized_ledger(meters: Meters, trial: RoundUsage) -> Ledger:
    """A ledger with nothing spent; refuses a budget that does not cover one step, or that no step uses up."""
    budget = meters.budget
    expected = _one_step(meters.expect(trial))
    for resource, limit, cost in zip(
        budget.resources, budget.array, expected.step, strict=True
    ):
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
        expected=None,
        nodes=nodes,
        left_out=(),
    )
    return round_, Broadcast(
        number, w, tau=1, eta=eta, request=Request(), best=False, stop=False
    )


def as_state(
    number: int, w: Float32, eta: float, ledger: Ledger
) -> AggregatorState[StepSizeState, None]:
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
    return RoundUsage(
        1,
        1,
        0,
        {name: CombinedReading(value, value, 1) for name, value in took.values.items()},
    )


def _one_step(costs: Costs) -> Costs:
    """Without the aggregation, for which simulated time draws its least number and not 0."""
    return Costs(costs.step, np.zeros_like(costs.aggregation))


FAST = 4.0
SLOW = 1.0


@dataclass(frozen=True)
class AsynchronousState:
    """What the engine must know to go on.

    Args:
      pulled: the w that each node pulled last, [parameters].
      positions: of the nodes' mini-batches.
      time: of the last push.
      coming: the time of each node's next push, and the node, in the heap's order; None before the first.
    """

    engine: str
    meters: dict[str, Any]
    pulled: tuple[Float32, ...]
    positions: tuple[Position, ...]
    time: float
    coming: tuple[tuple[float, int], ...] | None


@dataclass(eq=False)
class AsynchronousEngine(Engine):
    """Takes pushes as they arrive.

    Args:
      w: w(0), [parameters].
      eta: step size.
      batch: samples in a mini-batch; None for whole shards.
      seed: of the mini-batches; the same for every node.
      meters: their time is drawn from, and has to be simulated.
      speeds: of each node; 1 is the slowest node of those that the meters' profile was measured at.
      ledger: from `open_ledger`.
      rounds: the most rounds of N pushes to make, besides the budget.
    """

    model: Model
    shards: Shards
    w: Float32
    eta: float
    batch: int | None
    seed: int
    meters: Meters
    speeds: Sequence[float]
    ledger: Ledger
    rounds: int | None = None

    def __post_init__(self) -> None:
        self._number, self._members = 0, self._nodes()
        self._arrivals: _Arrivals | None = None

    def run(
        self,
        *,
        observe: Observer,
        interrupted: Condition = lambda: False,
        save: Save = lambda: None,
    ) -> Outcome:
        nodes = self._members
        arrivals = self._arrivals = self._arrivals or _Arrivals.first(
            self.meters.time, self.speeds
        )
        while (stopped_by := self._stopped_by(arrivals, interrupted)) is None:
            self._number, began = self._number + 1, self.w
            pushes: list[tuple[_Node, float]] = []
            while not pushes or (
                len(pushes) < len(nodes) and _fits(self.ledger, arrivals.next_time)
            ):
                node = nodes[arrivals.take()]
                self.w, loss = node.push(self.w)
                pushes.append((node, loss))
            ledger = self.ledger = self.ledger.charge(1, _until(arrivals.time, self.ledger))
            number = self._number
            loss = _mean_loss(pushes)
            took_part = len({id(node) for node, _ in pushes})
            observe(
                *as_round(
                    number, began, eta=self.eta, loss=loss, ledger=ledger, nodes=took_part
                )
            )
        save()
        return Outcome(self.w, stopped_by, self.ledger)

    def _stopped_by(self, arrivals: "_Arrivals", interrupted: Condition) -> str | None:
        if not self._number:
            return None
        if not _fits(self.ledger, arrivals.next_time):
            return "time"
        if self.rounds is not None and self._number >= self.rounds:
            return "rounds"
        return "interrupted" if interrupted() else None

    def state(self) -> tuple[AggregatorState[StepSizeState, None], AsynchronousState]:
        arrivals = self._arrivals
        nodes = self._members
        own = AsynchronousState(
            "in-process",
            self.meters.state(),
            tuple(node.pulled for node in nodes),
            tuple(node.sampler.position for node in nodes),
            0.0 if arrivals is None else arrivals.time,
            None if arrivals is None else tuple(arrivals.coming),
        )
        return as_state(self._number, self.w, self.eta, self.ledger), own

    def recall(self, state: AggregatorState[Any, Any], own: AsynchronousState) -> None:
        """Goes on from there, before the first push."""
        self._number = state.round - 1
        self.w = state.w
        self.ledger = replace(state.ledger, budget=self.ledger.budget)
        self.meters.restore(own.meters)
        for node, pulled, position in zip(
            self._members, own.pulled, own.positions, strict=True
        ):
            node.pulled = pulled
            node.sampler.go_to(position)
        if own.coming is not None:
            self._arrivals = _Arrivals(
                self.meters.time, self.speeds, own.time, list(own.coming)
            )

    def _nodes(self) -> "list[_Node]":
        shards = self.shards
        w = self.w
        steps = [
            np.float32(self.eta * share)
            for share in (shards.size / shards.size.sum()).tolist()
        ]
        alone = [shards.only([node]) for node in range(len(shards))]
        samplers = [Sampler(shard.size, self.batch, self.seed) for shard in alone]
        return [
            _Node(self.model, *parts, w)
            for parts in zip(alone, samplers, steps, strict=True)
        ]


def default_speeds(nodes: int) -> tuple[float, ...]:
    """Two of every five nodes fast, as the paper's two laptops and three Raspberry Pis.

    >>> default_speeds(6)
    (4.0, 4.0, 1.0, 1.0, 1.0, 4.0)
    """
    return tuple(FAST if node % 5 < 2 else SLOW for node in range(nodes))


def open_asynchronous_ledger(
    meters: Meters, shards: Shards, speeds: Sequence[float]
) -> Ledger:
    """A ledger with nothing spent; refuses what cannot be simulated, and a budget that is too short for one push."""
    budget = meters.budget
    if list(budget.limits) != ["time"]:
        others = ", ".join(name for name in budget.limits if name != "time")
        raise UserError(
            f"asynchronous gradient descent knows a budget of time only, not of {others}; use time=15s"
        )
    if meters.time.source != "simulated":
        raise UserError(
            "asynchronous gradient descent is simulated: its costs cannot be measured; use simulated costs"
        )
    require_speeds(speeds, len(shards))
    first = _cycle(meters.time.expect(_CYCLE), max(speeds))
    if budget.limits["time"] < first:
        (time,) = budget.resources
        raise UserError(
            f"budget time={time.format(budget.limits['time'])} is too small: the fastest node's first gradient arrives "
            f"after about {time.format(first)}"
        )
    return Ledger.open(budget, _seconds(first))


class _Arrivals:
    """The times at which pushes arrive. All nodes pull at time 0, and each again as soon as its push was taken."""

    def __init__(
        self,
        meter: TimeMeter,
        speeds: Sequence[float],
        time: float,
        coming: list[tuple[float, int]],
    ) -> None:
        self.time = time
        self.coming = coming
        self._meter = meter
        self._speeds = speeds

    @classmethod
    def first(cls, meter: TimeMeter, speeds: Sequence[float]) -> "_Arrivals":
        self = cls(meter, speeds, 0.0, [])
        self.coming = [(self._draw(node), node) for node in range(len(speeds))]
        heapq.heapify(self.coming)
        return self

    @property
    def next_time(self) -> float:
        return self.coming[0][0]

    def take(self) -> int:
        """The node whose push arrives next; it is on its way again when this returns."""
        self.time, node = self.coming[0]
        heapq.heapreplace(self.coming, (self.time + self._draw(node), node))
        return node

    def _draw(self, node: int) -> float:
        return _cycle(self._meter.read(_CYCLE), self._speeds[node])


@dataclass(eq=False)
class _Node:
    """A node with its shard, its place in the stream of mini-batches, its η D_i / D, and the w that it pulled last."""

    model: Model
    shard: Shards
    sampler: Sampler
    step_size: np.float32
    pulled: Float32

    @property
    def size(self) -> int:
        return int(self.shard.size[0])

    def push(self, w: Float32) -> tuple[Float32, float]:
        """Its gradient reaches the aggregator, where w has come to be this; gives the next w, and pulls it."""
        descent = self.model.descend(
            self.pulled[None], self.shard, self.sampler.round(1, anew=True), 0.0
        )
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # a w that diverges shows in the losses
            self.pulled = w - self.step_size * descent.gradients[0]
        return self.pulled, float(descent.losses[0])


def _mean_loss(pushes: Sequence[tuple[_Node, float]]) -> float:
    """Σ D_i F_i / Σ D_i; of one push its own F_i, to the bit."""
    if len(pushes) == 1:
        return pushes[0][1]
    return sum(node.size * loss for node, loss in pushes) / sum(
        node.size for node, _ in pushes
    )


_CYCLE = RoundUsage(updates=1, nodes=1, wire_bytes=0, readings={})
"""What a meter of simulated time is asked about: one local update and one exchange."""


def _cycle(drawn: Cost, speed: float) -> float:
    return (drawn.step + drawn.aggregation) / speed


def _fits(ledger: Ledger, time: float) -> bool:
    """Is this time within the budget? As the ledger sees it, which forgives what sums of costs are off by."""
    return ledger.fits(_until(time, ledger).step)


def _until(time: float, ledger: Ledger) -> Costs:
    """From what was spent to this time; rounding may have brought the ledger just past it."""
    return _seconds(max(0.0, time - float(ledger.spent[0])))


def _seconds(seconds: float) -> Costs:
    return Costs(np.array([seconds]), np.zeros(1))
