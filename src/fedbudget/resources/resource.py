"""Resources: the interface, the meters, and what a round costs.

A `Resource` has a name, units, a reader for nodes, a rule that combines the readings of
all nodes, and a meter. Budgets, engines and views find it by its name (`RESOURCES`).

What a round costs has one type at each of three stages:

1. `Usage`: what was measured, as a `Reading` for each counter. A node, several nodes that
   were measured together, and a whole round have the same type; `round_usage` combines.
2. `Cost`: what a meter computes from it for one resource, c per local update and b for the
   rest.
3. `Costs` (budget/budget.py): c and b of all resources of a budget, as charged to the
   ledger.

Time is metered first. Resources without a counter are computed from time and bytes, so a
run with simulated time is simulated in every resource.

Each meter names its source:

- `measured`: read from a counter
- `declared`: computed from settings such as watts or prices
- `estimated`: partly measured and partly declared
- `simulated`: drawn as in the paper
- `accounted`: computed from the noise that was added (privacy)

A counter that was not read is missing from the readings. It never counts as zero.
"""

import hashlib
import math
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from fedbudget.errors import UserError, WorkError, key

Source = Literal["measured", "estimated", "simulated", "declared", "accounted"]

_ROUNDING = 1e-9  # a sum of clock readings may decrease by this much
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ESTIMATE = "estimate:"


class MeterError(WorkError):
    """A meter cannot be read, or returns an impossible value."""


class Resource(ABC):
    """A quantity that training uses up.

    A subclass sets the names and implements `meter`. If nodes count the resource, it also
    has a `reader`.

    Args:
      name: name in a budget; letters only.
      unit: unit of all amounts.
      units: accepted units, each with its size in `unit`.
      shown_from: larger units for people, ascending, each with the smallest amount that
        it shows.
      settings: names of the settings that its cost depends on.
      machine_wide: the counter belongs to the machine, not to a process. It counts once
        for all nodes of a machine and continues while they wait. It is not read for
        simulated nodes, trial rounds or the aggregator.
      spread: relative error to expect of the first round's cost, as predicted by a trial.
      most_a_second: upper limit on the use of one machine per second.
      by_noise: the resource is spent on published results; more noise costs less.
    """

    name: ClassVar[str]
    unit: ClassVar[str] = ""
    units: ClassVar[Mapping[str, float]] = {}
    shown_from: ClassVar[Mapping[str, float]] = {}
    settings: ClassVar[tuple[str, ...]] = ()
    machine_wide: ClassVar[bool] = False
    spread: ClassVar[float] = 0.4  # that of aggregations in the paper's prototype
    most_a_second: ClassVar[float] = math.inf
    by_noise: ClassVar[bool] = False

    @abstractmethod
    def meter(self, metering: "Metering") -> "Meter":
        """Return the meter that computes the cost of a round."""

    def reader(self) -> "Reader | None":
        """Return a reader of this process's or machine's counter; None if it has none."""
        return None

    def combine(self, nodes: "Sequence[Usage]", own: float | None) -> "Reading | None":
        """Combine the readings of all nodes into one; None if no node has one.

        Args:
          nodes: the nodes that took part.
          own: use of the aggregator's process in the whole round; None in a trial round.
        """
        rule = once_per_host if self.machine_wide else total
        return rule(self.name, nodes, own)

    def format(self, amount: float) -> str:
        """Return the amount as text, with its unit."""
        unit = self.unit
        for larger, smallest in self.shown_from.items():
            if abs(amount) >= smallest:
                unit = larger
        value = amount / self.units.get(unit, 1.0)
        text = f"{value:,.0f}" if 9999.5 <= abs(value) < 1e15 else f"{value:.4g}"
        return f"{text}{unit}"

    def to_ledger(self, amount: float, delta: float | None) -> float:
        """Convert an amount to the additive quantity that the ledger holds.

        Args:
          amount: in the unit of the budget.
          delta: δ of the budget, for privacy.
        """
        return amount

    def from_ledger(self, amount: float, delta: float | None) -> float:
        """Convert a quantity of the ledger to the amount shown to the user."""
        return amount


class Reader(Protocol):
    """Reads a counter at a node."""

    @property
    def host(self) -> str:
        """Machine (`this_host`) whose processes share the counter; empty if none do."""

    def read(self) -> float:
        """Return the count, which never decreases; raise `MeterError` if unknown."""


class Meter(Protocol):
    """Computes the cost of a round in one resource."""

    @property
    def source(self) -> Source: ...

    def read(self, usage: "Usage", time: "Cost") -> "Cost":
        """Return the cost of a round from its usage and from its time."""


class TimeMeter(Meter, Protocol):
    """Computes the time of a round."""

    def read(self, usage: "Usage", time: "Cost | None" = None) -> "Cost":
        """Return the time of a completed round."""

    def expect(self, usage: "Usage") -> "Cost":
        """Return the time to expect of a round, from the usage of a trial round."""


@dataclass(frozen=True)
class Metering:
    """How the costs of a run are determined.

    Args:
      simulated: draws the time of rounds; None if it is measured.
      network: nodes are other processes: messages are counted and nodes read counters.
      declared: declared costs by the name of their setting.
    """

    simulated: TimeMeter | None = None
    network: bool = False
    declared: Mapping[str, float] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """Whether nodes read their own counters and messages are counted."""
        return self.network and self.simulated is None

    def declared_for(self, settings: Sequence[str]) -> dict[str, float]:
        """Return the declared costs among these settings."""
        return {name: self.declared[name] for name in settings if name in self.declared}


@dataclass(frozen=True)
class Cost:
    """Cost in one resource: c of a local update and b of the rest of the round."""

    step: float
    aggregation: float

    @classmethod
    def split(cls, label: str, reading: "Reading | None", updates: int) -> "Cost":
        """Return the cost of a round from its reading.

        Args:
          label: name of the quantity, for the error if it is unknown.
          reading: combined reading of the round.
          updates: local updates in the round.
        """
        if reading is None:
            raise MeterError(f"{label} of a round is unknown: no counter was read")
        whole = reading.whole
        if not (0 <= reading.step < math.inf and -_ROUNDING <= whole < math.inf):
            raise MeterError(
                f"{label} of a round is unknown: counters show {reading.step} for a local "
                f"update and {whole} for the whole round"
            )
        return cls(reading.step, max(0.0, whole - reading.step * updates))


@dataclass(frozen=True)
class CounterMeter:
    """Cost as the nodes' counters show it.

    Args:
      name: name of the resource.
      label: name of the quantity, for errors.
    """

    source: ClassVar[Source] = "measured"
    name: str
    label: str

    def read(self, usage: "Usage", time: Cost | None = None) -> Cost:
        return Cost.split(self.label, usage.readings.get(self.name), usage.updates)

    def expect(self, usage: "Usage") -> Cost:
        return self.read(usage)


@dataclass(frozen=True)
class Reading:
    """One counter's reading of a round.

    Args:
      step: use of one local update.
      whole: use of the whole round.
      host: machine whose nodes share the counter, see `this_host`; empty if none do.
      nodes: number of nodes that the reading covers.
    """

    step: float
    whole: float
    host: str = ""
    nodes: int = 1

    @property
    def estimated(self) -> bool:
        """Whether a part of it is an estimate instead of a meter's reading."""
        return self.host.startswith(_ESTIMATE)


@dataclass(frozen=True)
class Usage:
    """Measured use of a round: of a node, of nodes measured together, or of all nodes.

    Args:
      readings: readings by resource.
      nodes: number of nodes that took part.
      wire_bytes: bytes of their messages in both directions; 0 if the engine counts them.
      updates: local updates at every node; an evaluation of the final loss counts as one.
      here: the nodes run in the aggregator's process, whose counters include them.
      evaluation: additional use of evaluating test samples, by resource; in a trial, the
        use to expect.
      slowness: simulated time of the slowest node's updates, relative to a node of speed 1.
    """

    readings: Mapping[str, Reading]
    nodes: int = 1
    wire_bytes: int = 0
    updates: int = 1
    here: bool = False
    evaluation: Mapping[str, Reading] = field(default_factory=dict)
    slowness: float = 1.0

    @property
    def step_seconds(self) -> float:
        """Time of a local update, at the slowest node."""
        return self.readings["time"].step

    @property
    def seconds(self) -> float:
        """Time of the whole round."""
        return self.readings["time"].whole

    def as_round_of(self, nodes: int, wire_bytes: int) -> "Usage":
        """Return a trial by some nodes as a round with this many nodes and bytes."""
        readings = {
            name: replace(each, nodes=min(each.nodes, nodes))
            for name, each in self.readings.items()
        }
        return replace(self, nodes=nodes, wire_bytes=wire_bytes, readings=readings)

    def delayed(self, seconds: float) -> "Usage":
        """Return the usage with more time outside of the local updates."""
        time = self.readings["time"]
        later = replace(time, whole=time.whole + seconds)
        return replace(self, readings={**self.readings, "time": later})


# Rules that combine readings, see `Resource.combine`. If only some nodes have read a
# resource, the others count with their average: a missing reading does not end a run.


def slowest(name: str, nodes: Sequence[Usage], own: float | None) -> Reading:
    """Combine by the slowest node; the aggregator's clock has the whole round."""
    unread = Reading(math.nan, math.nan)
    readings = [usage.readings.get(name, unread) for usage in nodes]
    step = _largest([reading.step for reading in readings])
    if own is None:
        own = _largest([reading.whole for reading in readings])
    return Reading(step, own, nodes=sum(usage.nodes for usage in nodes))


def _largest(amounts: Sequence[float]) -> float:
    """Return the largest amount, at least 0; NaN if one is unknown."""
    return math.nan if any(map(math.isnan, amounts)) else max([0.0, *amounts])


def total(name: str, nodes: Sequence[Usage], own: float | None) -> Reading | None:
    """Sum over nodes and the aggregator; nodes in the aggregator's process count once."""
    if own is None and not any(name in usage.readings for usage in nodes):
        return None
    step = _sum_over_all(name, "step", nodes)
    if own is None:
        whole = _sum_over_all(name, "whole", nodes)
    else:
        elsewhere = [usage for usage in nodes if not usage.here]
        whole = own + _sum_over_all(name, "whole", elsewhere)
    return Reading(step, whole, nodes=_count(nodes))


def once_per_host(name: str, nodes: Sequence[Usage], own: float | None) -> Reading | None:
    """Sum over machines, whose nodes share a counter; nodes without one do not count."""
    read = [usage for usage in nodes if name in usage.readings]
    if not read:
        return None
    steps: dict[str, float] = {}
    wholes: dict[str, float] = {}
    mark = ""
    for usage in read:
        reading = usage.readings[name]
        host = reading.host.removeprefix(_ESTIMATE)
        steps[host] = max(steps.get(host, 0.0), reading.step)
        wholes[host] = max(wholes.get(host, 0.0), reading.whole)
        if reading.estimated:
            mark = _ESTIMATE
    return Reading(sum(steps.values()), sum(wholes.values()), mark, _count(read))


# Hosts of shared counters. A node reports no more about its meter than this text, so an
# estimate is marked in it.


def this_host() -> str:
    """Return an anonymous name of this machine.

    All processes of a machine have the same one until it restarts, also in containers.

    >>> this_host() == this_host(), len(this_host())
    (True, 16)
    """
    try:
        name = _BOOT_ID.read_text().strip()
    except OSError:
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def estimated(host: str) -> str:
    """Return the name of a host whose readings are estimates."""
    return _ESTIMATE + host


def require_not_negative(declared: object) -> None:
    """Raise `UserError` unless every field is a finite number of at least 0."""
    for name, value in vars(declared).items():
        if not 0 <= value < math.inf:
            raise UserError(f"{key(name)} must be a non-negative number, not {value:g}")


def _sum_over_all(name: str, part: str, nodes: Sequence[Usage]) -> float:
    """Sum over nodes; those without a reading count with the average, nan if none has."""
    read = [usage for usage in nodes if name in usage.readings]
    result = float(sum(getattr(usage.readings[name], part) for usage in read))
    if len(read) == len(nodes):
        return result
    return result * _count(nodes) / _count(read) if read else math.nan


def _count(nodes: Sequence[Usage]) -> int:
    return sum(usage.nodes for usage in nodes)
