"""What a resource is: a name, units, how nodes read it, how their readings combine, how a round's costs follow.

A resource is one object in one file, and budgets, engines and views know it by its name in the list of resources. An
engine measures a round: what counters say at every node, combined as the resource says. Meters turn that into costs: c
per local update and b for the rest of the round. Time comes first, simulated or measured; what no counter says is
figured from time and bytes, so that a simulated run is simulated in every resource.

Every meter says how it knows: `measured` is read from a counter, `declared` is figured from what the user says (watts,
prices), `estimated` is partly one and partly the other, `simulated` is the paper's, `accounted` follows from noise that
was added (privacy). A counter that cannot be read is an error, never zero.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from fedbudget.errors import UserError, WorkError, key
from fedbudget.resources.combine import once_per_host, total
from fedbudget.resources.usage import CombinedReading, NodeCosts, RoundUsage

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
        if step is None or whole is None or not (0 <= step < math.inf and -_ROUNDING <= whole < math.inf):
            raise MeterError(f"{label} of a round is not known: {step} for a local update, {whole} for the whole round")
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

    def combine(self, nodes: Sequence[NodeCosts], own: float | None) -> CombinedReading | None:
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
            raise UserError(f"{key(name)} must be a number that is not negative, not {value:g}")
