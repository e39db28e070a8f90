"""A node's work, without the network: what it does with a broadcast, what it remembers, what it measures.

A node remembers how its fleet stood after each of its last rounds, because the aggregator may not have counted them:
its report came too late, or the aggregator crashed and goes on from an earlier round. With every broadcast it is told
after which round its memory must stand. It goes back to there, as if it had never heard of what came later, and a round
that is made again is the same to the bit.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.data.shards import Table
from fedbudget.engines import in_process
from fedbudget.engines.remote.messages import Answer, Hello, RoundRequest, Welcome
from fedbudget.engines.remote.node_data import NodeData, describe_own
from fedbudget.engines.remote.node_limits import NodeLimits, PrivacyAccount
from fedbudget.engines.remote.task import Task, rounds_ahead
from fedbudget.errors import explained
from fedbudget.evaluation.metrics import Tally
from fedbudget.models.base import Model, require_fit
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, LocalError, PeerError, Report
from fedbudget.protocol.state import FleetState
from fedbudget.resources import RESOURCES, TIME
from fedbudget.resources.counters import ResourceCounters, Snapshot
from fedbudget.resources.resource import NodeCosts, Reader, Reading, Resource


@dataclass(frozen=True)
class _Standing:
    """A fleet as it stands after a round, and the w of that round's broadcast."""

    round: int
    fleet: Fleet
    w: Float32 | None


class Worker:
    """What a node does.

    Args:
      node_data: its samples.
      device: where PyTorch computes.
      pace: how many times as long as it could a local update takes, to stand for a slower machine.
      model: the node's own, or the name of the only one that it takes; None for whichever the aggregator names.
      readers: of counters, by resource, in place of those that the resource finds by itself; None for not at all.
      limits: the node's own, of what it will do.
      account: what it has told of itself in private runs, where it has a limit for that.
    """

    def __init__(
        self,
        node_data: NodeData,
        *,
        device: str = "auto",
        pace: float = 1.0,
        model: Model | str | None = None,
        readers: Mapping[str, Reader | None] | None = None,
        limits: NodeLimits | None = None,
        account: PrivacyAccount | None = None,
    ) -> None:
        self.limits = limits or NodeLimits()
        self.account = account
        self.node_data = node_data
        self.run = ""
        self.made = 0  # rounds, counted by the aggregator or not
        self.busy = False  # at work on one, or on a trial
        self._device = device
        self._pace = pace
        self._model = model
        self._readers = readers
        self._resources: tuple[Resource, ...] = (TIME,)
        self._counters = ResourceCounters({})
        self._last_report: Snapshot | None = None  # the counters when it was made
        self._task: Task | None = None
        self._new: Fleet | None = None  # as it stands before its first round
        self._test: Table | None = None  # what it evaluates on, if anything
        self._standings: list[_Standing] = []
        self.trial_tally: Tally | None = (
            None  # what test samples said in the trial, if there are any
        )

    @property
    def rounds(self) -> tuple[int, ...]:
        """After which our memory may stand."""
        return tuple(standing.round for standing in self._standings)

    def hello(self, instance: str) -> Hello:
        """What it says first.

        Args:
          instance: of the process.
        """
        return Hello(
            instance,
            self.node_data.samples(),
            self.run,
            self.rounds,
            describe_own(self._model),
        )

    def start(self, welcome: Welcome) -> NodeCosts:
        """Takes the task, and makes a trial round and, where it has test samples, an evaluation: that also compiles
        what there is to compile.
        """
        with self._working():
            return self._start(welcome)

    def _start(self, welcome: Welcome) -> NodeCosts:
        fleet = self.accept(welcome).fork()
        task = welcome.task
        first = Broadcast.first(
            np.asarray(fleet.model.initial(task.seed)), 1e-3, task.request
        )
        counters = ResourceCounters.of(
            each for each in self._resources if not each.machine_wide
        )
        require_fit(
            fleet.model,
            self.node_data.dataset.name,
            fleet.shards.table,
            task.batch,
            self._test,
        )
        failed = f"{fleet.model.name} cannot train on {self.node_data.dataset.name}"
        with (
            nullcontext()
            if self._model is None or isinstance(self._model, str)
            else explained(failed)
        ):
            costs = in_process.trial([fleet], first, counters)
            tallies, evaluation = [
                self._evaluate(fleet.model, [first.w], counters) for _ in range(2)
            ][-1]
        self.trial_tally = tallies[0] if tallies else None
        seconds = costs.readings[TIME.name]
        slower = self._pace * seconds.step
        slowed = replace(seconds, step=slower, whole=seconds.whole - seconds.step + slower)
        return replace(
            costs, readings={**costs.readings, TIME.name: slowed}, evaluation=evaluation
        )

    def accept(self, welcome: Welcome) -> Fleet:
        """Takes the task; gives the fleet as it stands before its first round."""
        if len(welcome.numbers) != len(self.node_data.rows):
            raise PeerError(
                f"numbers for {len(welcome.numbers)} nodes, where there are {len(self.node_data.rows)}"
            )
        if welcome.run != self.run or welcome.task != self._task:
            self.limits.require_task(welcome.task, min(map(len, self.node_data.rows)))
            if self.account is not None:
                self.account.require_private(welcome.task)
            self._new = self.node_data.fleet(
                welcome.task, welcome.numbers, device=self._device, own_model=self._model
            )
            self._test = self.node_data.test_table(welcome.task.samples, self._new.model)
            self._standings = []
            # Counters are read of these resources, as far as they are known and can be read here.
            names = dict.fromkeys((TIME.name, *welcome.task.readings))
            self._resources = tuple(RESOURCES[name] for name in names if name in RESOURCES)
            self._counters = ResourceCounters.of(self._resources, self._readers)
            self._last_report = None
            self.run = welcome.run
            self._task = welcome.task
        assert self._new is not None
        return self._new

    def memories(self, last: int) -> dict[int, FleetState]:
        """How the fleet stood after each of the last rounds, for a process to come."""
        return {
            standing.round: standing.fleet.memory() for standing in self._standings[-last:]
        }

    def recall(self, memories: Mapping[int, FleetState]) -> None:
        """Goes on with the task that was taken, from the memories of an earlier process."""
        self._standings = []
        for number in sorted(memories):
            memory = memories[number]
            fleet = self._standing(0).fleet.fork()
            fleet.recall(memory)
            self._standings.append(
                _Standing(memory.broadcast.round, fleet, memory.broadcast.w)
            )

    def warm_up(self, request: RoundRequest) -> None:
        """Makes one update that does not count, so that what a new process has to load or compile for it is there.

        The time of the updates that count would be wrong otherwise, where every round has a new process.
        """
        fleet = self._standing(request.base_round).fleet.fork()
        fleet.receive(
            replace(request.broadcast, tau=min(1, request.broadcast.tau), work=None)
        )
        fleet.update()

    def w_after(self, base_round: int) -> Float32 | None:
        """The w of the broadcast after which our memory is to stand."""
        return self._standing(base_round).w

    def answer(self, request: RoundRequest) -> Answer:
        """A round: the report, and what it cost."""
        if self._task is None:
            raise LocalError("an answer comes after a welcome")
        self.limits.require_round(request.broadcast)
        if self.account is not None:
            self.account.pay(self.run, request.broadcast)
        past = self._standing(request.base_round)
        back = (
            rounds_ahead(self._task.parameters) + 2
        )  # the most to go back: what is not on disk, one before, this one
        self._standings = [
            standing for standing in self._standings if standing.round <= past.round
        ][-back:]
        fleet = past.fleet.fork()
        with self._working():
            report, costs = self._round(fleet, request.broadcast)
        tallies: tuple[Tally, ...] = ()
        if asked := request.broadcast.tallies:
            points = [request.broadcast.w, fleet.memory().best][:asked]
            tallies, evaluation = self._evaluate(fleet.model, points, self._counters)
            costs = replace(costs, evaluation=evaluation)
            self._last_report = self._counters.read()
        self.made += 1
        if not rounds_ahead(self._task.parameters):
            fleet.compact()
        self._standings.append(
            _Standing(request.broadcast.round, fleet, request.broadcast.w)
        )
        return Answer(report, costs, tallies)

    def encode(self, report: Report) -> bytes | memoryview:
        """The vectors of the last report as they are sent."""
        if not self._standings or self._standings[-1].round != report.round:
            raise LocalError("what is encoded is the last report")
        return self._standings[-1].fleet.sent.encoded(report)

    @contextmanager
    def _working(self) -> Iterator[None]:
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def _standing(self, number: int) -> _Standing:
        if number == 0:
            if self._new is None:
                raise LocalError("a round comes after a welcome")
            return _Standing(0, self._new, None)
        for standing in self._standings:
            if standing.round == number:
                return standing
        raise PeerError(
            f"our memory cannot stand after round {number}, only after {list(self.rounds)}"
        )

    def _round(self, fleet: Fleet, broadcast: Broadcast) -> tuple[Report, NodeCosts]:
        now = self._counters.read
        updates = max(1, broadcast.tau)
        began = self._began(now())
        fleet.receive(broadcast)
        updating = now()
        if self._pace > 1:
            self._update_slowly(fleet)
        else:
            fleet.update()
        took = now() - updating
        report = fleet.report()
        self._last_report = now()
        readings = self._counters.readings(took, self._last_report - began, updates)
        return report, NodeCosts(readings, len(report.nodes))

    def _update_slowly(self, fleet: Fleet) -> None:
        """Waits in proportion to what it computes: what other processes take of this machine is not multiplied."""
        computing = time.thread_time()
        fleet.update()
        time.sleep((self._pace - 1) * (time.thread_time() - computing))

    def _evaluate(
        self, model: Model, points: Sequence[Float32], counters: ResourceCounters
    ) -> tuple[tuple[Tally, ...], dict[str, Reading]]:
        """What the test samples say of each w, and what it took to find out; nothing where there are none."""
        if self._test is None or self._task is None:
            return (), {}
        began = counters.read()
        units = self._task.samples.standardization
        tallies: list[Tally] = []
        for at, w in enumerate(points):
            same = [
                tallies[other] for other in range(at) if np.array_equal(points[other], w)
            ]
            tallies.append(same[0] if same else Tally.of(model, w, self._test, units))
        took = counters.read() - began
        return tuple(tallies), counters.readings(took - took, took, 1)

    def _began(self, now: Snapshot) -> Snapshot:
        """When the round began, for every counter: those of the machine ran on while the node waited for others."""
        last = now if self._last_report is None else self._last_report
        waited = [
            each.name
            for each in self._resources
            if each.machine_wide and each.name in now.values
        ]
        return Snapshot(
            {
                **now.values,
                **{name: last[name] for name in waited if not math.isnan(last[name])},
            }
        )
