"""CPU seconds, of all threads of every process that takes part."""

import time
from collections.abc import Mapping
from typing import ClassVar

from fedbudget.resources.counters import Clock
from fedbudget.resources.resource import Cost, Counted, Meter, Metering, Reader, Resource, Source
from fedbudget.resources.time import UNITS
from fedbudget.resources.usage import RoundUsage


class Cpu(Resource):
    name = "cpu"
    unit = "s"
    units: ClassVar[Mapping[str, float]] = UNITS
    most_a_second = 1024.0  # cores

    def reader(self) -> Reader:
        return Clock(time.process_time)

    def meter(self, metering: Metering) -> Meter:
        return Counted(self.name, "the CPU time") if metering.simulated is None else SimulatedCpu()


class SimulatedCpu:
    """Every node is busy during its local updates, and idle otherwise."""

    source: ClassVar[Source] = "simulated"

    def read(self, usage: RoundUsage, time: Cost) -> Cost:
        return Cost(time.step * usage.nodes, 0.0)
