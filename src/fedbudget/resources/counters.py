"""Counters of this process and machine, read together."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from fedbudget.resources.resource import MeterError, Reader, Reading, Resource


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counts at one moment, or between two, by resource; nan if a counter was not read."""

    values: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def __sub__(self, earlier: "Snapshot") -> "Snapshot":
        return Snapshot(
            {name: value - earlier.values[name] for name, value in self.values.items()}
        )

    def __add__(self, span: "Snapshot") -> "Snapshot":
        return Snapshot(
            {name: value + span.values[name] for name, value in self.values.items()}
        )


@dataclass(frozen=True)
class FunctionReader:
    """A counter that a function reads.

    Args:
      read: returns the count.
      host: see `Reader.host`.
    """

    read: Callable[[], float]
    host: str = ""


class ResourceCounters:
    """Counters by the name of their resource."""

    def __init__(self, readers: Mapping[str, Reader]) -> None:
        self._readers = readers

    @classmethod
    def of(
        cls,
        resources: Iterable[Resource],
        readers: Mapping[str, Reader | None] | None = None,
    ) -> Self:
        """Return the counters of those resources that can be read here.

        Args:
          resources: the resources to count.
          readers: replacements for the default readers, by resource; None switches a
            counter off.
        """
        given = readers or {}
        chosen = {
            each.name: given[each.name] if each.name in given else each.reader()
            for each in resources
        }
        return cls({name: reader for name, reader in chosen.items() if reader is not None})

    def read(self) -> Snapshot:
        """Read all counters; one that fails is nan, not zero."""
        counts = {}
        for name, reader in self._readers.items():
            try:
                counts[name] = reader.read()
            except MeterError:
                counts[name] = math.nan
        return Snapshot(counts)

    def readings(
        self, updating: Snapshot, whole: Snapshot, updates: int
    ) -> dict[str, Reading]:
        """Return the readings of a round, without the counters that failed.

        Args:
          updating: use of all local updates.
          whole: use of the round.
          updates: number of local updates.
        """
        readings = {}
        for name, reader in self._readers.items():
            reading = Reading(updating[name] / updates, whole[name], reader.host)
            if not math.isnan(reading.step + reading.whole):
                readings[name] = reading
        return readings
