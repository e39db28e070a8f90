"""Samples that are no rows of one array: of any kind, read when they are needed.

A map-style Dataset of PyTorch is a sequence of such samples, and so is a list. Nothing here looks inside of a sample.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedbudget.errors import UserError

LABELS = ("labels", "label", "y")
"""Where a sample that is a mapping has its target: under the first of these that is there."""


class SampleSequence(Protocol):
    """Samples by their place."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> Any: ...


class SampleStore:
    """Several sequences of samples, one after the other."""

    def __init__(self, parts: Sequence[SampleSequence]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, place: int) -> Any:
        part = bisect_right(self._ends, place)
        return self._parts[part][place - (self._ends[part - 1] if part else 0)]


class SeveralInputs:
    """Samples with several inputs each, from an array for each of these; by name, or in order.

    >>> samples = SeveralInputs({"left": [[1, 2], [3, 4]], "right": [[5], [6]]}, [0, 1])
    >>> samples[1]
    ({'left': array([3, 4]), 'right': array([6])}, np.int64(1))
    """

    def __init__(self, inputs: Mapping[str, ArrayLike] | Sequence[ArrayLike], y: ArrayLike) -> None:
        names = list(inputs) if isinstance(inputs, Mapping) else None
        self._names, self._y = names, np.asarray(y)
        values = inputs.values() if isinstance(inputs, Mapping) else inputs
        self._inputs: list[NDArray[Any]] = [np.asarray(each) for each in values]
        for each in self._inputs:
            if not each.ndim or len(each) != len(self._y):
                raise UserError(f"an input of shape {each.shape} beside {len(self._y)} targets")

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, place: int) -> Any:
        own = tuple(each[place] for each in self._inputs)
        return (own if self._names is None else dict(zip(self._names, own, strict=True))), self._y[place]
