"""Simulated nodes: their engine, fleets in this process, node groups and attacks.

- The clock stops while a round is observed and runs at all other times. Only the time of
  local updates counts as local updates.
- A node group answers with sums over its nodes if sums are enough. A lost group can be
  rebuilt from its shards and the broadcasts it received; a copy of its memory shortens
  the replay.
- Attackers are the nodes with the highest numbers. They change their w_i and report
  everything else as an honest node does. `Attack.name` is one of

      sign-flip    the update with its sign reversed
      scale        the update times 10
      noise        Gaussian noise, 10 times as long as the update
      label-flip   honest training on wrong labels
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np

from fedbudget.arrays import Flags, Float32, Float64, Int64
from fedbudget.data.shards import Shards
from fedbudget.engines.engine import (
    Condition,
    Engine,
    Observer,
    Pay,
    Save,
    no_payment,
    settle,
)
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
from fedbudget.resources.resource import Usage

_ATTACK_SCALE = np.float32(10.0)


@dataclass(frozen=True)
class NodeGroupState:
    """Memory of a group's fleets between two rounds.

    Args:
      fleets: state of each fleet; None before its first round.
      met: which fleets took part in any round.
      before: which fleets took part in the last round.
    """

    fleets: tuple[FleetState | None, ...]
    met: Flags
    before: Flags


@dataclass(frozen=True)
class SimulationState:
    """State of a simulation in a checkpoint, in addition to the aggregator's state.

    Args:
      engine: name of the engine that ran it.
      meters: state of the meters.
      present: state of the random attendance; None if all nodes take part.
      groups: memory of all nodes, in node order; None if it would be too large.
    """

    engine: str
    meters: dict[str, Any]
    present: dict[str, Any] | None
    groups: tuple[NodeGroupState, ...] | None


class SimulatedNodes(Protocol):
    """The nodes of a simulated run, in this process or in others."""

    engine: ClassVar[str]

    @property
    def took_part(self) -> Int64:
        """Numbers of the nodes in the last round, ascending."""

    def answer(self, broadcast: Broadcast) -> tuple[Report | Reports, Sequence[Usage]]:
        """Run one round.

        Returns: the reports, and the costs of each node or of each group of nodes.
        """

    def memory(self) -> tuple[NodeGroupState, ...]:
        """State of all nodes between two rounds."""

    def recall(self, groups: Sequence[NodeGroupState]) -> None:
        """Restore what `memory` returned, before the first round."""


@dataclass(eq=False)
class SimulationEngine(Engine):
    """Runs rounds between an aggregator and simulated nodes.

    Args:
      present: which nodes take part in each round; None for all.
      remembers: whether checkpoints include the nodes' memory. Otherwise nodes of a
        resumed run start without memory.
      compress: compression of vectors, which the byte counts simulate.
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
        pay: Pay = no_payment,
    ) -> Outcome:
        aggregator = self.aggregator
        now = self.meters.counters().read
        message = aggregator.pending or aggregator.outcome or aggregator.start()
        settle(aggregator, pay)
        mark = now()
        while isinstance(message, Broadcast):
            broadcast = message
            if self.compress != "none":
                broadcast = replace(message, compress=self.compress)
            report, node_costs = self.nodes.answer(broadcast)
            whole = now() - mark
            mark += whole

            costs = self.meters.read(self._usage(broadcast, node_costs, whole))
            message = aggregator.receive(report, costs, times=self._times(broadcast))
            settle(aggregator, pay)
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
        self, broadcast: Broadcast, node_costs: Sequence[Usage], whole: Snapshot
    ) -> Usage:
        """Usage of a round, with the time of the slowest node."""
        nodes = self.nodes.took_part
        tau = max(1, broadcast.tau)
        slowness = self.meters.slowness(nodes, broadcast.updates(nodes), tau)
        return replace(round_usage(node_costs, updates=tau, own=whole), slowness=slowness)

    def _times(self, broadcast: Broadcast) -> NodeTimes | None:
        nodes = self.nodes.took_part
        times = self.meters.step_times(nodes) if broadcast.tau > 0 else None
        return None if times is None else NodeTimes(nodes, times)

    def state(self) -> tuple[AggregatorState[Any, Any], SimulationState]:
        present = self.present
        groups = self.nodes.memory() if self.remembers else None
        drawn = present.state() if isinstance(present, Attendance) else None
        own = SimulationState(self.nodes.engine, self.meters.state(), drawn, groups)
        return self.aggregator.state, own

    def recall(self, state: SimulationState) -> None:
        """Restore the state of a checkpoint, before the first round."""
        self.meters.restore(state.meters)
        if isinstance(self.present, Attendance) and state.present is not None:
            self.present.restore(state.present)
        if state.groups is not None:
            self.nodes.recall(state.groups)


class InProcessEngine(SimulationEngine):
    """Aggregator and fleets in this process.

    Args:
      present: which fleets take part in each round; None for all.
      remembers: whether checkpoints include the nodes' memory.
      attack: what some nodes do to the run.
      compress: compression of vectors, which the byte counts simulate.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        fleets: Sequence[Fleet],
        meters: Meters,
        present: Iterator[Flags] | None = None,
        *,
        remembers: bool = True,
        attack: "Attack | None" = None,
        compress: Kind = "none",
    ) -> None:
        nodes = InProcessNodes(meters.counters(), fleets, present, attack)
        super().__init__(aggregator, nodes, meters, present, remembers, compress)


class InProcessNodes:
    """Fleets in this process.

    Args:
      counters: of this process.
      present: which fleets take part in each round; None for all.
      attack: what some nodes do to the run.
    """

    engine: ClassVar[str] = "in-process"

    def __init__(
        self,
        counters: ResourceCounters,
        fleets: Sequence[Fleet],
        present: Iterator[Flags] | None = None,
        attack: "Attack | None" = None,
    ) -> None:
        self._counters = counters
        self._attack = attack
        self._fleets = fleets
        self._present = present
        self._all = np.ones(len(fleets), dtype=bool)
        self._nodes = np.array([len(fleet.numbers) for fleet in fleets])
        self.took_part: Int64 = np.empty(0, np.int64)
        self.ever_present: Flags = np.zeros(len(fleets), dtype=bool)
        self._previous: Flags = self.ever_present  # fleets of the last round: up to date

    def answer(self, broadcast: Broadcast) -> tuple[Report, Sequence[Usage]]:
        present = None if self._present is None else next(self._present)
        report, costs = self.answer_with(broadcast, present)
        assert report is not None
        if self._attack is not None:
            report = self._attack.on(report, broadcast)
        return report, [costs]

    def answer_with(
        self, broadcast: Broadcast, present: Flags | None
    ) -> tuple[Report | None, Usage]:
        """Run one round.

        Args:
          present: which fleets take part; None for all.

        Returns: the report, None if no fleet takes part; and the costs.
        """
        now = self._counters.read
        if present is None:
            present = self._all
        informed = int(self._nodes[self._previous & present].sum())
        self._previous = present
        self.ever_present = self.ever_present | present
        if not present.any():
            return None, Usage({}, nodes=0)

        fleets = list(itertools.compress(self._fleets, present))
        began = now()
        for fleet in fleets:
            fleet.receive(broadcast.to(fleet.numbers))
        updating = now()
        for fleet in fleets:
            fleet.update()
        update_costs = now() - updating
        report = Report.merge([fleet.report() for fleet in fleets])
        self.took_part = report.nodes
        readings = self._counters.readings(
            update_costs, now() - began, max(1, broadcast.tau)
        )
        wire_bytes = _wire_bytes(broadcast, report, informed)
        return report, Usage(readings, len(report.nodes), wire_bytes, here=True)

    def memory(self) -> tuple[NodeGroupState]:
        fleets = [
            fleet.memory().for_disk if started else None
            for fleet, started in zip(self._fleets, self.ever_present, strict=True)
        ]
        return (NodeGroupState(tuple(fleets), self.ever_present, self._previous),)

    def recall(self, groups: Sequence[NodeGroupState]) -> None:
        """Restore what `memory` returned, before the first round."""
        (memory,) = groups
        lengths = {len(memory.fleets), len(memory.met), len(memory.before)}
        if lengths != {len(self._fleets)}:
            raise LocalError(
                f"the saved memory has {len(memory.fleets)} fleets, not {len(self._fleets)}"
            )
        for fleet, state in zip(self._fleets, memory.fleets, strict=True):
            if state is not None:
                fleet.recall(state)
        self.ever_present = memory.met
        self._previous = memory.before


def _wire_bytes(broadcast: Broadcast, report: Report, informed: int) -> int:
    """Bytes that a round would take on the wire.

    Args:
      informed: number of nodes from the previous round; they need no catch-up.
    """
    nodes = len(report.nodes)
    sent = informed * broadcast.wire_bytes
    if informed < nodes:
        sent += (nodes - informed) * broadcast.wire_bytes_with_catch_up
    reported = sum(getattr(report, name) is not None for name in VECTORS)
    compressed = nodes * reported + informed * (1 + (broadcast.mean is not None))
    saved = saved_bytes(broadcast.compress or "none", compressed, broadcast.w.size)
    return sent + report.wire_bytes - saved


class NodeGroup:
    """Nodes of a simulated run that share a process and answer together.

    Args:
      fleets: one fleet of all nodes, or one per node if some may be absent.
      counters: of this process.
      summed: whether sums over nodes are enough for the aggregator; otherwise the group
        returns the report of every node.
    """

    def __init__(
        self, fleets: Sequence[Fleet], counters: ResourceCounters, *, summed: bool = True
    ) -> None:
        self._fleets = fleets
        self._counters = counters
        self._nodes = InProcessNodes(counters, fleets)
        self._summed = summed
        first = int(fleets[0].numbers[0])
        end = int(fleets[-1].numbers[-1]) + 1
        self._begins = branches(first, end)[:-1]
        self._sizes = np.array([fleet.shards.size.sum() for fleet in fleets])
        self._reports: ReportsHere | None = None

    def answer(
        self, broadcast: Broadcast, present: Flags | None = None
    ) -> tuple[Sums | Report | None, Usage]:
        """Run one round.

        Args:
          present: which fleets take part; None for all.

        Returns: the sums or reports, None if no fleet takes part; and the costs.
        """
        began = self._counters.read()
        report, costs = self._nodes.answer_with(broadcast, present)
        if report is None:
            return None, costs
        report.require_answers(broadcast)
        self._reports = ReportsHere(report, self._begins)
        sums = replace(self._reports.sums, all_data=self._all_data())

        whole = self._counters.read() - began  # includes the time of the sums
        readings = {
            name: replace(reading, whole=whole[name])
            for name, reading in costs.readings.items()
        }
        costs = replace(costs, readings=readings, here=False)
        return sums if self._summed else report, costs

    def distance_sums(self, vectors: Vectors, mean: Float32) -> Float64:
        """Distance sums of the last round's vectors; see `Reports`."""
        assert self._reports is not None
        return self._reports.distance_sums(vectors, mean)

    def trial(self, first: Broadcast) -> Usage:
        """Costs of a round, measured on copies of the fleets."""
        return trial([fleet.fork() for fleet in self._fleets], first, self._counters)

    def memory(self) -> NodeGroupState:
        return self._nodes.memory()[0]

    def recall(self, memory: NodeGroupState) -> float:
        """Restore what `memory` returned, before the first round.

        Returns: the number of samples of all nodes that ever took part.
        """
        self._nodes.recall([memory])
        return self._all_data()

    def _all_data(self) -> float:
        return float(self._sizes[self._nodes.ever_present].sum())


class Attendance(Iterator[Flags]):
    """Random attendance, round after round; at least one node takes part in each.

    Args:
      number: of nodes.
      chance: probability that a node takes part in a round.
    """

    def __init__(self, number: int, chance: float, rng: np.random.Generator) -> None:
        self._number = number
        self._chance = chance
        self._rng = rng

    def __next__(self) -> Flags:
        while True:
            present = self._rng.random(self._number) < self._chance
            if present.any():
                return present

    def state(self) -> dict[str, Any]:
        """State of the generator, as plain JSON."""
        return dict(self._rng.bit_generator.state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._rng.bit_generator.state = dict(state)


def trial(fleets: Sequence[Fleet], first: Broadcast, counters: ResourceCounters) -> Usage:
    """Measure a round on fleets that are discarded afterwards; compile all kernels.

    The first round does not count: it compiles kernels and has nothing to estimate from.
    The quicker of the next two counts, so that a busy moment of the machine does not
    inflate the cost. A final round, which only evaluates, compiles the remaining kernels.

    Args:
      first: the run's first broadcast, except for τ and stop.
      counters: of this process.

    Raises:
      UserError: if no node's loss is finite, because no round would change that.
    """
    nodes = InProcessNodes(counters, fleets)
    costs = []
    for number in (1, 2, 3):
        _, (measured,) = nodes.answer(replace(first, round=number, tau=1, stop=False))
        costs.append(measured)
    report, _ = nodes.answer(replace(first, round=4, tau=0, stop=True))
    if not np.isfinite(report.losses).any():
        raise UserError(
            f"the loss of {fleets[0].model.name} is {report.losses[0]} before training: "
            "the samples contain non-finite numbers, or the model computes non-finite "
            "numbers from them"
        )
    return min(costs[1:], key=lambda each: each.seconds)


@dataclass(frozen=True)
class Attack:
    """An attack by some nodes of a simulation.

    Args:
      name: of the attack; see the top of this file.
      first: number of the first attacker; all nodes after it attack too.
      seed: random seed.
    """

    name: str
    first: int
    seed: int

    def on(self, report: Report, broadcast: Broadcast) -> Report:
        """Return the report with the w_i of attackers replaced."""
        attackers = report.nodes >= self.first
        if report.w is None or self.name == "label-flip" or not attackers.any():
            return report
        private = broadcast.private
        start = broadcast.w
        if private is not None and not private.per_sample:
            start = np.zeros_like(start)  # the report has updates, not w_i
        update = report.w[attackers] - start
        if self.name == "noise":
            rng = generator(self.seed, Stream.ATTACK, broadcast.round)
            noise = rng.standard_normal(update.shape, np.float32)
            update = noise * _norms(update) / _norms(noise)
        update = -update if self.name == "sign-flip" else _ATTACK_SCALE * update
        w = report.w.copy()
        w[attackers] = start + update
        return replace(report, w=w)


def _norms(rows: Float32) -> Float32:
    return np.asarray(np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


def with_flipped_labels(shards: Shards, first: int) -> Shards:
    """Return the shards with reversed labels from node `first` on.

    The last class replaces the first, and so on. Nodes may share samples, so attackers
    receive copies.
    """
    table = shards.table
    if table.store is not None or table.y.min() == table.y.max():
        raise UserError(
            "`attack` label-flip needs samples in arrays, with two or more targets"
        )
    rows = [shards.rows_of(node) for node in range(len(shards))]
    copied = np.concatenate(rows[first:])
    flipped = table.y.min() + table.y.max() - table.y[copied]
    extended = replace(
        table,
        x=np.concatenate([table.x, table.x[copied]]),
        y=np.concatenate([table.y, flipped]),
    )
    begin = len(table)
    for node in range(first, len(rows)):
        end = begin + len(rows[node])
        rows[node] = np.arange(begin, end, dtype=np.int32)
        begin = end
    return Shards.of(extended, rows)
