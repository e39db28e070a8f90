"""Bytes of all messages, both ways. Local updates send nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedbudget.resources.resource import Cost, Meter, Metering, Resource, Source
from fedbudget.resources.usage import RoundUsage


class Bytes(Resource):
    name = "bytes"
    unit = "B"
    units: ClassVar[Mapping[str, float]] = {
        **{"B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
        **{"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40},
    }
    spread = 0.05  # messages are much alike

    def format(self, amount: float) -> str:
        """In the largest unit that fits.

        >>> Bytes().format(20_000_000), Bytes().format(999)
        ('20MB', '999B')
        """
        scale, unit = 1.0, self.unit
        for candidate in ("kB", "MB", "GB"):
            if abs(amount) >= self.units[candidate]:
                scale, unit = self.units[candidate], candidate
        return f"{amount / scale:.4g}{unit}"

    def meter(self, metering: Metering) -> Meter:
        return WireBytes("measured" if metering.network and metering.simulated is None else "declared")


@dataclass(frozen=True)
class WireBytes:
    """The messages of a round, as counted by an engine that sends them, or as they would be on the wire."""

    source: Source

    def read(self, usage: RoundUsage, time: Cost) -> Cost:
        return Cost(0.0, float(usage.wire_bytes))
