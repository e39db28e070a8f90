"""Mean and deviation of columns, of several parts together without their rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedbudget.arrays import Float64


@dataclass(frozen=True)
class Moments:
    """Mean and deviation of each column, [columns]; a deviation is 0 where a column never changes."""

    mean: Float64
    deviation: Float64

    def __eq__(self, other: object) -> bool:
        """Of all columns: a node that comes back asks whether the task is still the one it knows."""
        if not isinstance(other, Moments):
            return NotImplemented
        return np.array_equal(self.mean, other.mean) and np.array_equal(self.deviation, other.deviation)

    @classmethod
    def of(cls, values: Float64) -> "Moments":
        """Of samples, [samples, columns]."""
        return cls(values.mean(axis=0), values.std(axis=0))

    @classmethod
    def together(cls, parts: "Sequence[Moments]", sizes: Sequence[int]) -> "Moments":
        """Of all samples of several parts."""
        share = np.array(sizes, np.float64)[:, None] / sum(sizes)
        means, deviations = np.array([part.mean for part in parts]), np.array([part.deviation for part in parts])
        mean = (share * means).sum(axis=0)
        return cls(mean, np.sqrt((share * (deviations**2 + (means - mean) ** 2)).sum(axis=0)))
