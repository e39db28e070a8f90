"""Energy: joules that machines measure, and declared watts where they do not.

Processors count their energy (rapl.py), and codecarbon estimates it where they do not (carbon.py). Both are of a whole
machine. Neither sees the network card, hence a declared cost of every byte.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from fedbudget.errors import UserError
from fedbudget.resources.resource import (
    Cost,
    Meter,
    MeterError,
    Metering,
    Reader,
    Resource,
    RoundUsage,
    Source,
    require_not_negative,
)

READERS = ("auto", "rapl", "codecarbon", "declared")


class Energy(Resource):
    name = "energy"
    unit = "J"
    units: ClassVar[Mapping[str, float]] = {
        "mJ": 1e-3,
        "J": 1.0,
        "kJ": 1e3,
        "MJ": 1e6,
        "Wh": 3600.0,
        "kWh": 3.6e6,
    }
    settings = ("watts", "joules_per_byte")
    machine_wide = True
    most_a_second = 1e6  # watts

    def reader(self) -> Reader | None:
        return energy_reader()

    def meter(self, metering: Metering) -> Meter:
        declared = DeclaredEnergy(**metering.declared_for(self.settings))
        return (
            MeasuredEnergy(declared)
            if metering.network and metering.simulated is None
            else declared
        )


def energy_reader(name: str | None = None) -> Reader | None:
    """What reads this machine's energy, or none where it is figured from declared watts.

    Args:
      name: `rapl`, `codecarbon` or `declared`; `auto`, or none, is RAPL where it can be read, else declared.
    """
    from fedbudget.resources.rapl import Rapl  # read only where energy is

    if name in (None, "auto"):
        return Rapl.find()
    if name == "declared":
        return None
    try:
        if name == "rapl":
            return Rapl()
        if name == "codecarbon":
            from fedbudget.resources.carbon import CodeCarbon

            return CodeCarbon.start()
    except MeterError as error:
        raise UserError(f"energy-meter {name} cannot be read here: {error}") from None
    raise UserError(f"energy-meter must be one of {', '.join(READERS)}, not {name!r}")


@dataclass(frozen=True)
class DeclaredEnergy:
    """A power draw per node, and the cost of every byte sent.

    Args:
      watts: of one node, as long as the run lasts; 5 W is a Raspberry Pi at work.
      joules_per_byte: of sending and receiving; 1e-6 is about right for Wi-Fi.
    """

    source: ClassVar[Source] = "declared"
    watts: float = 5.0
    joules_per_byte: float = 1e-6

    def __post_init__(self) -> None:
        require_not_negative(self)

    def read(self, usage: RoundUsage, time: Cost) -> Cost:
        power = self.watts * usage.nodes
        return Cost(
            power * time.step,
            power * time.aggregation + self.joules_per_byte * usage.wire_bytes,
        )


class MeasuredEnergy:
    """Joules as machines measure them, declared watts for the nodes on others, and a declared cost of every byte."""

    def __init__(self, declared: DeclaredEnergy) -> None:
        self._declared = declared
        # of the nodes' joules so far
        self._any_measured = False
        self._any_declared = False

    @property
    def source(self) -> Source:
        if not self._any_measured:
            return "declared"
        return (
            "estimated"
            if self._any_declared or self._declared.joules_per_byte > 0
            else "measured"
        )

    def read(self, usage: RoundUsage, time: Cost) -> Cost:
        reading = usage.readings.get(Energy.name)
        metered = 0 if reading is None else reading.nodes
        declared = self._declared.read(
            replace(usage, nodes=usage.nodes - metered, readings={}), time
        )
        measured = (
            Cost.split("the energy", reading, usage.updates) if metered else Cost(0.0, 0.0)
        )
        self._any_measured |= metered > 0
        self._any_declared |= metered < usage.nodes or (
            reading is not None and reading.estimated
        )
        return Cost(
            measured.step + declared.step, measured.aggregation + declared.aggregation
        )

    def state(self) -> list[bool]:
        """What `source` goes by, as a plain list."""
        return [self._any_measured, self._any_declared]

    def restore(self, state: Sequence[bool]) -> None:
        """Goes on from there."""
        self._any_measured, self._any_declared = state
