"""What a step costs."""

import numpy as np

from fedbudget.budget import Budget
from fedbudget.meters import simulated
from fedbudget.meters.declared import BusyCpu, Energy, Money, WireBytes
from fedbudget.meters.measured import CpuClock, MeasuredBytes, MeasuredEnergy, WallClock
from fedbudget.meters.meter import Meters


def measured_meters(budget: Budget, energy: Energy, money: Money) -> Meters:
    """This machine's clocks; bytes, energy and money as figured from them."""
    return Meters(budget, WallClock(), {"cpu": CpuClock(), "bytes": WireBytes(), "energy": energy, "money": money})


def network_meters(budget: Budget, energy: Energy, money: Money) -> Meters:
    """The clocks of all machines, bytes as counted, energy where it is measured; the rest as figured from these."""
    counted, read = MeasuredBytes(), MeasuredEnergy(energy)
    return Meters(budget, WallClock(), {"cpu": CpuClock(), "bytes": counted, "energy": read, "money": money})


def simulated_meters(
    budget: Budget, energy: Energy, money: Money, profile: simulated.Profile, rng: np.random.Generator
) -> Meters:
    """The paper's simulated time; everything else as figured from it."""
    time = simulated.SimulatedTime(profile, rng)
    return Meters(budget, time, {"cpu": BusyCpu(), "bytes": WireBytes(), "energy": energy, "money": money})
