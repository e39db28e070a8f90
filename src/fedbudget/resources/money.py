"""Money, figured from declared prices; whatever currency they are in."""

from dataclasses import dataclass
from typing import ClassVar

from fedbudget.resources.resource import Cost, Meter, Metering, Resource, Source, require_not_negative
from fedbudget.resources.usage import RoundUsage


class Money(Resource):
    name = "money"
    settings = ("price_per_hour", "price_per_gigabyte")

    def meter(self, metering: Metering) -> Meter:
        return Prices(**metering.declared_for(self.settings))


@dataclass(frozen=True)
class Prices:
    """A price per node and hour, and per gigabyte sent."""

    source: ClassVar[Source] = "declared"
    price_per_hour: float = 0.1
    price_per_gigabyte: float = 0.1

    def __post_init__(self) -> None:
        require_not_negative(self)

    def read(self, usage: RoundUsage, time: Cost) -> Cost:
        rate = self.price_per_hour / 3600 * usage.nodes
        return Cost(rate * time.step, rate * time.aggregation + self.price_per_gigabyte / 1e9 * usage.wire_bytes)
