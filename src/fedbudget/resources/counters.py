"""ResourceCounters of this process and machine, read all at once."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from fedbudget.resources.resource import MeterError, Reader, Reading, Resource


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What counters said at one moment, or what they counted between two; nan where one could not be read."""

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
class Clock:
    """A counter of this process.

    Args:
      read: gives the count.
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
        """Of those resources that can be read here.

        Args:
          readers: to read some with in place of what a resource finds by itself; None for not at all.
        """
        given = readers or {}
        chosen = {
            each.name: given[each.name] if each.name in given else each.reader()
            for each in resources
        }
        return cls({name: reader for name, reader in chosen.items() if reader is not None})

    def read(self) -> Snapshot:
        """A counter that cannot be read says nan, which is not zero."""
        return Snapshot({name: _count(reader) for name, reader in self._readers.items()})

    def readings(
        self, updating: Snapshot, whole: Snapshot, updates: int
    ) -> dict[str, Reading]:
        """A round's readings, of what could be read.

        Args:
          updating: what all local updates took.
          whole: what the round took.
        """
        readings = {
            name: Reading(updating[name] / updates, whole[name], reader.host)
            for name, reader in self._readers.items()
        }
        return {
            name: each
            for name, each in readings.items()
            if not math.isnan(each.step + each.whole)
        }


def _count(reader: Reader) -> float:
    try:
        return reader.read()
    except MeterError:
        return math.nan
