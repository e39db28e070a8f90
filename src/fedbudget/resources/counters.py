"""Counters of this process and machine, read together."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from fedbudget.arrays import Float64
from fedbudget.resources.resource import MeterError, Reader, Reading, Resource


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
    """Counters by the name of their resource.

    Counts are arrays [counters] in the order of `names`; nan if a counter was not read.
    """

    def __init__(self, readers: Mapping[str, Reader]) -> None:
        self.names = tuple(readers)
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

    def read(self) -> Float64:
        """Read all counters; one that fails is nan, not zero."""
        counts = []
        for reader in self._readers.values():
            try:
                counts.append(reader.read())
            except MeterError:
                counts.append(math.nan)
        return np.array(counts)

    def label(self, counts: Float64) -> dict[str, float]:
        """Return counts by the name of their resource."""
        return dict(zip(self.names, counts.tolist(), strict=True))

    def readings(
        self, updating: Float64, whole: Float64, updates: int
    ) -> dict[str, Reading]:
        """Return the readings of a round, without the counters that failed.

        Args:
          updating: use of all local updates.
          whole: use of the round.
          updates: number of local updates.
        """
        steps = (updating / updates).tolist()
        wholes = whole.tolist()
        return {
            name: Reading(step, used, reader.host)
            for (name, reader), step, used in zip(
                self._readers.items(), steps, wholes, strict=True
            )
            if not math.isnan(step + used)
        }
