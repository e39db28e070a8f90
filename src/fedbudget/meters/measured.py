"""What is read from meters: clocks, what passed over the network, processors' energy."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

from fedbudget.meters.declared import Energy
from fedbudget.meters.meter import Cost, RoundTrip, Source


class WallClock:
    """Time as it passes: c is the slowest node's per local update, b the rest of the round."""

    source: ClassVar[Source] = "measured"

    def read(self, trip: RoundTrip) -> Cost:
        return Cost.split("the time", trip.step_seconds, trip.seconds, trip.updates)

    def expect(self, trip: RoundTrip) -> Cost:
        return self.read(trip)


class CpuClock:
    """CPU seconds of all threads of every process that took part."""

    source: ClassVar[Source] = "measured"

    def read(self, trip: RoundTrip, time: Cost) -> Cost:
        return Cost.split("the CPU time", trip.step_cpu, trip.cpu, trip.updates)


class MeasuredBytes:
    """Bytes as counted by an engine that really sends them. Local updates send nothing."""

    source: ClassVar[Source] = "measured"

    def read(self, trip: RoundTrip, time: Cost) -> Cost:
        return Cost(0.0, float(trip.wire_bytes))


class MeasuredEnergy:
    """Joules: measured on machines that do, declared watts for the nodes on others, and a declared cost of every byte.

    A processor's meter does not see the network card, hence the bytes of all nodes.
    """

    def __init__(self, declared: Energy) -> None:
        self._declared = declared
        self._read, self._figured = False, False  # whether any node's joules were told so far, or figured

    @property
    def source(self) -> Source:
        if not self._read:
            return "declared"
        return "estimated" if self._figured or self._declared.joules_per_byte > 0 else "measured"

    def read(self, trip: RoundTrip, time: Cost) -> Cost:
        figured = self._declared.read(replace(trip, nodes=trip.nodes - trip.metered, metered=0), time)
        read = Cost(0.0, 0.0)
        if trip.metered:
            read = Cost.split("the energy", trip.step_joules, trip.joules, trip.updates)
        self._read |= trip.metered > 0
        self._figured |= trip.metered < trip.nodes or trip.estimated
        return Cost(read.step + figured.step, read.aggregation + figured.aggregation)

    def state(self) -> list[bool]:
        """What `source` goes by, as a plain list."""
        return [self._read, self._figured]

    def restore(self, state: Sequence[bool]) -> None:
        """Goes on from there."""
        self._read, self._figured = state


class Instant(NamedTuple):
    """A reading of both clocks, or what passed between two."""

    seconds: float
    cpu: float

    @classmethod
    def now(cls) -> "Instant":
        return cls(time.perf_counter(), time.process_time())

    @classmethod
    def wall_only(cls) -> "Instant":
        """Without the CPU's clock, which is slow to read on some machines."""
        return cls(time.perf_counter(), 0.0)

    def __sub__(self, earlier: "Instant") -> "Instant":
        return Instant(self.seconds - earlier.seconds, self.cpu - earlier.cpu)

    def __add__(self, span: "Instant") -> "Instant":  # type: ignore[override]  # not one tuple after the other
        return Instant(self.seconds + span.seconds, self.cpu + span.cpu)
