"""Resources that are figured from what the user declares, where nothing measures them."""

from dataclasses import dataclass
from typing import ClassVar

from fedbudget.errors import UserError
from fedbudget.meters.meter import Cost, RoundTrip, Source


class WireBytes:
    """Bytes: what the messages of a round would take on the wire. Local updates send nothing."""

    source: ClassVar[Source] = "declared"

    def read(self, trip: RoundTrip, time: Cost) -> Cost:
        return Cost(0.0, float(trip.wire_bytes))


class BusyCpu:
    """CPU seconds where time is simulated: every node is busy during its local updates, and idle otherwise."""

    source: ClassVar[Source] = "simulated"

    def read(self, trip: RoundTrip, time: Cost) -> Cost:
        return Cost(time.step * trip.nodes, 0.0)


@dataclass(frozen=True)
class Energy:
    """Joules: a power draw per node, and the cost of every byte sent.

    Args:
      watts: of one node, as long as the run lasts; 5 W is a Raspberry Pi at work.
      joules_per_byte: of sending and receiving; 1e-6 is about right for Wi-Fi.
    """

    source: ClassVar[Source] = "declared"
    watts: float = 5.0
    joules_per_byte: float = 1e-6

    def __post_init__(self) -> None:
        _require_not_negative(self.watts, "watts")
        _require_not_negative(self.joules_per_byte, "joules-per-byte")

    def read(self, trip: RoundTrip, time: Cost) -> Cost:
        power = self.watts * trip.nodes
        return Cost(power * time.step, power * time.aggregation + self.joules_per_byte * trip.wire_bytes)


@dataclass(frozen=True)
class Money:
    """A price per node and hour, and per gigabyte sent."""

    source: ClassVar[Source] = "declared"
    price_per_hour: float = 0.1
    price_per_gigabyte: float = 0.1

    def __post_init__(self) -> None:
        _require_not_negative(self.price_per_hour, "price-per-hour")
        _require_not_negative(self.price_per_gigabyte, "price-per-gigabyte")

    def read(self, trip: RoundTrip, time: Cost) -> Cost:
        rate = self.price_per_hour / 3600 * trip.nodes
        return Cost(rate * time.step, rate * time.aggregation + self.price_per_gigabyte / 1e9 * trip.wire_bytes)


def _require_not_negative(value: float, option: str) -> None:
    if not 0 <= value < float("inf"):
        raise UserError(f"{option} must be a number that is not negative, not {value:g}")
