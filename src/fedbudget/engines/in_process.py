"""Nodes of a simulation that attack it, so that people can see what a combination rule (protocol/combine.py) survives.

    sign-flip    the update goes the other way
    scale        it is ten times as long
    noise        in place of it there is noise, ten times as long
    label-flip   the node's samples have wrong labels, and it trains on them in good faith

The attackers are the nodes of the highest numbers. What they report besides w_i is as of an honest node.

Simulated nodes: the engine for them, wherever they are, and fleets in this process, a function call away.

The clock stands still while a round is observed, and runs at all other times; only the local updates count as such.

A group of nodes of a simulated run, in a process of their own, that answer together, with sums where these suffice.

A group that was lost can be made again: it follows from its shards and the broadcasts it has heard, and a copy of its
memory saves hearing all of them again.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np

from fedbudget.arrays import Flags, Float32, Float64, Int64
from fedbudget.data.shards import Shards
from fedbudget.engines.engine import Condition, Engine, Observer, Save
from fedbudget.errors import UserError
from fedbudget.protocol.aggregator import Aggregator, Outcome
from fedbudget.protocol.compression import Kind, saved_bytes
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import VECTORS, Broadcast, LocalError, Report
from fedbudget.protocol.state import AggregatorState, FleetState
from fedbudget.protocol.sums import Reports, ReportsHere, Sums, Vectors, branches
from fedbudget.protocol.workload import NodeTimes
from fedbudget.randomness import Stream, generator
from fedbudget.resources import round_usage
from fedbudget.resources.counters import ResourceCounters, Snapshot
from fedbudget.resources.meters import Meters
from fedbudget.resources.resource import NodeCosts, RoundUsage

_TIMES = np.float32(10.0)


@dataclass(frozen=True)
class Attack:
    """What some nodes do to a run.

    Args:
      name: as above.
      first: the number of the first node that attacks; all after it do too.
      seed: of the run.
    """

    name: str
    first: int
    seed: int

    def on(self, report: Report, broadcast: Broadcast) -> Report:
        """A round's report, with what attackers say."""
        attackers = report.nodes >= self.first
        if report.w is None or self.name == "label-flip" or not attackers.any():
            return report
        updates_alone = (
            broadcast.private is not None and not broadcast.private.per_sample
        )  # are sent, and not w_i
        start = np.zeros_like(broadcast.w) if updates_alone else broadcast.w
        w = report.w.copy()
        update = report.w[attackers] - start
        if self.name == "noise":
            noise = generator(self.seed, Stream.ATTACK, broadcast.round).standard_normal(
                update.shape, np.float32
            )
            sizes = [
                np.linalg.norm(each, axis=1, keepdims=True) for each in (update, noise)
            ]
            update = noise * sizes[0] / sizes[1]
        w[attackers] = start + (-update if self.name == "sign-flip" else _TIMES * update)
        return replace(report, w=w)


def with_flipped_labels(shards: Shards, first: int) -> Shards:
    """The same shards, of which those from this node on have wrong labels: the last class for the first, and so on.

    Samples may be of several nodes, so that attackers get copies of theirs.
    """
    table = shards.table
    if table.store is not None or table.y.min() == table.y.max():
        raise UserError(
            "`attack` label-flip needs arrays of samples with something to predict"
        )
    rows = [shards.rows_of(node) for node in range(len(shards))]
    copied = np.concatenate(rows[first:])
    flipped = table.y.min() + table.y.max() - table.y[copied]
    wider = replace(
        table,
        x=np.concatenate([table.x, table.x[copied]]),
        y=np.concatenate([table.y, flipped]),
    )
    at = len(table)
    for node in range(first, len(rows)):
        rows[node] = np.arange(at, at + len(rows[node]), dtype=np.int32)
        at += len(rows[node])
    return Shards.of(wider, rows)


@dataclass(frozen=True)
class NodeGroupState:
    """Fleets of a group between two rounds.

    Args:
      fleets: None of one that has not been in a round.
      met: which have.
      before: which were in the last.
    """

    fleets: tuple[FleetState | None, ...]
    met: Flags
    before: Flags


@dataclass(frozen=True)
class SimulationState:
    """What a simulation must know to go on, besides the aggregator's state.

    Args:
      engine: by which it was made.
      meters: of the run.
      present: where the draws of who takes part have come to; None where all do.
      groups: of all nodes, in node order; None where that would be too much.
    """

    engine: str
    meters: dict[str, Any]
    present: dict[str, Any] | None
    groups: tuple[NodeGroupState, ...] | None


class SimulatedNodes(Protocol):
    """The nodes of a run, wherever they are."""

    engine: ClassVar[str]

    @property
    def took_part(self) -> Int64:
        """The numbers of nodes that were in the last round, rising."""

    def answer(self, broadcast: Broadcast) -> tuple[Report | Reports, Sequence[NodeCosts]]:
        """One round, by those who take part in it, and what it took at each, or at each group of them."""

    def memory(self) -> tuple[NodeGroupState, ...]:
        """All that is needed to go on from here."""

    def recall(self, groups: Sequence[NodeGroupState]) -> None:
        """Goes on from there, before the first round."""


@dataclass(eq=False)
class SimulationEngine(Engine):
    """Carries messages between an aggregator and simulated nodes.

    Args:
      present: who takes part, where not all do.
      remembers: whether checkpoints hold what nodes remember; if not, nodes begin anew when the run goes on.
      compress: how vectors would be sent.
    """

    aggregator: Aggregator
    nodes: SimulatedNodes
    meters: Meters
    present: Iterator[Flags] | None = None
    remembers: bool = True
    compress: Kind = "none"

    def run(
        self,
        *,
        observe: Observer,
        interrupted: Condition = lambda: False,
        save: Save = lambda: None,
    ) -> Outcome:
        aggregator = self.aggregator
        meters = self.meters
        now = self.meters.counters().read
        message = aggregator.pending or aggregator.outcome or aggregator.start()
        mark = now()
        while isinstance(message, Broadcast):
            broadcast = (
                message
                if self.compress == "none"
                else replace(message, compress=self.compress)
            )
            report, took = self.nodes.answer(broadcast)
            whole = now() - mark
            mark += whole
            costs = meters.read(self._usage(broadcast, took, whole))
            message = aggregator.receive(report, costs, times=self._times(broadcast))
            assert aggregator.last is not None
            paused = now()
            observe(aggregator.last, broadcast)
            mark += now() - paused
            if interrupted() and isinstance(message, Broadcast):
                save()
                return aggregator.interrupt()
        save()
        return message

    def _usage(
        self, broadcast: Broadcast, took: Sequence[NodeCosts], whole: Snapshot
    ) -> RoundUsage:
        """What a round took, with the time of the slowest node."""
        nodes = self.nodes.took_part
        tau = max(1, broadcast.tau)
        slowness = self.meters.slowness(nodes, broadcast.updates(nodes), tau)
        return replace(round_usage(took, updates=tau, own=whole), slowness=slowness)

    def _times(self, broadcast: Broadcast) -> NodeTimes | None:
        nodes = self.nodes.took_part
        times = self.meters.step_times(nodes) if broadcast.tau > 0 else None
        return None if times is None else NodeTimes(nodes, times)

    def state(self) -> tuple[AggregatorState[Any, Any], SimulationState]:
        present = self.present
        groups = self.nodes.memory() if self.remembers else None
        drawn = present.state() if isinstance(present, Attendance) else None
        return self.aggregator.state, SimulationState(
            self.nodes.engine, self.meters.state(), drawn, groups
        )

    def recall(self, state: SimulationState) -> None:
        """Goes on from there, before the first round."""
        self.meters.restore(state.meters)
        if isinstance(self.present, Attendance) and state.present is not None:
            self.present.restore(state.present)
        if state.groups is not None:
            self.nodes.recall(state.groups)


class InProcessEngine(SimulationEngine):
    """Aggregator and fleets in this process.

    Args:
      present: which fleets take part, round after round; all in each when not given.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        fleets: Sequence[Fleet],
        meters: Meters,
        present: Iterator[Flags] | None = None,
        *,
        remembers: bool = True,
        attack: Attack | None = None,
        compress: Kind = "none",
    ) -> None:
        nodes = InProcessNodes(meters.counters(), fleets, present, attack)
        super().__init__(aggregator, nodes, meters, present, remembers, compress)


class InProcessNodes:
    """Fleets in this process.

    Args:
      counters: of this process.
      present: which fleets take part, round after round, where not all do.
      attack: what some nodes do to the run.
    """

    engine: ClassVar[str] = "in-process"

    def __init__(
        self,
        counters: ResourceCounters,
        fleets: Sequence[Fleet],
        present: Iterator[Flags] | None = None,
        attack: Attack | None = None,
    ) -> None:
        self._counters = counters
        self._attack = attack
        self._fleets = fleets
        self._present = present
        self._all = np.ones(len(fleets), dtype=bool)
        self._nodes = np.array([len(fleet.numbers) for fleet in fleets])
        self.took_part: Int64 = np.empty(0, np.int64)
        self.met = self._before = np.zeros(
            len(fleets), dtype=bool
        )  # those in the round before know what happened

    def answer(self, broadcast: Broadcast) -> tuple[Report, Sequence[NodeCosts]]:
        report, costs = self.answer_with(
            broadcast, self._all if self._present is None else next(self._present)
        )
        assert report is not None
        return report if self._attack is None else self._attack.on(report, broadcast), [
            costs
        ]

    def answer_with(
        self, broadcast: Broadcast, here: Flags | None
    ) -> tuple[Report | None, NodeCosts]:
        """One round; nothing when nobody is here.

        Args:
          here: which fleets are; all when None.
        """
        now, here = self._counters.read, self._all if here is None else here
        fleets = (
            self._fleets if here.all() else list(itertools.compress(self._fleets, here))
        )
        before, self._before, self.met = self._before, here, self.met | here
        if not fleets:
            return None, NodeCosts({}, nodes=0)
        began = now()
        for fleet in fleets:
            fleet.receive(broadcast.to(fleet.numbers))
        updating = now()
        for fleet in fleets:
            fleet.update()
        took = now() - updating
        report = Report.merge([fleet.report() for fleet in fleets])
        self.took_part = report.nodes
        readings = self._counters.readings(took, now() - began, max(1, broadcast.tau))
        wire_bytes = _wire_bytes(
            broadcast, report, informed=int(self._nodes[before & here].sum())
        )
        return report, NodeCosts(readings, len(report.nodes), wire_bytes, here=True)

    def memory(self) -> tuple[NodeGroupState]:
        fleets = [
            fleet.memory().for_disk if met else None
            for fleet, met in zip(self._fleets, self.met, strict=True)
        ]
        return (NodeGroupState(tuple(fleets), self.met, self._before),)

    def recall(self, groups: Sequence[NodeGroupState]) -> None:
        """Goes on from here as those would that `memory` was taken from, before the first round."""
        (memory,) = groups
        if (
            not len(self._fleets)
            == len(memory.fleets)
            == len(memory.met)
            == len(memory.before)
        ):
            raise LocalError(
                f"a memory of {len(memory.fleets)} fleets is not of {len(self._fleets)}"
            )
        for fleet, known in zip(self._fleets, memory.fleets, strict=True):
            if known is not None:
                fleet.recall(known)
        self.met = memory.met
        self._before = memory.before


def _wire_bytes(broadcast: Broadcast, report: Report, *, informed: int) -> int:
    """What a round would take on the wire.

    Args:
      informed: how many of the nodes were in the round before, and need not be told what happened in it.
    """
    nodes = len(report.nodes)
    count = broadcast.w.size
    kind = broadcast.compress or "none"
    told = informed * broadcast.wire_bytes
    if informed < nodes:
        told += (nodes - informed) * broadcast.wire_bytes_with_catch_up
    vectors = sum(getattr(report, name) is not None for name in VECTORS)
    saved = saved_bytes(
        kind, nodes * vectors + informed * (1 + (broadcast.mean is not None)), count
    )
    return told + report.wire_bytes - saved


class Attendance(Iterator[Flags]):
    """Who takes part, round after round: each with this chance, but never nobody.

    Args:
      number: of nodes.
      chance: of each, in every round.
    """

    def __init__(self, number: int, chance: float, rng: np.random.Generator) -> None:
        self._number = number
        self._chance = chance
        self._rng = rng

    def __next__(self) -> Flags:
        while True:
            here = self._rng.random(self._number) < self._chance
            if here.any():
                return here

    def state(self) -> dict[str, Any]:
        """Where the draws have come to, as plain JSON."""
        return dict(self._rng.bit_generator.state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from where `state` was taken."""
        self._rng.bit_generator.state = dict(state)


def trial(
    fleets: Sequence[Fleet], first: Broadcast, counters: ResourceCounters
) -> NodeCosts:
    """Rounds on fleets that are thrown away afterwards, to see what one takes, and to have made all that a run needs.

    The first one made does not count, because it compiles kernels and has nothing to estimate from; of two more the
    quicker one does, so that a slow moment of the machine is not taken for the cost of a round. A final round, which
    only evaluates, has kernels of its own. Where no node's loss is a number, no round would change that: the samples or
    the model are refused.

    Args:
      first: what a run's first broadcast says, but for τ and stop.
      counters: of this process.
    """
    nodes = InProcessNodes(counters, fleets)
    _, *tried = (
        nodes.answer(replace(first, round=number, tau=1, stop=False))[1][0]
        for number in (1, 2, 3)
    )
    report, _ = nodes.answer(replace(first, round=4, tau=0, stop=True))
    if not np.isfinite(report.losses).any():
        raise UserError(
            f"the loss of {fleets[0].model.name} is {report.losses[0]} before any training: either samples have numbers"
            " that are not finite, or the model makes such numbers of them"
        )
    return min(tried, key=lambda costs: costs.seconds)


class NodeGroup:
    """Nodes that answer together.

    Args:
      fleets: all nodes in one, or each alone where some may be absent.
      counters: of this process.
      summed: whether sums are enough for the aggregator; every node's report is given otherwise.
    """

    def __init__(
        self, fleets: Sequence[Fleet], counters: ResourceCounters, *, summed: bool = True
    ) -> None:
        self._fleets = fleets
        self._counters = counters
        self._nodes = InProcessNodes(counters, fleets)
        self._summed = summed
        self._begins = branches(int(fleets[0].numbers[0]), int(fleets[-1].numbers[-1]) + 1)[
            :-1
        ]
        self._sizes = np.array([fleet.shards.size.sum() for fleet in fleets])
        self._reports: ReportsHere | None = None

    def answer(
        self, broadcast: Broadcast, here: Flags | None = None
    ) -> tuple[Sums | Report | None, NodeCosts]:
        """One round; nothing when nobody is here.

        Args:
          here: which fleets are; all when not given.
        """
        began = self._counters.read()
        report, costs = self._nodes.answer_with(broadcast, here)
        if report is None:
            return None, costs
        report.require_answers(broadcast)
        self._reports = ReportsHere(report, self._begins)
        sums = replace(self._reports.sums, all_data=self._all_data())
        whole = self._counters.read() - began  # with the sums
        readings = {
            name: replace(reading, whole=whole[name])
            for name, reading in costs.readings.items()
        }
        return sums if self._summed else report, replace(
            costs, readings=readings, here=False
        )

    def distance_sums(self, vectors: Vectors, mean: Float32) -> Float64:
        """Of the last round's vectors, see `Reports`."""
        assert self._reports is not None
        return self._reports.distance_sums(vectors, mean)

    def trial(self, first: Broadcast) -> NodeCosts:
        """What a round takes; it leaves no trace."""
        return trial([fleet.fork() for fleet in self._fleets], first, self._counters)

    def memory(self) -> NodeGroupState:
        return self._nodes.memory()[0]

    def recall(self, memory: NodeGroupState) -> float:
        """Goes on from here as the group would that `memory` was taken from, before its first round.

        Returns: the data of its nodes that ever took part.
        """
        self._nodes.recall([memory])
        return self._all_data()

    def _all_data(self) -> float:
        return float(self._sizes[self._nodes.met].sum())
