"""What this machine's clocks say."""

import time
from typing import ClassVar, NamedTuple

from fedbudget.meters.meter import Cost, RoundTrip, Source


class WallClock:
    """Time as it passes: c is the slowest node's per local update, b the rest of the round."""

    source: ClassVar[Source] = "measured"

    def read(self, trip: RoundTrip) -> Cost:
        return Cost(trip.step_seconds, max(0.0, trip.seconds - trip.step_seconds * trip.updates))

    def expect(self, trip: RoundTrip) -> Cost:
        return self.read(trip)


class CpuClock:
    """CPU seconds of all threads of this process."""

    source: ClassVar[Source] = "measured"

    def read(self, trip: RoundTrip, time: Cost) -> Cost:
        return Cost(trip.step_cpu, max(0.0, trip.cpu - trip.step_cpu * trip.updates))


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
