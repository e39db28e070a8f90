"""Simulated nodes: fleets in this process, node groups and attacks.

- Nodes work while the engine waits for them. Only the time of local updates counts as
  local updates.
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
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from fedbudget.arrays import Flags, Float32, Float64, Int64
from fedbudget.data.shards import Shards
from fedbudget.engines.engine import Nodes, RoundTerms
from fedbudget.engines.noise import SimulatedSums
from fedbudget.errors import UserError
from fedbudget.protocol.features.compression import saved_bytes
from fedbudget.protocol.features.drift import DriftPart
from fedbudget.protocol.features.feature import FleetState
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import (
    Broadcast,
    Kind,
    LocalError,
    LossReport,
    PersonalRound,
    Report,
    SiteReport,
    SiteRound,
    VoteRound,
)
from fedbudget.protocol.personal import Personal, vote_report_of
from fedbudget.protocol.site_figures import report_of
from fedbudget.protocol.sums import NoisySums, Sums, branches
from fedbudget.randomness import Stream, generator
from fedbudget.resources import round_usage
from fedbudget.resources.counters import ResourceCounters
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


@dataclass(frozen=True)
class SimulatedRound:
    """The result of a round of simulated nodes; see `Collected`.

    Args:
      usages: of each node group.
    """

    reports: Report | Sums | NoisySums
    numbers: Int64
    usages: Sequence[Usage]
    enough: bool = True
    missed: tuple[int, ...] = ()
    not_finite: tuple[int, ...] = ()
    times: None = None  # nodes are measured together
    peers: None = None  # simulated nodes are trusted
    evaluation: None = None  # the aggregator's process has all test samples
    waited: Mapping[int, float] = field(default_factory=dict)
    line_seconds: Mapping[int, float] = field(default_factory=dict)

    def usage(
        self, updates: int, own: Mapping[str, float], wire_bytes: int
    ) -> tuple[Usage, Usage | None]:
        return round_usage(self.usages, updates=updates, own=own), None


class SimulatedNodes(Nodes):
    """Simulated nodes, in this process or in others.

    Args:
      present: which nodes take part in each round; None for all.
      remembers: whether checkpoints include the nodes' memory. Otherwise nodes of a
        resumed run start without memory.
      compress: compression of vectors, which the byte counts simulate.
      secure: opens the sums of reports, with secure aggregation.
    """

    engine: ClassVar[str]

    def __init__(
        self,
        present: Iterator[Flags] | None,
        *,
        remembers: bool = True,
        compress: Kind = "none",
        secure: SimulatedSums | None = None,
    ) -> None:
        self._present = present
        self._remembers = remembers
        self._compress = compress
        self._secure = secure
        self._broadcast: Broadcast | None = None

    @abstractmethod
    def personal_models(self) -> dict[int, Personal]:
        """Return the personal model of each node by its number, after a `PersonalRound`."""

    @abstractmethod
    def answer(self, broadcast: Broadcast, present: Flags | None) -> SimulatedRound:
        """Run one round.

        Args:
          present: which nodes take part; None for all.
        """

    @abstractmethod
    def trials(self, rounds: Sequence[Broadcast]) -> Sequence[Usage]:
        """Usage of a trial round at each node group."""

    @abstractmethod
    def memory(self) -> tuple[NodeGroupState, ...]:
        """State of all nodes between two rounds."""

    @abstractmethod
    def recall(self, groups: Sequence[NodeGroupState]) -> None:
        """Restore what `memory` returned, before the first round."""

    def begin(self, broadcast: Broadcast, terms: RoundTerms) -> None:
        if self._compress != "none":
            broadcast = replace(broadcast, compress=self._compress)
        self._broadcast = broadcast

    def trial(self, rounds: Sequence[Broadcast]) -> Usage:
        """Measure a round on copies of the nodes.

        Args:
          rounds: three rounds with τ=1, and a final round if the run has one.
        """
        tried = [replace(each, compress=self._compress) for each in rounds]
        return round_usage(self.trials(tried))

    def finish(self) -> SimulatedRound:
        assert self._broadcast is not None
        # Drawn only now: a checkpoint between `begin` and `finish` precedes the round.
        present = None
        if self._present is not None and not isinstance(self._broadcast, SiteRound):
            present = next(self._present)
        answered = self.answer(self._broadcast, present)
        if self._secure is None or isinstance(self._broadcast, SiteRound):
            return answered
        assert isinstance(answered.reports, Report)
        opened = self._secure.opened(answered.reports, self._broadcast)
        return replace(answered, reports=opened)

    def state(self, meters: dict[str, Any]) -> SimulationState:
        present = self._present
        return SimulationState(
            self.engine,
            meters,
            present.state() if isinstance(present, Attendance) else None,
            self.memory() if self._remembers else None,
        )

    def restore(self, state: SimulationState) -> None:
        """Restore the state of a checkpoint, before the first round."""
        if isinstance(self._present, Attendance) and state.present is not None:
            self._present.restore(state.present)
        if state.groups is not None:
            self.recall(state.groups)


class InProcessNodes(SimulatedNodes):
    """Fleets in this process.

    Args:
      counters: of this process.
      present: which fleets take part in each round; None for all.
      attack: what some nodes do to the run.
      together: all nodes as one fleet, for a quicker trial than with many.
      rest: see `SimulatedNodes`.
    """

    engine: ClassVar[str] = "in-process"

    def __init__(
        self,
        fleets: Sequence[Fleet],
        counters: ResourceCounters,
        present: Iterator[Flags] | None = None,
        *,
        attack: "Attack | None" = None,
        together: Fleet | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(present, **rest)
        self._group = NodeGroup(fleets, counters)
        self._trial_group = self._group
        if together is not None:
            self._trial_group = NodeGroup([together], counters)
        self._attack = attack

    def answer(self, broadcast: Broadcast, present: Flags | None) -> SimulatedRound:
        report, usage = self._group.report(broadcast, present)
        assert report is not None
        if self._attack is not None:
            report = self._attack.on(report, broadcast)
        return SimulatedRound(report, report.nodes, [usage])

    def trials(self, rounds: Sequence[Broadcast]) -> Sequence[Usage]:
        return [self._trial_group.trial(rounds)]

    def personal_models(self) -> dict[int, Personal]:
        return self._group.personal

    def memory(self) -> tuple[NodeGroupState]:
        return (self._group.memory(),)

    def recall(self, groups: Sequence[NodeGroupState]) -> None:
        (memory,) = groups
        self._group.recall(memory)


class NodeGroup:
    """Nodes of a simulated run that share a process and answer together.

    Args:
      fleets: one fleet of all nodes, or one per node if some may be absent.
      counters: of this process.
      summed: whether sums over nodes are enough for the aggregator; otherwise `answer`
        returns the report of every node.
    """

    def __init__(
        self, fleets: Sequence[Fleet], counters: ResourceCounters, *, summed: bool = True
    ) -> None:
        self._fleets = fleets
        self._counters = counters
        self._summed = summed
        self._all = np.ones(len(fleets), dtype=bool)
        self._nodes = np.array([len(fleet.numbers) for fleet in fleets])
        self._sizes = np.array([fleet.sizes.sum() for fleet in fleets])
        self._ever_present: Flags = np.zeros(len(fleets), dtype=bool)
        self._previous: Flags = self._ever_present  # fleets of the last round: up to date
        self._informed = 0  # nodes of the last round's fleets
        self._sums: Sums | None = None
        self.personal: dict[int, Personal] = {}  # models by node number, at the end

    def report(
        self, broadcast: Broadcast, present: Flags | None = None
    ) -> tuple[Report | None, Usage]:
        """Run one round, for an aggregator in this process.

        Args:
          present: which fleets take part; None for all.

        Returns: the report, None if no fleet takes part; and the usage.
        """
        if isinstance(broadcast, SiteRound):
            return self._personalise(broadcast)
        now = self._counters.read
        if present is None:
            present = self._all
        if present is self._previous:
            informed = self._informed
        else:
            informed = int(self._nodes[self._previous & present].sum())
            self._informed = int(self._nodes[present].sum())
            self._previous = present
            self._ever_present = self._ever_present | present
        if not informed and not present.any():
            return None, Usage({}, nodes=0)

        fleets = list(itertools.compress(self._fleets, present))
        began = now()
        for fleet in fleets:
            fleet.receive(broadcast.to(fleet.numbers))
        updating = now()
        for fleet in fleets:
            fleet.update()
        updates = now() - updating
        report = Report.merge([fleet.report() for fleet in fleets])
        readings = self._counters.readings(updates, now() - began, broadcast.steps)
        wire_bytes = _wire_bytes(broadcast, report, informed)
        return report, Usage(readings, len(report.nodes), wire_bytes, here=True)

    def answer(
        self, broadcast: Broadcast, present: Flags | None = None
    ) -> tuple[Sums | Report | None, Usage]:
        """Run one round, for an aggregator in another process.

        Args:
          present: which fleets take part; None for all.

        Returns: the sums or reports, None if no fleet takes part; and the usage.
        """
        began = self._counters.read()
        report, usage = self.report(broadcast, present)
        if report is None or isinstance(report, SiteReport):
            return report, usage
        report.require_answers(broadcast)
        self._sums = Sums.of(report, broadcast.report, self._begins)
        sums = replace(self._sums, all_data=self._all_data(), report=None)

        # Includes the time of the sums.
        whole = self._counters.label(self._counters.read() - began)
        readings = {
            name: replace(reading, whole=whole[name])
            for name, reading in usage.readings.items()
        }
        usage = replace(usage, readings=readings, here=False)
        return sums if self._summed else report, usage

    def personal_models(self) -> dict[int, Personal]:
        """Return the personal model of each node by its number."""
        return self.personal

    def _personalise(self, broadcast: SiteRound) -> tuple[Report, Usage]:
        began = self._counters.read()
        reports: list[Report] = []
        for fleet in self._fleets:
            sites = fleet.sites(broadcast.w)
            if isinstance(broadcast, VoteRound):
                votes = sites.votes()
                reports.append(vote_report_of(broadcast, fleet.numbers, fleet.sizes, votes))
                continue
            assert isinstance(broadcast, PersonalRound)
            models = sites.personal(broadcast.prior)
            numbers = fleet.numbers.tolist()
            self.personal.update(zip(numbers, models, strict=True))
            figures = [each.figures for each in models]
            reports.append(report_of(broadcast, fleet.numbers, fleet.sizes, figures))
        used = self._counters.read() - began
        report = Report.merge(reports)
        return report, Usage(
            self._counters.readings(used - used, used, 1), len(report.nodes)
        )

    def distance_sums(self, name: str, mean: Float32) -> Float64:
        """Distance sums of the last round's vectors; see `Sums`."""
        assert self._sums is not None
        return self._sums.distance_sums(name, mean)

    def trial(self, rounds: Sequence[Broadcast]) -> Usage:
        """Usage of a round, measured on copies of the fleets."""
        return trial([fleet.fork() for fleet in self._fleets], rounds, self._counters)

    def memory(self) -> NodeGroupState:
        fleets = [
            fleet.memory() if started else None
            for fleet, started in zip(self._fleets, self._ever_present, strict=True)
        ]
        return NodeGroupState(tuple(fleets), self._ever_present, self._previous)

    def recall(self, memory: NodeGroupState) -> float:
        """Restore what `memory` returned, before the first round.

        Returns: the number of samples of all nodes that ever took part.
        """
        lengths = {len(memory.fleets), len(memory.met), len(memory.before)}
        if lengths != {len(self._fleets)}:
            raise LocalError(
                f"the saved memory has {len(memory.fleets)} fleets, not {len(self._fleets)}"
            )
        for fleet, state in zip(self._fleets, memory.fleets, strict=True):
            if state is not None:
                fleet.recall(state)
        self._ever_present = memory.met
        self._previous = memory.before
        self._informed = int(self._nodes[memory.before].sum())
        return self._all_data()

    @cached_property
    def _begins(self) -> Int64:
        """First node of each branch to sum."""
        first = int(self._fleets[0].numbers[0])
        end = int(self._fleets[-1].numbers[-1]) + 1
        return branches(first, end)[:-1]

    def _all_data(self) -> float:
        return float(self._sizes[self._ever_present].sum())


def _wire_bytes(broadcast: Broadcast, report: Report, informed: int) -> int:
    """Bytes that a round would take on the wire.

    Args:
      informed: number of nodes from the previous round; they need no catch-up.
    """
    nodes = len(report.nodes)
    sent = informed * broadcast.wire_bytes
    if informed < nodes:
        sent += (nodes - informed) * broadcast.wire_bytes_with_catch_up
    if broadcast.compress == "none":
        return sent + report.wire_bytes
    drift = broadcast.part(DriftPart)
    vectors = 1 if drift is None or drift.mean is None else 2
    compressed = nodes * len(report.vectors) + informed * vectors
    saved = saved_bytes(broadcast.compress, compressed, broadcast.w.size)
    return sent + report.wire_bytes - saved


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


def trial(
    fleets: Sequence[Fleet], rounds: Sequence[Broadcast], counters: ResourceCounters
) -> Usage:
    """Measure a round on fleets that are discarded afterwards; compile all kernels.

    The first round does not count: it compiles kernels and has nothing to estimate from.
    The quicker of the next two counts, so that a busy moment of the machine does not
    inflate the cost. A final round, which only evaluates, compiles the remaining kernels.

    Args:
      rounds: three rounds with τ=1, and a final round if the run has one.
      counters: of this process.

    Raises:
      UserError: if no node's loss is finite, because no round would change that.
    """
    nodes = NodeGroup(fleets, counters)
    usages = []
    for broadcast in rounds:
        report, usage = nodes.report(broadcast)
        usages.append(usage)
    if isinstance(report, LossReport) and not np.isfinite(report.losses).any():
        raise UserError(
            f"the loss of {fleets[0].model.name} is {report.losses[0]} before training: "
            "the samples contain non-finite numbers, or the model computes non-finite "
            "numbers from them"
        )
    return min(usages[1:3], key=lambda each: each.seconds)


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
        name = next(iter(report.vectors), "w")
        updates = name != "w"
        reported = report.vectors.get(name)
        if reported is None or self.name == "label-flip" or not attackers.any():
            return report
        start = np.zeros_like(broadcast.w) if updates else broadcast.w
        update = reported[attackers] - start
        if self.name == "noise":
            rng = generator(self.seed, Stream.ATTACK, broadcast.round)
            noise = rng.standard_normal(update.shape, np.float32)
            update = noise * _norms(update) / _norms(noise)
        update = -update if self.name == "sign-flip" else _ATTACK_SCALE * update
        changed = reported.copy()
        changed[attackers] = start + update
        return replace(report, vectors={**report.vectors, name: changed})


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
