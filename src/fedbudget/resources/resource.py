"""What a round used, as counters say it: at one node, and at all nodes together.

Readings go by the name of their resource. What was not read is not in them, which is not zero.

Of which machine a meter's joules are: nodes that share a machine read the same ones, which count once.

An estimate says so in front of the machine, because nodes tell no more of their meter than this.

How the readings of many nodes become one: of the slowest, of all added up, or of every machine once.

Every function here has the same arguments, and `Resource.combine` chooses one of them:

  name: of the resource.
  nodes: that took part.
  own: what the aggregator's process used in the whole round; None where that is not known, as of a trial round.

The result is None where nobody has read the resource. Where only some nodes have, the others are taken to have used as
much as these on average: what one does not tell is unknown, and no reason to end a run.

What a resource is: a name, units, how nodes read it, how their readings combine, how a round's costs follow.

A resource is one object in one file, and budgets, engines and views know it by its name in the list of resources. An
engine measures a round: what counters say at every node, combined as the resource says. Meters turn that into costs: c
per local update and b for the rest of the round. Time comes first, simulated or measured; what no counter says is
figured from time and bytes, so that a simulated run is simulated in every resource.

Every meter says how it knows: `measured` is read from a counter, `declared` is figured from what the user says (watts,
prices), `estimated` is partly one and partly the other, `simulated` is the paper's, `accounted` follows from noise that
was added (privacy). A counter that cannot be read is an error, never zero.
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


@dataclass(frozen=True)
class Reading:
    """What one counter says of a round at a node.

    Args:
      step: of one local update.
      whole: of the whole round.
      host: whose counter it is, where all nodes on a machine read the same one; see `host.py`.
    """

    step: float
    whole: float
    host: str = ""


@dataclass(frozen=True)
class NodeCosts:
    """What a round took at a node, or at several that were measured together.

    Args:
      readings: by resource.
      nodes: how many they are.
      wire_bytes: of their messages, both ways, as if each had sent its own; 0 where an engine counts them itself.
      here: in the aggregator's own process, whose counters have the whole round already.
      evaluation: what evaluating on test samples took besides, by resource; in a trial, what it will take.
    """

    readings: Mapping[str, Reading]
    nodes: int = 1
    wire_bytes: int = 0
    here: bool = False
    evaluation: Mapping[str, Reading] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        return self.readings["time"].step

    @property
    def seconds(self) -> float:
        return self.readings["time"].whole

    def within(self, most: Mapping[str, float], updates: int) -> "NodeCosts":
        """The same with no more of each resource than there was.

        Args:
          most: by resource.
        """
        readings = _held(self.readings, most, updates)
        evaluation = _held(self.evaluation, most, 1)
        if readings is self.readings and evaluation is self.evaluation:
            return self
        return replace(self, readings=readings, evaluation=evaluation)


def _held(
    readings: Mapping[str, Reading], limits: Mapping[str, float], updates: int
) -> Mapping[str, Reading]:
    held = {}
    for name, reading in readings.items():
        most = limits.get(name, math.inf)
        if reading.step > most / updates or reading.whole > most:
            held[name] = replace(
                reading,
                step=min(reading.step, most / updates),
                whole=min(reading.whole, most),
            )
    return {**readings, **held} if held else readings


@dataclass(frozen=True)
class CombinedReading:
    """What the counters of all nodes together say of a round.

    Args:
      step: of one local update.
      whole: of the whole round.
      nodes: how many nodes it is of.
      estimated: whether any of it is an estimate, and not read from a meter.
    """

    step: float
    whole: float
    nodes: int
    estimated: bool = False


@dataclass(frozen=True)
class RoundUsage:
    """What an engine measured of one round; meters turn it into costs.

    Args:
      updates: local updates in it, each at every node; the final loss counts as one.
      nodes: how many took part.
      wire_bytes: all messages of the round, of all nodes, both ways.
      readings: by resource.
      slowness: how many times as long as at a node of speed 1 the updates of the slowest took, where that is simulated.
    """

    updates: int
    nodes: int
    wire_bytes: int
    readings: Mapping[str, CombinedReading]
    slowness: float = 1.0

    def __post_init__(self) -> None:
        for name, reading in self.readings.items():
            if not 0 <= reading.nodes <= self.nodes:
                raise ValueError(
                    f"{name} of {reading.nodes} of {self.nodes} nodes cannot be metered"
                )

    @property
    def step_seconds(self) -> float:
        """Per local update, of the slowest node."""
        return self.readings["time"].step

    @property
    def seconds(self) -> float:
        """Of the whole round."""
        return self.readings["time"].whole

    def as_round_of(self, nodes: int, wire_bytes: int) -> "RoundUsage":
        """A trial that some nodes have made alone, as a round of so many with such messages."""
        readings = {
            name: replace(each, nodes=min(each.nodes, nodes))
            for name, each in self.readings.items()
        }
        return replace(self, nodes=nodes, wire_bytes=wire_bytes, readings=readings)

    def delayed(self, seconds: float) -> "RoundUsage":
        """The same, had the round taken so much longer besides its local updates."""
        time = self.readings["time"]
        return replace(
            self,
            readings={**self.readings, "time": replace(time, whole=time.whole + seconds)},
        )


_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ESTIMATE = "estimate:"


def this_host() -> str:
    """This machine, without its name: the same for all of its processes until it starts again, in containers too.

    >>> this_host() == this_host(), len(this_host())
    (True, 16)
    """
    try:
        name = _BOOT.read_text().strip()
    except OSError:
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def estimated(host: str) -> str:
    """The machine, of joules that are an estimate."""
    return _ESTIMATE + host


def is_estimate(host: str) -> bool:
    return host.startswith(_ESTIMATE)


def machine(host: str) -> str:
    """Of which machine, estimated or not.

    >>> machine(estimated("a")), machine("a")
    ('a', 'a')
    """
    return host.removeprefix(_ESTIMATE)


_UNKNOWN = Reading(math.nan, math.nan)


def slowest(name: str, nodes: Sequence[NodeCosts], own: float | None) -> CombinedReading:
    """All wait for the slowest node; the aggregator's clock has the whole round."""
    readings = [costs.readings.get(name, _UNKNOWN) for costs in nodes]
    step, whole = (
        _max([getattr(reading, part) for reading in readings]) for part in ("step", "whole")
    )
    return CombinedReading(step, whole if own is None else own, _count(nodes))


def total(
    name: str, nodes: Sequence[NodeCosts], own: float | None
) -> CombinedReading | None:
    """All nodes and the aggregator add up; what is in the aggregator's process counts once."""
    if own is None and not any(name in costs.readings for costs in nodes):
        return None
    step = _sum_of_all(name, "step", nodes)
    whole = _sum_of_all(
        name, "whole", [costs for costs in nodes if own is None or not costs.here]
    )
    return CombinedReading(step, whole if own is None else own + whole, _count(nodes))


def once_per_host(
    name: str, nodes: Sequence[NodeCosts], own: float | None
) -> CombinedReading | None:
    """Nodes on one machine read one counter, which counts once; of nodes without a counter nothing is known."""
    read = [(costs, costs.readings[name]) for costs in nodes if name in costs.readings]
    if not read:
        return None
    steps: dict[str, float] = {}
    wholes: dict[str, float] = {}
    for _, reading in read:
        host = machine(reading.host)
        steps[host] = max(steps.get(host, 0.0), reading.step)
        wholes[host] = max(wholes.get(host, 0.0), reading.whole)
    count = _count([costs for costs, _ in read])
    estimated = any(is_estimate(reading.host) for _, reading in read)
    return CombinedReading(sum(steps.values()), sum(wholes.values()), count, estimated)


def _sum_of_all(name: str, part: str, nodes: Sequence[NodeCosts]) -> float:
    """Over nodes that tell, and as much on average for the others; nan where none tells."""
    told = [costs for costs in nodes if name in costs.readings]
    total = sum(getattr(costs.readings[name], part) for costs in told)
    if len(told) == len(nodes):
        return float(total)
    return float(total) * _count(nodes) / _count(told) if told else math.nan


def _count(nodes: Sequence[NodeCosts]) -> int:
    return sum(costs.nodes for costs in nodes)


def _max(values: Sequence[float]) -> float:
    """0 of none; nan when one is."""
    return (
        math.nan if any(math.isnan(value) for value in values) else max(values, default=0.0)
    )


_ROUNDING = 1e-9
"""By this much a clock that is added up may seem to run backwards."""

Source = Literal["measured", "estimated", "simulated", "declared", "accounted"]


class MeterError(WorkError):
    """A meter that should be read cannot be, or says what cannot be."""


@dataclass(frozen=True)
class Cost:
    """c for one local update and b for the rest of the round, of one resource."""

    step: float
    aggregation: float

    @classmethod
    def split(cls, label: str, reading: CombinedReading | None, updates: int) -> "Cost":
        """From what counters say of one local update and of the whole round.

        Args:
          label: what was read, for the error when it is not known.
        """
        step, whole = (None, None) if reading is None else (reading.step, reading.whole)
        if (
            step is None
            or whole is None
            or not (0 <= step < math.inf and -_ROUNDING <= whole < math.inf)
        ):
            raise MeterError(
                f"{label} of a round is not known: {step} for a local update, {whole} for the whole round"
            )
        return cls(step, max(0.0, whole - step * updates))


class Reader(Protocol):
    """Reads a counter at a node."""

    @property
    def host(self) -> str:
        """Of which machine, where its processes share the counter, as `host.py` has it; else empty."""

    def read(self) -> float:
        """The count; never less than before. Raises a `MeterError` where that cannot be known."""


class Meter(Protocol):
    @property
    def source(self) -> Source: ...

    def read(self, usage: RoundUsage, time: Cost) -> Cost:
        """The cost of a round in this meter's resource, from what it used and from the time that it took."""


class TimeMeter(Meter, Protocol):
    def read(self, usage: RoundUsage, time: Cost | None = None) -> Cost:
        """The time of a round that was made."""

    def expect(self, usage: RoundUsage) -> Cost:
        """The time of a round to come, judged from a trial round."""


@dataclass(frozen=True)
class Metering:
    """How the costs of a run come to be known.

    Args:
      simulated: draws the time of rounds; None where it is measured.
      network: nodes are other machines: their messages are counted, and they read counters of their own.
      declared: what the user declares of costs, by the name of the setting.
    """

    simulated: TimeMeter | None = None
    network: bool = False
    declared: Mapping[str, float] = field(default_factory=dict)

    def declared_for(self, settings: Sequence[str]) -> dict[str, float]:
        """Of these settings, those that are declared."""
        return {name: self.declared[name] for name in settings if name in self.declared}


class Resource(ABC):
    """Something that training uses up.

    Subclasses set the names and say with `meter` what a round costs; one that is counted at nodes has a `reader`.

    Args:
      name: as in a budget, of letters.
      unit: of all amounts.
      units: every way to write the unit, with its size in `unit`.
      settings: names of the settings that it is figured from.
      machine_wide: its counter is the machine's and not a process's. It counts once for all nodes there, runs on while
        they wait, and says nothing of simulated nodes, of trial rounds, or of the aggregator.
      spread: by how much of it the first round's cost may be off from what a trial says; rounds then show it.
      most_a_second: that no machine uses more of.
      by_noise: it is spent by what is made known of nodes, and the less of it the more noise there is.
    """

    name: ClassVar[str]
    unit: ClassVar[str] = ""
    units: ClassVar[Mapping[str, float]] = {}
    settings: ClassVar[tuple[str, ...]] = ()
    machine_wide: ClassVar[bool] = False
    spread: ClassVar[float] = 0.4  # as of aggregations in the paper's prototype
    most_a_second: ClassVar[float] = math.inf
    by_noise: ClassVar[bool] = False

    def format(self, amount: float) -> str:
        """An amount as a person would write it."""
        return f"{amount:.4g}{self.unit}"

    def to_ledger(self, amount: float, delta: float | None) -> float:
        """What the ledger holds of so much, where that does not add up itself; δ is that of the run's budget."""
        return amount

    def from_ledger(self, amount: float, delta: float | None) -> float:
        """What people are shown of so much in the ledger."""
        return amount

    def reader(self) -> Reader | None:
        """Reads the counter of this process or machine; None where there is none."""
        return None

    def combine(
        self, nodes: Sequence[NodeCosts], own: float | None
    ) -> CombinedReading | None:
        """One reading from those of all nodes; see combine.py for the arguments."""
        return (once_per_host if self.machine_wide else total)(self.name, nodes, own)

    @abstractmethod
    def meter(self, metering: Metering) -> Meter:
        """What tells the cost of a round."""


@dataclass(frozen=True)
class Counted:
    """The cost that nodes' counters say.

    Args:
      name: of the resource.
      label: what is counted, for errors.
    """

    source: ClassVar[Source] = "measured"
    name: str
    label: str

    def read(self, usage: RoundUsage, time: Cost | None = None) -> Cost:
        return Cost.split(self.label, usage.readings.get(self.name), usage.updates)

    def expect(self, usage: RoundUsage) -> Cost:
        return self.read(usage)


def require_not_negative(declared: object) -> None:
    """Refuses what a user cannot mean to declare, of any field."""
    for name, value in vars(declared).items():
        if not 0 <= value < math.inf:
            raise UserError(
                f"{key(name)} must be a number that is not negative, not {value:g}"
            )
