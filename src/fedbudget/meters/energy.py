"""Which meter tells the energy of a machine that nodes run on."""

from typing import Protocol

from fedbudget.errors import UserError
from fedbudget.meters.meter import MeterError
from fedbudget.meters.rapl import Rapl

METERS = ("auto", "rapl", "codecarbon", "declared")


class EnergyMeter(Protocol):
    host: str
    """Of which machine, as `meters.host` has it."""

    def joules(self) -> float:
        """Since the meter was made; never less than before. Raises a `MeterError` where that cannot be told."""


def energy_meter(name: str | None = None) -> EnergyMeter | None:
    """The meter by its name, or none where energy is figured from declared watts.

    Args:
      name: `rapl`, `codecarbon` or `declared`; `auto`, or none, is RAPL where it can be read, else declared.
    """
    if name in (None, "auto"):
        return Rapl.find()
    if name == "declared":
        return None
    try:
        if name == "rapl":
            if (reason := Rapl.why_not()) is not None:
                raise MeterError(reason)
            return Rapl.find()
        if name == "codecarbon":
            from fedbudget.meters.carbon import CodeCarbon

            return CodeCarbon.start()
    except MeterError as error:
        raise UserError(f"energy-meter {name} cannot be read here: {error}") from None
    raise UserError(f"energy-meter must be one of {', '.join(METERS)}, not {name!r}")
