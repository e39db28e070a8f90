"""The paper's baselines: centralized gradient descent, and asynchronous gradient descent.

**Centralized** (baseline (a)): all samples on one node.

- Each step is w(t) = w(t-1) - η ∇F(w(t-1)) on a new mini-batch. Mini-batch reuse serves
  the estimates, and this baseline has none.
- Nothing is sent: b is 0 and a step costs c. The result is the last w, not w^f, because
  the paper spends nothing on losses here.
- A step is made if the cost of the last one fits in the rest of the budget, in every
  resource.
- An observer receives every step as a round with τ=1 at one node. Its loss is a
  by-product of the step, on the step's samples, and also counts as the best loss.

**Asynchronous**: no node waits for another. Time is simulated.

Every node repeats a cycle: it pulls the newest w, computes the gradient of its F_i and
pushes it. When the push of node i arrives, the aggregator applies node i's part of the step
of eqs. (4) and (5) with τ=1, and the node pulls again at once:

    w ← w - η (D_i / D) ∇F_i(w that node i pulled)

The gradient is stale: other pushes moved w in the meantime. One push of each of N nodes
amounts to one step of η, as in a synchronous round with τ=1. A fast node pushes more often
than a slow one, so its data weigh more.

A cycle, from pull to push, takes

    (c + b) / speed_i        new draws for every cycle, c first

- A synchronous round with τ=1 takes c + b because it waits for its slowest node. So a
  cycle of that node takes c + b, at speed 1. A node with speed 4 takes a quarter.
- Each cycle contains a whole b, and the node's speed applies to it. With an N-th of b, as
  for a channel that N nodes share, asynchronous descent would gain a second advantage
  unless cycles queued for the channel. w has a few kilobytes, so an aggregation is assumed
  to be mostly work at the nodes; the paper does not define the parts of b.
- This choice matters. b exceeds c in every profile, ten times with mini-batches. With the
  same b for all nodes, or with a queue, nodes would run at nearly the same pace and descent
  would hardly be biased. The paper observed that fast nodes make many more steps.

Rules of the asynchronous baseline:

- Pushes are applied in order of their times, and in node order at the same time. Every
  draw comes from one time meter, in the order of pulls. A run repeats bit for bit.
- A push after the end of the budget is not made, except the very first one. The result is
  the last w, because F(w) is unknown.
- An observer receives N pushes as one round with τ=1, so t counts local updates per node
  on average. The last round may have fewer pushes. The round's loss is Σ D_i F_i / Σ D_i
  over its pushes, each F_i on the mini-batch and at the w of its gradient.
- Nodes overlap, so a round's time cannot be split into c and b: all of it is c.
- All nodes use the same sampling seed, each at its own position. With one node the two
  baselines are the same descent, bit for bit.
"""

import heapq
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.budget.budget import Costs, Ledger
from fedbudget.budget.control import Reason
from fedbudget.data.sampling import Sampler, SamplerState
from fedbudget.data.shards import Shards, Table
from fedbudget.engines.engine import (
    After,
    Condition,
    Engine,
    Observer,
    Pay,
    Save,
    no_payment,
)
from fedbudget.errors import UserError
from fedbudget.models.base import Model
from fedbudget.protocol.state import Outcome, Phase, Round
from fedbudget.resources.counters import ResourceCounters
from fedbudget.resources.kinds import CENTRALIZED_SGD, DGD, Gaussian, Profile
from fedbudget.resources.meters import Meters
from fedbudget.resources.resource import Cost, TimeMeter, Usage
from fedbudget.resources.speeds import require_speeds

FAST = 4.0
SLOW = 1.0
_CYCLE = Usage({})
"""One local update and one exchange, for the meter of simulated time."""


@dataclass(frozen=True)
class BaselineState:
    """A baseline between two rounds, in a checkpoint.

    Args:
      round: number of the coming round.
      w: [parameters].
      ledger: what was spent.
      meters: state of the meters.
      positions: of all nodes in their mini-batch streams.
      pulled: the w that each asynchronous node pulled last, [parameters].
      time: of the last push.
      coming: (time, node) of each node's next push, in heap order; None before the first.
    """

    phase: ClassVar[Phase] = Phase.ROUND  # a larger budget always buys more rounds
    round: int
    w: Float32
    ledger: Ledger
    meters: dict[str, Any]
    positions: tuple[SamplerState, ...]
    pulled: tuple[Float32, ...] = ()
    time: float = 0.0
    coming: tuple[tuple[float, int], ...] | None = None

    def require_possible(self) -> None:
        """Raise ValueError for a state that no run can reach, as of a corrupt file."""
        if not 1 <= self.round < 2**63:
            raise ValueError(f"round is {self.round}")
        if self.w.ndim != 1 or not self.w.size or not np.isfinite(self.w).all():
            raise ValueError(f"w has shape {self.w.shape}, or is not finite")
        self.ledger.require_possible()


@dataclass(eq=False, kw_only=True)
class BaselineEngine(Engine):
    """Gradient descent without an aggregator.

    Args:
      w: w(0), [parameters].
      eta: step size.
      batch: samples in a mini-batch; None for all samples of a node.
      seed: random seed of the mini-batches.
      ledger: with nothing spent.
      rounds: maximum number of rounds, in addition to the budget.
    """

    model: Model
    w: Float32
    eta: float
    batch: int | None
    seed: int
    meters: Meters
    ledger: Ledger
    rounds: int | None = None

    def __post_init__(self) -> None:
        self._number = 0
        self._counters = self.meters.counters()

    @abstractmethod
    def _round(self) -> tuple[float, int]:
        """Make a round: move w and charge the ledger.

        Returns: the round's loss, and the number of nodes in it.
        """

    @abstractmethod
    def _spent(self) -> str | None:
        """Name of the resource that does not cover another round, if any."""

    @abstractmethod
    def _samplers(self) -> Sequence[Sampler]:
        """Mini-batch streams of all nodes."""

    def run(
        self,
        *,
        observe: Observer,
        interrupted: Condition = lambda: False,
        save: Save = lambda: None,
        pay: Pay = no_payment,
        after: After = lambda outcome: None,
    ) -> Outcome:
        now = self._counters.read
        self._mark = now()  # of the last round's end, without the time of observers
        while (stopped_by := self._stopped_by(interrupted)) is None:
            start = self.w
            self._number += 1
            loss, nodes = self._round()
            paused = now()
            observe(self._record(loss, nodes), start)
            self._mark += now() - paused
        save()
        outcome = Outcome(self.w, stopped_by, self.ledger)
        after(outcome)
        return outcome

    def _stopped_by(self, interrupted: Condition) -> str | None:
        if not self._number:
            return None
        if (resource := self._spent()) is not None:
            return resource
        if self.rounds is not None and self._number >= self.rounds:
            return "rounds"
        return "interrupted" if interrupted() else None

    def _record(self, loss: float, nodes: int) -> Round:
        """Record of a round with τ=1."""
        return Round(
            round=self._number,
            t=self._number,
            tau=1,
            reason=Reason.FIXED,
            eta=self.eta,
            loss=loss,
            best_loss=loss,
            estimates=None,
            kept=(),
            ledger=self.ledger,
            expected=None,
            nodes=nodes,
            left_out=(),
        )

    def state(self) -> tuple[BaselineState, dict[str, str]]:
        positions = tuple(sampler.position for sampler in self._samplers())
        state = BaselineState(
            self._number + 1, self.w, self.ledger, self.meters.state(), positions
        )
        return state, {"engine": "in-process"}

    def recall(self, state: BaselineState) -> None:
        """Restore the state of a checkpoint, before the first round."""
        self._number = state.round - 1
        self.w = state.w
        self.ledger = replace(state.ledger, budget=self.ledger.budget)
        self.meters.restore(state.meters)
        for sampler, position in zip(self._samplers(), state.positions, strict=True):
            sampler.restore(position)


@dataclass(eq=False, kw_only=True)
class CentralizedEngine(BaselineEngine):
    """Centralized gradient descent; a round is a step.

    Args:
      table: all samples.
    """

    table: Table

    def __post_init__(self) -> None:
        super().__post_init__()
        self._shards = Shards.whole(self.table)
        self._sampler = Sampler(self._shards.size, self.batch, self.seed)

    def _round(self) -> tuple[float, int]:
        batches = self._sampler.round(1, fresh=True)
        descent = self.model.descend(self.w[None], self._shards, batches, self.eta)
        self.w = descent.w[0]
        elapsed = self._counters.read() - self._mark
        self._mark += elapsed
        usage = Usage(self._counters.readings(elapsed, elapsed, 1))
        costs = _step_only(self.meters.read(usage))
        self.ledger = self.ledger.charge(1, costs)
        return float(descent.losses[0]), 1

    def _spent(self) -> str | None:
        step = self.ledger.costs.step  # an evaluation costs the same
        return None if self.ledger.fits(step) else self.ledger.nearest_limit(step)

    def _samplers(self) -> Sequence[Sampler]:
        return [self._sampler]


def profile(batch: int | None) -> Profile:
    """Simulated time of a centralized step; an aggregation takes none.

    With mini-batches, this is the paper's table for centralized SGD. The paper did not
    simulate deterministic descent. The nearest measurement is the local update of
    distributed DGD in Case 3: each node processes all data, and c is the time of the
    slowest node, a Raspberry Pi, the machine of the paper's centralized descent. It may be
    too long, because c waits for the slowest of several Raspberry Pis. With mini-batches
    the paper has both tables, and the distributed c is 1.3 times the centralized one.
    """
    return CENTRALIZED_SGD if batch else Profile(DGD[3].step, Gaussian(0.0, 0.0))


def trial(
    model: Model,
    table: Table,
    w: Float32,
    *,
    batch: int | None,
    seed: int,
    counters: ResourceCounters,
) -> Usage:
    """Measure a step: the quicker of two, after a first one that compiles kernels."""
    shards = Shards.whole(table)
    sampler = Sampler(shards.size, batch, seed)

    def step() -> Usage:
        before = counters.read()
        model.descend(w[None], shards, sampler.round(1, fresh=True), 0.0)
        elapsed = counters.read() - before
        return Usage(counters.readings(elapsed, elapsed, 1))

    step()
    return min(step(), step(), key=lambda usage: usage.seconds)


def open_centralized_ledger(meters: Meters, trial: Usage) -> Ledger:
    """Open an empty ledger.

    Raises:
      UserError: if the budget does not cover one step, or if a step costs nothing.
    """
    budget = meters.budget
    expected = _step_only(meters.expect(trial))
    limits = zip(budget.resources, budget.array, expected.step, strict=True)
    for resource, limit, cost in limits:
        if limit < cost:
            raise UserError(
                f"budget {resource.name}={resource.format(limit)} is too small: one step "
                f"of centralized gradient descent costs about {resource.format(cost)}"
            )
    if not expected.step.any():
        raise UserError(
            f"centralized gradient descent costs no {' and no '.join(budget.limits)}, so "
            "this budget would never be spent; add a time limit, for example time=15s"
        )
    return Ledger.open(budget, expected)


def _step_only(costs: Costs) -> Costs:
    """Costs without the aggregation; simulated time draws a tiny one."""
    return Costs(costs.step, np.zeros_like(costs.aggregation))


@dataclass(eq=False, kw_only=True)
class AsynchronousEngine(BaselineEngine):
    """Asynchronous gradient descent: applies pushes as they arrive; a round is N of them.

    Args:
      speeds: of each node; 1 is the slowest node of the meters' profile.
    """

    shards: Shards
    speeds: Sequence[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._nodes = self._build_nodes()
        self._arrivals: _Arrivals | None = None

    def _round(self) -> tuple[float, int]:
        if self._arrivals is None:
            self._arrivals = _Arrivals.first(self.meters.time, self.speeds)
        arrivals = self._arrivals
        pushes: list[tuple[_Node, float]] = []
        while not pushes or (
            len(pushes) < len(self._nodes) and _fits(self.ledger, arrivals.next_time)
        ):
            node = self._nodes[arrivals.take()]
            self.w, loss = node.push(self.w)
            pushes.append((node, loss))
        self.ledger = self.ledger.charge(1, _until(arrivals.time, self.ledger))
        return _mean_loss(pushes), len({id(node) for node, _ in pushes})

    def _spent(self) -> str | None:
        assert self._arrivals is not None
        return None if _fits(self.ledger, self._arrivals.next_time) else "time"

    def _samplers(self) -> Sequence[Sampler]:
        return [node.sampler for node in self._nodes]

    def state(self) -> tuple[BaselineState, dict[str, str]]:
        state, own = super().state()
        state = replace(state, pulled=tuple(node.pulled for node in self._nodes))
        arrivals = self._arrivals
        if arrivals is not None:
            state = replace(state, time=arrivals.time, coming=tuple(arrivals.coming))
        return state, own

    def recall(self, state: BaselineState) -> None:
        super().recall(state)
        for node, pulled in zip(self._nodes, state.pulled, strict=True):
            node.pulled = pulled
        if state.coming is not None:
            self._arrivals = _Arrivals(
                self.meters.time, self.speeds, state.time, list(state.coming)
            )

    def _build_nodes(self) -> "list[_Node]":
        nodes = []
        for number, share in enumerate(self.shards.size / self.shards.size.sum()):
            shard = self.shards.only([number])
            sampler = Sampler(shard.size, self.batch, self.seed)
            step_size = np.float32(self.eta * float(share))
            nodes.append(_Node(self.model, shard, sampler, step_size, self.w))
        return nodes


def default_speeds(nodes: int) -> tuple[float, ...]:
    """Speeds with two fast nodes in every five: the paper's two laptops and three Pis.

    >>> default_speeds(6)
    (4.0, 4.0, 1.0, 1.0, 1.0, 4.0)
    """
    return tuple(FAST if node % 5 < 2 else SLOW for node in range(nodes))


def open_asynchronous_ledger(
    meters: Meters, shards: Shards, speeds: Sequence[float]
) -> Ledger:
    """Open an empty ledger.

    Raises:
      UserError: if costs are not simulated, if the budget is not of time alone, or if it
        is too small for one push.
    """
    budget = meters.budget
    if list(budget.limits) != ["time"]:
        others = ", ".join(name for name in budget.limits if name != "time")
        raise UserError(
            f"asynchronous gradient descent supports a budget of time only, not of "
            f"{others}; use for example time=15s"
        )
    if meters.time.source != "simulated":
        raise UserError(
            "asynchronous gradient descent is simulated: its costs cannot be measured; use "
            "simulated costs"
        )
    require_speeds(speeds, len(shards))
    first = _cycle(meters.time.expect(_CYCLE), max(speeds))
    if budget.limits["time"] < first:
        (time,) = budget.resources
        raise UserError(
            f"budget time={time.format(budget.limits['time'])} is too small: the first "
            f"gradient of the fastest node arrives after about {time.format(first)}"
        )
    return Ledger.open(budget, _seconds(first))


class _Arrivals:
    """Arrival times of pushes. All nodes pull at time 0, and again after each push."""

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
        """Return the node whose push arrives next, and schedule its following push."""
        self.time, node = self.coming[0]
        heapq.heapreplace(self.coming, (self.time + self._draw(node), node))
        return node

    def _draw(self, node: int) -> float:
        return _cycle(self._meter.read(_CYCLE), self._speeds[node])


@dataclass(eq=False)
class _Node:
    """A node: shard, sampler, η D_i / D as `step_size`, and the w that it pulled last."""

    model: Model
    shard: Shards
    sampler: Sampler
    step_size: np.float32
    pulled: Float32

    @property
    def size(self) -> int:
        return int(self.shard.size[0])

    def push(self, w: Float32) -> tuple[Float32, float]:
        """Apply the node's gradient to w, and pull the result.

        Returns: the new w, and the loss F_i at the w of the gradient.
        """
        descent = self.model.descend(
            self.pulled[None], self.shard, self.sampler.round(1, fresh=True), 0.0
        )
        # A diverging w shows in the losses.
        with np.errstate(over="ignore", invalid="ignore"):
            self.pulled = w - self.step_size * descent.gradients[0]
        return self.pulled, float(descent.losses[0])


def _mean_loss(pushes: Sequence[tuple[_Node, float]]) -> float:
    """Σ D_i F_i / Σ D_i; for one push exactly its F_i."""
    if len(pushes) == 1:
        return pushes[0][1]
    samples = sum(node.size for node, _ in pushes)
    return sum(node.size * loss for node, loss in pushes) / samples


def _cycle(drawn: Cost, speed: float) -> float:
    return (drawn.step + drawn.aggregation) / speed


def _fits(ledger: Ledger, time: float) -> bool:
    """Whether a time is within the budget, with the ledger's tolerance for rounding."""
    return ledger.fits(_until(time, ledger).step)


def _until(time: float, ledger: Ledger) -> Costs:
    """Costs from the spent time to `time`; rounding may have passed it already."""
    return _seconds(max(0.0, time - float(ledger.spent[0])))


def _seconds(seconds: float) -> Costs:
    return Costs(np.array([seconds]), np.zeros(1))
