"""Simulated nodes: the engine for them, wherever they are, and fleets in this process, a function call away.

The clock stands still while a round is observed, and runs at all other times; only the local updates count as such.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np

from fedbudget.arrays import Flags, Int64
from fedbudget.engines.attack import Attack
from fedbudget.engines.engine import Condition, Engine, Observer, Save
from fedbudget.errors import UserError
from fedbudget.meters.meters import Meters
from fedbudget.protocol.aggregator import Aggregator, Outcome
from fedbudget.protocol.compression import Kind, saved_bytes
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import VECTORS, Broadcast, LocalError, Report
from fedbudget.protocol.state import AggregatorState, FleetState
from fedbudget.protocol.sums import Reports
from fedbudget.protocol.workload import NodeTimes
from fedbudget.resources import round_usage
from fedbudget.resources.counters import ResourceCounters, Snapshot
from fedbudget.resources.usage import NodeCosts, RoundUsage


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

    def run(self, *, observe: Observer, interrupted: Condition = lambda: False, save: Save = lambda: None) -> Outcome:
        aggregator, meters, now = self.aggregator, self.meters, self.meters.counters().read
        message = aggregator.pending or aggregator.outcome or aggregator.start()
        mark = now()
        while isinstance(message, Broadcast):
            broadcast = message if self.compress == "none" else replace(message, compress=self.compress)
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

    def _usage(self, broadcast: Broadcast, took: Sequence[NodeCosts], whole: Snapshot) -> RoundUsage:
        """What a round took, with the time of the slowest node."""
        nodes, tau = self.nodes.took_part, max(1, broadcast.tau)
        slowness = self.meters.slowness(nodes, broadcast.updates(nodes), tau)
        return replace(round_usage(took, updates=tau, own=whole), slowness=slowness)

    def _times(self, broadcast: Broadcast) -> NodeTimes | None:
        nodes = self.nodes.took_part
        times = self.meters.step_times(nodes) if broadcast.tau > 0 else None
        return None if times is None else NodeTimes(nodes, times)

    def state(self) -> tuple[AggregatorState[Any, Any], SimulationState]:
        present, groups = self.present, self.nodes.memory() if self.remembers else None
        drawn = present.state() if isinstance(present, Attendance) else None
        return self.aggregator.state, SimulationState(self.nodes.engine, self.meters.state(), drawn, groups)

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
        self.met = self._before = np.zeros(len(fleets), dtype=bool)  # those in the round before know what happened

    def answer(self, broadcast: Broadcast) -> tuple[Report, Sequence[NodeCosts]]:
        report, costs = self.answer_with(broadcast, self._all if self._present is None else next(self._present))
        assert report is not None
        return report if self._attack is None else self._attack.on(report, broadcast), [costs]

    def answer_with(self, broadcast: Broadcast, here: Flags | None) -> tuple[Report | None, NodeCosts]:
        """One round; nothing when nobody is here.

        Args:
          here: which fleets are; all when None.
        """
        now, here = self._counters.read, self._all if here is None else here
        fleets = self._fleets if here.all() else list(itertools.compress(self._fleets, here))
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
        wire_bytes = _wire_bytes(broadcast, report, informed=int(self._nodes[before & here].sum()))
        return report, NodeCosts(readings, len(report.nodes), wire_bytes, here=True)

    def memory(self) -> tuple[NodeGroupState]:
        fleets = [fleet.memory().for_disk if met else None for fleet, met in zip(self._fleets, self.met, strict=True)]
        return (NodeGroupState(tuple(fleets), self.met, self._before),)

    def recall(self, groups: Sequence[NodeGroupState]) -> None:
        """Goes on from here as those would that `memory` was taken from, before the first round."""
        (memory,) = groups
        if not len(self._fleets) == len(memory.fleets) == len(memory.met) == len(memory.before):
            raise LocalError(f"a memory of {len(memory.fleets)} fleets is not of {len(self._fleets)}")
        for fleet, known in zip(self._fleets, memory.fleets, strict=True):
            if known is not None:
                fleet.recall(known)
        self.met, self._before = memory.met, memory.before


def _wire_bytes(broadcast: Broadcast, report: Report, *, informed: int) -> int:
    """What a round would take on the wire.

    Args:
      informed: how many of the nodes were in the round before, and need not be told what happened in it.
    """
    nodes, count, kind = len(report.nodes), broadcast.w.size, broadcast.compress or "none"
    told = informed * broadcast.wire_bytes
    if informed < nodes:
        told += (nodes - informed) * broadcast.wire_bytes_with_catch_up
    vectors = sum(getattr(report, name) is not None for name in VECTORS)
    saved = saved_bytes(kind, nodes * vectors + informed * (1 + (broadcast.mean is not None)), count)
    return told + report.wire_bytes - saved


class Attendance(Iterator[Flags]):
    """Who takes part, round after round: each with this chance, but never nobody.

    Args:
      number: of nodes.
      chance: of each, in every round.
    """

    def __init__(self, number: int, chance: float, rng: np.random.Generator) -> None:
        self._number, self._chance, self._rng = number, chance, rng

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


def trial(fleets: Sequence[Fleet], first: Broadcast, counters: ResourceCounters) -> NodeCosts:
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
    _, *tried = (nodes.answer(replace(first, round=number, tau=1, stop=False))[1][0] for number in (1, 2, 3))
    report, _ = nodes.answer(replace(first, round=4, tau=0, stop=True))
    if not np.isfinite(report.losses).any():
        raise UserError(
            f"the loss of {fleets[0].model.name} is {report.losses[0]} before any training: either samples have numbers"
            " that are not finite, or the model makes such numbers of them"
        )
    return min(tried, key=lambda costs: costs.seconds)
