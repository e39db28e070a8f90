"""Energy: measured joules, or declared watts on machines without a meter.

Two readers measure a whole machine: RAPL counters of the processor (rapl.py), and
estimates by codecarbon (carbon.py). Neither includes the network card, so each byte has a
declared cost in addition.
"""

import logging
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
    Reading,
    Resource,
    Source,
    Usage,
    require_not_negative,
)

_MOST_POWER = 20.0  # times the declared watts, if too few meters can be compared
_FEWEST = 3  # meters
_LOG = logging.getLogger("fedbudget.network")

READERS = ("auto", "rapl", "codecarbon", "declared")


class Energy(Resource):
    name = "energy"
    unit = "J"
    shown_from: ClassVar[Mapping[str, float]] = {"kJ": 1e4}
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
        return MeasuredEnergy(declared) if metering.measured else declared


def energy_reader(name: str | None = None) -> Reader | None:
    """Return the reader of this machine's energy; None if declared watts are used.

    Args:
      name: `rapl`, `codecarbon` or `declared`. `auto` or None selects RAPL if this process
        can read it, and declared watts otherwise.
    """
    from fedbudget.resources.rapl import Rapl  # needed only if energy is read

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
    """A constant power per node, and a cost for every byte.

    Args:
      watts: power of one node during the run; 5 W is a busy Raspberry Pi.
      joules_per_byte: energy to send and receive a byte; about 1e-6 for Wi-Fi.
    """

    source: ClassVar[Source] = "declared"
    watts: float = 5.0
    joules_per_byte: float = 1e-6

    def __post_init__(self) -> None:
        require_not_negative(self)

    def read(self, usage: Usage, time: Cost) -> Cost:
        power = self.watts * usage.nodes
        traffic = self.joules_per_byte * usage.wire_bytes
        return Cost(power * time.step, power * time.aggregation + traffic)


class MeasuredEnergy:
    """Measured joules, declared watts of other nodes, and a declared cost of bytes.

    A false reading is limited by the readings of other nodes. If fewer than three nodes, or
    less than half of at least three, have a meter, declared watts and time limit it.
    """

    def __init__(self, declared: DeclaredEnergy) -> None:
        self._warned = False
        self._declared = declared
        self._any_measured = False  # in any round so far
        self._any_declared = False

    @property
    def source(self) -> Source:
        if not self._any_measured:
            return "declared"
        if self._any_declared or self._declared.joules_per_byte > 0:
            return "estimated"
        return "measured"

    def read(self, usage: Usage, time: Cost) -> Cost:
        reading = usage.readings.get(Energy.name)
        if reading is None or not reading.nodes:
            self._any_declared |= usage.nodes > 0
            return self._declared.read(usage, time)
        reading = self._plausible(reading, usage, time)
        measured = Cost.split("the energy", reading, usage.updates)
        self._any_measured = True
        self._any_declared |= reading.nodes < usage.nodes or reading.estimated

        others = replace(usage, nodes=usage.nodes - reading.nodes, readings={})
        declared = self._declared.read(others, time)
        return Cost(
            measured.step + declared.step, measured.aggregation + declared.aggregation
        )

    def _plausible(self, reading: Reading, usage: Usage, time: Cost) -> Reading:
        few = reading.nodes < _FEWEST or 2 * reading.nodes < usage.nodes
        seconds = time.step * usage.updates + time.aggregation
        most = _MOST_POWER * self._declared.watts * reading.nodes * seconds
        if usage.nodes < _FEWEST or not few or reading.whole <= most:
            return reading
        if not self._warned:
            _LOG.warning(
                "%d of %d nodes measured %.3g J in %.3g s; it counts as %.3g J, %g times "
                "the declared watts (--watts)",
                reading.nodes,
                usage.nodes,
                reading.whole,
                seconds,
                most,
                _MOST_POWER,
            )
        self._warned = True
        return replace(reading, step=reading.step * most / reading.whole, whole=most)

    def state(self) -> list[bool]:
        """Return the state that `source` depends on, as plain JSON."""
        return [self._any_measured, self._any_declared]

    def restore(self, state: Sequence[bool]) -> None:
        """Continue from a `state`."""
        self._any_measured, self._any_declared = state
